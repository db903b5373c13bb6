"""Processes that encode splits, each a single-worker pool of the standard library that is restarted if it dies.

A split that ends its process twice is encoded shard by shard. In a shard that still does, the text that by itself ends
a process is found and rejected with its id, and the job goes on.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from onnxtool.encoding.encoder import SplitEncoder, Task
from onnxtool.encoding.options import ProcessOptions
from onnxtool.encoding.progress import Event, OnEvent
from onnxtool.errors import OnnxtoolError, SessionError, shorten
from onnxtool.interruption import check_interrupted, deaf
from onnxtool.runtime.machine import available_cores

# More threads in one interpreter would wait for each other: a twentieth of the work holds the GIL.
_THREADS_OF_A_PROCESS = 8
_POLL_S = 0.2
_LONGEST_WRITE_S = 5.0

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


class Died(Exception):  # noqa: N818  it is caught by who started the process
    """A worker process ended without an error."""


@dataclass
class _Here:
    """The state of this process if it is a worker."""

    task: Task
    tell: Connection
    encoder: SplitEncoder | None = None
    texts: tuple[int, list[Any]] = (-1, [])

    def open(self) -> SplitEncoder:
        if self.encoder is None:
            self.encoder = SplitEncoder(self.task).begin()
        return self.encoder


_here: list[_Here] = []


def _begin(task: Task, tell: Connection, memory_bytes: int) -> None:
    """Initialize a worker process, which ends with its parent in any case."""
    if memory_bytes and sys.platform != "win32":
        import resource

        # Larger allocations fail: then a text is at fault, not the machine.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    _here[:] = [_Here(task, tell)]

    def watch() -> None:
        from onnxtool.encoding.files import appearing, remove_unfinished

        with suppress(EOFError, OSError):
            tell.recv()
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


def _encode(number: int, *, one_shard: bool = False, left_out: dict[int, str] | None = None) -> bool:
    """Encode a split, or its next shard; return whether the split is done."""
    here = _here[0]
    try:
        return here.open().encode([number], here.tell.send, left_out=left_out, one_shard=one_shard) > 0
    except MemoryError as error:
        raise SessionError(str(error) or "there is not enough memory") from None


def _count(number: int) -> int:
    """Count the texts of the next shard of a split."""
    here = _here[0]
    here.texts = number, here.open().next_texts(number)
    return len(here.texts[1])


def _fault(number: int, place: int) -> str:
    """Run one text of a split's next shard by itself; return why it cannot be run, or an empty string."""
    from onnxtool.encoding.pipeline import encode_windows
    from onnxtool.encoding.splits import ShardName, Window

    here = _here[0]
    if here.texts[0] != number:
        _count(number)
    job = here.open().job
    window = Window((here.texts[1][place],), ShardName(number, 0), "")
    try:
        for _ in encode_windows(job.model, iter([window]), job.plan, lambda _event: None):
            pass
    except (SessionError, MemoryError) as error:
        return f"cannot be encoded: {shorten(' '.join(str(error).split()), 200)}"
    return ""


def _settle() -> None:
    _here[0].tell.send(None)


class Worker:
    """A process that encodes splits, restarted if it dies.

    Args:
        task: the encoding task.
        memory_bytes: the process's allocation limit; 0 for none.
        on_event: called for its reports, in a separate thread.
    """

    def __init__(self, task: Task, memory_bytes: int, on_event: OnEvent) -> None:
        self._task, self._memory_bytes, self._on_event = task, memory_bytes, on_event
        self._pool: ProcessPoolExecutor | None = None
        self._connection: Connection | None = None
        self._listener: threading.Thread | None = None
        self._unwritten = 0  # texts that were run but are not in a written shard yet
        self._is_heard = threading.Event()
        self._is_stopped = False
        self._lock = threading.Lock()  # a process that is started meanwhile is told to end as it begins

    def open(self) -> Opened:
        """Load the model, and claim the folder.

        Raises:
            OnnxtoolError: as `encode_corpus`.
        """
        try:
            return self._twice(_open)
        except Died:
            raise SessionError(
                "the encoding process dies while loading the model", "run onnxtool infer with the model and a text"
            ) from None

    def encode(self, number: int) -> None:
        """Encode a split.

        Raises:
            OnnxtoolError: a worker's error, unless caused by a text.
        """
        try:
            self._twice(_encode, number)
        except (Died, SessionError):
            while not self._encode_shard(number):
                check_interrupted()

    def _encode_shard(self, number: int) -> bool:
        """Encode a split's next shard, without texts that cannot be run; return whether it was the last.

        Windows that are read ahead then belong to the same shard.
        """
        try:
            return self._twice(_encode, number, one_shard=True)
        except (Died, SessionError):
            found = self._find(number)
        if not found:
            raise SessionError(
                f"split {number} ends the process that encodes it, but none of its texts does alone",
                "encode with smaller batches: --batch_tokens, or fewer --workers",
            )
        self._on_event(Event(left_out=len(found)))
        return self._call(_encode, number, one_shard=True, left_out=found)

    def _find(self, number: int) -> dict[int, str]:
        """Return the positions of texts in the next shard that fail in two trials by themselves, with reasons."""
        try:
            count = self._twice(_count, number)
        except Died:
            raise SessionError(
                f"the process that encodes split {number} ends before it runs a text",
                "run onnxtool infer with the model and a text",
            ) from None
        found: dict[int, str] = {}
        for place in range(count):
            try:
                fault = self._twice(_fault, number, place)
            except Died:
                fault = "cannot be encoded: it ends the process"
            if fault:
                found[place] = fault
        return found

    def _twice(self, function: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
        """Call a function, and retry once if it fails: the first death may have another cause."""
        try:
            return self._call(function, *arguments, **named)
        except (Died, SessionError):
            check_interrupted()
            return self._call(function, *arguments, **named)

    def _call(self, function: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
        """Call a function in the process, starting it if necessary.

        Raises:
            Died: the process ended.
            OnnxtoolError: its error.
        """
        try:
            return self._started().submit(function, *arguments, **named).result()
        except BrokenProcessPool:
            self.close()
            check_interrupted()
            if self._is_stopped:
                raise OnnxtoolError("the worker was stopped") from None
            self._on_event(Event(texts=-self._unwritten, deaths=1))
            self._unwritten = 0
            raise Died from None

    def _started(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._is_stopped:
                raise OnnxtoolError("the worker was stopped")
            if self._pool is not None:
                return self._pool
            context = get_context("spawn")  # threads and store clients belong to one process
            self._connection, theirs = context.Pipe()
        try:
            self._pool = ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(self._task, theirs, self._memory_bytes)
            )
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
                event: Event | None = connection.recv()
                if event is None:
                    self._is_heard.set()
                    continue
                self._unwritten += event.texts - event.encoded
                self._on_event(event)

    def settle(self) -> None:
        """Wait until all reports of the process are handled."""
        self._is_heard.clear()
        with suppress(Died):  # then it is heard already
            self._call(_settle)
            self._is_heard.wait()

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
        self._memory_bytes = options.memory_limit * 1_000_000
        self._on_event = on_event
        self._workers = [Worker(self._task, self._memory_bytes, on_event)]

    def open(self) -> Opened:
        """Load the model in the first process, and claim the folder."""
        (opened,) = self._together([Worker.open])
        return opened

    def encode(self, numbers: Sequence[int]) -> None:
        """Encode splits, each in the next free process; the first error stops all, like an interruption."""
        self.num_processes = min(self.num_processes, len(numbers))
        other = replace(self._task, force=False)
        self._workers += [Worker(other, self._memory_bytes, self._on_event) for _ in range(self.num_processes - 1)]
        self._together([partial(Worker.encode, number=number) for number in numbers])

    def _together(self, calls: Sequence[Callable[[Worker], Answer]]) -> set[Answer]:
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

        answers: set[Answer] = set()
        with ThreadPoolExecutor(len(self._workers), thread_name_prefix="worker") as threads:
            try:
                waiting = {threads.submit(take, call) for call in calls}
                while waiting:
                    check_interrupted()
                    done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    answers |= {future.result() for future in done}
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
