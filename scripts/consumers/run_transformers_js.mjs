// Encode texts with Transformers.js: settings are `sparse`, or `dense`, the pooling and whether to normalize; and the dtype.
// Called as the Python scripts of this folder are, see exchange.py.
import { readFileSync, writeFileSync } from "node:fs";
import path from "node:path";
import { AutoModel, AutoModelForMaskedLM, AutoTokenizer, env, pipeline } from "@huggingface/transformers";

const [folder, textsPath, answersPath, kind, pooling, normalize, dtype] = process.argv.slice(2);
const texts = JSON.parse(readFileSync(textsPath, "utf-8"));
const options = dtype ? { dtype } : {};
env.allowRemoteModels = false;
env.localModelPath = path.dirname(folder);
const name = path.basename(folder);

async function sparse() {
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModelForMaskedLM.from_pretrained(name, options);
  const answers = [];
  for (const text of texts) {
    const { logits } = await model(await tokenizer(text, { truncation: true }));
    const [, sequence, vocabulary] = logits.dims;
    const terms = {};
    for (let term = 0; term < vocabulary; term += 1) {
      let largest = 0;
      for (let token = 0; token < sequence; token += 1) {
        largest = Math.max(largest, logits.data[token * vocabulary + term]);
      }
      if (largest > 0) terms[term] = Math.log1p(largest);
    }
    answers.push(terms);
  }
  return answers;
}

async function inGraph() {
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModel.from_pretrained(name, options);
  const inputs = await tokenizer(texts, { padding: true, truncation: true });
  return (await model(inputs)).sentence_embedding.tolist();
}

async function pooled() {
  const extractor = await pipeline("feature-extraction", name, options);
  return (await extractor(texts, { pooling, normalize: normalize === "normalize" })).tolist();
}

const run = kind === "sparse" ? sparse : pooling === "none" ? inGraph : pooled;
writeFileSync(answersPath, JSON.stringify(await run()));
