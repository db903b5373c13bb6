// A client for server.py: it trains on its own batches, and sends parameters, never data.
import { Trainer } from "./onnxtool-training.mjs";

/** Take part until the last round; returns the trainer with the checkpoint of all. */
export async function takePart({ ort, url, client, batches, samples, learningRate = 1e-2, onRound = () => {} }) {
  const get = async (name) => {
    const response = await fetch(new URL(name, url), { cache: "no-store" });
    if (!response.ok) throw new Error(`${name}: ${response.status} ${await response.text()}`);
    return response;
  };
  const bytes = async (name) => (await get(name)).arrayBuffer();
  const trainer = await Trainer.create({ ort, files: bytes });
  for (let done = -1; ; ) {
    const { round, rounds } = await (await get("round")).json();
    if (round === done) {
      await new Promise((resolve) => setTimeout(resolve, 100)); // other clients are not ready
      continue;
    }
    trainer.load(await bytes("global"));
    if (round === rounds) return trainer;
    trainer.learningRate = learningRate;
    let loss;
    for (const batch of batches) loss = await trainer.trainStep(batch);
    const address = new URL(`update?round=${round}&client=${client}&samples=${samples}`, url);
    const response = await fetch(address, { method: "POST", body: trainer.save() });
    if (!response.ok) throw new Error(await response.text());
    done = round;
    onRound({ round, rounds, loss });
  }
}

/** Batches of one client for a model of inputs `x` and `labels`: points around the centre of their class. */
export function ownBatches({ inputs }, client, { classes = 3, size = 16, count = 10 } = {}) {
  const width = inputs.find(({ name }) => name === "x").shape.at(-1);
  let state = client + 1;
  const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
  return Array.from({ length: count }, () => {
    // Most of a client's samples are of one class, so no single client can learn all classes.
    const labels = Array.from({ length: size }, () => (random() < 0.7 ? client : Math.floor(random() * classes)) % classes);
    const x = labels.flatMap((label) => Array.from({ length: width }, (_, axis) => 2 * (axis % classes === label) + random()));
    return { x: { data: x, dims: [size, width] }, labels: { data: labels, dims: [size] } };
  });
}
