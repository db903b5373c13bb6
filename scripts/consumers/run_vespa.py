"""Encode texts as Vespa's SpladeEmbedder and HuggingFaceEmbedder do, one at a time: their source, in Python.

Settings are `sparse`, or `dense`, the pooling strategy, the output and whether to normalize.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from exchange import Answer, inputs_of, nonzero, open_graph
from tokenizers import Tokenizer

MAX_TOKENS = 512


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector, or terms and weights, for each text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    if tokenizer.truncation is None:
        tokenizer.enable_truncation(MAX_TOKENS)
    session = open_graph(folder / "model.onnx")
    names = [value.name for value in session.get_inputs()]
    answers: list[Answer] = []
    for text in texts:
        offered = inputs_of(tokenizer.encode(text))
        # SpladeEmbedder feeds all three; HuggingFaceEmbedder as many as the graph has.
        used = offered if settings[0] == "sparse" else list(offered)[: len(names)]
        feeds = {name: np.array([offered[name]], dtype=np.int64) for name in used}
        if settings[0] == "sparse":
            (logits,) = session.run(["logits"], feeds)
            weights = np.log(1.0 + np.maximum(logits[0].astype(np.float64).max(axis=0), 0.0))
            answers.append(nonzero(weights))
            continue
        _, pooling, output, normalize = settings
        (states,) = session.run([output], feeds)
        vector = {"mean": lambda s: s[0].mean(axis=0), "cls": lambda s: s[0, 0], "none": lambda s: s[0]}[pooling](
            states
        )
        answers.append((vector / np.linalg.norm(vector) if normalize == "normalize" else vector).tolist())
    return answers
