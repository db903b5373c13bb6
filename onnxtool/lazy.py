"""Names of a package that are imported when they are first used, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from onnxtool.renamed import moved_name


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of `package` whose public names are in `modules`, name to module."""

    def get(name: str) -> object:
        if name not in modules:
            return moved_name(package, name)
        return getattr(importlib.import_module(modules[name]), name)

    return get
