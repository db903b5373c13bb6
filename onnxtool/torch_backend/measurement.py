"""Measured times that placement decisions are based on, kept for the rest of the process and in the disk cache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.runtime.machine import processor_name
from onnxtool.torch_backend.cache import Cache
from onnxtool.torch_backend.nodes import seen_shape, seen_size

Call = Callable[[], Any]

_LEAST_GAIN = 0.05
_LEAST_CALLS, _MOST_CALLS, _ENOUGH_MS = 4, 12, 60.0

_measured: dict[str, tuple[float, ...]] = {}  # for this process


def measured_ms(
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


def arguments_of(module: torch.fx.GraphModule) -> list[torch.Tensor]:
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
    found = tuple(ms for ms in times if isinstance(ms, float))
    return found if len(found) == len(ways) else None


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
