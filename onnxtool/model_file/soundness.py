"""Check an untrusted graph before another library loads it: C++ code crashes on some unsound graphs.

Only onnxtool's own reader is used, in time linear in the file size. All limits are defined here.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

from onnxtool.errors import ModelFileError
from onnxtool.model_file.domains import settled
from onnxtool.model_file.wire import DTYPE_NAMES, Function, Structure, read_names
from onnxtool.reports import TensorInfo

MAX_CALL_DEPTH = 100
MAX_EXPANDED_NODES = 1_000_000
MAX_INPUT_ELEMENTS = 1 << 28  # of fixed dims in a graph


def check_sound(path: Path, structure: Structure) -> None:
    """Refuse the model at `path` if its names, dtypes, dims or functions could crash a library.

    Raises:
        ModelFileError: the unsound part, by name.
    """
    _check_names(path, structure)
    for tensor in structure.initializers:
        if tensor.dtype == "undefined" or tensor.dtype not in DTYPE_NAMES:
            raise _unsound(path, f"the initializer {tensor.name[:60]!r} has the unknown dtype {tensor.dtype}")
    for info in structure.inputs:
        _check_dims(path, info)
    _check_functions(path, structure)


def _check_names(path: Path, structure: Structure) -> None:
    defined = {info.name for info in structure.inputs}
    initializers, outputs = read_names(path)
    for name in (*initializers, *outputs):
        if name in defined:
            raise _unsound(path, f"the name {name[:60]!r} is defined twice")
        defined.add(name)
    for info in structure.outputs:
        if info.name not in defined:
            raise _unsound(path, f"no node makes the output {info.name[:60]!r}")


def _check_dims(path: Path, info: TensorInfo) -> None:
    fixed = [size for size in info.shape if isinstance(size, int)]
    if any(size < 0 for size in fixed):
        raise _unsound(path, f"the input {info.name[:60]!r} has a negative dimension: {min(fixed)}")
    if prod(size for size in fixed if size > 0) > MAX_INPUT_ELEMENTS:
        raise _unsound(
            path, f"the input {info.name[:60]!r} has {fixed} as fixed dims, more than {MAX_INPUT_ELEMENTS:,} elements"
        )


def _check_functions(path: Path, structure: Structure) -> None:
    """Refuse functions that call themselves, are nested too deeply, or become too many nodes when inlined."""
    functions: dict[str, list[Function]] = {}
    for function in structure.functions:
        domain = settled(function.domain)
        functions.setdefault(f"{domain}::{function.name}" if domain else function.name, []).append(function)
    expanded: dict[str, tuple[int, int]] = {}  # by operator: its number of nodes, and the depth of its calls

    def expand(op: str, depth: int) -> tuple[int, int]:
        if op not in functions:
            return 1, 0
        if op not in expanded:
            if depth > MAX_CALL_DEPTH:
                raise _unsound(path, f"functions call each other more than {MAX_CALL_DEPTH} deep, or call themselves")
            bodies = [total(function.ops.items(), depth + 1) for function in functions[op]]
            expanded[op] = max(nodes for nodes, _ in bodies), 1 + max(height for _, height in bodies)
        return expanded[op]

    def total(ops: Iterable[tuple[str, int]], depth: int) -> tuple[int, int]:
        nodes = height = 0
        for op, count in ops:
            inner, inner_height = expand(op, depth)
            nodes, height = nodes + count * inner, max(height, inner_height)
        return nodes, height

    sizes = [expand(op, 1) for op in functions]
    nodes = total(structure.ops.items(), 1)[0] if functions else 0
    if max((height for _, height in sizes), default=0) > MAX_CALL_DEPTH:
        raise _unsound(path, f"functions call each other more than {MAX_CALL_DEPTH} deep")
    if max([nodes, *(size for size, _ in sizes)]) > MAX_EXPANDED_NODES:
        raise _unsound(path, f"its functions make more than {MAX_EXPANDED_NODES:,} nodes where they are inlined")


def _unsound(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"{path} cannot be run: {reason}", "export the model again, or do not trust this file")
