"""Compile chains of elementwise operators that stay in PyTorch into one inductor kernel each, where that is faster.

PyTorch's own kernels each make a pass over memory, and some have a single loop for all layouts: a batch normalization,
a rectifier and a max pooling of 8 x 64 x 32 x 32 numbers take 1.8 ms, but 0.5 ms as inductor kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.errors import CompilationError
from onnxtool.torch_backend.lower.decisions import decision
from onnxtool.torch_backend.measurement import arguments_of, gains, measured_ms
from onnxtool.torch_backend.nodes import MANY_ELEMENTS, Node, called, is_random, is_static, is_view
from onnxtool.torch_backend.partition import Partition, extract
from onnxtool.torch_backend.translator import Translator

aten = torch.ops.aten
Compiled = Callable[..., Any]

_FUSIBLE = frozenset(
    {
        *(aten._to_copy.default, aten.clone.default, torch.ops.prims.convert_element_type.default),
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        *(aten.amax.default, aten.amin.default),
        *(aten.var.correction, aten.var_mean.correction, aten.native_layer_norm.default),
        *(aten._softmax.default, aten._softmax_backward_data.default),
        *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
    }
)
"""Operators that inductor computes in loops, in addition to those that PyTorch marks as pointwise."""
_LEAST_GAIN_MS = 0.02
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-3, torch.float64: 1e-6}
"""The accepted difference relative to the largest number in a result: sums are computed in another order."""
_SETTINGS = {
    "fx_graph_cache": False,  # its files are pickles, and so are the ones of AOTAutograd, which needs it
    "fx_graph_remote_cache": False,
    "compile_threads": 1,  # no processes that outlive compilation
}

_kernels: dict[str, Compiled] = {}  # for this process, which never unloads a library anyway


@dataclass(frozen=True)
class Chain:
    """Operators that run as one.

    Attributes:
        nodes: the operators, in graph order.
        partition: the same operators as a separate graph.
        kernel: takes the partition's inputs, and returns its outputs.
        reason: the times that the decision is based on.
    """

    nodes: tuple[Node, ...]
    partition: Partition
    kernel: Compiled
    reason: str


def in_chains(owner: torch.fx.GraphModule, nodes: Sequence[Node], translator: Translator) -> Iterator[Node | Chain]:
    """Yield nodes that stay in PyTorch in a runnable order, with each chain that inductor speeds up as one item.

    `nodes` run one after another, in the graph order of `owner`.

    Raises:
        CompilationError: inductor cannot compile a chain, or its results differ.
    """
    if translator.options.elementwise != "inductor" or any(map(_is_mutable, nodes)):  # those keep their order
        yield from nodes
        return
    for level, together in _levels(nodes):
        if not together:
            yield from level
            continue
        for component in _components(level):
            computing, views = _without_last_views(component)
            chain = _compiled(owner, computing, translator) if _is_worth_compiling(computing) else None
            yield from (chain,) if chain else computing
            yield from views


def _levels(nodes: Sequence[Node]) -> Iterator[tuple[list[Node], bool]]:
    """Alternate between operators that inductor does not fuse and ones it may, each after what it reads."""
    levels: dict[Node, int] = {}
    last_random = 0
    for node in nodes:
        fusible = _is_fusible(node)
        sources = [source for source in node.all_input_nodes if source in levels]
        level = max((levels[source] + (levels[source] % 2 != fusible) for source in sources), default=int(fusible))
        if is_random(node):
            level = last_random = max(level, last_random)
        levels[node] = level
    for index in range(max(levels.values(), default=-1) + 1):
        yield [node for node in nodes if levels[node] == index], index % 2 == 1


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_fusible(node: Node) -> bool:
    """Return whether inductor may compute a node with others in one loop."""
    if node.target is operator.getitem:
        return _is_fusible(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload) or _is_mutable(node) or is_random(node):
        return False
    known = torch.Tag.pointwise in node.target.tags or node.target in _FUSIBLE or is_view(node)
    if not known and decision(node.target).fused_kernel is None:
        return False
    return all(is_static(value) and value.device.type == "cpu" for value in _values(node))


def _values(node: Node) -> Iterator[Any]:
    for item in (node, *node.all_input_nodes):
        value = item.meta.get("val")
        yield from value if isinstance(value, tuple | list) else (value,)


def _components(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the parts of a level that do not read each other, each in graph order."""
    inside, component = set(nodes), {node: node for node in nodes}

    def root(node: Node) -> Node:
        while component[node] is not node:
            node = component[node]
        return node

    for node in nodes:
        for source in node.all_input_nodes:
            if source in inside:
                component[root(node)] = root(source)
    found: dict[Node, list[Node]] = {}
    for node in nodes:
        found.setdefault(root(node), []).append(node)
    return list(found.values())


def _without_last_views(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Return the nodes and, separately, the views that only others read, which a kernel would copy."""
    inside, views = set(nodes), []
    for node in reversed(nodes):
        if is_view(node) and inside.isdisjoint(node.users):
            inside.remove(node)
            views.append(node)
    return [node for node in nodes if node in inside], views[::-1]


def _is_worth_compiling(nodes: Sequence[Node]) -> bool:
    """Return whether there are several kernels to fuse, at least one of them with much work."""
    computing = [node for node in nodes if not is_view(node) and node.target is not operator.getitem]
    return len(computing) > 1 and any(
        isinstance(value, torch.Tensor) and value.numel() >= MANY_ELEMENTS
        for node in computing
        for value in _values(node)
    )


def _compiled(owner: torch.fx.GraphModule, nodes: Sequence[Node], translator: Translator) -> Chain | None:
    """Return the nodes as one kernel; None if PyTorch's own are as fast."""
    partition = extract(owner, nodes)
    key = f"{translator.fingerprint(partition)} {torch.get_num_threads()} threads"
    arguments = arguments_of(partition.module)

    def kernel() -> Compiled:
        if key not in _kernels:
            _kernels[key] = _checked(_compile(extract(owner, nodes).module, arguments), partition.module, arguments)
        return _kernels[key]

    def prepare() -> list[Callable[[], Any]]:
        return [partial(kernel(), *arguments), partial(partition.module, *arguments)]

    inductor_ms, pytorch_ms = measured_ms(("inductor", "pytorch"), key, translator.cache, prepare)
    if not gains(pytorch_ms, inductor_ms, _LEAST_GAIN_MS):
        return None
    reason = f"in one kernel of inductor: measured: {inductor_ms:.2f} ms, {pytorch_ms:.2f} ms one after another"
    return Chain(tuple(nodes), partition, kernel(), reason)


def _compile(module: torch.fx.GraphModule, arguments: Sequence[torch.Tensor]) -> Compiled:
    from torch._inductor import compile as compile_by_inductor

    try:
        with unset_fake_temporarily(), tracing(None), torch.no_grad():
            compiled: Compiled = compile_by_inductor(module, list(arguments), options=_SETTINGS)
    except Exception as error:  # anything that its passes and the C++ compiler raise
        raise CompilationError(
            f"inductor cannot compile {_operators(module)}: {error}", 'leave elementwise at "pytorch"'
        ) from error

    return compiled


def _operators(module: torch.fx.GraphModule) -> str:
    return ", ".join(
        called(node.target) for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    )


def _checked(kernel: Compiled, module: torch.fx.GraphModule, arguments: Sequence[torch.Tensor]) -> Compiled:
    """Compare a kernel with the operators it replaces, and give its results their memory layouts."""
    with unset_fake_temporarily(), torch.no_grad():
        expected, given = module(*arguments), kernel(*arguments)
        is_same = all(map(_is_close, given, expected))
    if not is_same:
        raise CompilationError(
            f"inductor's kernel for {_operators(module)} gives other numbers", 'leave elementwise at "pytorch"'
        )
    strides = [None if a.stride() == b.stride() else b.stride() for a, b in zip(given, expected, strict=True)]

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = kernel(*inputs)
        return [
            result if stride is None else torch.empty_strided(result.shape, stride, dtype=result.dtype).copy_(result)
            for result, stride in zip(results, strides, strict=True)
        ]

    call.__name__ = call.__qualname__ = "inductor_kernel"
    return call


def _is_close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    if expected.dtype not in _TOLERANCES:
        return bool(torch.equal(given, expected))
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = _TOLERANCES[expected.dtype] * scale
    return bool(torch.allclose(given, expected, rtol=0.0, atol=tolerance, equal_nan=True))
