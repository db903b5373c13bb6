"""Prove an exported file against the PyTorch model that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.export.companions import Pooling
from onnxtool.export.heads import Head
from onnxtool.export.signature import Signature, run_torch_tensors, to_numpy
from onnxtool.model_file import ModelFile
from onnxtool.reports import Verification
from onnxtool.runtime.comparison import Answers, Case, Tolerance, ask, require_passed, verify
from onnxtool.runtime.feeds import index_bounds, random_feeds, verification_shapes
from onnxtool.runtime.session import open_session

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TEXTS = (
    "what is AI?",
    "Sparse retrieval weighs the terms of the whole vocabulary, so that a query meets documents that use other words.",
    "Ein Satz auf Deutsch, 12345, naïve café — and some punctuation: (a), [b]; {c}!",
)
_UNLIMITED = 10**6


@dataclass(frozen=True)
class Prover:
    """The PyTorch model that an exported file has to agree with, and how to call it."""

    model: Any
    tokenizer: Any
    signature: Signature
    head: Head | None
    pooling: Pooling

    def ask(self, path: Path) -> Answers:
        """Run the model on what the file at `path` will be run on: several shapes and masks, and real text."""
        return ask(self.run, self._cases(ModelFile.open(path)), name="PyTorch")

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run the PyTorch model, with the head in PyTorch on top."""
        import torch

        tensors = run_torch_tensors(self.model, feeds)
        if self.head is not None:
            mask = torch.from_numpy(feeds["attention_mask"]).to(self.model.device)
            with torch.inference_mode():
                tensors = {self.head.output: self.head.reference(tensors[self.head.source], mask, self.pooling)}
        return {name: to_numpy(tensor) for name, tensor in tensors.items()}

    def _cases(self, file: ModelFile) -> list[Case]:
        bounds = index_bounds(file)
        shapes = verification_shapes(longest_text(self.model, self.tokenizer))
        cases = []
        for seed, shape in enumerate(shapes):
            feeds = random_feeds(file.structure.inputs, shape, bounds, seed=seed)
            cases.append(Case(shape.description, feeds, shape.mask if "attention_mask" in feeds else None))
        tokens = tokenize(self.tokenizer, _TEXTS, self.signature)
        mask = tokens.get("attention_mask")
        return [*cases, Case("real text", tokens, None if mask is None else mask.astype(bool))]


def prove(path: Path, answers: Answers, tolerance: Tolerance) -> Verification:
    """Compare the file at `path` with what the PyTorch model answered.

    Raises:
        VerificationError: an output differs by more than `tolerance`.
    """
    verification = verify(open_session(path, provider="cpu").run, answers, tolerance)
    require_passed(verification, "try the other --exporter; --no_verify keeps the file, wrong as it is")
    return verification


def longest_text(model: Any, tokenizer: Any) -> int | None:
    """Return how many tokens the model takes, as far as its configuration and tokenizer tell; None for no limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    limits = [limit for limit in (positions, getattr(tokenizer, "model_max_length", None)) if limit]
    # RoBERTa and its kin start counting positions after the padding id.
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    padding_id = getattr(embeddings, "padding_idx", None)
    if positions is not None and padding_id is not None:
        limits.append(positions - padding_id - 1)
    # transformers writes "no limit" as 1e30.
    return min((int(limit) for limit in limits if limit < _UNLIMITED), default=None)


def tokenize(tokenizer: Any, texts: Sequence[str], signature: Signature) -> dict[str, NDArray[np.int64]]:
    """Tokenize `texts` into int64 [B, S] arrays for the inputs of `signature`, padded to the longest.

    A tokenizer that knows no padding token (GPT-2's) repeats the first text, which then needs none.
    """
    batch = list(texts) if tokenizer.pad_token is not None else [texts[0]] * len(texts)
    encoded = tokenizer(
        batch, padding=tokenizer.pad_token is not None, truncation=True, max_length=128, return_tensors="np"
    )
    return {name: np.asarray(encoded[name], dtype=np.int64) for name in signature.inputs}
