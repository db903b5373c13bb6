"""Ray as an engine of `encode_plan`: an actor for each worker, and nothing of Ray's that says what is done.

An actor that is lost with its node, or preempted, is started again by Ray, on another node where there is one; its run
of shards is encoded again, without those that have a record.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from onnxtool.encoding.parts import missing_shards
from onnxtool.encoding.plan import CorpusPlan
from onnxtool.encoding.workers import OnEvent, RunOptions, Worker, WorkerOptions, runs_of
from onnxtool.errors import InputError, OnnxtoolError
from onnxtool.interruption import check_interrupted

_POLL_S = 0.5
_MOST_LOSSES = 20  # of one run of shards, in a row


def require_ray() -> ModuleType:
    """Return Ray.

    Raises:
        InputError: it is not installed.
    """
    try:
        ray: ModuleType = importlib.import_module("ray")
    except ImportError as error:
        raise InputError(
            f"the engine ray needs Ray, which cannot be imported: {error}",
            "pip install 'onnxtool[ray]', or leave out --engine",
        ) from error
    return ray


class _Actor:
    """Encodes runs of shards by a process of its own, which may die without the actor."""

    def __init__(self, options: WorkerOptions) -> None:
        self._worker = Worker(options)

    def encode(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Encode shards, and return all answers."""
        before = self._worker.deaths
        events: list[dict[str, Any]] = []
        self._worker.encode(numbers, events.append)
        return [*events, {"deaths": self._worker.deaths - before}]


def run_on_ray(plan: CorpusPlan, options: RunOptions, missing: Sequence[int], on_event: OnEvent) -> int:
    """Encode shards by actors of the cluster that RAY_ADDRESS names, else of one on this machine; return how many.

    Raises:
        InputError: Ray is missing, or the cluster does not see the plan.
        OnnxtoolError: what a worker has met.
    """
    ray = require_ray()
    is_own = not ray.is_initialized()
    if is_own:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        return _run(ray, plan, options, missing, on_event)
    finally:
        if is_own:
            ray.shutdown()


def _run(ray: ModuleType, plan: CorpusPlan, options: RunOptions, missing: Sequence[int], on_event: OnEvent) -> int:
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    count = min(options.workers or max(1, len(nodes)), len(missing))
    cores = min(node["Resources"]["CPU"] for node in nodes)
    gpus = min(node["Resources"].get("GPU", 0) for node in nodes) if plan.options.provider == "cuda" else 0
    on_a_node = -(-count // len(nodes))
    threads = max(1, int(cores) // on_a_node)
    actor_class = ray.remote(_Actor).options(
        num_cpus=cores / on_a_node, num_gpus=gpus / on_a_node, max_restarts=-1, max_task_retries=0
    )
    chosen = options.worker(plan, threads)
    idle = deque(actor_class.remote(chosen) for _ in range(count))
    waiting = deque(runs_of(missing, count))
    losses = {tuple(run): 0 for run in waiting}
    running: dict[Any, tuple[Any, list[int]]] = {}
    while waiting or running:
        check_interrupted()
        while waiting and idle:
            actor, run = idle.popleft(), waiting.popleft()
            running[actor.encode.remote(run)] = (actor, run)
        done, _ = ray.wait([*running], timeout=_POLL_S)
        for task in done:
            actor, run = running.pop(task)
            idle.append(actor)
            try:
                for event in ray.get(task):
                    on_event(event)
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except ray.exceptions.RayError as error:  # the node is gone, or the actor was killed
                losses[tuple(run)] = losses.pop(tuple(run)) + 1
                if losses[tuple(run)] > _MOST_LOSSES:
                    raise OnnxtoolError(
                        f"the actors for shards {run[0]} to {run[-1]} were lost {_MOST_LOSSES} times: {error}",
                        "look at the nodes, and run the same command again: what is done stays",
                    ) from None
                on_event({"deaths": 1})
                if left := missing_shards(plan, run):
                    losses[tuple(left)] = losses.pop(tuple(run))
                    waiting.appendleft(left)
    return count


def _cause(error: Any) -> Exception:
    """Return what a worker raised: Ray makes a class of its own for it."""
    cause = error.cause
    if isinstance(cause, OnnxtoolError):
        return cause
    return OnnxtoolError(f"a worker failed: {cause}", f"look at the log of the actor; this is process {os.getpid()}")
