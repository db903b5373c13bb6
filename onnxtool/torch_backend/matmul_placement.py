"""Measure whether a large matmul or convolution is faster in onnxruntime or in PyTorch, and place it there.

Which library is faster depends on the processor, the shapes and what is transposed: on Intel processors, MKL takes a
tenth less time than onnxruntime, and a third less for the gradient of a large weight.
"""

from __future__ import annotations

import hashlib
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.runtime.machine import processor_name
from onnxtool.torch_backend.cache import Cache
from onnxtool.torch_backend.execution import SessionCall
from onnxtool.torch_backend.nodes import Node, is_seen, is_static, is_view, seen_shape, seen_size, tensor_of
from onnxtool.torch_backend.partition import Partition, extract, value_of
from onnxtool.torch_backend.sessions import select_providers
from onnxtool.torch_backend.translator import PartitionError, Translator

aten = torch.ops.aten
Call = Callable[[], Any]

MATMULS = (aten.mm.default, aten.addmm.default, aten.convolution.default)
_LEAST_MULTIPLICATIONS = 2**24
"""About 0.1 ms on one core; smaller ones gain less than a measurement can detect."""
_LEAST_GAIN_MS = 0.1
_BORDER_MS = 0.2
"""The cost of a border to onnxruntime: another session, what it cannot fuse, and starting PyTorch threads."""


def faster_in_pytorch(owner: torch.fx.GraphModule, stay: Mapping[Node, str], translator: Translator) -> dict[str, str]:
    """Return the names of the matmuls that PyTorch computes faster, each with its times as the reason.

    `stay` holds what stays in PyTorch for other reasons. Nothing is measured if the user's own function translates.
    """
    if translator.options.matmuls != "measured" or not translator.is_reproducible:
        return {}
    reasons: dict[str, str] = {}
    for node in owner.graph.nodes:
        if node in stay or not _is_worth_measuring(node):
            continue
        times = _times_ms(owner, node, translator)
        least_ms = _least_gain_ms(node, stay)
        if times and gains(*times, least_ms):
            measured = f"measured: {times[1]:.2f} ms there, {times[0]:.2f} ms in onnxruntime"
            alone = ", without the borders of a session for it alone" if least_ms < 0 else ""
            reasons[node.name] = f"{measured}{alone}"
    return reasons


def _least_gain_ms(node: Node, stay: Mapping[Node, str]) -> float:
    """Return PyTorch's required gain; negative if onnxruntime would need a session only for this node."""
    borders = _reads_onnxruntime(node, stay) + _is_read_by_onnxruntime(node, stay)
    if not borders and any(other in stay for other in (*node.all_input_nodes, *node.users)):
        return -_BORDER_MS
    return _LEAST_GAIN_MS + borders * _BORDER_MS


def _is_worth_measuring(node: Node) -> bool:
    if node.target not in MATMULS:
        return False
    values = [tensor_of(item) for item in (node, *node.all_input_nodes)]
    if not all(value is not None and is_seen(value) and value.device.type == "cpu" for value in values):
        return False
    if not all(value is not None and value.dtype in (torch.float32, torch.float64) for value in values):
        return False
    return _multiplications(node) >= _LEAST_MULTIPLICATIONS


def _multiplications(node: Node) -> int:
    first = 1 if node.target is aten.addmm.default else 0
    result, left, right = (seen_shape(item.meta["val"]) for item in (node, *node.args[first : first + 2]))
    if node.target is aten.convolution.default:
        pixels = left if node.args[6] else result  # a transposed one multiplies each input pixel
        return int(math.prod(pixels) // pixels[1] * math.prod(right))
    return int(math.prod(result) * left[1])


def _reads_onnxruntime(node: Node, stay: Mapping[Node, str]) -> bool:
    """Return whether an operand, or the base of a view operand, is computed in onnxruntime."""
    return any(
        _reads_onnxruntime(source, stay) if is_view(source) else source.op == "call_function" and source not in stay
        for source in node.all_input_nodes
    )


def _is_read_by_onnxruntime(node: Node, stay: Mapping[Node, str]) -> bool:
    """Return whether a reader of the result, or of a view of it, runs in onnxruntime."""
    return any(
        _is_read_by_onnxruntime(user, stay) if is_view(user) else user.op != "output" and user not in stay
        for user in node.users
    )


def _times_ms(owner: torch.fx.GraphModule, node: Node, translator: Translator) -> tuple[float, float] | None:
    """Return the times of a matmul in onnxruntime and in PyTorch; None if onnxruntime cannot run it."""
    nodes = [*_views_of_operands(node), node]
    partition = extract(owner, nodes)
    seen = [seen_shape(value_of(owner, item)) for item in partition.inputs]  # the fingerprint has no dynamic sizes
    graph = f"{translator.fingerprint(partition)} {seen}"

    def prepare() -> Sequence[Call]:
        return _both(partition, extract(owner, nodes), owner, translator)

    try:
        onnxruntime_ms, pytorch_ms = _measured_ms(("onnxruntime", "pytorch"), graph, translator.cache, prepare)
    except PartitionError:
        return None  # compiling the whole graph fails the same way, and reports it
    return onnxruntime_ms, pytorch_ms


def _views_of_operands(node: Node) -> list[Node]:
    """Return the views that only this node reads, such as a weight's transpose; either library fuses them."""
    views: list[Node] = []
    for source in node.all_input_nodes:
        while is_view(source) and len(source.users) == 1 and len(source.all_input_nodes) == 1:
            views.append(source)
            source = source.all_input_nodes[0]
    return list(reversed(views))


def _both(partition: Partition, same: Partition, owner: torch.fx.GraphModule, translator: Translator) -> Sequence[Call]:
    """Return calls that run the partition in onnxruntime, and `same` in PyTorch."""
    inputs = [value_of(owner, node) for node in partition.inputs]
    providers = select_providers(translator.options, inputs, [node.meta["val"] for node in partition.outputs])
    session = translator.translate_alone(partition, providers)
    in_session = SessionCall("onnxruntime_measured", session, partition, inputs, translator.options)
    for node in same.module.graph.nodes:
        if node.target in MATMULS:
            node.target = with_result_memory(node, ResultMemory())
    same.module.recompile()
    arguments = _arguments_of(same.module)
    return [partial(in_session, *arguments), partial(same.module, *arguments)]


# Memory for large results of PyTorch's kernels, reused between calls.
#
# PyTorch's allocator returns large blocks to the system, and the pages of the next one are cleared as they are written,
# which takes half the time of a matmul of 1024 x 256 by 256 x 30522. onnxruntime also keeps its memory.


_WITH_OUT = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out}


class ResultMemory:
    """Memory blocks by size in bytes, as many as were in use at the same time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized CPU tensor; once nothing refers to it, its memory is free again."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free[size]
        try:  # other threads also take from the list
            block = free.pop()
        except IndexError:
            block = torch.empty(size, dtype=torch.uint8)
        owner = block.numpy()  # only the storage of the tensor below keeps this array
        weakref.finalize(owner, free.append, block).atexit = False
        return torch.from_numpy(owner).view(dtype).view(tuple(shape))


def with_result_memory(node: Node, memory: ResultMemory) -> Callable[..., Any]:
    """Return a function that computes a node's call, placing its result in `memory` if the kernel allows that.

    The node must return a CPU tensor. A tensor whose shape varies between calls would need separate memory for each.
    """
    target: Callable[..., Any] = node.target
    kernel, result = _WITH_OUT.get(target), node.meta["val"]
    if kernel is None or not is_static(result) or not result.is_contiguous():
        return target
    shape, dtype = tuple(result.shape), result.dtype

    def call(*arguments: Any, **options: Any) -> Any:
        return kernel(*arguments, **options, out=memory.allocate(shape, dtype))

    call.__name__ = call.__qualname__ = node.name
    return call


# Measured times, kept for the rest of the process and in the disk cache.


_LEAST_GAIN = 0.05
_LEAST_CALLS, _MOST_CALLS, _ENOUGH_MS = 4, 12, 60.0

_measured: dict[str, tuple[float, ...]] = {}  # for this process


def _measured_ms(
    ways: Sequence[str], graph: str, cache: Cache, prepare: Callable[[], Sequence[Call]]
) -> tuple[float, ...]:
    """Return the time a graph takes in each of `ways`, in ms: the shortest of several alternating calls.

    `graph` is its fingerprint, and `prepare` returns a call for each way. Nothing is measured if this process or the
    cache already has times for this machine with the same number of threads.
    """
    machine = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    key = hashlib.sha256(f"times {' '.join(ways)} {machine} {graph}".encode()).hexdigest()
    if key not in _measured and (kept := _read(cache.read_json(key), ways)):
        _measured[key] = kept
    if key not in _measured:
        calls = prepare()
        with unset_fake_temporarily(), torch.no_grad():
            _measured[key] = _shortest_ms(calls)
        cache.write_json(key, {f"{way}_ms": ms for way, ms in zip(ways, _measured[key], strict=True)})
    return _measured[key]


def gains(slower_ms: float, faster_ms: float, least_ms: float) -> bool:
    """Return whether the second time is shorter by at least `least_ms`, and by more than measurement noise.

    It may be longer if `least_ms` is negative.
    """
    return slower_ms - faster_ms >= (max(least_ms, _LEAST_GAIN * slower_ms) if least_ms > 0 else least_ms)


def _arguments_of(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Return arguments with the sizes of the first call: normal random numbers, and zeros for possible indices."""
    with unset_fake_temporarily():
        return [_argument(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]


def _argument(value: torch.Tensor) -> torch.Tensor:
    argument = torch.empty_strided(seen_shape(value), tuple(map(seen_size, value.stride())), dtype=value.dtype)
    if not value.is_floating_point():
        return argument.zero_()
    return argument.normal_(generator=torch.Generator().manual_seed(0))  # leaves the user's random state unchanged


def _read(record: object, ways: Sequence[str]) -> tuple[float, ...] | None:
    """Return the times in a cache record; None if there is none, or it is damaged."""
    if not isinstance(record, dict):
        return None
    times = [record.get(f"{way}_ms") for way in ways]
    known_ms = tuple(ms for ms in times if isinstance(ms, float))
    return known_ms if len(known_ms) == len(ways) else None


def _shortest_ms(calls: Sequence[Call]) -> tuple[float, ...]:
    """Return the shortest time of each call in milliseconds; the first round is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(_MOST_CALLS + 1):
        for call, durations in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            durations.append((time.perf_counter() - start) * 1e3)
        if turn >= _LEAST_CALLS and sum(map(sum, times)) > _ENOUGH_MS * len(calls):
            break
    return tuple(round(min(durations[1:]), 4) for durations in times)
