"""Ray as an engine of `encode_parts`, and a class for pipelines of Ray Data and Spark."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding.encoder import EncodingTask, load_for_texts
from onnxtool.encoding.files import model_on_this_machine
from onnxtool.encoding.locations import Location, parse_location
from onnxtool.encoding.options import ProcessOptions, VectorOptions
from onnxtool.encoding.progress import Event, OnEvent
from onnxtool.encoding.workers import LocalWorkers, StartupFindings
from onnxtool.errors import InputError, OnnxtoolError, imported
from onnxtool.infer.chats import CUT
from onnxtool.infer.vectors import SparseVectors, TokenVectors
from onnxtool.interruption import check_interrupted, critical
from onnxtool.model_file import ModelFile
from onnxtool.runtime.providers import is_on_cuda

_POLL_S = 0.5
_MOST_LOSSES = 20  # of one split


class RayWorkers:
    """Encoding tasks on a Ray cluster: the one named in RAY_ADDRESS, else one on this machine.

    Ray only schedules: it restarts a task lost with its node, on another node if possible. The records in the folder
    hold the state.

    Attributes:
        num_processes: number of concurrent tasks.

    Raises:
        InputError: Ray is missing, or no node has the required resources.
    """

    def __init__(self, task: EncodingTask, options: ProcessOptions, on_event: OnEvent) -> None:
        hint = "pip install 'onnxtool-cli[ray]', or leave out --engine"
        self._ray = ray = imported("ray", "the engine ray needs Ray", hint)
        self._task, self._on_event = task, on_event
        self._until_closed = ExitStack()
        if not ray.is_initialized():
            # Ray prints lost nodes to stdout, which is reserved for the report.
            self._until_closed.enter_context(redirect_stdout(sys.stderr))
            self._until_closed.callback(ray.shutdown)
            with critical():  # Ray sets a handler of its own for SIGTERM
                ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        needed = ("CPU", "GPU") if is_on_cuda(task.options.provider) else ("CPU",)
        nodes = [node for node in ray.nodes() if node["Alive"] and all(node["Resources"].get(name) for name in needed)]
        if not nodes:
            self.close()
            raise InputError(
                f"no node of the cluster has a {' and a '.join(needed)} now", "start one, or leave out --engine"
            )
        self.num_processes = options.processes or len(nodes)
        cores = min(node["Resources"]["CPU"] for node in nodes)
        gpus = min(node["Resources"].get("GPU", 0) for node in nodes) if "GPU" in needed else 0
        on_a_node = -(-self.num_processes // len(nodes))
        self._task = replace(task, workers=options.workers or max(1, int(cores) // on_a_node))
        self._remote = ray.remote(_work).options(
            num_cpus=cores / on_a_node,
            num_gpus=min(1, gpus / on_a_node),  # a session runs on one
            max_retries=_MOST_LOSSES,
            scheduling_strategy="SPREAD",
        )

    def open(self) -> StartupFindings:
        """Load the model on a node, and claim the folder."""
        findings: StartupFindings = self._result_of(self._remote.remote(self._task, None))
        return findings

    def encode(self, numbers: Sequence[int]) -> None:
        """Encode splits.

        Raises:
            OnnxtoolError: a worker's error, or a task was lost too often.
        """
        task = replace(self._task, force=False)
        waiting = deque(numbers)
        running: set[Any] = set()
        self.num_processes = min(self.num_processes, len(numbers))
        while waiting or running:
            check_interrupted()
            while waiting and len(running) < self.num_processes:
                running.add(self._remote.remote(task, waiting.popleft()))
            done, _ = self._ray.wait([*running], timeout=_POLL_S)
            for finished in done:
                running.remove(finished)
                self._on_event(self._result_of(finished))

    def _result_of(self, finished: Any) -> Any:
        errors = self._ray.exceptions
        try:
            while True:
                check_interrupted()
                try:
                    return self._ray.get(finished, timeout=_POLL_S)
                except errors.GetTimeoutError:
                    continue
        except errors.RayTaskError as error:  # Ray creates its own class for a worker's error
            if isinstance(error.cause, OnnxtoolError):
                raise error.cause from None
            raise OnnxtoolError(f"a worker failed: {error.cause}", "check the task's log") from None
        except errors.RayError as error:
            raise OnnxtoolError(
                f"a task was lost {_MOST_LOSSES} times: {error}",
                "check the nodes and run the same command again: finished work is kept",
            ) from None

    def close(self) -> None:
        """Leave a cluster that was started for this."""
        self._until_closed.close()


_kept: dict[str, tuple[LocalWorkers, list[Event]]] = {}


def _work(task: EncodingTask, number: int | None) -> StartupFindings | Event:
    """Encode a split in a Ray process, which keeps the model for the next one; without a number, only load it.

    The model runs in a child process, whose end is an error of the task; Ray would only repeat the task.
    """
    key = repr(task)
    if key not in _kept:
        sink: list[Event] = []
        _kept[key] = LocalWorkers(task, ProcessOptions(processes=1, workers=task.workers), sink.append), sink
        atexit.register(_kept[key][0].close)
    workers, events = _kept[key]
    events.clear()
    try:
        if number is None:
            return workers.open()
        workers.encode([number])
    except BaseException:
        workers.close()  # the next split begins with another process
        raise
    return reduce(Event.plus, events)


# Options without meaning for pipeline tables, because they concern files or splits.
_OF_FILES = (
    "overlap",
    "output_format",
    "contents",
    "weights",
    "calibration",
    "shard_size",
    "split_bytes",
    "batch_tokens",
)


class Encoder:
    """Add vectors to pipeline batches, as a class for `map_batches` of Ray Data, or in a pandas UDF of Spark.

    The model is loaded once, on construction in an actor or a Spark Python worker. A batch of N texts gets `vector` [N,
    H] from an embedder; `indices` (int32) and `values` (float32), arrays per text, from a sparse encoder; or `vectors`
    [T, W] per text, in late interaction. All other columns are kept.

    There are no records or digests here: resuming and row order are up to the pipeline.
    """

    def __init__(
        self, model_path: Location | str, options: VectorOptions | None = None, *, column: str = "contents"
    ) -> None:
        """Load the model.

        Args:
            model_path: the ONNX file, at a path that every machine can access.
            options: options of the vectors; `threads` 0 follows OMP_NUM_THREADS, which Ray and Spark set to the cores
                of an actor or executor, else one per core.
            column: the column of texts.

        Raises:
            InputError: an option is for files of vectors, or `long` is `window`, which makes several rows per text.
            OnnxtoolError: the model cannot be loaded, or returns no vectors.
        """
        self._options = options = options or VectorOptions()
        usual = VectorOptions()
        if names := [name for name in _OF_FILES if getattr(options, name) != getattr(usual, name)]:
            raise InputError(
                f"{' and '.join(names)} was passed, which does not apply to batches of a pipeline",
                "leave it out, or encode with encode_corpus",
            )
        if options.long == "window":
            raise InputError(
                "long is window, and a batch has one row for a text", "use encode_corpus, or cut texts first"
            )
        self._column = column
        path = model_on_this_machine(parse_location(model_path), options.text_task)
        self._model = load_for_texts(ModelFile.open(path), options, options.threads or _threads_of_the_pipeline())
        self._encode(["a"])  # before the first batch, so that a model without vectors fails at once

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch of N rows, with the columns of its vectors added.

        Raises:
            InputError: the text column is missing, a value in it is not a text or has no tokens, or the batch already
                has a column with the name of a vector column.
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
                f"row {wrong[0]} of a batch has {str(texts[wrong[0]])[:40]!r} in {self._column}, which is not a text",
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
    """Put arrays of different lengths into one of objects [N]; NumPy would stack arrays of equal length."""
    arrays = list(rows)
    result = np.empty(len(arrays), object)
    for place, row in enumerate(arrays):
        result[place] = row
    return result
