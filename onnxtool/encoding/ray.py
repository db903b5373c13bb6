"""Ray as an engine of `encode_plan`, an actor for each worker, and a class for pipelines of Ray Data and Spark.

Nothing of Ray's says what is done. An actor that is lost with its node, or preempted, is started again by Ray, on
another node where there is one; its run of shards is encoded again, without those that have a record.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding.fetched_model import model_on_this_machine
from onnxtool.encoding.locations import Location, parse_location
from onnxtool.encoding.options import VectorOptions
from onnxtool.encoding.parts import missing_shards
from onnxtool.encoding.plan import CorpusPlan
from onnxtool.encoding.workers import OnEvent, RemoteWorker, RunOptions, runs_of
from onnxtool.errors import InputError, OnnxtoolError
from onnxtool.infer.chats import CUT
from onnxtool.infer.loading import load
from onnxtool.infer.text_model import find_file
from onnxtool.infer.vectors import SparseVectors, TokenVectors
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


def run_on_ray(plan: CorpusPlan, options: RunOptions, missing: Sequence[int], on_event: OnEvent) -> int:
    """Encode shards by actors of the cluster that RAY_ADDRESS names, else of one on this machine; return how many.

    Raises:
        InputError: Ray is missing, or the cluster does not see the plan.
        OnnxtoolError: what a worker has met.
    """
    ray = require_ray()
    is_own = not ray.is_initialized()
    if not is_own:
        return _run(ray, plan, options, missing, on_event)
    with redirect_stdout(sys.stderr):  # Ray prints there that a node is lost, and a report is to be alone
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        try:
            return _run(ray, plan, options, missing, on_event)
        finally:
            ray.shutdown()


def _run(ray: ModuleType, plan: CorpusPlan, options: RunOptions, missing: Sequence[int], on_event: OnEvent) -> int:
    needed = ("CPU", "GPU") if plan.options.provider == "cuda" else ("CPU",)
    nodes = [node for node in ray.nodes() if node["Alive"] and all(node["Resources"].get(name) for name in needed)]
    if not nodes:
        raise InputError(
            f"no node of the cluster has a {' and a '.join(needed)} now", "start one, or leave out --engine"
        )
    count = min(options.workers or len(nodes), len(missing))
    cores = min(node["Resources"]["CPU"] for node in nodes)
    gpus = min(node["Resources"].get("GPU", 0) for node in nodes) if "GPU" in needed else 0
    on_a_node = -(-count // len(nodes))
    threads = max(1, int(cores) // on_a_node)
    actor_class = ray.remote(RemoteWorker).options(
        num_cpus=cores / on_a_node,
        num_gpus=min(1, gpus / on_a_node),  # a session runs on one
        max_restarts=-1,
        max_task_retries=0,
    )
    chosen = options.worker(plan, threads)
    # One that is on its way, at first or to another node, gets nothing to do: no node may be left for it.
    starting = {actor.__ray_ready__.remote(): actor for actor in (actor_class.remote(chosen) for _ in range(count))}
    waiting = deque(runs_of(missing, count))
    losses: Counter[tuple[int, ...]] = Counter()  # by runs; that of no shards is a start
    idle: list[Any] = []
    running: dict[Any, tuple[Any, list[int]]] = {}
    while waiting or running:
        check_interrupted()
        while waiting and idle:
            actor, run = idle.pop(), waiting.popleft()
            running[actor.encode.remote(run)] = (actor, run)
        done, _ = ray.wait([*running, *starting], timeout=_POLL_S)
        for task in done:
            actor, run = running.pop(task) if task in running else (starting.pop(task), [])
            try:
                events = ray.get(task)
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except ray.exceptions.RayError as error:  # the node is gone, or the actor was killed
                starting[actor.__ray_ready__.remote()] = actor
                lost = losses.pop(tuple(run), 0) + 1
                if lost > _MOST_LOSSES:
                    whose = f"the actors for shards {run[0]} to {run[-1]}" if run else "actors that start"
                    raise OnnxtoolError(
                        f"{whose} were lost {_MOST_LOSSES} times: {error}",
                        "look at the nodes, and run the same command again: what is done stays",
                    ) from None
                on_event({"deaths": 1})
                if left := missing_shards(plan, run):
                    waiting.appendleft(left)
                losses[tuple(left)] = lost
                continue
            losses.pop(tuple(run), None)
            for event in events if run else ():
                on_event(event)
            idle.append(actor)
    return count


def _cause(error: Any) -> Exception:
    """Return what a worker raised: Ray makes a class of its own for it."""
    cause = error.cause
    if isinstance(cause, OnnxtoolError):
        return cause
    return OnnxtoolError(f"a worker failed: {cause}", f"look at the log of the actor; this is process {os.getpid()}")


# What a table of any pipeline has no use for, as it is of files or of how they are split.
_OF_FILES = ("overlap", "output_format", "gzip", "contents", "weights", "calibration", "shard_size", "batch_tokens")


class Encoder:
    """Adds vectors to batches of a pipeline, as a class for `map_batches` of Ray Data, or in a pandas UDF of Spark.

    The model is loaded once, by whoever constructs it: an actor of a pool, a Python worker of Spark. A batch of N texts
    gets `vector` [N, H] of an embedder; `indices` (int32) and `values` (float32), arrays for each text, of a sparse
    encoder; or `vectors` [T, W] for each text, of late interaction. All other columns stay.

    There are neither records nor digests here: what is resumed, and whether rows keep their order, is the pipeline's.
    """

    def __init__(
        self, model_path: Location | str, options: VectorOptions | None = None, *, column: str = "contents"
    ) -> None:
        """Load the model.

        Args:
            model_path: the ONNX file, at a place that every machine sees.
            options: what the vectors are; `threads` 0 is what OMP_NUM_THREADS says, which Ray and Spark set to the
                cores of an actor or an executor, else one a core.
            column: that texts are in.

        Raises:
            InputError: an option is for files of vectors, or `long` is `window`, which gives several rows for a text.
            OnnxtoolError: the model cannot be loaded, or gives no vectors.
        """
        self._options = options = options or VectorOptions()
        usual = VectorOptions()
        if given := [name for name in _OF_FILES if getattr(options, name) != getattr(usual, name)]:
            raise InputError(
                f"{' and '.join(given)} was passed, which batches of a pipeline have no use for",
                "leave it out, or encode with encode_plan",
            )
        if options.long == "window":
            raise InputError(
                "long is window, and a batch has one row for a text", "use encode_plan, or cut texts first"
            )
        self._column = column
        threads = options.threads or _threads_of_the_pipeline()
        path, model_name = find_file(
            model_on_this_machine(parse_location(model_path), options.text_task), options.model_name, options.text_task
        )
        self._model = load(
            path,
            model_name=model_name,
            description=options.description,
            provider=options.provider,
            threads=threads,
            representation=options.representation,
        )
        self._encode(["a"])  # before the first batch comes: a model without vectors is an error of the model

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch of N rows, and those of its vectors.

        Raises:
            InputError: there is no column of texts, a value of it is no text or has no token, or the batch has a column
                that is called as those of vectors.
            SessionError: onnxruntime fails.
        """
        if self._column not in batch:
            raise InputError(
                f"a batch has no column {self._column!r}: it has {', '.join(batch) or 'none'}",
                "pass the column of texts as column",
            )
        texts = list(batch[self._column])
        if wrong := [row for row, text in enumerate(texts) if not isinstance(text, str)]:
            raise InputError(
                f"row {wrong[0]} of a batch has {str(texts[wrong[0]])[:40]!r} in {self._column}, which is no text",
                "leave such rows out before they are encoded",
            )
        added = self._encode(texts) if texts else {name: rows[:0] for name, rows in self._encode(["a"]).items()}
        if taken := [name for name in added if name in batch]:
            raise InputError(f"a batch has a column {taken[0]} already", "rename it before texts are encoded")
        return {**batch, **added}

    def _encode(self, texts: list[str]) -> dict[str, NDArray[Any]]:
        options = self._options
        vectors = self._model.encode(
            texts,
            prompt=options.prompt,
            task=options.text_task,
            long=options.long or CUT,
            keep_special=options.keep_special,
            vectors_as=options.vectors_as,
            ranges=options.ranges,
            dimensions=options.dimensions,
        )
        if isinstance(vectors, SparseVectors):
            indices, values = zip(*map(vectors.row, range(len(vectors))), strict=True)
            return {"indices": _ragged(indices), "values": _ragged(values)}
        if isinstance(vectors, TokenVectors):
            return {"vectors": _ragged(map(vectors.row, range(len(vectors))))}
        return {"vector": vectors}


def _threads_of_the_pipeline() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if value and not re.fullmatch("[0-9]{1,4}", value):
        raise InputError(f"the variable OMP_NUM_THREADS is {value[:40]!r}, and no number", "pass threads, or unset it")
    return int(value or 0)


def _ragged(rows: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Put arrays of different lengths into one of objects [N], which NumPy would join where all are of one length."""
    given = list(rows)
    result = np.empty(len(given), object)
    for place, row in enumerate(given):
        result[place] = row
    return result
