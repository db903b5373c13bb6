// The training that the tests compare with Python's, in node and in browsers.
import { Trainer } from "./onnxtool-training.mjs";

/** Train on Python's batches, in two halves, and once more the second half from Python's checkpoint between them. */
export async function run(ort, files) {
  const { rate, batches } = JSON.parse(new TextDecoder().decode(await files("batches.json")));
  const half = batches.length / 2;
  const trainer = await Trainer.create({ ort, files, sessionOptions: { intraOpNumThreads: 1 } });
  trainer.learningRate = rate;
  const train = async (some) => {
    const losses = [];
    for (const batch of some) losses.push(await trainer.trainStep(batch));
    return losses;
  };
  const started = performance.now();
  const losses = await train(batches.slice(0, half));
  const saved = trainer.save();
  losses.push(...(await train(batches.slice(half))));
  const stepMs = (performance.now() - started) / batches.length;
  const { loss } = await trainer.evaluate(batches.at(-1));
  const halfway = new Uint8Array(await files("halfway"));
  trainer.load(halfway);
  const again = trainer.save();
  const isStable = again.length === halfway.length && again.every((byte, place) => byte === halfway[place]);
  const { executionProvider, reason } = trainer;
  const continued = await train(batches.slice(half));
  await trainer.release();
  return { losses, loss, continued, isStable, executionProvider, reason, stepMs, saved: base64(saved) };
}

function base64(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}
