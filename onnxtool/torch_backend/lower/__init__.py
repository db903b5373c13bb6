"""Lower ATen operators: decisions, decompositions, rewrites, translation to ONNX and corrections."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def attempted(rewrite: Callable[..., T], *arguments: Any) -> T | None:
    """Return what `rewrite` returns; if it raises, warn and return None.

    Before it has decided, it may only add nodes: unread ones are removed later.
    """
    try:
        return rewrite(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever a faulty rewrite raises, the graph is right without it
        name = f"{rewrite.__module__.removeprefix('onnxtool.torch_backend.')}.{rewrite.__name__}"
        warnings.warn(
            f"the graph rewrite {name} failed at {arguments[0].name}, and is left out there: {type(error).__name__}: "
            f"{error}; results are not affected, but please report this with your model",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
