"""Encode the same texts at each request; a worker of workers.py.

It runs in the environment of the contender, and those of peers have no onnxtool. `encode` encodes all texts and answers
wall and processor seconds; `save` writes the vectors of the last time, float32 [N, H], to the file of the last
argument.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.workers import serve

Encode = Callable[[list[str]], Any]
BATCH_SIZE = 32  # sentence-transformers' default
MAX_TOKENS = 256  # of MiniLM, by its sentence_bert_config.json


def sentence_transformers(checkpoint: str, _model: str, dtype: str = "float32") -> Encode:
    """Return sentence-transformers on PyTorch, with its defaults."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(checkpoint, device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})
    return lambda texts: model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False)


def sentence_transformers_onnx(checkpoint: str, _model: str) -> Encode:
    """Return sentence-transformers on its onnx backend, which exports the checkpoint by itself."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        checkpoint, backend="onnx", model_kwargs={"provider": "CPUExecutionProvider", "export": True}
    )
    return lambda texts: model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False)


def openvino(checkpoint: str, model: str) -> Encode:
    """Return OpenVINO on an ONNX file that ends in pooled vectors: f32, set up for throughput, requests in parallel.

    Its own integration in sentence-transformers is for versions of transformers before this one. Texts are sorted and
    batched as sentence-transformers does it.
    """
    import openvino as ov
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(checkpoint) / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest of a batch
    tokenizer.enable_truncation(MAX_TOKENS)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "THROUGHPUT"}
    compiled = ov.Core().compile_model(model, "CPU", settings)
    names = [port.get_any_name() for port in compiled.inputs]

    def encode(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        vectors: list[Any] = [None] * len(texts)

        def store(request: Any, places: list[int]) -> None:
            for place, vector in zip(places, request.get_output_tensor(0).data.copy(), strict=True):
                vectors[place] = vector

        requests = ov.AsyncInferQueue(compiled)
        requests.set_callback(store)
        for start in range(0, len(order), BATCH_SIZE):
            places = order[start : start + BATCH_SIZE]
            batch = tokenizer.encode_batch([texts[place] for place in places])
            ids, mask = (np.array([getattr(row, name) for row in batch]) for name in ("ids", "attention_mask"))
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            requests.start_async({name: feeds[name] for name in names}, places)
        requests.wait_all()
        return np.stack(vectors)

    return encode


def onnxtool(texts_path: str, model: str, provider: str, workers: str, threads: str) -> Callable[[], tuple[float, Any]]:
    """Return onnxtool, from the file of texts to files of vectors; loading the model is not part of the wall time."""
    from onnxtool.encoding import CorpusOptions, encode_corpus

    folder = Path(f"{model}-vectors")
    options = CorpusOptions(provider=provider, workers=int(workers), threads=int(threads), force=True)

    def encode() -> tuple[float, Any]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.manifest.json").unlink(missing_ok=True)
        report = encode_corpus(Path(model), Path(texts_path), folder, options)
        return report.seconds, folder

    return encode


PEERS: dict[str, Callable[[str, str], Encode]] = {
    "sentence-transformers": sentence_transformers,
    "sentence-transformers-bf16": partial(sentence_transformers, dtype="bfloat16"),
    "sentence-transformers-onnx": sentence_transformers_onnx,
    "openvino": openvino,
}


def peer(name: str, checkpoint: str, model: str, texts_path: str) -> Callable[[], tuple[float, Any]]:
    """Return a peer that has loaded its model and run once."""
    texts = [json.loads(line)["contents"] for line in Path(texts_path).read_text(encoding="utf-8").split("\n") if line]
    encode = PEERS[name](checkpoint, model)
    encode(texts[:BATCH_SIZE])

    def timed() -> tuple[float, Any]:
        start = time.perf_counter()
        vectors = encode(texts)
        return time.perf_counter() - start, vectors

    return timed


def main() -> int:
    """Serve until stdin ends."""
    name, *arguments, vectors_path = sys.argv[1:]
    encode = onnxtool(*arguments) if name == "onnxtool" else peer(name, *arguments)
    vectors: Any = None

    def answer(request: str) -> tuple[float, float] | None:
        nonlocal vectors
        if request == "save":
            shards = sorted(vectors.glob("*.npy")) if isinstance(vectors, Path) else ()
            array = np.concatenate([np.load(shard) for shard in shards]) if shards else np.asarray(vectors)
            np.save(vectors_path, array.astype(np.float32))
            return None
        used = time.process_time()
        wall_s, vectors = encode()
        return wall_s, time.process_time() - used

    serve(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
