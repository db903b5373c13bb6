"""Which pass brings a fused model to a lower precision; what it leaves as it is, is measured on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtool.optimize.passes.float16 import to_float16
from onnxtool.optimize.pipeline import Pass
from onnxtool.optimize.precision.ranges import Feeds, beyond, measure_ranges

if TYPE_CHECKING:
    import onnx_ir as ir

# Half of what float16 holds: other texts give larger values than those that were tried.
_LARGEST_IN_FLOAT16 = 65504.0 / 2


def converter(model: ir.Model, precision: str, feeds: Iterable[Feeds], folder: Path) -> Pass:
    """Return the pass that brings `model` to a precision of PRECISIONS other than fp32.

    Args:
        model: what the passes of a provider made.
        precision: the one that is wanted.
        feeds: what to run the model on, to see what it would lose.
        folder: where to put files that are run and removed again.
    """
    return _CONVERTERS[precision](model, feeds, folder)


def _float16(model: ir.Model, feeds: Iterable[Feeds], folder: Path) -> Pass:
    return to_float16(beyond(measure_ranges(model, feeds, folder), _LARGEST_IN_FLOAT16))


_CONVERTERS: dict[str, Callable[[ir.Model, Iterable[Feeds], Path], Pass]] = {"fp16": _float16}
