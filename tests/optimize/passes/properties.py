"""The row of a pass in the table of test_every_pass.py: graphs on which it fires, for the properties of all passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtool.optimize.pipeline import Pass
from tests.optimize.passes.builders import Arrays


@dataclass(frozen=True)
class Row:
    """A pass with graphs on which it fires.

    Attributes:
        graphs: builders of the graphs by their names; each call returns a new model.
        feeds: inputs of the graphs; None for random ones.
        atol: how far outputs may differ; None for a pass whose numbers its own file compares with another oracle.
    """

    step: Pass
    graphs: Mapping[str, Callable[[], ir.Model]]
    feeds: Arrays | None = field(default=None, repr=False)
    atol: float | None = 1e-5
