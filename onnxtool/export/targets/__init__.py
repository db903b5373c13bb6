"""The consumers of exported models, one module each, found by name: what each needs, and how to configure it.

To add a consumer, add a module here with a subclass of Target and an instance of it named TARGET. The module has the
target's name for users, with `_` for `-` and for the dot in `.js`.
"""

from __future__ import annotations

import pkgutil

MODULES = {info.name.replace("_js", ".js").replace("_", "-"): info.name for info in pkgutil.iter_modules(__path__)}
TARGET_NAMES = tuple(sorted(MODULES, key=lambda name: (name != "plain", name)))
