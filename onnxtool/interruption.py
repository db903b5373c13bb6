"""Remember a requested interruption, because third-party code may swallow the exception."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

# Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# A half-removed folder would remain, or a published corpus with the records of its run.
_TIDYING = frozenset(("__exit__", "mkdtemp", "rmtree", "_publish_whole"))
_MOST_STAGED_BYTES = 1 << 16  # of names: a corpus stages files as long as it runs
_asked: list[BaseException] = []
_staged: list[int] = []  # the descriptor of a file in memory, which the parent of a supervised command reads


def stop(exception: BaseException, frame: FrameType | None = None) -> None:
    """Raise `exception` now, and again at every later call of `check_interrupted`.

    A KeyboardInterrupt that arrives in a library's destructor or callback is printed and lost. It is not raised yet if
    `frame`, where it would be raised, or one of its callers is making or removing files that belong together.
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


def share_staged() -> None:
    """Let processes forked from here on tell this one which folders they stage, in case they die."""
    _staged[:] = [os.memfd_create("staged")]


def tell_staged(path: Path) -> None:
    """Tell a supervising process that a staging folder will be made; if full, drop names of folders that are gone."""
    for descriptor in _staged:
        with suppress(OSError):  # a limit on the size of files holds here too
            if os.fstat(descriptor).st_size > _MOST_STAGED_BYTES:
                left = [one for one in told_staged() if one.exists()]
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, b"".join(os.fsencode(one) + b"\0" for one in left))
            os.write(descriptor, os.fsencode(path.absolute()) + b"\0")


def told_staged() -> set[Path]:
    """Return the staging folders that forked processes told of."""
    return {
        Path(os.fsdecode(name))
        for descriptor in _staged
        for name in os.pread(descriptor, os.fstat(descriptor).st_size, 0).split(b"\0")
        if name
    }


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
