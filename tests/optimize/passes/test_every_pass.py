"""What holds for every pass of every preset."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from onnxtool.optimize.pipeline import Context, Pass
from onnxtool.optimize.presets import PRESETS
from tests.optimize.passes.builders import assert_left_alone, build
from tests.workshop import Workshop

# Each pass with those that run before it where it first stands.
STEPS: dict[str, tuple[Pass, ...]] = {}
for _steps in PRESETS.values():
    for _number, _step in enumerate(_steps):
        STEPS.setdefault(_step.name, _steps[: _number + 1])
BERT = Context("bert", num_heads=4, hidden_size=32)


@pytest.mark.parametrize("name", STEPS)
def test_a_pass_has_tests_of_its_own(name: str) -> None:
    """A new one fails this test until it has its file."""
    tests = Path(__file__).resolve().parent.parent
    assert list(tests.glob(f"*/test_{name}.py"))


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", STEPS)
def test_a_pass_does_nothing_the_second_time_and_keeps_the_metadata(
    workshop: Workshop, name: str, exporter: str
) -> None:
    """Behind the passes that run before it."""
    model = ir.load(workshop.exported("tiny-encoder", exporter=exporter))
    *before, step = STEPS[name]
    for earlier in before:
        model = earlier.apply(model, BERT).model
    metadata = dict(model.metadata_props)
    assert metadata
    once = step.apply(model, BERT).model
    assert step.apply(once, BERT).num_changes == 0
    assert once.metadata_props == metadata


@pytest.mark.parametrize("name", STEPS)
def test_a_pass_leaves_a_model_alone_that_has_nothing_for_it(name: str) -> None:
    """Integers only: nothing to fuse, to clean up or to share."""
    assert_left_alone(STEPS[name][-1], build("g (int64[B] x) => (int64[B] y) { y = Neg(x) }"))
