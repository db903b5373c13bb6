"""What a signal asked for, remembered: code of others may swallow the exception that it raised there."""

from __future__ import annotations

from typing import NoReturn

_asked: list[BaseException] = []


def stop(exception: BaseException) -> NoReturn:
    """Raise `exception`, and again wherever `check_interrupted` is called from now on.

    A KeyboardInterrupt that arrives in a destructor or a callback of a library is printed there and forgotten.
    """
    _asked.append(exception)
    raise exception


def check_interrupted() -> None:
    """Raise what a signal asked for, if one did.

    Raises:
        BaseException: what was given to `stop`.
    """
    if _asked:
        raise _asked[0]
