"""Fetch a large file from the hub, and tell whoever listens how much of it is here."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO, Any

from onnxtool.progress import Stage, listener

_MB = 1_000_000


def fetch(model_name: str, name: str, revision: str | None) -> None:
    """Fetch a file of a checkpoint into the hub's cache, unless it is there; failures are left to whoever reads it.

    Transformers fetches it as well, with a bar of its own that would run into that of the command line.
    """
    from huggingface_hub import hf_hub_download

    with suppress(OSError, ValueError), open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123  no path
        hf_hub_download(model_name, name, revision=revision or "main", tqdm_class=_bar(name, nowhere))


def _bar(name: str, nowhere: IO[str]) -> Any:
    """Return a class of bars that show nothing, of which the first tells how far it is."""
    from huggingface_hub.utils import tqdm

    say = listener()  # of this thread; the hub's own may call
    made: list[Any] = []

    class Told(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            made.append(self)
            super().__init__(*args, **{**more, "file": nowhere, "disable": False})
            self._tell()

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            self._tell()
            return shown

        def _tell(self) -> None:
            if self is made[0] and self.total and self.total >= _MB:
                say(Stage(f"downloading {name}, MB", int(self.n) // _MB, int(self.total) // _MB))

    return Told
