"""The consumers of exported models, a module each, found by its name: what each needs, and how it is told of a model.

A further consumer is a further module here with a subclass of Target, and an instance of it called TARGET. The module
is called as users call the target, with `_` for `-`, and for the point of `.js`.
"""

from __future__ import annotations

import pkgutil

MODULES = {info.name.replace("_js", ".js").replace("_", "-"): info.name for info in pkgutil.iter_modules(__path__)}
TARGET_NAMES = tuple(sorted(MODULES, key=lambda name: (name != "plain", name)))
