"""Processes that encode splits, each a pool of one of the standard library's, started again where it dies.

A split that ends its process twice is encoded shard by shard, and in a shard that still does, the text is found that
ends a process by itself. That one is rejected, with its id, and the job goes on.
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

from onnxtool.encoding.encoder import DoneShard, SplitEncoder, Task
from onnxtool.encoding.options import ProcessOptions
from onnxtool.encoding.progress import Event
from onnxtool.errors import OnnxtoolError, SessionError
from onnxtool.interruption import check_interrupted, deaf
from onnxtool.runtime.session import available_cores

# More threads of one interpreter wait for each other: a twentieth of the work holds its lock.
_THREADS_OF_A_PROCESS = 8
_POLL_S = 0.2
_LONGEST_WRITE_S = 5.0
_LONGEST_REASON = 200

Answer = TypeVar("Answer")


OnEvent = Callable[[Event], None]


class Opened(NamedTuple):
    """What a worker finds as it begins.

    Attributes:
        sizes: bytes of each split.
        missing: which of them have no record.
        notes: what a user should know of the corpus and the model.
    """

    sizes: tuple[int, ...]
    missing: tuple[int, ...]
    notes: tuple[str, ...]


class Died(Exception):  # noqa: N818  it is caught by who started the process
    """A worker process ended without saying why."""


@dataclass
class _Here:
    """What this process is, where it is a worker."""

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
    """Begin a worker process, which ends with the one that has started it, however that ends."""
    if memory_bytes and sys.platform != "win32":
        import resource

        # Allocations beyond fail: then a text is at fault, and not the machine.
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
    is_done = False
    try:
        for done in here.open().encode(
            [number],
            lambda window, count, share: here.tell.send(Event(texts=count, size_bytes=share * window.size_bytes)),
            left_out=left_out,
            one_shard=one_shard,
        ):
            if isinstance(done, DoneShard):
                shard = done.shard
                here.tell.send(Event(encoded=shard.num_texts, tokens=shard.num_tokens, rejects=len(shard.rejects)))
            else:
                is_done = True
                here.tell.send(Event(splits=1, rejects=done.num_rejects, size_bytes=done.size_bytes))
    except MemoryError as error:
        raise SessionError(str(error) or "there is not enough memory") from None
    return is_done


def _count(number: int) -> int:
    """Count the texts of the next shard of a split."""
    here = _here[0]
    here.texts = number, here.open().next_texts(number)
    return len(here.texts[1])


def _fault(number: int, place: int) -> str:
    """Run a text of the next shard of a split by itself; return why it cannot be run, or an empty string."""
    from onnxtool.encoding.pipeline import encode_windows
    from onnxtool.encoding.splits import ShardName, Window

    here = _here[0]
    if here.texts[0] != number:
        _count(number)
    job = here.open().job
    window = Window((here.texts[1][place],), ShardName(number, 0), "")
    try:
        for _ in encode_windows(job.model, iter([window]), job.plan, lambda *_: None):
            pass
    except (SessionError, MemoryError) as error:
        return f"cannot be encoded: {' '.join(str(error).split())[:_LONGEST_REASON]}"
    return ""


def _settle() -> None:
    _here[0].tell.send(None)


class Worker:
    """A process that encodes splits, started again where it dies.

    Args:
        task: what is encoded.
        memory_bytes: that the process may allocate; 0 for all.
        on_event: called for what it says, in a thread of its own.
    """

    def __init__(self, task: Task, memory_bytes: int, on_event: OnEvent) -> None:
        self._task, self._memory_bytes, self._on_event = task, memory_bytes, on_event
        self._pool: ProcessPoolExecutor | None = None
        self._connection: Connection | None = None
        self._listener: threading.Thread | None = None
        self._unwritten = 0  # texts that were run, and are of no shard that is written yet
        self._is_heard = threading.Event()
        self._is_stopped = False
        self._lock = threading.Lock()  # a process that is started meanwhile is told to end as it begins

    def open(self) -> Opened:
        """Load the model, and say what the folder is for.

        Raises:
            OnnxtoolError: as `encode_corpus`.
        """
        try:
            return self._twice(_open)
        except Died:
            raise SessionError(
                "the process that encodes ends as it loads the model", "run onnxtool infer with the model and a text"
            ) from None

    def encode(self, number: int) -> None:
        """Encode a split.

        Raises:
            OnnxtoolError: what a worker has met, unless it is of a text.
        """
        try:
            self._twice(_encode, number)
        except (Died, SessionError):
            while not self._encode_shard(number):
                check_interrupted()

    def _encode_shard(self, number: int) -> bool:
        """Encode the next shard of a split, without those of its texts that cannot be run; return whether it was last.

        Windows that are read ahead are of no other shard then.
        """
        try:
            return self._twice(_encode, number, one_shard=True)
        except (Died, SessionError):
            found = self._find(number)
        if not found:
            raise SessionError(
                f"split {number} ends the process that encodes it, and none of its texts does alone",
                "encode with smaller batches: --batch_tokens, or fewer --workers",
            )
        self._on_event(Event(left_out=len(found)))
        return self._call(_encode, number, one_shard=True, left_out=found)

    def _find(self, number: int) -> dict[int, str]:
        """Return the places of texts of the next shard that cannot be run, and why: each by itself, twice."""
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
        """Call a function, and again where it fails: a first death may be somebody else's fault."""
        try:
            return self._call(function, *arguments, **named)
        except (Died, SessionError):
            check_interrupted()
            return self._call(function, *arguments, **named)

    def _call(self, function: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
        """Call a function in the process, which is started where there is none.

        Raises:
            Died: the process ended.
            OnnxtoolError: what it has met.
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
            context = get_context("spawn")  # threads and clients of stores are of one process
            self._connection, theirs = context.Pipe()
        try:
            self._pool = ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(self._task, theirs, self._memory_bytes)
            )
            listener = threading.Thread(target=self._listen, args=(self._connection,), daemon=True)
            listener.start()
            self._listener = listener
            with deaf():
                resource_tracker.ensure_running()  # which hears them again
                with deaf():
                    started = self._pool.submit(os.getpid)
            started.result()
        finally:
            theirs.close()  # the process has its end of the pipe now
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
        """Wait until all that the process has said was heard."""
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
        """Load the model in the first process, and say what the folder is for."""
        (opened,) = self._together([Worker.open])
        return opened

    def encode(self, numbers: Sequence[int]) -> None:
        """Encode splits, each by the next process that is free; the first error stops all, as an interruption does."""
        self.num_processes = min(self.num_processes, len(numbers))
        other = replace(self._task, force=False)
        self._workers += [Worker(other, self._memory_bytes, self._on_event) for _ in range(self.num_processes - 1)]
        self._together([partial(Worker.encode, number=number) for number in numbers])

    def _together(self, calls: Sequence[Callable[[Worker], Answer]]) -> set[Answer]:
        """Make calls in threads; a signal raises in the main one alone, and leaves no process half started there."""
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
