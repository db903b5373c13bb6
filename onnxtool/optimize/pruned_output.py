"""Detach the pruning of term weights from a graph during optimization, and restore it unchanged.

Rounding errors at a threshold would change terms, so passes, conversions, the error on texts and the verification work
on all weights, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.checkpoint.pruning import WHOLE, Pruning
from onnxtool.errors import PassError
from onnxtool.graph.builder import Builder
from onnxtool.graph.edit import drop_unused, remove_unused
from onnxtool.model_file import ModelFile


class _Builder(Builder):
    """Names the constants of the pruning so that they are found in the file."""

    def constant(self, array: NDArray[Any], name: str = "") -> ir.Value:
        """Return a new initializer that holds `array`."""
        return self.initializer(ir.tensor(array), f"onnxtool.vectors.constant_{len(self.initializers)}")


@dataclass(frozen=True)
class PrunedOutput:
    """The pruning that was taken off a graph.

    Attributes:
        pruning: the rule.
        dtype: the element type of the weights before.
        output: the output of the graph, with its dtype and shape.
    """

    pruning: Pruning
    dtype: ir.DataType
    output: ir.Value

    def put_back(self, model: ir.Model) -> None:
        """Prune the output of `model` that has the name of the output before."""
        graph = model.graph
        place = next(place for place, value in enumerate(graph.outputs) if value.name == self.output.name)
        vectors = graph.outputs[place]
        vectors.name = WHOLE
        build = _Builder(graph, self.dtype)
        output = self.pruning.build(build, vectors)
        if self.output.dtype not in (None, build.dtype):
            output = build.cast(output, self.output.dtype)
        output.name, output.type, output.shape = self.output.name, self.output.type, self.output.shape
        graph.outputs[place] = output
        model.metadata_props.update(self.pruning.metadata)

    @classmethod
    def adding(cls, model: ir.Model, pruning: Pruning) -> PrunedOutput:
        """Return what prunes the output of a graph that gives all terms.

        Raises:
            PassError: it gives none.
        """
        for output in model.graph.outputs:
            if output.name == pruning.output and output.shape is not None and len(output.shape) == 2:
                before = ir.Value(name=output.name, type=output.type, shape=output.shape)
                return cls(pruning, output.dtype or ir.DataType.FLOAT, before)
        raise PassError(
            f"--prune {pruning} is for the term weights of a sparse encoder, and the graph gives "
            + ", ".join(str(output.name) for output in model.graph.outputs),
            "export the model with --head splade",
        )


def take_off(model: ir.Model, source: ModelFile) -> PrunedOutput | None:
    """End the graph of `source` in the weights before pruning, under the name of its output; None without.

    Raises:
        InputError: the metadata of the file is malformed.
        PassError: the graph does not show where pruning begins.
    """
    pruning = Pruning.of_model(source)
    if pruning is None:
        return None
    graph = model.graph
    for place, output in enumerate(graph.outputs):
        vectors: ir.Value | None = output
        while vectors is not None and vectors.name != WHOLE:
            node = vectors.producer()
            vectors = node.inputs[0] if node is not None and node.inputs else None
        last = output.producer()
        if vectors is None or vectors is output or last is None or output.name != pruning.output:
            continue
        before = ir.Value(name=output.name, type=output.type, shape=output.shape)
        graph.outputs[place] = vectors
        remove_unused(graph, [last])
        drop_unused(list(graph.initializers.values()))
        vectors.name = before.name
        return PrunedOutput(pruning, vectors.dtype or ir.DataType.FLOAT, before)
    raise PassError(
        f"{source.path} says that its vectors are pruned by {pruning}, and the graph does not show where they are made",
        "optimize the model exported without --prune, or export it again",
    )
