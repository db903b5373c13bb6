// node node.mjs RUNTIME FOLDER …: RUNTIME is the name of a package; a line of JSON for each folder.
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";
import { run } from "./training.mjs";

const [name, ...folders] = process.argv.slice(2);
const runtime = await import(name);
const ort = runtime.InferenceSession ? runtime : runtime.default;
for (const folder of folders) {
  const files = (file) => readFile(new URL(file, pathToFileURL(`${folder}/`)));
  console.log(JSON.stringify(await run(ort, files)));
}
