// Train the artifacts of onnxtool in any onnxruntime of JavaScript: onnxruntime-web, -node and -react-native.

/** An error in files or inputs: what happened, the value, and the way out. */
export class TrainingError extends Error {
  name = "TrainingError";
}

const fail = (message) => {
  throw new TrainingError(message);
};

// safetensors dtype: onnxruntime dtype and its array. In the order of the format's own writer, which puts larger
// types first so that all data is aligned.
const DTYPES = {
  U64: ["uint64", BigUint64Array],
  I64: ["int64", BigInt64Array],
  F64: ["float64", Float64Array],
  F32: ["float32", Float32Array],
  U32: ["uint32", Uint32Array],
  I32: ["int32", Int32Array],
  F16: ["float16", Uint16Array],
  U16: ["uint16", Uint16Array],
  I16: ["int16", Int16Array],
  I8: ["int8", Int8Array],
  U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};
const ORDER = Object.keys(DTYPES);
const ARRAYS = { ...Object.fromEntries(Object.values(DTYPES)), string: Array };
const KEY = "onnxtool_checkpoint";
const VERSION = 1;
const MOMENTS = { first_order_moments: "momentum0", second_order_moments: "momentum1" };
const MODELS = ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"];
// As of 1.30, builds for only WebGPU and JSPI lack double-precision kernels, which the optimizer needs.
const BUNDLES = "of the bundles of onnxruntime-web take ort.min.mjs, or ort.wasm.min.mjs for no WebGPU";
const MAX_HEADER_BYTES = 100_000_000;

const count = (dims) => dims.reduce((product, size) => product * size, 1);
const bytesOf = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
const isSize = (value) => Number.isSafeInteger(value) && value >= 0;
const isShape = (value) => Array.isArray(value) && value.every(isSize);
const same = (one, other) => one.length === other.length && one.every((size, axis) => size === other[axis]);

/**
 * Read a safetensors file; its header is checked against its length before anything is read.
 * Returns the metadata, an object of strings, and the tensors {dtype, dims, data}, a Map by name.
 */
export function readSafetensors(file) {
  const bytes = file instanceof ArrayBuffer ? new Uint8Array(file) : bytesOf(file);
  const broken = (why) => fail(`this safetensors file is truncated or damaged: ${why}; copy it again`);
  if (bytes.length < 8) broken(`${bytes.length} bytes`);
  const size = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  if (size > Math.min(MAX_HEADER_BYTES, bytes.length - 8)) broken(`a header of ${size} bytes`);
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + size)));
  } catch {
    broken("its header is not JSON");
  }
  if (header === null || typeof header !== "object" || Array.isArray(header)) broken("its header is no object");
  const entries = new Map(Object.entries(header));
  const metadata = entries.get("__metadata__") ?? {};
  entries.delete("__metadata__");
  const data = bytes.subarray(8 + size);
  const found = [...entries].map(([name, entry]) => {
    const [from, to] = Array.isArray(entry?.data_offsets) ? entry.data_offsets : [];
    if (!Object.hasOwn(DTYPES, entry?.dtype)) broken(`${name} has the dtype ${entry?.dtype}`);
    if (!isShape(entry.shape) || !isSize(from) || !isSize(to)) broken(`${name} has no shape or place`);
    const [dtype, Kind] = DTYPES[entry.dtype];
    if (count(entry.shape) * Kind.BYTES_PER_ELEMENT !== to - from || to > data.length) {
      broken(`${name}, ${entry.dtype} [${entry.shape}], has the bytes ${from} to ${to} of ${data.length}`);
    }
    return { name, dtype, dims: entry.shape, Kind, from, to };
  });
  let end = 0;
  for (const { name, from, to } of [...found].sort((a, b) => a.from - b.from || a.to - b.to)) {
    if (from !== end) broken(`${name} begins at ${from}, and the tensor before it ends at ${end}`);
    end = to;
  }
  if (end !== data.length) broken(`its tensors end at ${end} of ${data.length} bytes`);
  const tensors = new Map(
    found.map(({ name, dtype, dims, Kind, from, to }) => {
      return [name, { dtype, dims, data: new Kind(data.slice(from, to).buffer) }]; // a copy is aligned
    }),
  );
  return { metadata, tensors };
}

/** Write tensors {dtype, dims, data}, a Map by name, and metadata: the same bytes as the format's own writer. */
export function writeSafetensors(tensors, metadata) {
  const rows = [...tensors].map(([name, tensor]) => {
    const rank = ORDER.findIndex((key) => DTYPES[key][0] === tensor.dtype);
    if (rank < 0) fail(`safetensors has no dtype ${tensor.dtype}, which ${name} has`);
    return { name, rank, ...tensor };
  });
  rows.sort((a, b) => a.rank - b.rank || (a.name < b.name ? -1 : 1));
  let end = 0;
  const parts = rows.map(({ name, rank, dims, data }) => {
    const entry = { dtype: ORDER[rank], shape: dims, data_offsets: [end, (end += data.byteLength)] };
    return `${JSON.stringify(name)}:${JSON.stringify(entry)}`;
  });
  // Assembled as text: an object would move numeric names to the front.
  const header = new TextEncoder().encode(`{${[`"__metadata__":${JSON.stringify(metadata)}`, ...parts].join(",")}}`);
  const start = 8 + Math.ceil(header.length / 8) * 8;
  const file = new Uint8Array(start + end).fill(32, 8, start);
  new DataView(file.buffer).setBigUint64(0, BigInt(start - 8), true);
  file.set(header, 8);
  end = start;
  for (const { data } of rows) {
    file.set(bytesOf(data), end);
    end += data.byteLength;
  }
  return file;
}

/** The learning rate after `done` steps: linear warm-up from zero, then linear decay to zero. */
export function linearRate({ learning_rate, warmup_steps, total_steps }, done) {
  const isWarm = done >= warmup_steps;
  const factor = isWarm ? (total_steps - done) / Math.max(1, total_steps - warmup_steps) : done / warmup_steps;
  return learning_rate * Math.max(0, factor);
}

const SETTINGS = { constant: [], linear: ["learning_rate", "warmup_steps", "total_steps"] };

function checkSchedule(schedule) {
  const { name, ...settings } = schedule;
  if (!Object.hasOwn(SETTINGS, name)) {
    fail(`there is no schedule ${name}; write one of ${Object.keys(SETTINGS).join(", ")}`);
  }
  const unknown = Object.keys(settings).filter((key) => !SETTINGS[name].includes(key));
  if (unknown.length) fail(`the schedule ${name} has no ${unknown.join(", ")}; it has ${SETTINGS[name].join(", ")}`);
  const missing = SETTINGS[name].filter((key) => !(Number.isFinite(settings[key]) && settings[key] >= 0));
  if (missing.length) fail(`the schedule ${name} needs a number as ${missing.join(", ")}`);
  if (settings.warmup_steps > settings.total_steps) {
    fail(`${settings.warmup_steps} warm-up steps of ${settings.total_steps} in all; pass at most the total`);
  }
  return schedule;
}

/** A batch that fits the inputs of training.json, of zeros and ones: for trying out a training, not for learning. */
export function exampleBatch({ inputs }, size = 8) {
  const of = ({ name, dtype, shape }) => {
    const dims = shape.map((dim) => (Number.isInteger(dim) ? dim : size));
    const data = Array.from({ length: count(dims) }, (_, place) => (place * 2654435761) % 7 % 2);
    return [name, { data: dtype === "string" ? data.map(String) : data, dims }];
  };
  return Object.fromEntries(inputs.map(of));
}

export class Trainer {
  #ort;
  #training;
  #optimizer;
  #evaluation;
  #schedule;
  #onProgress;
  #head; // the text of the checkpoint's document before the moments, and after the learning rate
  #tail;
  #inputs; // of training.json, by name
  #places = new Map(); // of the trained parameters in flat buffers: {from, to, dims}
  #flat = {}; // params, gradients and moments, each Float32Array, all blocks one after the other
  #blocks;
  #losses = []; // of the batches since the last update
  #isBusy = false;

  /**
   * Open the artifacts of one folder.
   *
   * ort: the module of onnxruntime-web, -node or -react-native.
   * url: the address of the folder, in a browser; or
   * files: (name) => bytes of a file of the folder.
   * executionProviders: as in onnxruntime; by default WebGPU if the browser has it, wasm in other browsers, and the CPU
   *   elsewhere. `trainer.executionProvider` says what it is.
   * sessionOptions: additional onnxruntime session options.
   * schedule: replaces the one in training.json: {name: "constant"}, the checkpoint's learning rate, or {name:
   *   "linear", learning_rate, warmup_steps, total_steps}.
   * onProgress: called after each step with {step, loss, learningRate}.
   */
  static async create({ ort, url, files, executionProviders, sessionOptions, schedule, onProgress, ...unknown } = {}) {
    if (Object.keys(unknown).length) fail(`Trainer.create knows no ${Object.keys(unknown).join(", ")}`);
    if (!ort?.InferenceSession) fail("Trainer.create needs ort, the module of onnxruntime-web, -node or -react-native");
    if ((url === undefined) === (files === undefined)) fail("Trainer.create needs either url or files");
    const read = async (name) => new Uint8Array(await (files ?? ((file) => download(url, file)))(name));
    const text = new TextDecoder().decode(await read("training.json"));
    let description;
    try {
      description = JSON.parse(text);
    } catch {
      fail("training.json is not JSON; make the artifacts again");
    }
    if (description?.version !== VERSION) {
      fail(`training.json is of version ${description?.version}, and this module reads ${VERSION}; take both of one run`);
    }
    const models = MODELS.slice(0, description.optimizer ? 3 : 2);
    const [checkpoint, training, evaluation, optimizer] = await Promise.all(["checkpoint", ...models].map(read));
    const openAll = async (providers) => {
      const sessions = [];
      for (const [place, model] of [training, evaluation, optimizer].entries()) {
        const options = providers ? { ...sessionOptions, executionProviders: providers } : { ...sessionOptions };
        const open = () => ort.InferenceSession.create(model, options);
        const explain = ({ message }) => fail(`onnxruntime cannot open ${MODELS[place]}: ${message}; ${BUNDLES}`);
        sessions.push(model && (await open().catch(explain)));
      }
      return sessions;
    };
    const trainer = new Trainer();
    let sessions;
    if (executionProviders) {
      sessions = await openAll(executionProviders);
      trainer.executionProvider = executionProviders.map((one) => one.name ?? one).join(", ");
    } else if (!isBrowser()) {
      sessions = await openAll();
      trainer.executionProvider = "cpu";
    } else {
      let reason = "this browser has no WebGPU adapter";
      if (await globalThis.navigator?.gpu?.requestAdapter()) {
        try {
          sessions = await openAll(["webgpu", "wasm"]);
          trainer.executionProvider = "webgpu";
        } catch (error) {
          reason = `onnxruntime cannot train on WebGPU: ${error.message}`;
        }
      }
      if (!sessions) {
        sessions = await openAll(["wasm"]);
        trainer.executionProvider = "wasm";
        trainer.reason = reason;
      }
    }
    [trainer.#training, trainer.#evaluation, trainer.#optimizer] = sessions;
    trainer.#ort = ort;
    trainer.#onProgress = onProgress ?? (() => {});
    trainer.#schedule = checkSchedule(schedule ?? description.schedule);
    trainer.#describe(description);
    trainer.load(checkpoint);
    return trainer;
  }

  /** Where a step runs: webgpu, wasm, cpu, or the requested providers. */
  executionProvider = "";
  /** Why a browser uses wasm. */
  reason = "";
  /** training.json. */
  description;
  /** The learning rate of the next step; a linear schedule sets it. */
  learningRate = 0;
  /** The number of steps so far. */
  step = 0;
  /** All parameters {dtype, dims, data}, a Map by name; data of trained ones are views that change each step. */
  parameters = new Map();

  /** Add the gradients of a batch, {name: ort.Tensor or {data, dims}}, and return its loss. */
  accumulate(batch) {
    return this.#alone(async () => {
      const feeds = { ...this.#feeds(batch), ...this.#tensors() };
      feeds.lazy_reset_grad = this.#tensor("bool", Uint8Array.of(this.#losses.length === 0), [1]);
      for (const [name, { from, to, dims }] of this.#places) {
        const gradient = this.#flat.gradients.subarray(from, to);
        feeds[`${name}_grad.accumulation.buffer`] = this.#tensor("float32", gradient, dims);
      }
      const out = await this.#training.run(only(this.#training, feeds));
      for (const [name, { from }] of this.#places) {
        this.#flat.gradients.set(out[`${name}_grad.accumulation.out`].data, from);
      }
      for (const [name, { data }] of this.parameters) {
        if (!this.#places.has(name) && out[`${name}_out`]) data.set(out[`${name}_out`].data); // running statistics
      }
      this.#losses.push(lossOf(out[this.description.loss]));
      return this.#losses.at(-1);
    });
  }

  /** Update the parameters with the accumulated gradients, and return {step, loss, learningRate}. */
  update() {
    return this.#alone(async () => {
      if (!this.#optimizer) fail("these artifacts have no optimizer model; make them with --optimizer AdamW or SGD");
      if (!this.#losses.length) fail("there are no gradients; call accumulate first");
      const feeds = {
        learning_rate: this.#tensor("float32", Float32Array.of(this.learningRate), [1]),
        step: this.#tensor("int64", BigInt64Array.of(BigInt(this.step + 1)), [1]),
      };
      for (const [name, data] of Object.entries(this.#flat)) feeds[name] = this.#tensor("float32", data, this.#blocks);
      const out = await this.#optimizer.run(only(this.#optimizer, feeds));
      for (const [name, data] of Object.entries(this.#flat)) if (out[`${name}_out`]) data.set(out[`${name}_out`].data);
      this.step++;
      const loss = this.#losses.reduce((sum, one) => sum + one, 0) / this.#losses.length;
      const progress = { step: this.step, loss, learningRate: this.learningRate };
      this.#losses = [];
      this.#scheduleNext();
      this.#onProgress(progress);
      return progress;
    });
  }

  /** Accumulate the gradients of these batches, update the parameters, and return the mean loss. */
  async trainStep(...batches) {
    for (const batch of batches) await this.accumulate(batch);
    return (await this.update()).loss;
  }

  /** Return the outputs of the eval model, ort.Tensor by name; the loss is a number, `loss`. */
  evaluate(batch) {
    return this.#alone(async () => {
      const feeds = { ...this.#feeds(batch), ...this.#tensors() };
      const { [this.description.loss]: loss, ...outputs } = await this.#evaluation.run(only(this.#evaluation, feeds));
      return { ...outputs, loss: lossOf(loss) };
    });
  }

  /** Return a checkpoint with the optimizer state, as the bytes of a file that onnxtool can read. */
  save() {
    const tensors = new Map(this.parameters);
    const moments = Object.keys(this.#flat).filter((name) => name in MOMENTS);
    for (const name of moments) {
      for (const [parameter, { from, to, dims }] of this.#places) {
        const data = this.#flat[name].subarray(from, to);
        tensors.set(`optimizer/${MOMENTS[name]}/${parameter}`, { dtype: "float32", dims, data });
      }
    }
    const names = `[${[...this.#places.keys()].map(pythonText).join(", ")}]`;
    const text = moments.map((name) => `"${MOMENTS[name]}": ${names}`).join(", ");
    const state = `"moments": {${text}}, "step": ${this.step}, "learning_rate": ${pythonNumber(this.learningRate)}`;
    return writeSafetensors(tensors, { [KEY]: this.#head + state + this.#tail });
  }

  /** Resume from a checkpoint, the bytes of a file for the same artifacts; accumulated gradients are dropped. */
  load(file) {
    if (this.#isBusy) fail("a step is running; await it first");
    const { metadata, tensors } = readSafetensors(file);
    if (typeof metadata[KEY] !== "string") fail("this safetensors file is no checkpoint of onnxtool");
    let state;
    try {
      state = JSON.parse(metadata[KEY]);
    } catch {
      fail("the checkpoint is damaged: its metadata are not JSON; copy it again");
    }
    // The rest of the document stays text: Python numbers lose their type in JavaScript.
    const parts = DOCUMENT.exec(metadata[KEY]);
    if (state?.version !== VERSION || !parts) {
      fail(`the checkpoint is of version ${state?.version}, and this module reads ${VERSION}`);
    }
    if (state.nominal) fail("the checkpoint is nominal and has no values; load one that has");
    if (!isSize(state.step) || !Number.isFinite(state.learning_rate)) fail("the checkpoint has no step or learning rate");
    const { trained, frozen } = this.description.parameters;
    const known = new Set([...trained, ...frozen].map(({ name }) => name));
    const other = [...tensors.keys()].filter((name) => !known.has(name) && !name.startsWith("optimizer/"));
    if (other.length) fail(`the checkpoint is of another model: ${other.slice(0, 5).join(", ")} unknown to this one`);
    const take = (name, { dtype, shape }) => {
      const tensor = tensors.get(name);
      if (tensor?.dtype === dtype && same(tensor.dims, shape)) return tensor;
      const found = tensor ? `${tensor.dtype} [${tensor.dims}]` : "missing";
      return fail(`the checkpoint is of another model: ${name} is ${found}, not ${dtype} [${shape}]`);
    };
    const size = count(this.#blocks);
    const flat = Object.fromEntries(Object.keys(this.#flat).map((name) => [name, new Float32Array(size)]));
    const parameters = new Map();
    for (const entry of trained) {
      const { from, to, dims } = this.#places.get(entry.name);
      const data = flat.params.subarray(from, to);
      data.set(take(entry.name, entry).data);
      parameters.set(entry.name, { dtype: "float32", dims, data });
    }
    for (const entry of frozen) parameters.set(entry.name, take(entry.name, entry));
    for (const [name, moment] of Object.entries(MOMENTS)) {
      for (const parameter of state.moments?.[moment] ?? []) {
        const place = this.#places.get(parameter);
        if (!place || !flat[name]) fail(`the checkpoint has the moments ${moment} of ${parameter}; the optimizer is another`);
        const tensor = take(`optimizer/${moment}/${parameter}`, { dtype: "float32", shape: place.dims });
        flat[name].set(tensor.data, place.from);
      }
    }
    [, this.#head, this.#tail] = parts;
    this.#flat = flat;
    this.parameters = parameters;
    this.step = state.step;
    this.learningRate = state.learning_rate;
    this.#losses = [];
    this.#scheduleNext();
  }

  /** Free onnxruntime's memory. */
  async release() {
    for (const session of [this.#training, this.#evaluation, this.#optimizer]) await session?.release();
  }

  /** Apply training.json, and compare it with the models. */
  #describe(description) {
    const { inputs, parameters } = description;
    const unlike = [...inputs, ...parameters.trained].filter(({ name }) => !this.#training.inputNames.includes(name));
    if (unlike.length || !this.#training.outputNames.includes(description.loss)) {
      fail("training.json and training_model.onnx are of different artifacts; copy all files of one folder");
    }
    this.description = description;
    this.#inputs = new Map(inputs.map((input) => [input.name, input]));
    let end = 0;
    for (const { name, shape } of parameters.trained) {
      this.#places.set(name, { from: end, to: (end += count(shape)), dims: shape });
    }
    const block = Math.min(description.block_size, Math.max(end, 1));
    this.#blocks = [Math.ceil(end / block), block];
    const moments = Object.keys(MOMENTS).filter((name) => this.#optimizer?.inputNames.includes(name));
    this.#flat = Object.fromEntries(["params", "gradients", ...moments].map((name) => [name, null]));
  }

  #scheduleNext() {
    if (this.#schedule.name === "linear") this.learningRate = linearRate(this.#schedule, this.step);
  }

  /** Run one step at a time: two would read and write the same buffers. */
  async #alone(work) {
    if (this.#isBusy) fail("a step is running; await it first");
    this.#isBusy = true;
    try {
      return await work();
    } finally {
      this.#isBusy = false;
    }
  }

  #tensor(dtype, data, dims) {
    return new this.#ort.Tensor(dtype, data, dims);
  }

  #tensors() {
    const tensors = [...this.parameters].map(([name, { dtype, dims, data }]) => [name, this.#tensor(dtype, data, dims)]);
    return Object.fromEntries(tensors);
  }

  /** Compare a batch with the inputs of training.json, and return its tensors. */
  #feeds(batch) {
    const names = [...this.#inputs.keys()].join(", ");
    const unknown = Object.keys(batch).filter((name) => !this.#inputs.has(name));
    if (unknown.length) fail(`there is no input ${unknown.join(", ")}; a batch has ${names}`);
    const missing = [...this.#inputs.keys()].filter((name) => !Object.hasOwn(batch, name));
    if (missing.length) fail(`the batch lacks ${missing.join(", ")}; a batch has ${names}`);
    return Object.fromEntries([...this.#inputs.values()].map((input) => [input.name, this.#feed(input, batch[input.name])]));
  }

  #feed({ name, dtype, shape }, value) {
    const { data, dims, type } = value ?? {};
    if (!data || !isShape(dims)) fail(`the input ${name} is no tensor; pass {data, dims} or an ort.Tensor`);
    const Kind = ARRAYS[dtype];
    const isPlain = Array.isArray(data) && type === undefined;
    const isFloat16 = dtype === "float16" && type === dtype; // its array depends on the version of JavaScript
    if ((type !== undefined && type !== dtype) || !(isPlain || isFloat16 || data instanceof Kind)) {
      fail(`the input ${name} is ${type ?? data.constructor.name}, not ${dtype}; pass ${Kind.name}, or an array of numbers`);
    }
    const fits = dims.length === shape.length && shape.every((size, axis) => !isSize(size) || size === dims[axis]);
    const declared = `[${shape.map((size) => size ?? "?").join(", ")}]`;
    if (shape.length && !fits) fail(`the input ${name} is ${declared}, not [${dims.join(", ")}]; reshape it`);
    if (data.length !== count(dims)) fail(`the input ${name}, [${dims.join(", ")}], has ${data.length} values`);
    const labels = this.description.labels?.[name];
    if (labels) checkLabels(name, data, dims, labels);
    return this.#tensor(dtype, isPlain ? converted(name, dtype, data) : data, dims);
  }
}

// What Python writes, in its order: names cannot end a string here because quotes inside strings are escaped.
const DOCUMENT = /^(.*?)"moments": \{.*?\}, "step": \d+, "learning_rate": [-+.\de]+(, "properties": .*)$/s;

/** A string as written by Python's json. */
function pythonText(text) {
  const escape = (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, escape);
}

/** A float as written by Python's json. */
function pythonNumber(value) {
  const [digits, exponent] = value.toExponential().split("e").map((part, place) => (place ? Number(part) : part));
  if (value !== 0 && (exponent < -4 || exponent >= 16)) {
    return `${digits}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  return Number.isInteger(value) ? `${value}.0` : String(value);
}

/** Convert numbers to an array of a dtype; numbers that the dtype cannot represent are refused. */
function converted(name, dtype, data) {
  if (dtype === "string") return data.every((one) => typeof one === "string") ? data : fail(`the input ${name} is string`);
  if (dtype === "float16") fail(`the input ${name} is float16; pass an ort.Tensor`);
  const Kind = ARRAYS[dtype];
  const isFloat = dtype.startsWith("float");
  const isBig = Kind === BigInt64Array || Kind === BigUint64Array;
  const array = new Kind(data.length);
  data.forEach((one, place) => {
    const isNumber = typeof one === "number" || typeof one === "bigint" || (dtype === "bool" && typeof one === "boolean");
    if (!isNumber || !(isFloat || Number.isInteger(Number(one)))) fail(`the input ${name} is ${dtype}, and has ${one}`);
    array[place] = isBig ? BigInt(one) : Number(one);
    if (!isFloat && Number(array[place]) !== Number(one)) fail(`the input ${name} is ${dtype}, and has ${one}`);
  });
  return array;
}

/** Refuse labels that are neither a valid class nor ignored: not every provider checks indices. */
function checkLabels(name, data, dims, { classes, first, ignore_index }) {
  const tokens = dims[1] ?? 1;
  const isWrong = (one, place) => {
    const label = Number(one);
    return (label < 0 || label >= (classes ?? Infinity)) && label !== ignore_index && place % tokens >= first;
  };
  const wrong = data.find(isWrong);
  if (wrong === undefined) return;
  const known = classes === null ? "classes from 0 on" : `${classes} classes, from 0 to ${classes - 1}`;
  const ignored = ignore_index === null ? "no ignore_index is set" : `the ignore_index is ${ignore_index}`;
  fail(`the input ${name} has the label ${wrong}, and the loss has ${known}; ${ignored}; pass classes alone`);
}

/** The loss, float [] or [1]. */
function lossOf({ data, dims }) {
  return data.length === 1 ? Number(data[0]) : fail(`the loss is [${dims}], and a step needs one value`);
}

/** Select the inputs a session takes: onnxruntime refuses inputs that a model does not have. */
function only(session, feeds) {
  return Object.fromEntries(session.inputNames.map((name) => [name, feeds[name]]));
}

function isBrowser() {
  const isNode = Boolean(globalThis.process?.versions?.node);
  return !isNode && globalThis.navigator !== undefined && globalThis.navigator.product !== "ReactNative";
}

async function download(url, name) {
  const address = new URL(name, new URL(String(url).replace(/\/?$/, "/"), globalThis.location?.href));
  const response = await fetch(address);
  if (!response.ok) fail(`${address} is not there: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
}
