"""Compare files that read texts with tokenizer and graph apart: answers, milliseconds in turns, and sizes.

`python scripts/bench_text_input.py` exports MiniLM, the trained SPLADE, and a reranker over MiniLM with a head from a
seed, with the tokenizer in the graph and next to it. Answers are those of sentence-transformers; times are those of
the tokenizers library and onnxruntime, of single texts and of batches of 32, in turns.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from harness.machine import describe_machine
from harness.pages import print_head, print_row
from harness.workers import times_in_turns
from make_models import place_trained, trained_model
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from tokenizers import Tokenizer
from transformers import BertForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool import ExportOptions, export_model
from onnxtool.model_file import ModelFile
from onnxtool.runtime.providers import find_library
from onnxtool.runtime.tokens import HARD_TEXTS

SENTENCE = "A model is exported, optimized and verified before it is kept."
PASSAGE = " ".join([SENTENCE] * 8)
WORKLOADS = {
    "1 sentence": [SENTENCE],
    "1 passage": [PASSAGE],
    "32 sentences": [SENTENCE] * 32,
    "32 passages": [PASSAGE] * 32,
}
TURNS = 25


def open_session(path: Path) -> onnxruntime.InferenceSession:
    """Open a file as a program would that has onnxruntime alone."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(find_library())
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def runs_of(folder: Path, most_tokens: int) -> tuple[Callable[[Sequence[Any]], Any], Callable[[Sequence[Any]], Any]]:
    """Return how texts, or pairs, are run by the file that reads them, and by tokenizer and file apart."""
    whole, apart = open_session(folder / "text.onnx"), open_session(folder / "ids.onnx")
    names, wanted = ([value.name for value in session.get_inputs()] for session in (whole, apart))
    tokenizer = Tokenizer.from_file(str(folder / "ids" / "tokenizer.json"))
    tokenizer.enable_truncation(most_tokens)
    tokenizer.enable_padding()

    def read(texts: Sequence[Any]) -> Any:
        columns = [texts] if len(names) == 1 else zip(*texts, strict=True)
        return whole.run(None, dict(zip(names, map(list, columns), strict=True)))[0]

    def tokenize(texts: Sequence[Any]) -> Any:
        rows = tokenizer.encode_batch(texts)
        arrays = {
            "input_ids": np.array([row.ids for row in rows]),
            "attention_mask": np.array([row.attention_mask for row in rows]),
            "token_type_ids": np.array([row.type_ids for row in rows]),
        }
        return apart.run(None, {name: arrays[name] for name in wanted})[0]

    return read, tokenize


def make_reranker(folder: Path) -> Path:
    """Save MiniLM with a random score of pairs."""
    torch.manual_seed(0)
    shutil.copytree(trained_model(), folder, dirs_exist_ok=True)
    model = BertForSequenceClassification.from_pretrained(trained_model(), num_labels=1)
    model.classifier.weight.data *= 20
    model.save_pretrained(folder)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def main() -> int:
    """Print a row for each model."""
    texts = [text for text in HARD_TEXTS if "\0" not in text]
    pairs = list(zip(texts, [*texts[7:], *texts[:7]], strict=True))
    print(f"{describe_machine()}; ms of the file that reads texts, and their ratio to tokenizer and graph apart\n")
    print_head(["model", f"largest difference of {len(texts)} texts", "MB more", *WORKLOADS])
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        place_trained(base)
        models: dict[str, tuple[Path, str, Callable[[str], Any]]] = {
            "MiniLM": (trained_model(), "in_graph", lambda path: SentenceTransformer(path, device="cpu").encode(texts)),
            "SPLADE": (
                base / "splade",
                "in_graph",
                lambda path: SparseEncoder(path, device="cpu").encode(texts[:100]).to_dense().numpy(),
            ),
            "reranker": (
                make_reranker(base / "reranker"),
                "pairs_in_graph",
                lambda path: CrossEncoder(path, device="cpu").predict(pairs, activation_fn=lambda scores: scores),
            ),
        }
        for title, (checkpoint, place, answer) in models.items():
            folder = base / f"files-{title}"
            for kind, tokenizer in (("text", place), ("ids", "beside")):
                export_model(ExportOptions(str(checkpoint), output=folder / f"{kind}.onnx", tokenizer=tokenizer))
            stated = ModelFile.open(folder / "text.onnx").text_input
            read, tokenize = runs_of(folder, stated.most_tokens if stated else 0)
            samples: Sequence[Any] = pairs if title == "reranker" else texts
            expected = np.asarray(answer(str(checkpoint)))
            actual = np.concatenate([read(samples[start : start + 32]) for start in range(0, len(expected), 32)])
            difference = np.abs(actual[: len(expected)].reshape(expected.shape) - expected).max()
            more = (folder / "text.onnx").stat().st_size - (folder / "ids.onnx").stat().st_size
            cells = [f"{difference:.2g} of {np.abs(expected).max():.2g}", f"{more / 1e6:.2f}"]
            for workload in WORKLOADS.values():
                inputs: list[Any] = [(SENTENCE, text) for text in workload] if title == "reranker" else workload
                seconds = times_in_turns([partial(read, inputs), partial(tokenize, inputs)], TURNS)
                own, other = map(statistics.median, seconds)
                cells.append(f"{1e3 * own:.2f} ({own / other:.2f}x)")
            print_row(title, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
