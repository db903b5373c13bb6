"""Encode splits in processes; each receives the numbers of its splits over a pipe.

If a process dies, the run ends with an error that names the texts in progress. Finished shards are kept.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

from onnxtool.encoding.encoder import EncodingTask, SplitEncoder
from onnxtool.encoding.manifest import Identity
from onnxtool.encoding.options import ProcessOptions
from onnxtool.encoding.progress import Event, OnEvent, RunningTexts
from onnxtool.errors import SessionError, shorten
from onnxtool.interruption import check_interrupted, critical, deaf, remove_unfinished
from onnxtool.runtime.machine import available_cores

# More threads in one interpreter would wait for each other: a twentieth of the work holds the GIL.
_THREADS_OF_A_PROCESS = 8
_POLL_S = 0.2
_MOST_CHARACTERS = 80  # of an id in an error


class StartupFindings(NamedTuple):
    """A worker's findings at startup.

    Attributes:
        sizes: sizes of the splits in bytes.
        missing: splits without a record.
        notes: notes for the user about the corpus and the model.
        identity: everything that determines the bytes of the output.
    """

    sizes: tuple[int, ...]
    missing: tuple[int, ...]
    notes: tuple[str, ...]
    identity: Identity

    @classmethod
    def of(cls, encoder: SplitEncoder) -> StartupFindings:
        """Return the findings of an encoder that has claimed the folder."""
        numbers = range(len(encoder.splits))
        done = numbers if encoder.records is None else encoder.records.done()
        sizes = tuple(split.size_bytes for split in encoder.splits)
        missing = tuple(number for number in numbers if number not in done)
        return cls(sizes, missing, tuple(encoder.notes(0)), encoder.identity)


def end_process() -> None:
    """End this process without unwinding, and without unfinished files."""
    remove_unfinished()
    os._exit(0)


def serve(task: EncodingTask, connection: Connection, end: Callable[[], None] = end_process) -> None:
    """Encode the splits whose numbers come over a connection; end as soon as its other end is closed.

    It sends its findings at startup, events and running texts, None for each finished split, and finally an error.
    """
    numbers: SimpleQueue[int | None] = SimpleQueue()
    lock = threading.Lock()  # a connection takes one thread at a time

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                numbers.put(connection.recv())
        numbers.put(None)
        end()

    def tell(message: StartupFindings | Event | RunningTexts | Exception | None) -> None:
        with lock:
            connection.send(message)

    threading.Thread(target=listen, daemon=True).start()
    try:
        encoder = SplitEncoder(task).begin()
        tell(StartupFindings.of(encoder))
        for number in iter(numbers.get, None):
            encoder.encode([number], tell, tell)  # with a stage of its own: a worker of Ray outlives its run
            tell(None)
    except Exception as error:  # noqa: BLE001  the parent raises it
        error.add_note(traceback.format_exc())
        with suppress(OSError):  # the parent has closed its end
            tell(error)


def start_process(task: EncodingTask, connection: Connection) -> Any:
    """Start a process that serves a connection and shares no thread or client; only this process handles signals."""
    process = get_context("spawn").Process(target=serve, args=(task, connection))
    with deaf():
        resource_tracker.ensure_running()  # signals are handled again
        with critical(), deaf():
            process.start()
    return process


@dataclass
class _Worker:
    """A process.

    Attributes:
        split: the number of the split that it encodes; None while it loads the model or is idle.
        running: the texts that it tokenizes or runs: shard, first and last id.
    """

    process: Any
    split: int | None = None
    running: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def death(self) -> SessionError:
        """Describe the end of the process, which has told of no error."""
        self.process.join()
        code = self.process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        places = [
            f"shard {shard}, texts {shorten(first, _MOST_CHARACTERS)} to {shorten(last, _MOST_CHARACTERS)}"
            for (shard, first, last), count in self.running.items()
            if count > 0
        ]
        activity = "loaded the model" if self.split is None else f"read or wrote texts of split {self.split}"
        if places:
            activity = f"encoded {' and '.join(places)}"
        return SessionError(
            f"an encoding process {how} while it {activity}",
            "run the same command again, which continues from the last finished shard; if it ends there again, it "
            "needs more memory (fewer --processes or --workers, a smaller --batch_tokens), or a text ends it: try "
            "these with onnxtool infer, and leave that text out",
        )


class LocalWorkers:
    """Processes of this machine that encode splits.

    Attributes:
        num_processes: how many there are.
    """

    def __init__(self, task: EncodingTask, options: ProcessOptions, on_event: OnEvent) -> None:
        self.num_processes = options.processes or max(1, available_cores() // _THREADS_OF_A_PROCESS)
        threads = options.workers or max(1, available_cores() // self.num_processes)
        self._task = replace(task, workers=threads)
        self._on_event = on_event
        self._workers: dict[Connection, _Worker] = {}

    def open(self) -> StartupFindings:
        """Load the model in the first process, and claim the folder.

        Raises:
            OnnxtoolError: as `encode_corpus`.
        """
        self._start(self._task)
        opened: StartupFindings
        _, opened = next(self._answers())
        return opened

    def encode(self, numbers: Sequence[int]) -> None:
        """Encode splits, each in the next free process.

        Raises:
            OnnxtoolError: the first error of a process, or its end.
        """
        self.num_processes = min(self.num_processes, len(numbers))
        waiting, num_left = deque(numbers), len(numbers)
        idle = [*self._workers]
        for _ in range(self.num_processes - len(self._workers)):
            self._start(replace(self._task, force=False))
        answers = self._answers()
        while num_left:
            while idle and waiting:
                connection = idle.pop()
                self._workers[connection].split = waiting.popleft()
                connection.send(self._workers[connection].split)
            connection, _ = next(answers)
            num_left -= self._workers[connection].split is not None
            self._workers[connection].split = None
            idle.append(connection)

    def _start(self, task: EncodingTask) -> None:
        ours, theirs = get_context("spawn").Pipe()
        with theirs:
            self._workers[ours] = _Worker(start_process(task, theirs))

    def _answers(self) -> Iterator[tuple[Connection, Any]]:
        """Yield each process that has loaded the model or finished a split, with its answer."""
        while True:
            check_interrupted()
            for connection in wait(self._workers, _POLL_S):
                assert isinstance(connection, Connection)  # noqa: S101  nothing else is waited for
                worker = self._workers[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    raise worker.death() from None
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Event):
                    self._on_event(message)
                elif isinstance(message, RunningTexts):
                    worker.running[message.shard, message.first, message.last] += message.change
                else:
                    yield connection, message

    def close(self) -> None:
        """End the processes, which remove their temporary files, such as a model."""
        for connection in self._workers:
            connection.close()
        for worker in self._workers.values():
            worker.process.join()
        self._workers.clear()
