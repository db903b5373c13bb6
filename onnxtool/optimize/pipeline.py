"""The pass interface, and running a list of passes."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtool.errors import OnnxtoolError, PassError, first_line
from onnxtool.graph.shapes import find_shapes
from onnxtool.model_file.weights import release_weights
from onnxtool.optimize.kept import Trail
from onnxtool.optimize.report import PassResult
from onnxtool.progress import Stage, tell

_LOGGER = logging.getLogger(__name__)
MOST_ROUNDS = 4


@dataclass(frozen=True)
class Context:
    """Information for passes besides the graph.

    Attributes:
        model_type: transformers' name of the architecture; empty if unknown.
        num_heads: attention heads; 0 if unknown, in which case passes infer it.
        hidden_size: width of the hidden states; 0 if unknown.
        provider: the execution provider that the model is for.
        precision: the precision that the model is converted to after the passes.
    """

    model_type: str = ""
    num_heads: int = 0
    hidden_size: int = 0
    provider: str = "cpu"
    precision: str = "fp32"


class FailedPassError(PassError):
    """A pass raised an unexpected error.

    Attributes:
        name: the pass.
        why: the error it raised.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"the pass {name} failed: {reason}",
            "the input file is untouched; another --model_type may help, or a model of another exporter",
        )
        self.name, self.why = name, f"it failed: {reason}"


@dataclass(frozen=True)
class Outcome:
    """The result of a pass.

    Attributes:
        model: the result, which may be the same object, changed in place.
        num_changes: nodes and initializers added, removed or rewritten; 0 if nothing changed.
        note: a remark for the report, such as a precondition that did not hold.
        left_out: whether the pass could not be run, as `note` explains; the model is unchanged.
    """

    model: ir.Model
    num_changes: int
    note: str = ""
    left_out: bool = False


@dataclass(frozen=True)
class Pass:
    """A step of the pipeline: a name and a function of a model."""

    name: str
    apply: Callable[[ir.Model, Context], Outcome]


def run_passes(
    model: ir.Model,
    passes: Sequence[Pass],
    context: Context,
    *,
    most_rounds: int = MOST_ROUNDS,
) -> tuple[ir.Model, tuple[PassResult, ...]]:
    """Run `passes` in order, repeat until none of them changes anything, and return the result of each.

    One pass may enable another in the next round; on the final result, none of them changes anything.

    Raises:
        PassError: a pass failed; the message names it.
    """
    results = {step.name: PassResult(step.name, 0, 0.0, "") for step in passes}
    ease_wide_nodes(model)
    for _ in range(most_rounds):
        num_changes = 0
        for number, step in enumerate(passes):
            tell(Stage("optimizing", number, len(passes), step.name))
            start = time.perf_counter()
            trail, outcome = Trail.of(model), _apply(step, model, context)
            model = outcome.model
            if trail is not None:
                trail.note(model)
            if outcome.num_changes:
                _keep_names_apart(model)
            release_weights(model)
            duration_ms = results[step.name].duration_ms + (time.perf_counter() - start) * 1e3
            total = results[step.name].num_changes + outcome.num_changes
            results[step.name] = PassResult(step.name, total, duration_ms, outcome.note, outcome.left_out)
            num_changes += outcome.num_changes
            _LOGGER.log(
                logging.INFO if outcome.num_changes else logging.DEBUG,
                "pass %s: %d changes in %.1f ms%s",
                step.name,
                outcome.num_changes,
                (time.perf_counter() - start) * 1e3,
                outcome.note and f"; {outcome.note}",
            )
        if not num_changes:
            break
    return model, tuple(results.values())


def _keep_names_apart(model: ir.Model) -> None:
    """Rename values of the main graph whose names are used elsewhere in the model.

    New values get names that are unique within their kind, but names must be unique in the whole model.
    """
    graphs = list(model.graphs())
    taken = {output.name for graph in graphs[1:] for node in graph for output in node.outputs}
    taken |= {value.name for graph in graphs[1:] for value in (*graph.inputs, *graph.initializers.values())}
    outputs = [output for node in model.graph for output in node.outputs]
    initializers = list(model.graph.initializers.values())
    elsewhere = taken | {value.name for value in (*model.graph.inputs, *outputs)}
    known = elsewhere | {value.name for value in initializers}
    for value in initializers:
        if value.name in elsewhere and not value.is_graph_input() and not value.is_graph_output():
            _rename(value, known)
    for output in outputs:
        # Without a name: an optional output that is not computed.
        if output.name and output.name in taken and not output.is_graph_output():
            _rename(output, known)


def _rename(value: ir.Value, used_names: set[str | None]) -> None:
    names = (f"{value.name}_{number}" for number in itertools.count(1))
    new = next(name for name in names if name not in used_names)
    value.name = new
    used_names.add(new)


def _apply(step: Pass, model: ir.Model, context: Context) -> Outcome:
    try:
        return step.apply(model, context)
    except OnnxtoolError:
        raise
    except Exception as error:  # libraries may raise any error on an unexpected graph
        reason = first_line(error)
        raise FailedPassError(step.name, f"{type(error).__name__}: {reason}") from error


def rewrite_each(
    model: ir.Model, matches: Sequence[Sequence[Any]], rewrite: Callable[..., str], *shared: object
) -> Outcome:
    """Rewrite each match of a pattern by `rewrite(*match, shapes of the model, *shared)`.

    `rewrite` returns the precondition that does not hold, if any.
    """
    shapes = find_shapes(model) if matches else None
    reasons = [reason for match in matches if (reason := rewrite(*match, shapes, *shared))]
    return Outcome(model, len(matches) - len(reasons), refusals(reasons))


def refusals(reasons: Sequence[str]) -> str:
    """Return the note of a pass that left patterns unchanged: a count per reason; empty without reasons."""
    return "; ".join(f"{count} left alone: {reason}" for reason, count in Counter(reasons).items())


def inventory(model: ir.Model) -> Counter[tuple[str, ...]]:
    """Return each node (operator, inputs, outputs, attributes) and initializer (name, type) with its count."""
    entries: Counter[tuple[str, ...]] = Counter()
    for graph in model.graphs():
        for node in graph:
            inputs = ",".join("" if value is None else str(value.name) for value in node.inputs)
            outputs = ",".join(str(value.name) for value in node.outputs)
            # Tensors and graphs are described by their names: reading their content for a count would take long.
            attributes = ",".join(
                f"{attribute.name}={attribute.value if attribute.type.name not in ('TENSOR', 'GRAPH') else '…'}"
                for attribute in node.attributes.values()
            )
            entries[(node.domain, node.op_type, inputs, outputs, attributes)] += 1
        for name, value in graph.initializers.items():
            entries[("initializer", name, str(value.dtype), str(value.shape))] += 1
    return entries


def count_changes(before: Counter[tuple[str, ...]], after: Counter[tuple[str, ...]]) -> int:
    """Count nodes and initializers that are in only one inventory; a rewritten one counts once."""
    return max((before - after).total(), (after - before).total())


_NARROW = 64  # inputs


class _WideNode(ir.Node):
    """A node with its inputs in a list: onnx_ir's tuple is copied for each input that is replaced."""

    __slots__ = ()
    _inputs: Any

    def replace_input_with(self, index: int, value: Any) -> None:
        if not 0 <= index < len(self._inputs):
            raise ValueError(f"Index out of range: {index}")
        old, self._inputs[index] = self._inputs[index], value
        if old is not None:
            old._remove_usage(self, index)
        if value is not None:
            value._add_usage(self, index)

    def resize_inputs(self, new_size: int, /) -> None:
        self._inputs += [None] * (new_size - len(self._inputs))
        super().resize_inputs(new_size)


def ease_wide_nodes(model: ir.Model) -> None:
    """Let passes replace each input of a node with thousands of inputs, in time proportional to their number."""
    for node in model.graph.all_nodes():
        # Placement on several devices follows the inputs, which only onnx_ir's own method knows.
        if type(node) is ir.Node and len(node.inputs) > _NARROW and not getattr(node, "device_configurations", ()):
            node.__class__ = _WideNode
            node._inputs = list(node.inputs)  # type: ignore[assignment]  # by its new class
