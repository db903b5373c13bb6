// node again.mjs FOLDER FILE …: load each checkpoint of the folder, and save it as FILE.again.
import { readFile, writeFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import { Trainer } from "./onnxtool-training.mjs";

const [folder, ...names] = process.argv.slice(2);
const trainer = await Trainer.create({ ort, files: (name) => readFile(`${folder}/${name}`) });
for (const name of names) {
  trainer.load(await readFile(name));
  await writeFile(`${name}.again`, trainer.save());
}
