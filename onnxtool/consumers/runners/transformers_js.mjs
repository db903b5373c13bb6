// Transformers.js, in node or in a page. The job and its answers are described in exchange.py.

const DTYPES = { "": "fp32", _quantized: "q8" }; // others are the end of the file's name

const dtypeOf = (file) => {
  const end = file.split("/").pop().replace(/^model|\.onnx$/g, "");
  return DTYPES[end] ?? end.slice(1);
};

const chunks = (texts, size) => Array.from({ length: Math.ceil(texts.length / size) }, (_, i) => texts.slice(i * size, (i + 1) * size));

// The rows of real tokens of each text: logits [B, S, ...], mask [B, S].
const byText = (logits, mask) => {
  const flags = mask.tolist();
  return logits.tolist().map((rows, i) => rows.filter((_, j) => Number(flags[i][j])));
};

const sparse = (logits, mask) => {
  const [batch, sequence, vocabulary] = logits.dims;
  return Array.from({ length: batch }, (_, i) => {
    const largest = new Float32Array(vocabulary);
    for (let j = 0; j < sequence; j += 1) {
      if (!Number(mask.data[i * sequence + j])) continue;
      const start = (i * sequence + j) * vocabulary;
      for (let term = 0; term < vocabulary; term += 1) largest[term] = Math.max(largest[term], logits.data[start + term]);
    }
    return Object.fromEntries([...largest.entries()].filter(([, weight]) => weight > 0).map(([term, weight]) => [term, Math.log1p(weight)]));
  });
};

async function open(lib, job, name, options) {
  const encodes = job.kind === "text encoders";
  if (encodes && job.pooling !== "none") {
    const extract = await lib.pipeline("feature-extraction", name, options);
    const run = async (texts) => (await extract(texts, { pooling: job.pooling, normalize: job.normalize })).tolist();
    return { run, dispose: () => extract.dispose() };
  }
  const classes = { "text classifiers": "AutoModelForSequenceClassification", "sparse encoders": "AutoModelForMaskedLM", "token classifiers": "AutoModelForTokenClassification" };
  const tokenizer = await lib.AutoTokenizer.from_pretrained(name);
  const model = await lib[encodes ? "AutoModel" : classes[job.kind]].from_pretrained(name, options);
  const run = async (texts) => {
    const pair = job.question === null ? {} : { text_pair: texts };
    const firsts = job.question === null ? texts : texts.map(() => job.question);
    const inputs = await tokenizer(firsts, { padding: true, truncation: true, ...pair });
    const outputs = await model(inputs);
    if (encodes) return outputs.sentence_embedding.tolist();
    if (job.kind === "text classifiers") return outputs.logits.tolist();
    return (job.kind === "sparse encoders" ? sparse : byText)(outputs.logits, inputs.attention_mask);
  };
  return { run, dispose: () => model.dispose() };
}

export async function answer(lib, job, name) {
  const answers = [];
  let model, opened;
  for (const { file, batch_size: size, role } of job.calls) {
    try {
      if (file !== opened) {
        await model?.dispose();
        [model, opened] = [undefined, undefined];
        model = await open(lib, job, name, file ? { dtype: dtypeOf(file) } : {});
        opened = file;
      }
      const rows = [], start = performance.now();
      for (const texts of chunks(job.texts[role], size)) rows.push(...(await model.run(texts)));
      answers.push({ rows, seconds: (performance.now() - start) / 1000 });
    } catch (error) {
      answers.push({ error: String(error.message ?? error) });
    }
  }
  return answers;
}

if (globalThis.process?.argv[2] !== undefined) {
  const [{ createRequire }, { readFileSync, writeFileSync }, path] = await Promise.all([import("node:module"), import("node:fs"), import("node:path")]);
  const [jobPath, answersPath] = process.argv.slice(2);
  const job = JSON.parse(readFileSync(jobPath, "utf-8"));
  let found = { missing: "@huggingface/transformers" };
  try {
    const require = createRequire(path.join(process.cwd(), "package.json")), lib = require(found.missing);
    Object.assign(lib.env, { allowRemoteModels: false, localModelPath: path.dirname(job.folder) });
    const stated = readFileSync(path.join(path.dirname(require.resolve(found.missing)), "..", "package.json"), "utf-8");
    found = { version: `${found.missing} ${JSON.parse(stated).version}`, answers: await answer(lib, job, path.basename(job.folder)) };
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
  }
  writeFileSync(answersPath, JSON.stringify(found));
}
