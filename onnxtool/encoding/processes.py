"""Worker processes: they are told by lines of JSON what to do, and answer by such lines; and who hands tasks to them.

Each is a command of its own, so that nothing of this process crosses into it: threads, clients of stores, or a script
that would be run again.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from onnxtool import errors
from onnxtool.encoding.answers import GRACE_S
from onnxtool.errors import OnnxtoolError
from onnxtool.guarded import module_command, module_environment
from onnxtool.interruption import check_interrupted

_POLL_S = 0.2


class Died(Exception):  # noqa: N818  it is caught by who started the process
    """A worker process ended without saying why."""


class WorkerProcess:
    """A process that runs a module, whose end of the line is `onnxtool.encoding.answers`.

    Attributes:
        module: that is run.
        start: the first order, which each new process is given; None for none.
    """

    def __init__(self, module: str, start: dict[str, Any] | None = None) -> None:
        self.module = module
        self.start = start
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def ask(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answers to an order; a process is started where there is none.

        Raises:
            OnnxtoolError: what the process says that it has met.
            Died: it ended without a word.
        """
        if self._is_closed:
            raise OnnxtoolError("the worker was stopped")
        if self._process is None:
            self._begin()
            if self.start is not None:
                yield from self._answers(self.start)
        yield from self._answers(order)

    def _begin(self) -> None:
        try:
            self._process = subprocess.Popen(
                module_command(self.module),
                env=module_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # a terminal's Ctrl-C is for who waits for it
            )
        except OSError as error:
            raise OnnxtoolError(
                f"cannot start a process: {error.strerror}", "pass fewer --workers, or end other processes"
            ) from error
        if self._is_closed:  # meanwhile, by another thread
            self._process.kill()

    def _answers(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: S101, PT018
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            if not line.endswith("\n"):  # it died as it wrote
                break
            answer = json.loads(line)
            if "done" in answer:
                return
            if "error" in answer:
                self._end()
                raise _error(answer)
            yield answer
        code = self._end()
        check_interrupted()
        if self._is_closed:
            raise OnnxtoolError("the worker was stopped")
        raise Died(_name_of(code))

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        return process.wait()

    def stop(self) -> None:
        """Kill the process; a thread that waits for its answers gets an error."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, for whose answers no thread waits; it removes its temporary files, such as a model."""
        self._is_closed = True
        if (process := self._process) is not None and process.stdin is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(GRACE_S)
        self.stop()
        self._end()


def _error(answer: dict[str, Any]) -> OnnxtoolError:
    kind = getattr(errors, str(answer["kind"]), OnnxtoolError)
    is_ours = isinstance(kind, type) and issubclass(kind, OnnxtoolError) and kind is not errors.VerificationError
    return (kind if is_ours else OnnxtoolError)(str(answer["error"]), str(answer["hint"]))


def _name_of(code: int) -> str:
    """Name how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


class Stoppable(Protocol):
    """What has a process, or can be stopped otherwise."""

    def stop(self) -> None:
        """End it; a thread that waits for its answers gets an error."""


S = TypeVar("S", bound=Stoppable)
Task = TypeVar("Task")
Result = TypeVar("Result")


def share_out(workers: Sequence[S], tasks: Sequence[Task], do: Callable[[S, Task], Result]) -> list[Result]:
    """Have workers do tasks, each the next one as soon as it is free, and return what they give, in order of the tasks.

    The first error stops all workers, and so does an interruption.
    """
    idle: queue.SimpleQueue[S] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def take(task: Task) -> Result:
        worker = idle.get()
        try:
            return do(worker, task)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(len(workers), thread_name_prefix="worker") as threads:
        futures = [threads.submit(take, task) for task in tasks]
        waiting = set(futures)
        try:
            while waiting:
                check_interrupted()
                done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.stop()
            raise
    return [future.result() for future in futures]
