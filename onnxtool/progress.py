"""Progress: the library reports its stages, and the caller listens with `with listening(print): …`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
OnProgress = Callable[[str], None]
"""Receives the current activity; a `Stage` if its progress is known."""


class Stage(str):
    """The current activity, as text, with its progress.

    Attributes:
        name: the same for all steps of a stage.
        done: number of finished steps.
        total: number of steps; 0 if unknown.
    """

    name: str
    done: int
    total: int

    __slots__ = ("done", "name", "total")

    def __new__(cls, name: str, done: int, total: int, detail: str = "") -> Stage:
        """Write the stage as text, e.g. `optimizing 3 of 20: attention`; `detail` describes the current step."""
        step = f"{min(done + 1, total)} of {total}" if total else str(done + 1)
        stage = super().__new__(cls, f"{name} {step}{': ' if detail else ''}{detail}")
        stage.name, stage.done, stage.total = name, done, total
        return stage

    def time_left_s(self, elapsed_s: float) -> float | None:
        """Return the estimated remaining seconds after `elapsed_s`; None if unknown."""
        return elapsed_s * (self.total - self.done) / self.done if self.done and self.total and elapsed_s else None


def ignore(_stage: str) -> None:
    """Listen to nothing."""


_listener: ContextVar[OnProgress] = ContextVar("_listener", default=ignore)


@contextmanager
def listening(on_progress: OnProgress) -> Iterator[None]:
    """Pass reports of `tell` and `counted` inside the block to `on_progress`."""
    token = _listener.set(on_progress)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> OnProgress:
    """Return the current listener, so that another thread can report to it."""
    return _listener.get()


def tell(stage: str) -> None:
    """Report the current activity to the listener."""
    _listener.get()(stage)


def counted(items: Sequence[Item], name: str) -> Iterator[Item]:
    """Yield `items`, reporting before each one how many are done."""
    for number, item in enumerate(items):
        tell(Stage(name, number, len(items)))
        yield item
