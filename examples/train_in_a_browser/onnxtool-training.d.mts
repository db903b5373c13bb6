/** The types of onnxtool-training.mjs. */

export class TrainingError extends Error {}

export type Dtype =
  | "float32" | "float64" | "float16" | "string" | "bool"
  | "int8" | "int16" | "int32" | "int64" | "uint8" | "uint16" | "uint32" | "uint64";
export type Data =
  | Float32Array | Float64Array | Int8Array | Int16Array | Int32Array | BigInt64Array
  | Uint8Array | Uint16Array | Uint32Array | BigUint64Array;

/** An input: an array of the input's dtype, or numbers to convert to it; an ort.Tensor also works. */
export interface Input {
  readonly data: Data | ArrayLike<unknown>;
  readonly dims: readonly number[];
  readonly type?: string;
}
export type Batch = Record<string, Input>;

/** A parameter; `data` of trained ones changes with each step. */
export interface Parameter {
  dtype: Dtype;
  dims: number[];
  data: Data;
}

export type Schedule =
  | { name: "constant" }
  | { name: "linear"; learning_rate: number; warmup_steps: number; total_steps: number };

export interface Progress {
  step: number;
  loss: number;
  learningRate: number;
}

export interface Value {
  name: string;
  dtype: Dtype;
  /** Numbers, names of dynamic axes, or null. */
  shape: (number | string | null)[];
}

/** training.json. */
export interface Description {
  version: 1;
  loss: string;
  loss_function: string;
  optimizer: string | null;
  block_size: number;
  schedule: Schedule;
  inputs: Value[];
  outputs: Value[];
  /** For label inputs; the first token whose label counts is 1 if labels are shifted. */
  labels: Record<string, { classes: number | null; first: number; ignore_index: number | null }>;
  parameters: Record<"trained" | "frozen", { name: string; dtype: Dtype; shape: number[] }[]>;
  made_with: { onnxtool: string; opset: number; onnxruntime: string };
}

export interface CreateOptions {
  /** The module of onnxruntime-web, onnxruntime-node or onnxruntime-react-native. */
  ort: { InferenceSession: { create(...args: any[]): Promise<any> }; Tensor: new (...args: any[]) => any };
  /** The address of the folder; this or `files`. */
  url?: string | URL;
  /** Reads a file of the folder. */
  files?: (name: string) => ArrayBuffer | Uint8Array | Promise<ArrayBuffer | Uint8Array>;
  executionProviders?: readonly (string | { name: string })[];
  sessionOptions?: object;
  schedule?: Schedule;
  onProgress?: (progress: Progress) => void;
}

export class Trainer {
  static create(options: CreateOptions): Promise<Trainer>;
  private constructor();
  readonly executionProvider: string;
  readonly reason: string;
  readonly description: Description;
  learningRate: number;
  readonly step: number;
  readonly parameters: Map<string, Parameter>;
  accumulate(batch: Batch): Promise<number>;
  update(): Promise<Progress>;
  trainStep(...batches: Batch[]): Promise<number>;
  evaluate(batch: Batch): Promise<Record<string, any> & { loss: number }>;
  save(): Uint8Array;
  load(checkpoint: ArrayBuffer | Uint8Array): void;
  release(): Promise<void>;
}

export function exampleBatch(description: Description, size?: number): Batch;
export function linearRate(schedule: Schedule & { name: "linear" }, done: number): number;
export function readSafetensors(file: ArrayBuffer | Uint8Array): {
  metadata: Record<string, string>;
  tensors: Map<string, Parameter>;
};
export function writeSafetensors(tensors: Map<string, Parameter>, metadata: Record<string, string>): Uint8Array;
