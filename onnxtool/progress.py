"""Progress: the library tells its stages, and the caller listens with `with listening(print): …`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
OnProgress = Callable[[str], None]
"""Receives what is being done; a `Stage` where it is known how far that is."""


class Stage(str):
    """What is being done, as text, and how much of it is done.

    Attributes:
        name: the same for all steps of a stage.
        done: how many steps are finished.
        total: how many there are; 0 where that is not known.
    """

    name: str
    done: int
    total: int

    __slots__ = ("done", "name", "total")

    def __new__(cls, name: str, done: int, total: int, detail: str = "") -> Stage:
        """Say it as text, e.g. `optimizing 3 of 20: attention`; `detail` is of the step under way."""
        step = f"{min(done + 1, total)} of {total}" if total else str(done + 1)
        stage = super().__new__(cls, f"{name} {step}{': ' if detail else ''}{detail}")
        stage.name, stage.done, stage.total = name, done, total
        return stage

    def time_left_s(self, elapsed_s: float) -> float | None:
        """Return how long the stage still takes if it took `elapsed_s` so far; None if that is not known."""
        return elapsed_s * (self.total - self.done) / self.done if self.done and self.total and elapsed_s else None


def ignore(_stage: str) -> None:
    """Listen to nothing."""


_listener: ContextVar[OnProgress] = ContextVar("_listener", default=ignore)


@contextmanager
def listening(on_progress: OnProgress) -> Iterator[None]:
    """Pass what `tell` and `counted` say inside of the block to `on_progress`."""
    token = _listener.set(on_progress)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> OnProgress:
    """Return what `tell` tells, for another thread to tell it."""
    return _listener.get()


def tell(stage: str) -> None:
    """Say what is being done to whoever listens."""
    _listener.get()(stage)


def counted(items: Sequence[Item], name: str) -> Iterator[Item]:
    """Give `items` one by one, and say before each how many of them are done."""
    for number, item in enumerate(items):
        tell(Stage(name, number, len(items)))
        yield item
