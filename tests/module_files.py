"""Files that sentence-transformers writes for the modules of a checkpoint, without their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS = "sentence_transformers.models."
Module = str | tuple[str, Mapping[str, Any]]


def write_modules(folder: Path, *modules: Module, first: str = "Transformer", **files: Any) -> Path:
    """Write modules.json of `first` and of `modules` behind it, their settings, and other JSON files by their names.

    A kind without a package is one of sentence-transformers.
    """
    paths = {"": first}
    for place, module in enumerate(modules, start=1):
        kind, settings = (module, {}) if isinstance(module, str) else module
        path = folder / f"{place}_{kind.rpartition('.')[2]}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(settings))
        paths[path.name] = kind
    listed = [
        {"idx": place, "name": str(place), "path": path, "type": kind if "." in kind else f"{MODELS}{kind}"}
        for place, (path, kind) in enumerate(paths.items())
    ]
    for name, content in {"modules": listed, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
