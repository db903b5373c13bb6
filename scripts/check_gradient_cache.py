"""Measure the peak memory of a large batch in mini-batches, and compare its loss and gradients with PyTorch's.

A model of MiniLM's shape with random weights computes the gradients of in-batch negatives, in a process
of its own: on a batch of 64 pairs, and on a batch of 1,024 pairs with `mini_batch_size=64`. Peak memory is what the
process gained after its imports (Linux). The larger batch's loss and gradients are compared with those of sentence-
transformers' CachedMultipleNegativesRankingLoss in eager PyTorch, with the same dropout masks.

    pip install sentence-transformers
    python scripts/check_gradient_cache.py

Fails if memory grows by more than a tenth, if losses differ by more than 1e-6, or if gradients differ by more than
5e-5 of the largest: they are float32 sums over all rows in another order. On 64 pairs without dropout, the gradients of
the whole batch in eager PyTorch are 1.8e-5 from those in float64, and mini-batches here 1.5e-5.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness.isolation import Isolation
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim

from onnxtool.runtime.timing import peak_rss_bytes, reset_peak_rss
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss

PAIRS, MINI_BATCH, LENGTH, DROPOUT = 1024, 64, 16, 0.1  # LENGTH: tokens of a text
MEMORY_RATIO, LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1.1, 1e-6, 5e-5


class Encoder(torch.nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """A BERT of MiniLM's shape with the mean of its token embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        rates = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
        self.bert = transformers.BertModel(transformers.BertConfig(**sizes, **rates), add_pooling_layer=False)

    def __getitem__(self, _index: int) -> torch.nn.Module:
        """Return the first module, which sentence-transformers asks for."""
        return self

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Embed texts."""
        tokens = self.bert(**features).last_hidden_state
        mask = features["attention_mask"][..., None]
        return {"sentence_embedding": (tokens * mask).sum(1) / mask.sum(1)}


def in_batch_negatives(
    model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Return the loss of pairs among all documents."""
    queries, documents = (model(features)["sentence_embedding"] for features in inputs["columns"])
    return torch.nn.functional.cross_entropy(20 * cos_sim(queries, documents), torch.arange(len(queries)))


def run(kind: str, pairs: int, gradients: Path) -> tuple[int, float]:
    """Take a step, write the gradients, and return the memory gained and the loss."""
    warnings.simplefilter("ignore")
    reset_peak_rss()
    before = peak_rss_bytes()
    model = Encoder().train()
    draw = torch.Generator().manual_seed(0)
    columns = []
    for _ in range(2):
        ids = torch.randint(1000, 30000, (pairs, LENGTH), generator=draw)
        columns.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    compute: Any
    if kind == "PyTorch":
        cached = CachedMultipleNegativesRankingLoss(model, mini_batch_size=MINI_BATCH)
        compute = lambda: cached(columns, None)  # noqa: E731
    else:
        size = MINI_BATCH if kind == "mini-batches" else None
        module = ModuleWithLoss(model, compute_loss=in_batch_negatives, mini_batch_size=size)
        compute = lambda: module({"columns": columns})  # noqa: E731
    torch.manual_seed(1)
    loss = compute()
    loss.backward()
    peak = peak_rss_bytes() - before
    np.savez(gradients, **{name: value.grad.numpy() for name, value in model.named_parameters()})
    return peak, loss.item()


def main() -> None:
    """Print the table."""
    print("| step | pairs | peak memory | loss |\n|---|---:|---:|---:|")
    rows = (("whole batch", MINI_BATCH), ("mini-batches", PAIRS), ("PyTorch", PAIRS))
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, pairs in rows:
            file = Path(name, f"{kind}.npz")
            ended = Isolation().run(run, Path(name, kind), 3600, kind, pairs, file)
            if ended.value is None:
                sys.exit(ended.stderr)
            peak, loss = ended.value
            found[kind] = (peak, loss, dict(np.load(file)))
            print(f"| {kind} | {pairs} | {peak / 1e6:.0f} MB | {loss:.7g} |", flush=True)
    ratio = found["mini-batches"][0] / found["whole batch"][0]
    (_, loss, gradients), (_, theirs, others) = found["mini-batches"], found["PyTorch"]
    loss_difference = abs(loss - theirs) / abs(theirs)
    scale = max(float(abs(other).max()) for other in others.values())
    difference = max(float(abs(gradients[name] - other).max()) for name, other in others.items()) / scale
    print(
        f"\nmemory ratio {ratio:.2f}; relative difference of loss {loss_difference:.1e}, of gradients {difference:.1e}"
    )
    sys.exit(int(ratio > MEMORY_RATIO or loss_difference > LOSS_TOLERANCE or difference > GRADIENT_TOLERANCE))


if __name__ == "__main__":
    main()
