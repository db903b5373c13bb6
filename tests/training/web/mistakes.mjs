// node mistakes.mjs FOLDER OTHER_FOLDER: the message of each mistake, and that a step works after all of them.
import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import { Trainer, TrainingError } from "./onnxtool-training.mjs";

const [folder, other] = process.argv.slice(2);
const files = (name) => readFile(`${folder}/${name}`);
const trainer = await Trainer.create({ ort, files });
const found = {};
async function mistake(name, act) {
  try {
    await act();
    found[name] = "nothing";
  } catch (error) {
    found[name] = error instanceof TrainingError ? error.message : `${error.stack}`;
  }
}
const x = { data: Array(10).fill(1), dims: [2, 5] };
const labels = { data: [0, 1], dims: [2] };
const before = trainer.save();
const step = (batch) => () => trainer.trainStep({ x, labels, ...batch });
await mistake("unknown input", step({ y: x }));
await mistake("missing input", () => trainer.trainStep({ x }));
await mistake("other dtype", step({ labels: { data: Float32Array.of(0, 1), dims: [2] } }));
await mistake("other dtype of a tensor", step({ x: new ort.Tensor("int64", new BigInt64Array(10), [2, 5]) }));
await mistake("fraction", step({ labels: { data: [0, 0.5], dims: [2] } }));
await mistake("no class", step({ labels: { data: [0, -1], dims: [2] } }));
await mistake("no class of a tensor", step({ labels: new ort.Tensor("int64", BigInt64Array.of(3n, 1n), [2]) }));
await mistake("text", step({ x: { data: Array(10).fill("1"), dims: [2, 5] } }));
await mistake("other shape", step({ x: { data: Array(8).fill(1), dims: [2, 4] } }));
await mistake("other length", step({ x: { data: Array(9).fill(1), dims: [2, 5] } }));
await mistake("no tensor", step({ x: [1, 2] }));
await mistake("no gradients", () => trainer.update());
await mistake("two at once", async () => {
  const first = trainer.evaluate({ x, labels });
  try {
    await trainer.evaluate({ x, labels });
  } finally {
    await first;
  }
});
await mistake("other checkpoint", async () => trainer.load(await readFile(`${other}/checkpoint`)));
await mistake("unknown schedule", () => Trainer.create({ ort, files, schedule: { name: "cosine" } }));
const lacking = { name: "linear", warmup_steps: 1, total_steps: 2 };
await mistake("lacking schedule", () => Trainer.create({ ort, files, schedule: lacking }));
await mistake("unknown option", () => Trainer.create({ ort, files, provider: "wasm" }));
await mistake("no files", () => Trainer.create({ ort }));
await mistake("no ort", () => Trainer.create({ files }));
const isUnchanged = Buffer.compare(Buffer.from(before), Buffer.from(trainer.save())) === 0;
await trainer.trainStep({ x, labels });
found["after all of them"] = [isUnchanged, trainer.step];
console.log(JSON.stringify(found));
