"""Rows that a step leaves out: how they are counted, and what the checks share that show that nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from onnxtool.errors import OnnxtoolError

OUTPUTS = "the outputs of all rows were asked for"
INFERENCE = "inference mode has no gradients to compare"

# The largest relative difference accepted. Attention and linear layers sum in the same order in both runs, the loss
# does not; a wrong row has a relative error of about 1.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 5e-2
# Exceptions from models that use labels or rows in ways a check does not cover.
MODEL_ERRORS = (OnnxtoolError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True)
class RowReport:
    """The number of rows left out so far; `str()` gives a readable text.

    Attributes:
        kind: what left them out.
        place: where.
        num_batches: calls of the model with its loss.
        num_pruned_batches: calls that left rows out.
        num_rows: rows of all batches.
        num_kept_rows: rows that were computed.
        reasons: why batches were not pruned, with counts.
    """

    kind: str
    place: str
    num_batches: int = 0
    num_pruned_batches: int = 0
    num_rows: int = 0
    num_kept_rows: int = 0
    reasons: tuple[tuple[str, int], ...] = ()

    def with_batch(self, num_rows: int, num_kept: int, reason: str) -> RowReport:
        """Count another batch; with a reason if all rows were computed."""
        reasons = Counter(dict(self.reasons))
        reasons.update([reason] if reason else [])
        return replace(
            self,
            num_batches=self.num_batches + 1,
            num_pruned_batches=self.num_pruned_batches + (not reason),
            num_rows=self.num_rows + num_rows,
            num_kept_rows=self.num_kept_rows + num_kept,
            reasons=tuple(reasons.most_common()),
        )

    def __str__(self) -> str:
        batches = f"{self.num_pruned_batches} of {self.num_batches} batches"
        rows = f"{self.num_kept_rows} of {self.num_rows} rows {self.place}"
        reasons = [f"  {count} x all rows: {reason}" for reason, count in self.reasons]
        return "\n".join([f"{self.kind}: {batches}, {rows}", *reasons])


class RefusalError(Exception):
    """The reason why no row may be left out."""


def kind_of(inputs: object) -> tuple[tuple[str, str], ...]:
    """Return the names of inputs with their texts: a trainer of several losses chooses by a dataset's name."""
    named = inputs if isinstance(inputs, Mapping) else {}
    return tuple(sorted((str(name), value if isinstance(value, str) else "") for name, value in named.items()))


@contextmanager
def state_restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` and PyTorch's random generators after the block."""
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
