// npm install onnxruntime-node, then: node train.mjs
import { readFile, writeFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import { Trainer, exampleBatch } from "./onnxtool-training.mjs";

const files = (name) => readFile(new URL(name, import.meta.url));
const onProgress = ({ step, loss }) => console.log(step, loss);
const trainer = await Trainer.create({ ort, files, onProgress });
const batch = exampleBatch(trainer.description); // write your own here: { input_ids: { data, dims }, labels: … }
for (let step = 0; step < 10; step++) await trainer.trainStep(batch);
await writeFile(new URL("trained", import.meta.url), trainer.save());
