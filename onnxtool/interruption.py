"""Remember a requested interruption, because third-party code may swallow the exception."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_TIDYING = frozenset(("__exit__", "mkdtemp", "rmtree"))  # a half-removed folder would remain
_asked: list[BaseException] = []


def stop(exception: BaseException, frame: FrameType | None = None) -> None:
    """Raise `exception` now, and again at every later call of `check_interrupted`.

    A KeyboardInterrupt that arrives in a library's destructor or callback is printed and lost. It is not raised yet if
    `frame`, where it would be raised, or one of its callers is making or removing a temporary folder.
    """
    _asked.append(exception)
    while frame is not None:
        if frame.f_code.co_name in _TIDYING:
            return
        frame = frame.f_back
    raise exception


def check_interrupted() -> None:
    """Raise the exception requested by a signal, if any.

    Raises:
        BaseException: the exception passed to `stop`.
    """
    if _asked:
        raise _asked[0]


@contextmanager
def deaf() -> Iterator[None]:
    """Block termination signals for processes started in the block: their parent handles the signals and ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
