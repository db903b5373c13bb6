"""Small graphs, in ONNX's own text form, and what the tests of the passes ask of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.runtime.quiet import quiet
from tests import graphs
from tests.optimize.exact_products import with_exact_products
from tests.workshop import WORDS

Arrays = Mapping[str, NDArray[Any]]
CONTEXT = Context()
Graph = Callable[[], ir.Model]


@dataclass(frozen=True)
class Row:
    """A pass with graphs on which it fires and graphs that it leaves alone; test_every_pass.py runs all of them.

    Attributes:
        fires: builders of the graphs by their names; each call returns a new model.
        stays: those of graphs that stay as they are, with a part of the note of the pass, which is empty where this is.
        after: the operators that are left of the graphs that it fires on, by their names, or of all.
        feeds: inputs of the graphs; None for random ones.
        atol: how far outputs may differ; None for a pass whose numbers its own file compares with another oracle.
    """

    step: Pass
    fires: Mapping[str, Graph]
    stays: Mapping[str, tuple[Graph, str]] = field(default_factory=dict)
    after: Mapping[str, str] | str = ""
    feeds: Arrays | None = field(default=None, repr=False)
    atol: float | None = 1e-5

    def left(self, graph: str) -> list[str]:
        """Return the operators that are left of a graph; empty where the table does not say."""
        return (self.after if isinstance(self.after, str) else self.after.get(graph, "")).split()


def of_text(text: str, weights: Arrays | None = None, opset: int = 17) -> Graph:
    """Return the builder of a model; see `build`."""
    return partial(build, text, weights, opset)


def of_body(body: str, weights: Arrays | None = None, opset: int = 17, dtype: str = "float") -> Graph:
    """Return the builder of a model of nodes that make `y` [B, S, 8] of `x` [B, S, 8]."""
    return partial(build_body, body, weights, opset, dtype)


def as_type(dtype: Any, weights: Arrays) -> dict[str, NDArray[Any]]:
    """Return weights with floats of another dtype."""
    return {name: array.astype(dtype) if array.dtype.kind == "f" else array for name, array in weights.items()}


def build(graph: str, weights: Arrays | None = None, opset: int = 17) -> ir.Model:
    """Return the model of `name (inputs) => (outputs) <constants> { nodes }`, with `weights` as initializers."""
    model: ir.Model = ir.from_proto(graphs.of_text(graph, weights, opset))
    return model


def build_body(body: str, weights: Arrays | None = None, opset: int = 17, dtype: str = "float") -> ir.Model:
    """Return the model of nodes that make `y` [B, S, 8] of `x` [B, S, 8]."""
    return build(f"g ({dtype}[B, S, 8] x) => ({dtype}[B, S, 8] y) {{ {body} }}", weights, opset)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Return numbers from a normal distribution, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def exported(module: Any, *shape: int, dynamo: bool) -> ir.Model:
    """Return what PyTorch exports for a module of one float32 input, whose axes but the last are dynamic."""
    import torch

    sample = (torch.zeros(shape),)
    # Both exporters warn of their own doings.
    with quiet(), io.BytesIO() as file:
        if dynamo:
            axes = (dict.fromkeys(range(len(shape) - 1), torch.export.Dim.DYNAMIC),)
            # Its optimizer would fuse some of what the passes are to find.
            program = torch.onnx.export(
                module.eval(), sample, dynamo=True, opset_version=18, dynamic_shapes=axes, optimize=False
            )
            proto = program.model_proto
        else:
            torch.onnx.export(
                module.eval(),
                sample,
                file,
                dynamo=False,
                opset_version=17,
                input_names=["x"],
                dynamic_axes={"x": dict(zip(range(len(shape) - 1), "BS", strict=False))},
            )
            proto = onnx.load_from_string(file.getvalue())
    model: ir.Model = ir.from_proto(proto)
    return model


def run(model: ir.Model, feeds: Arrays | None = None) -> list[NDArray[Any]]:
    """Run the graph without onnxruntime's own fusions, with products of int8 that are exact on every CPU.

    Float inputs are made up where there are no `feeds`.
    """
    return run_as_stored(with_exact_products(model), feeds)


def run_as_stored(model: ir.Model, feeds: Arrays | None = None) -> list[NDArray[Any]]:
    """Run the graph as it is, without onnxruntime's own fusions, on the kernels that it has for this CPU."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1  # threads that wait for a graph of ten nodes take ten times its time
    content = ir.to_proto(ir.external_data.load_to_model(model)).SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    given = feeds or {
        value.name: normal(*(size if isinstance(size, int) else 2 + axis for axis, size in enumerate(value.shape)))
        for value in session.get_inputs()
    }
    outputs: list[NDArray[Any]] = session.run(None, given)
    return outputs


def apply(step: Pass, model: ir.Model) -> Outcome:
    """Apply a pass that knows nothing but the graph."""
    return step.apply(model, CONTEXT)


def count(model: ir.Model, operator: str, domain: str = "") -> int:
    """Count the nodes of an operator in the main graph."""
    return sum(node.op_type == operator and node.domain == domain for node in model.graph)


def operators(model: ir.Model) -> list[str]:
    """Return the operators of the main graph in their order."""
    return [node.op_type for node in model.graph]


def assert_same_numbers(step: Pass, model: ir.Model, feeds: Arrays | None = None, atol: float = 1e-5) -> None:
    """Compare the outputs before and after a pass that fires, by name, dtype and number, and the metadata.

    The default of `atol` is for values around 1, in float32, that are summed in another order.
    """
    names, expected = [value.name for value in model.graph.outputs], run(model, feeds)
    model.metadata_props["made_for"] = "a test"
    metadata = dict(model.metadata_props)
    outcome = apply(step, model)
    assert outcome.num_changes > 0
    assert outcome.model.metadata_props == metadata
    assert [value.name for value in outcome.model.graph.outputs] == names
    for one, other in zip(run(outcome.model, feeds), expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)


def assert_twice_is_once(step: Pass, model: ir.Model) -> None:
    """Apply a pass that fires a second time, which must change nothing."""
    once = apply(step, model)
    assert once.num_changes > 0
    before = ir.to_proto(once.model).SerializeToString(deterministic=True)
    assert apply(step, once.model).num_changes == 0
    assert ir.to_proto(once.model).SerializeToString(deterministic=True) == before


def assert_left_alone(step: Pass, model: ir.Model, note: str = "") -> None:
    """Apply a pass that must not fire, and whose note holds `note`."""
    before = operators(model)
    outcome = apply(step, model)
    assert outcome.num_changes == 0
    assert operators(outcome.model) == before
    assert note in outcome.note
    assert note or not outcome.note


def ragged_feeds() -> dict[str, NDArray[np.int64]]:
    """Return ids for a BERT, [3, 9], with a mask that has holes on the right, on the left and in the middle."""
    generator = np.random.default_rng(0)
    mask = np.ones((3, 9), np.int64)
    mask[0, 6:] = mask[1, :4] = mask[2, 3:5] = 0
    return {
        "input_ids": generator.integers(0, WORDS, (3, 9)),
        "token_type_ids": generator.integers(0, 2, (3, 9)),
        "attention_mask": mask,
    }
