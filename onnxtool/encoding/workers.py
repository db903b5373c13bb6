"""Processes that encode splits, each a single-worker pool of the standard library.

A process that ends on its own ends the run, with an error that names the texts it was at. What was encoded is kept.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from onnxtool.encoding.encoder import SplitEncoder, Task
from onnxtool.encoding.options import ProcessOptions
from onnxtool.encoding.progress import Event, OnEvent, Running
from onnxtool.errors import OnnxtoolError, SessionError, shorten
from onnxtool.interruption import check_interrupted, deaf
from onnxtool.runtime.machine import available_cores

# More threads in one interpreter would wait for each other: a twentieth of the work holds the GIL.
_THREADS_OF_A_PROCESS = 8
_POLL_S = 0.2
_LONGEST_WRITE_S = 5.0
_MOST_CHARACTERS = 80  # of an id in an error

Answer = TypeVar("Answer")


class Opened(NamedTuple):
    """A worker's findings at startup.

    Attributes:
        sizes: sizes of the splits in bytes.
        missing: splits without a record.
        notes: notes for the user about the corpus and the model.
    """

    sizes: tuple[int, ...]
    missing: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass
class _Here:
    """The state of this process if it is a worker."""

    task: Task
    connection: Connection
    encoder: SplitEncoder | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # a connection takes one thread at a time

    def open(self) -> SplitEncoder:
        if self.encoder is None:
            self.encoder = SplitEncoder(self.task).begin()
        return self.encoder

    def tell(self, what: Event | Running) -> None:
        with self.lock:
            self.connection.send(what)


_here: list[_Here] = []


def _begin(task: Task, connection: Connection) -> None:
    """Initialize a worker process, which ends with its parent in any case."""
    _here[:] = [_Here(task, connection)]

    def watch() -> None:
        from onnxtool.encoding.files import appearing, remove_unfinished

        with suppress(EOFError, OSError):
            connection.recv()
        appearing.acquire(timeout=_LONGEST_WRITE_S)
        remove_unfinished()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _open() -> Opened:
    encoder = _here[0].open()
    numbers = range(len(encoder.splits))
    done = numbers if encoder.records is None else encoder.records.done()
    return Opened(
        sizes=tuple(split.size_bytes for split in encoder.splits),
        missing=tuple(number for number in numbers if number not in done),
        notes=tuple(encoder.job.notes(0)),
    )


def _encode(number: int) -> Event:
    """Encode a split, and return the sum of the events."""
    total = Event()
    here = _here[0]

    def on_event(event: Event) -> None:
        nonlocal total
        total = total.plus(event)
        here.tell(event)

    here.open().encode([number], on_event, here.tell)
    return total


class Worker:
    """A process that encodes splits.

    Args:
        task: the encoding task.
        on_event: called for its reports, in a separate thread.
    """

    def __init__(self, task: Task, on_event: OnEvent) -> None:
        self._task, self._on_event = task, on_event
        self._pool: ProcessPoolExecutor | None = None
        self._connection: Connection | None = None
        self._listener: threading.Thread | None = None
        self._running: Counter[tuple[str, str, str]] = Counter()
        self._is_stopped = False
        self._lock = threading.Lock()  # a process that is started meanwhile is told to end as it begins

    def open(self) -> Opened:
        """Load the model, and claim the folder.

        Raises:
            OnnxtoolError: as `encode_corpus`.
        """
        return self._call("it loaded the model", _open)

    def encode(self, number: int) -> Event:
        """Encode a split, and return the sum of its events.

        Raises:
            OnnxtoolError: a worker's error, or the process ended.
        """
        return self._call(f"it read or wrote texts of split {number}", _encode, number)

    def _call(self, what: str, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function in the process, starting it if necessary.

        Raises:
            OnnxtoolError: its error, or the process ended while it did `what`.
        """
        try:
            return self._started().submit(function, *arguments).result()
        except BrokenProcessPool:
            self.close()
            check_interrupted()
            if self._is_stopped:
                raise OnnxtoolError("the worker was stopped") from None
            raise SessionError(
                f"an encoding process ended without an error while {self._place() or what}",
                "run the same command again, which continues from the last finished shard; if it ends there again, it "
                "needs more memory (fewer --processes or --workers, a smaller --batch_tokens), or a text ends it: try "
                "these with onnxtool infer, and leave that text out",
            ) from None

    def _place(self) -> str:
        """Describe the texts that were tokenized or run when the process ended."""
        places = [
            f"shard {shard}, texts {shorten(first, _MOST_CHARACTERS)} to {shorten(last, _MOST_CHARACTERS)}"
            for (shard, first, last), count in self._running.items()
            if count > 0
        ]
        return f"it encoded {' and '.join(places)}" if places else ""

    def _started(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._is_stopped:
                raise OnnxtoolError("the worker was stopped")
            if self._pool is not None:
                return self._pool
            context = get_context("spawn")  # threads and store clients belong to one process
            self._connection, theirs = context.Pipe()
            self._running.clear()
        try:
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(self._task, theirs))
            listener = threading.Thread(target=self._listen, args=(self._connection,), daemon=True)
            listener.start()
            self._listener = listener
            with deaf():
                resource_tracker.ensure_running()  # signals are handled again
                with deaf():
                    started = self._pool.submit(os.getpid)
            started.result()
        finally:
            theirs.close()  # the process now has its end of the pipe
        return self._pool

    def _listen(self, connection: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                told: Event | Running = connection.recv()
                if isinstance(told, Event):
                    self._on_event(told)
                else:
                    self._running[told.shard, told.first, told.last] += told.change

    def stop(self) -> None:
        """End the process; a thread that waits for its answer gets an error."""
        with self._lock, suppress(OSError):
            self._is_stopped = True
            if self._connection is not None:
                self._connection.send(None)

    def close(self) -> None:
        """End the process once it has removed its temporary files, such as a model."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        if self._listener is not None:
            self._listener.join()
        if self._connection is not None:
            self._connection.close()


class LocalWorkers:
    """Processes of this machine that encode splits.

    Attributes:
        num_processes: how many there are.
    """

    def __init__(self, task: Task, options: ProcessOptions, on_event: OnEvent) -> None:
        self.num_processes = options.processes or max(1, available_cores() // _THREADS_OF_A_PROCESS)
        threads = options.workers or max(1, available_cores() // self.num_processes)
        self._task = replace(task, workers=threads)
        self._on_event = on_event
        self._workers = [Worker(self._task, on_event)]

    def open(self) -> Opened:
        """Load the model in the first process, and claim the folder."""
        (opened,) = self._together([Worker.open])
        return opened

    def encode(self, numbers: Sequence[int]) -> None:
        """Encode splits, each in the next free process; the first error stops all, like an interruption."""
        self.num_processes = min(self.num_processes, len(numbers))
        other = replace(self._task, force=False)
        self._workers += [Worker(other, self._on_event) for _ in range(self.num_processes - 1)]
        self._together([partial(Worker.encode, number=number) for number in numbers])

    def _together(self, calls: Sequence[Callable[[Worker], Answer]]) -> list[Answer]:
        """Make calls in threads; a signal only raises in the main thread, where no process is half started."""
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def take(call: Callable[[Worker], Answer]) -> Answer:
            worker = idle.get()
            try:
                return call(worker)
            finally:
                idle.put(worker)

        answers: list[Answer] = []
        with ThreadPoolExecutor(len(self._workers), thread_name_prefix="worker") as threads:
            try:
                waiting = {threads.submit(take, call) for call in calls}
                while waiting:
                    check_interrupted()
                    done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    answers += [future.result() for future in done]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in self._workers:
                    worker.stop()
                raise
        return answers

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
