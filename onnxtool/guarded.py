"""Child processes that do what untrusted input asks for, with limits of processor time and memory.

A graph, a template or a tokenizer of a stranger may loop, grow or end the process. A `GuardedChild` calls one function
of a module with such input, request after request; what becomes of it is an exception here. Limits are those of the
operating system, and the parent waits only so long beside them. Systems without such limits have that wait alone.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, Self, TypeVar, cast

Result = TypeVar("Result")

_OUT_OF_MEMORY = 3  # the child's exit status
_MOST_START_SECONDS = 120.0  # to import what the function needs, on a busy machine
_PATIENCE = 4  # times the processor time of a request: a busy machine is not the input's fault
_MOST_REPLY_BYTES = 1 << 28
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


@contextmanager
def trusted() -> Iterator[None]:
    """Leave guarded children out in the block: graphs, tokenizers, templates and pickles are trusted not to do harm.

    The limits of time and memory go with the children; no code of a checkpoint runs because of it.
    """
    token = _trusting.set(True)
    try:
        yield
    finally:
        _trusting.reset(token)


class ChildError(Exception):
    """The function raised an error; its text is the first line of it."""


class ChildEndedError(Exception):
    """The child did not come back.

    Attributes:
        kind: the limit that ended it, `time` or `memory`; `death` for a signal that nothing handles, or an exit;
            `start` where no process could be started.
        detail: of a death, the name of the signal.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} {detail}".strip())
        self.kind, self.detail = kind, detail

    def reason(self, seconds: int, num_bytes: int) -> str:
        """Say what became of the child, with the limits that it was given."""
        if self.detail == "SIGABRT":  # by which Rust ends where it gets no memory, and C++ for any reason
            return f"asks for more than {num_bytes >> 20} MB, or makes a library give up (SIGABRT)"
        return {
            "time": f"takes more than {seconds} s",
            "memory": f"takes more than {num_bytes >> 20} MB",
            "start": f"is tried in another process first, which cannot be started ({self.detail}); onnxtool.trusted() "
            "leaves that out",
        }.get(self.kind, f"ends the process that tries it ({self.detail})")


class GuardedChild:
    """A process that calls one function with JSON, and gives back JSON. Threads may share it; one is served at a time.

    It starts with the first request, and again after one that ended it.
    """

    def __init__(self, target: str, imports: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        """Describe the child.

        Args:
            target: the function, as `package.module:name`.
            imports: modules that are loaded before any limit: what they take is not the input's.
            variables: of the environment, beside those of this process.
        """
        self._target = target
        self._command = module_command(__name__, target, *imports)
        self._variables = dict(variables or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def call(self, argument: Any, *, seconds: int, num_bytes: int) -> Any:
        """Return what the function makes of `argument`.

        Args:
            argument: of JSON's types.
            seconds: of processor time.
            num_bytes: of memory, with what the child has loaded.

        Raises:
            ChildError: the function raises an error.
            ChildEndedError: a limit or a signal ended the child.
        """
        if _trusting.get():
            return _function(self._target)(argument)
        request = json.dumps([argument, seconds, num_bytes]).encode() + b"\n"
        with self._lock:
            process = self._running()
            reply = _ask(process, request, _PATIENCE * seconds)
            if reply is None:
                raise self._ending(process)
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply["result"]

    def __enter__(self) -> Self:
        """Return the child, which is closed behind the block."""
        return self

    def __exit__(self, *_raised: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a fork has its parent's child, whose answers are not for it
            self._process = None
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=module_environment() | self._variables,
            )
        except OSError as error:
            raise ChildEndedError("start", str(error)) from error
        self._process, self._owner = process, os.getpid()
        if _ask(process, b"", _MOST_START_SECONDS) is None:
            raise self._ending(process)
        return process

    def _ending(self, process: subprocess.Popen[bytes]) -> ChildEndedError:
        """Say what ended the child."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        status = process.poll()
        self.close()
        if status is None or status == _OUT_OF_MEMORY:  # the former: its answer was too long to read
            return ChildEndedError("memory")
        if -status in (getattr(signal, "SIGXCPU", 0), getattr(signal, "SIGKILL", 0)):
            return ChildEndedError("time")
        return ChildEndedError("death", signal_name(-status) if status < 0 else f"exit code {status}")


def attempt(child: GuardedChild, argument: Any, *, seconds: int, num_bytes: int) -> None:
    """Let a child do once what this process is to do afterwards; where all is trusted, nothing is tried.

    Args:
        child: what tries it.
        argument: as for its `call`.
        seconds: as for its `call`.
        num_bytes: as for its `call`.

    Raises:
        ChildError: as its `call`.
        ChildEndedError: as its `call`.
    """
    if not _trusting.get():
        child.call(argument, seconds=seconds, num_bytes=num_bytes)


def in_time(function: Callable[[], Result], seconds: float) -> Result:
    """Return what `function` returns. It runs in a thread, which is left behind where it takes longer.

    For a call that releases Python's lock and cannot be stopped. The thread ends with the process.

    Raises:
        TimeoutError: it takes longer.
        BaseException: what `function` raises.
    """
    outcome: list[Callable[[], Result]] = []

    def run() -> None:
        try:
            result = function()
            outcome.append(lambda: result)
        except BaseException as error:  # noqa: BLE001  raised again, where it is waited for
            outcome.append(partial(_raise, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError
    return outcome[0]()


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[bool]:
    """Let this process take only so many bytes more in the block: what asks for more gets an error, and no memory.

    For what has to be done here and takes its size from untrusted settings. Not where all is trusted, and not on
    Windows. Gives whether that is the lowest limit there is: otherwise an error tells nothing of the settings.
    """
    status = Path("/proc/self/status")
    if _trusting.get() or not status.is_file():
        yield False
        return
    import resource

    taken = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    unlimited = resource.RLIM_INFINITY
    others = (soft, hard, resource.getrlimit(resource.RLIMIT_AS)[0])
    wanted = min([taken + num_bytes, *(limit for limit in others if limit != unlimited)])
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield wanted == taken + num_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _raise(error: BaseException) -> NoReturn:
    raise error


def _ask(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, Any] | None:
    """Return the answer to a request; None where the child is gone, or is killed after `seconds`."""
    requests, replies = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        requests.write(request)
        requests.flush()
        line = replies.readline(_MOST_REPLY_BYTES)
    except OSError:  # a broken pipe
        return None
    finally:
        timer.cancel()
    reply: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return reply


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module; without `-P`, a `json.py` of the working directory would run as well."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Return the variables with which a module is found where this process finds it."""
    places = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in places if place)}


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _limit(seconds: int, num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows; the parent's patience is the limit there
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds),
        (resource.RLIMIT_DATA, num_bytes),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _serve(target: str, imports: Sequence[str]) -> None:
    """Answer requests until there are no more; the parent's end is theirs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal asks all processes of a job; the parent decides
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is no answer
        for name in imports:
            importlib.import_module(name)
        function = _function(target)
        _answer(answers, {"result": "ready"})
        for line in sys.stdin.buffer:
            argument, seconds, num_bytes = json.loads(line)
            _limit(seconds, num_bytes)
            try:
                reply = {"result": function(argument)}
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  it may fail in any way; the parent reports it
                reply = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:300]}
            _answer(answers, reply)


def _function(target: str) -> Callable[[Any], Any]:
    module, _, name = target.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return function


def _answer(answers: IO[bytes], reply: dict[str, Any]) -> None:
    answers.write(json.dumps(reply).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    try:
        _serve(sys.argv[1], sys.argv[2:])
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
