"""Reverse-mode differentiation of a graph, independent of specific operators.

The graph is traversed backward from the output. An operator's rule turns the gradients of its outputs into gradients of
its inputs, and the gradients from all readers of a value are summed. Values that do not depend on a source, or do not
affect the output, are skipped. Method: Griewank and Walther, Evaluating Derivatives, SIAM 2008, chapter 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor, UnknownDtypeError, sum_to
from onnxtool.autodiff.expansion import check_prepared, expand_functions, known_branch, replace_sequences
from onnxtool.autodiff.rules import NON_DIFFERENTIABLE, RULES
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule
from onnxtool.autodiff.rules.tensor import add_up
from onnxtool.errors import GradientError, some
from onnxtool.graph.edit import reads
from onnxtool.graph.shapes import infer_types
from onnxtool.model_file.domains import settle_imports


class Flow:
    """The nodes between sources and output, connected by differentiable edges.

    Args:
        graph: a sorted graph with known dtypes.
        output: name of the value to differentiate.
        sources: names of the values to differentiate with respect to.

    Attributes:
        output: the value to differentiate.
        sources: the values to differentiate with respect to.
        reaching: for each value, the names of the sources that it depends on.
        active: for each node that depends on a source, the indices in `reads` of the values that do.
        nodes: the active nodes that the output depends on, in graph order.
        needed: the values that a gradient flows to.
    """

    def __init__(self, graph: ir.Graph, output: str, sources: Sequence[str]) -> None:
        values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
        self.output = values[output]
        self.sources = [values[name] for name in dict.fromkeys(sources)]
        self.reaching = {source: frozenset((str(source.name),)) for source in self.sources}
        self.active: dict[ir.Node, frozenset[int]] = {}
        for node in graph:
            self._reach(node)
        self.nodes = self._leading_to(self.output)

    def _reach(self, node: ir.Node) -> None:
        """Record which sources a node depends on; its float and quantized outputs then depend on them too."""
        ignored = NON_DIFFERENTIABLE.get((node.domain, node.op_type), frozenset())
        reached = {
            index: self.reaching[value]
            for index, value in enumerate(reads(node))
            if value is not None and value in self.reaching and index not in ignored
        }
        if not reached:
            return
        self.active[node] = frozenset(reached)
        carries = _carries_integers(node, reached)
        for value in node.outputs:
            if value.dtype is None or value.dtype.is_floating_point() or (carries and value.dtype.is_integer()):
                known = self.reaching.get(value, frozenset())
                self.reaching[value] = known.union(*reached.values())

    def _leading_to(self, output: ir.Value) -> list[ir.Node]:
        self.needed: set[ir.Value | None] = {output}
        nodes = []
        for node, places in reversed(self.active.items()):
            if not self.needed.isdisjoint(node.outputs):
                values = reads(node)
                self.needed.update(values[place] for place in places)
                nodes.append(node)
        return nodes[::-1]

    def lacks_rule(self, node: ir.Node) -> bool:
        """Return whether no rule can compute the required input gradients of a node from its outputs.

        An If of which the branch is known needs none.
        """
        rule = _find_rule(node)
        return (
            rule is None
            or known_branch(node) is not None
            or not (
                all(place in rule.outputs for place, value in enumerate(node.outputs) if value in self.needed)
                and all(rule.find(index) for index in self.active[node])
            )
        )


def _carries_integers(node: ir.Node, reached: Collection[int]) -> bool:
    """Return whether a node's integer outputs are quantized numbers: without a gradient, and not constant either.

    Most operators' integers are indices, steps or sizes; an operator unknown to ONNX may output any kind.
    """
    if node.domain or node.op_type == "QuantizeLinear":
        return True
    values = reads(node)
    kinds = [value.dtype for index in reached if (value := values[index]) is not None]
    return any(kind is not None and kind.is_integer() for kind in kinds)


# Exceptions that rules raise for contradictory attributes and shapes; onnxruntime would fail on them at run time.
_MISFITS = (ArithmeticError, LookupError, TypeError, ValueError)


def differentiate(
    model_or_graph: ir.Model | ir.Graph, output: str, with_respect_to: Sequence[str]
) -> dict[str, ir.Value]:
    """Add the gradients of a scalar value with respect to other values to a graph, using standard operators.

    The forward graph changes where the gradient flows: operators without a rule are replaced by their ONNX function
    bodies, and sequences of chunks by the chunks. A cross entropy, or a BatchNormalization in training mode, becomes
    operators shared with its gradient. Nodes get the optional outputs that rules read. All values stay the same, and
    graph outputs keep their names. New names begin with `gradient/`.

    Args:
        model_or_graph: opset 18 or later, sorted, without local functions; the main graph is changed in place.
        output: name of a float value with one element, the loss.
        with_respect_to: names of float values of the main graph: initializers, inputs, or node outputs.

    Returns:
        The gradient of each, with its dtype and shape; two gradients may be the same value. Values that `output` does
        not depend on are omitted.

    Raises:
        GradientError: a name is not in the graph, the output is not a scalar, or operators have no gradient; the
            message lists all of them, and the hint says what to omit from `with_respect_to` to avoid them.
    """
    model = model_or_graph if isinstance(model_or_graph, ir.Model) else ir.Model(model_or_graph, ir_version=10)
    settle_imports(model.opset_imports)
    check_prepared(model)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for name in (output, *with_respect_to):
        _check_name(name, values)
    _infer(model, with_respect_to)
    if replace_sequences(model.graph):
        _infer(model, with_respect_to)
    flow = Flow(model.graph, output, with_respect_to)
    while expand_functions(model, [node for node in flow.nodes if flow.lacks_rule(node)]):
        _infer(model, with_respect_to)
        flow = Flow(model.graph, output, with_respect_to)
    if _add_outputs(flow.nodes):
        _infer(model, with_respect_to)
    _check_scalar(flow.output)
    for value, role in ((flow.output, "output"), *((source, "value") for source in flow.sources)):
        _check_float(value, role)
    return _ReverseSweep(flow, Builder(model.graph)).gradients()


def _infer(model: ir.Model, sources: Collection[str]) -> None:
    """Infer types, and record the elements of values computed only from constants and fixed shapes.

    Neither sources nor default values of graph inputs count as constants.
    """
    numbers = infer_types(model)
    fixed = {None, *(value for name, value in model.graph.initializers.items() if name not in sources)}
    fixed.difference_update(model.graph.inputs)
    for node in model.graph:
        if node.op_type in ("Shape", "Size") or fixed.issuperset(node.inputs):
            for value in node.outputs:
                if (number := numbers.get(str(value.name))) is not None:
                    value.const_value = ir.tensor(number)
                    fixed.add(value)


def _find_rule(node: ir.Node) -> Rule | None:
    return RULES.get((node.domain, node.op_type))


def _add_outputs(nodes: Sequence[ir.Node]) -> bool:
    """Add optional outputs that rules read; return whether any were missing."""
    added = False
    for node in nodes:
        rule = _find_rule(node)
        for place in range(0 if rule is None else rule.num_outputs):
            if place == len(node.outputs):
                node.resize_outputs(place + 1)
            if not node.outputs[place].name:
                node.outputs[place].name = f"{node.outputs[0].name}/output_{place}"
                added = True
    return added


class _ReverseSweep:
    """A reverse sweep over a flow; collects the gradients of values and the refusals of rules."""

    def __init__(self, flow: Flow, build: Builder) -> None:
        self._flow = flow
        self._build = build
        one = build.constant(1.0, build.tensor(flow.output).dtype)
        self._contributions = {
            flow.output: [one if flow.output.shape == () else one.reshape(build.tensor(flow.output).size())]
        }
        self._refusals: dict[ir.Node, Refusal] = {}
        self._unknown: dict[ir.Node, Refusal] = {}

    def gradients(self) -> dict[str, ir.Value]:
        """Add the gradients of all sources to the graph; if a rule refuses a node, nothing is added."""
        replaced = {node: self._forward(node) for node in self._flow.nodes}
        for node in reversed(self._flow.nodes):
            self._propagate(node)
        if refusals := self._refusals or self._unknown:
            raise _unsupported(refusals, self._flow)
        gradients = {str(source.name): self._sum(source) for source in self._flow.sources}
        self._build.finish({node: outputs for node, outputs in replaced.items() if outputs})
        return {name: gradient.value for name, gradient in gradients.items() if gradient is not None}

    def _forward(self, node: ir.Node) -> Sequence[Tensor]:
        """Return a node's outputs as recomputed by its rule; none if the node is kept."""
        rule = _find_rule(node)
        if rule is None or rule.forward is None:
            return ()
        try:
            return rule.forward(Backward(self._build, node, 0, [None] * len(node.outputs), self._flow.active[node]))
        except UnknownDtypeError as error:
            self._unknown[node] = Refusal(str(error))
        except Refusal as refusal:
            self._refusals[node] = refusal
        except _MISFITS as error:
            self._refusals[node] = _misfit(error)
        return ()

    def _propagate(self, node: ir.Node) -> None:
        """Add the gradients of the inputs of `node`, computed from the gradients of its outputs."""
        gradients = [self._sum(value) for value in node.outputs]
        if all(gradient is None for gradient in gradients):
            return
        values = reads(node)
        for index in sorted(self._flow.active[node]):
            value = values[index]
            if value is None:
                continue
            try:
                gradient = self._apply(
                    Backward(self._build, node, index, gradients, self._flow.active[node]), self._build.tensor(value)
                )
            except UnknownDtypeError as error:  # perhaps caused by an unknown operator, which is also refused
                self._unknown[node] = Refusal(str(error))
                gradient = self._build.tensor(value)
            except (Refusal, *_MISFITS) as error:
                self._refusals.setdefault(node, error if isinstance(error, Refusal) else _misfit(error))
                gradient = self._build.tensor(value)  # a placeholder, to find the remaining refusals too
            self._contributions.setdefault(value, []).append(gradient)

    def _apply(self, back: Backward, value: Tensor) -> Tensor:
        """Return the gradient with respect to the input `back.index`, which is `value`."""
        rule = _find_rule(back.node)
        if rule is None:
            raise Refusal("")
        for place, gradient in enumerate(back.gradients):
            if gradient is not None and place not in rule.outputs:
                raise Refusal(f"not through its output {place}")
        gradient = rule.gradient(back.index)(back)
        if rule.broadcasts:
            gradient = sum_to(self._build, gradient, of=back.y(), to=value)
        if gradient.value.shape is None:
            gradient.value.shape = value.value.shape
        return gradient

    def _sum(self, value: ir.Value) -> Tensor | None:
        gradients = self._contributions.get(value, [])
        if len(gradients) > 1:
            total = add_up(self._build, gradients)
            total.value.shape = value.shape
            self._contributions[value] = gradients = [total]
        return gradients[0] if gradients else None


def _unsupported(refusals: Mapping[ir.Node, Refusal], flow: Flow) -> GradientError:
    """Return an error that lists all refused nodes with reasons, and the sources that reach them."""
    nodes = sorted(refusals, key=lambda node: (node.op_type, str(node.name)))
    lines = [
        f"{node.op_type} (node {node.name or node.outputs[0].name})"
        + (f": {refusals[node]}" if str(refusals[node]) else "")
        for node in nodes
    ]
    places = {value for node in nodes for value in reads(node)}
    reaching = frozenset().union(*(flow.reaching.get(value, ()) for value in places if value is not None))
    names = [str(source.name) for source in flow.sources if source.name in reaching]
    fused = any(node.domain == "com.microsoft" for node in nodes)
    return GradientError(
        f"no gradient for {'; '.join(lines)}",
        f"{'take the file from before it was optimized; or ' if fused else ''}"
        f"freeze the parameters behind {'it' if len(nodes) == 1 else 'them'}: {some(names)}; "
        "or add a rule in onnxtool/autodiff/rules/",
    )


def _misfit(error: Exception) -> Refusal:
    return Refusal(f"its attributes and shapes do not fit each other ({type(error).__name__}: {error})")


def _check_name(name: str, values: Mapping[str, ir.Value]) -> None:
    if name not in values:
        close = get_close_matches(name, values, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "pass the name of an initializer, input or output"
        raise GradientError(f"the graph has no value called {name}", hint)


def _check_float(value: ir.Value, role: str) -> None:
    if value.dtype is None or not value.dtype.is_floating_point():
        kind = "of unknown dtype" if value.dtype is None else value.dtype.name.lower()
        raise GradientError(f"the {role} {value.name} is {kind}", "only floating point values have a gradient")


def _check_scalar(output: ir.Value) -> None:
    if output.shape is None or any(size != 1 for size in output.shape):
        raise GradientError(
            f"the output {output.name} has the shape {output.shape or 'unknown'}, and a loss has one element",
            "reduce it with ReduceMean or ReduceSum first",
        )
