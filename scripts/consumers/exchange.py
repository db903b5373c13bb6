"""Run a script of this folder, `exchange.py SCRIPT FOLDER TEXTS ANSWERS [SETTING ...]`, and what several of them share.

FOLDER is what onnxtool exported, TEXTS a JSON list of strings. ANSWERS is written: a list with, for each text, a
vector or an object of term ids and weights.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUERY = 40  # so many characters of a text are a query to encoders that tell queries and documents apart
QUESTION = "what is the capital of France?"  # which texts are ranked by
Answer = list[float] | dict[int, float]


def open_graph(path: Path) -> Any:
    """Open a graph in the onnxruntime of this environment."""
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def inputs_of(encoding: Any) -> dict[str, list[int]]:
    """Return what a graph may take of a text that a tokenizer has encoded."""
    return {
        "input_ids": encoding.ids,
        "attention_mask": encoding.attention_mask,
        "token_type_ids": encoding.type_ids,
    }


def register(settings: Sequence[str], dim: int = 1) -> str:
    """Add the exported model to fastembed's list, and return its name there; its width is used nowhere but there."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    name, (pooling, normalize) = "local/exported", settings
    TextEmbedding.add_custom_model(
        model=name,
        pooling=PoolingType[pooling],
        normalization=normalize == "normalize",
        sources=ModelSource(hf=name),
        dim=dim,
        model_file="model.onnx",
    )
    return name


def nonzero(weights: Any) -> dict[int, float]:
    """Return the entries above 0 of a vector of term weights."""
    return {int(term): float(weights[term]) for term in weights.nonzero()[0]}


if __name__ == "__main__":
    script, folder, texts, answers, *settings = sys.argv[1:]
    run = importlib.import_module(Path(script).stem).run
    found = run(Path(folder), json.loads(Path(texts).read_text(encoding="utf-8")), settings)
    Path(answers).write_text(json.dumps(found), encoding="utf-8")
