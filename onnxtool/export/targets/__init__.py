"""The consumers of exported models, a module each, found by its name: what each needs, and how it is told of a model.

A further consumer is a further module here with a subclass of Target, and an instance of it called TARGET.
"""

from __future__ import annotations

import importlib
import pkgutil

from onnxtool.export.target import Target


def _find_targets() -> dict[str, Target]:
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    targets = sorted((module.TARGET for module in modules), key=lambda target: (target.reads_folder, target.name))
    return {target.name: target for target in targets}


TARGETS = _find_targets()
TARGET_NAMES = tuple(TARGETS)


def find_target(name: str) -> Target:
    """Return the target called `name`, which must be one of TARGET_NAMES."""
    return TARGETS[name]
