"""A session of onnxruntime, as it is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from onnxtool.benchmarking.report import TransferTimes
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.runtime.nesting import is_part
from onnxtool.runtime.session import Session
from onnxtool.runtime.timing import summarize_latencies

Feeds = Mapping[str, NDArray[Any]]

_TRANSFERS = 50


@dataclass(frozen=True)
class SessionRunner:
    """A session of onnxruntime.

    Attributes:
        io_binding: whether inputs and outputs lie in buffers that are bound once.
    """

    session: Session
    io_binding: bool = False

    @property
    def load_ms(self) -> float:
        """From the file to the session."""
        return self.session.load_ms

    def prepare(self, feeds: Feeds) -> Callable[[], object]:
        """Return a run on the inputs that the graph has, in its dtypes."""
        own = self._own(feeds)
        return (
            self.session.bind(own) if self.io_binding else partial(self.session.run_unchecked, self.session.nested(own))
        )

    def outputs(self, feeds: Feeds) -> Mapping[str, NDArray[Any]]:
        """Run once."""
        return self.session.run(self._own(feeds))

    def _own(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        inputs = self.session.model.structure.inputs
        found = {name: array for name, array in feeds.items() for info in inputs if is_part(name, info)}
        return found | {
            info.name: feeds[info.name] if info.dtype == "string" else feeds[info.name].astype(info.dtype, copy=False)
            for info in inputs
            if info.name in feeds and info.name not in found
        }

    def time_transfers(self, feeds: Feeds) -> TransferTimes | None:
        """Time the copies to the device and back apart from the computation; None where there is no device."""
        if self.session.provider == "cpu":
            return None
        bound = self.session.bind(self._own(feeds))
        times = [bound.time_transfer() for _ in range(_TRANSFERS + 1)][1:]
        return TransferTimes(*(summarize_latencies(part) for part in zip(*times, strict=True)))


def require_same_inputs(model: ModelFile, other: ModelFile) -> None:
    """Refuse to compare with a model that takes what this one does not.

    Raises:
        InputError: `other` has an input that `model` has not.
    """
    names = {info.name for info in model.structure.inputs}
    unknown = [info.name for info in other.structure.inputs if info.name not in names]
    if unknown:
        raise InputError(
            f"{other.path} takes {', '.join(unknown)}, which {model.path} does not; no inputs suit both",
            "compare models with the same inputs",
        )
