"""Read tensors from a PyTorch pickle that the user allowed: no code runs, and a child process reads it first.

`torch.load(..., weights_only=True)` supports only what makes tensors, numbers and containers. A file can still exhaust
memory (it is a zip whose entries may be compressed), or take forever (a dictionary key that holds itself twice, 60
times over, is hashed 2^60 times).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxtool.errors import OnnxtoolError, first_line
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild, attempt

_SECONDS = 10  # CPU time of the child, plus one second for each _BYTES_PER_SECOND
_BYTES_PER_SECOND = 50_000_000
_BYTES = 2 << 30  # of memory, with PyTorch, in addition to twice the file
# One process for all pickles: importing PyTorch takes two seconds.
_CHILD = GuardedChild(f"{__name__}:try_pickle", ("torch",))
_harmless: set[tuple[str, int, int]] = set()


def load_pickle(path: Path, make: Callable[[str], OnnxtoolError], device: str | None = "cpu") -> Mapping[str, Any]:
    """Return the content of a pickle by name; if it is not a dictionary, under an empty name.

    Args:
        path: the file.
        make: makes the error for what the file does, such as `takes more than 10 s`.
        device: where to put tensors; None for where they were.

    Raises:
        OnnxtoolError: it takes too long or too much memory, holds more than tensors, or is no such file.
    """
    import torch

    stat = path.stat()
    version = (str(path.resolve()), stat.st_mtime_ns, stat.st_size)
    seconds, num_bytes = _SECONDS + stat.st_size // _BYTES_PER_SECOND, _BYTES + 2 * stat.st_size
    if version not in _harmless:
        try:
            attempt(_CHILD, str(path), seconds=seconds, num_bytes=num_bytes)
        except ChildError:  # it will occur again
            pass
        except ChildEndedError as error:
            raise make(error.reason(seconds, num_bytes)) from None
        _harmless.add(version)
    try:
        loaded = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # zip, pickle and tensors each fail differently
        if refused := _refused_object(error):
            raise make(f"holds more than tensors ({refused}), and loading that runs code") from error
        raise make(f"is not a PyTorch pickle: {first_line(error)}") from error
    return loaded if isinstance(loaded, dict) else {"": loaded}


def _refused_object(error: BaseException | None) -> str:
    """Return the non-tensor that PyTorch's tensor unpickler found; empty for an error of another kind."""
    while error is not None:
        if "Weights only load failed" in str(error):
            match = re.search(r"GLOBAL (\S+)", str(error))
            return match[1] if match else "objects"
        error = error.__cause__ or error.__context__
    return ""


def try_pickle(path: str) -> None:
    """Load a pickle; called in the child."""
    import torch

    torch.load(path, map_location="cpu", weights_only=True)
