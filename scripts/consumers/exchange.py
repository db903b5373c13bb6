"""What the scripts of this folder are told and give back: `script.py FOLDER TEXTS ANSWERS [SETTING ...]`.

FOLDER is what onnxtool exported, TEXTS a JSON list of strings. ANSWERS is written: a list with, for each text, a
vector or an object of term ids and weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Answer = list[float] | dict[int, float]


def answer(run: Callable[[Path, list[str], Sequence[str]], Sequence[Answer]]) -> None:
    """Call `run` with the folder, the texts and the settings of the command line, and write what it returns."""
    folder, texts, answers, *settings = sys.argv[1:]
    found = run(Path(folder), json.loads(Path(texts).read_text(encoding="utf-8")), settings)
    Path(answers).write_text(json.dumps(found), encoding="utf-8")


def register(fastembed: Any, descriptions: Any, pooling: str, normalize: str, dim: int = 1) -> str:
    """Add the exported model to fastembed's list, and return its name there; its width is used nowhere but there."""
    name = "local/exported"
    fastembed.TextEmbedding.add_custom_model(
        model=name,
        pooling=descriptions.PoolingType[pooling],
        normalization=normalize == "normalize",
        sources=descriptions.ModelSource(hf=name),
        dim=dim,
        model_file="model.onnx",
    )
    return name


def nonzero(weights: Any) -> dict[int, float]:
    """Return the entries above 0 of a vector of term weights."""
    return {int(term): float(weights[term]) for term in weights.nonzero()[0]}
