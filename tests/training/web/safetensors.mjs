// node safetensors.mjs FILE …: what reading each gives, the names of its tensors or the error.
import { readFile } from "node:fs/promises";
import { readSafetensors } from "./onnxtool-training.mjs";

const found = [];
for (const path of process.argv.slice(2)) {
  try {
    found.push([...readSafetensors(await readFile(path)).tensors.keys()].join());
  } catch (error) {
    found.push(`${error.name}: ${error.message}`);
  }
}
console.log(JSON.stringify(found));
