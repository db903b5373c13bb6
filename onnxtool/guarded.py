"""Child processes that handle untrusted input, with limits on CPU time and memory.

An untrusted graph, template or tokenizer may loop, exhaust memory or end the process. A `GuardedChild` calls one
function of a module with such input, request after request, and turns failures into exceptions. The operating system
enforces the limits, and the parent also stops waiting after a while; on systems without such limits, that timeout is
the only one.
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
# Times the processor time of a request: a busy machine is not the input's fault. Windows has no other limit.
_PATIENCE = 4 if sys.platform == "win32" else 24
_MOST_REPLY_BYTES = 1 << 28
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


@contextmanager
def trusted() -> Iterator[None]:
    """Run without guarded children in the block: graphs, tokenizers, templates and pickles are trusted.

    This also lifts the limits on time and memory; it does not allow checkpoint code to run.
    """
    token = _trusting.set(True)
    try:
        yield
    finally:
        _trusting.reset(token)


class ChildError(Exception):
    """The function raised an error; the text is its first line."""


class ChildEndedError(Exception):
    """The child ended without an answer.

    Attributes:
        kind: the limit that ended it, `time` or `memory`; `death` for an unhandled signal or an exit; `start` if no
            process could be started.
        detail: for a death, the name of the signal.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} {detail}".strip())
        self.kind, self.detail = kind, detail

    def reason(self, seconds: int, num_bytes: int) -> str:
        """Describe how the child ended, with its limits."""
        if self.detail == "SIGABRT":  # raised by Rust when out of memory, and by C++ for any reason
            return f"asks for more than {num_bytes >> 20} MB, or makes a library give up (SIGABRT)"
        return {
            "time": f"takes more than {seconds} s",
            "memory": f"takes more than {num_bytes >> 20} MB",
            "start": f"is tried in another process first, which cannot be started ({self.detail}); onnxtool.trusted() "
            "leaves that out",
        }.get(self.kind, f"ends the process that tries it ({self.detail})")


class GuardedChild:
    """A process that calls one function with JSON and returns JSON. Threads may share it, one request at a time.

    It starts with the first request, and restarts after a request that ended it.
    """

    def __init__(self, target: str, imports: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        """Describe the child.

        Args:
            target: the function, as `package.module:name`.
            imports: modules that are loaded before limits apply, so their cost is not charged to the input.
            variables: environment variables in addition to the inherited ones.
        """
        self._target = target
        self._command = module_command(__name__, target, *imports)
        self._variables = dict(variables or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def call(self, argument: Any, *, seconds: int, num_bytes: int) -> Any:
        """Return the function's result for `argument`.

        Args:
            argument: a JSON value.
            seconds: limit on CPU time.
            num_bytes: limit on memory, in addition to what the child has loaded.

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
        """Return the child, which is closed after the block."""
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
        if self._owner != os.getpid():  # a fork inherits its parent's child, whose answers belong to the parent
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
        if status is None or status == _OUT_OF_MEMORY:  # killed here: its answer was too long to read
            return ChildEndedError("memory")
        if -status in (getattr(signal, "SIGXCPU", 0), getattr(signal, "SIGKILL", 0)):
            return ChildEndedError("time")
        return ChildEndedError("death", signal_name(-status) if status < 0 else f"exit code {status}")


def attempt(child: GuardedChild, argument: Any, *, seconds: int, num_bytes: int) -> None:
    """Try an operation in a child before this process performs it; inside `trusted()`, skip the trial.

    Args:
        child: the child that tries it.
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
    """Return the result of `function`, run in a thread that is abandoned if it takes too long.

    For calls that release the GIL and cannot be stopped. The thread ends with the process.

    Raises:
        TimeoutError: it takes longer.
        BaseException: whatever `function` raises.
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
    """Limit how many more bytes this process may allocate in the block: larger requests fail.

    For work that must happen in this process and whose size comes from untrusted settings. Does nothing inside
    `trusted()` or on Windows. Yields whether this is the lowest limit in force: otherwise an error says nothing about
    the settings.
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
    """Return the answer to a request; None if the child has ended, or was killed after `seconds`."""
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
    """Return the command that runs a module; without `-P`, a `json.py` in the working directory would run too."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Return the environment variables that let a child find modules where this process does."""
    places = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in places if place)}


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _limit(seconds: int, num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows; the parent's timeout is the only limit there
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
    """Answer requests until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals all processes of a job; the parent decides
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keep library output out of the answers
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
