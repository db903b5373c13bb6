// node schedule.mjs FOLDER: the steps of a linear schedule with two batches each.
import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import { Trainer } from "./onnxtool-training.mjs";

const steps = [];
const files = (name) => readFile(`${process.argv[2]}/${name}`);
const schedule = { name: "linear", learning_rate: 1e-2, warmup_steps: 2, total_steps: 6 };
const trainer = await Trainer.create({ ort, files, schedule, onProgress: (step) => steps.push(step) });
const { batches } = JSON.parse(await files("batches.json"));
for (let place = 0; place < 14; place += 2) await trainer.trainStep(batches[place], batches[place + 1]);
console.log(JSON.stringify(steps));
