"""What a signal asked for, remembered: code of others may swallow the exception that it raised there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_TIDYING = frozenset(("__exit__", "mkdtemp", "rmtree"))  # what is half removed would stay
_asked: list[BaseException] = []


def stop(exception: BaseException, frame: FrameType | None = None) -> None:
    """Raise `exception`, and again wherever `check_interrupted` is called from now on.

    A KeyboardInterrupt that arrives in a destructor or a callback of a library is printed there and forgotten. Where
    `frame`, in which it would be raised, or a caller of it makes or removes a temporary folder, it is not raised yet.
    """
    _asked.append(exception)
    while frame is not None:
        if frame.f_code.co_name in _TIDYING:
            return
        frame = frame.f_back
    raise exception


def check_interrupted() -> None:
    """Raise what a signal asked for, if one did.

    Raises:
        BaseException: what was given to `stop`.
    """
    if _asked:
        raise _asked[0]


@contextmanager
def deaf() -> Iterator[None]:
    """Let processes that are started in the block hear no signal that asks to end: their parent does, and ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
