"""A checkpoint whose Router encodes queries and documents by different models: two exports that know each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnxtool.errors import ExportError
from onnxtool.export.options import ExportOptions
from onnxtool.export.preparation import Located, locate, open_checkpoint
from onnxtool.model_file.metadata import PAIR_KEY, PARTNER_KEY

_TASKS = ("query", "document")


@dataclass(frozen=True)
class Side:
    """One of the two exports.

    Attributes:
        options: those of a user, with the route and the output of this side.
        located: where the checkpoint is, what will run the model, and where the files go.
        stamps: what the file says of the other one; empty where there is one export.
    """

    options: ExportOptions
    located: Located
    stamps: Mapping[str, str] = field(default_factory=dict)


def find_sides(options: ExportOptions) -> tuple[Side, ...]:
    """Return the exports that `options` ask for: of a Router's two encoders, first the one that reads any text.

    That one has the output's name, and the other one what it reads behind it: NAME.onnx and NAME-query.onnx.

    Raises:
        ExportError: ranges of numbers would be measured for each side, and be others.
        OnnxtoolError: the checkpoint cannot be found or read, or an output is there.
    """
    located = locate(options)
    source, target, paths = located
    modules = source.sentence_modules
    routes = {modules.route_of[task]: task for task in _TASKS if task in modules.route_of}
    if len(routes) < len(_TASKS) or not modules.routes or not target.takes_any_graph:
        return (Side(options, located),)
    if options.calibration is not None:
        raise ExportError(
            "--calibration measures the range of each number, and queries and documents of this checkpoint have "
            "encoders of their own: their codes could not be compared",
            "export one route with --calibration, and both with --ranges",
        )
    first = modules.route_of.get("", "")
    first = first if first in routes else modules.route_of["document"]
    outputs = {first: paths.graph}
    outputs |= {route: _other_path(paths.graph, task) for route, task in routes.items() if route != first}
    each = [replace(options, route=route, output=output) for route, output in outputs.items()]
    sides = [Side(one, locate(one)) for one in each]
    digest = hashlib.sha256()
    for side in sides:
        checkpoint = open_checkpoint(side.options, side.located[0], target)
        computed = [(module.kind, module.settings) for module in side.located[0].sentence_modules.modules]
        digest.update(
            json.dumps([checkpoint.weights_sha256, computed, options.head, options.choices], sort_keys=True).encode()
        )
    names = [output.name for output in outputs.values()]
    return tuple(
        replace(side, stamps={PARTNER_KEY: name, PAIR_KEY: digest.hexdigest()})
        for side, name in zip(sides, reversed(names), strict=True)
    )


def partner_paths(path: Path) -> tuple[Path, ...]:
    """Return where the partner of the first file may go."""
    return tuple(_other_path(path, task) for task in _TASKS)


def _other_path(path: Path, task: str) -> Path:
    """Return where the file for the texts of a task goes: NAME-query.onnx beside NAME.onnx."""
    return path.with_name(f"{path.stem}-{task}{path.suffix}")
