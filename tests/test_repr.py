"""What public objects look like at a prompt and in a log: a line, whatever they hold."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest.mock import Mock

import numpy as np
import pytest

from onnxtool.infer import SparseVectors, TokenVectors
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Structure
from onnxtool.options import Options
from tests.test_contract import flattened, public_calls, public_modules

MOST = 500
_MANY = 60


def public_classes() -> list[type]:
    """Return the dataclasses and named tuples that are public, that public calls return, and that these hold."""
    found: dict[type, None] = {}
    hints: list[Any] = [getattr(module, name) for module in public_modules() for name in module.__all__]
    for call, _ in public_calls().values():
        if not inspect.isclass(call):
            hints.append(get_type_hints(inspect.unwrap(call)).get("return"))
    while hints:
        hint = hints.pop()
        hints += get_args(hint)
        kind = get_origin(hint) or hint
        has_fields = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields")
        if isinstance(kind, type) and has_fields and kind.__module__.startswith("onnxtool") and kind not in found:
            found[kind] = None
            hints += get_type_hints(kind).values()
    return sorted(found, key=lambda kind: f"{kind.__module__}.{kind.__name__}")


def large_value(hint: Any, depth: int = 2) -> Any:
    """Return much of what a field holds."""
    (kind, option), *_ = flattened(hint)
    origin = get_origin(kind) or kind
    if option.choices:
        return option.choices[-1]
    if origin is np.ndarray:
        return np.zeros((_MANY, 3), np.float32)
    if not isinstance(origin, type):
        return "x" * _MANY
    if issubclass(origin, str):
        return "x" * _MANY
    if issubclass(origin, os.PathLike):
        return Path("x" * _MANY)
    if issubclass(origin, Mapping):
        return {f"name {number}": "y" * 20 for number in range(_MANY)}
    if origin in (tuple, list) or origin.__module__ == "collections.abc":
        return (large_value(get_args(kind)[0], depth),) * _MANY if get_args(kind) else (1,) * _MANY
    if origin in (int, float, bool):
        return origin(1)
    return made(origin, depth - 1) if depth and origin.__module__.startswith("onnxtool") else Mock()


def made(owner: Any, depth: int = 2) -> Any:
    """Return an object with much in every field, made past what checks them."""
    if inspect.isabstract(owner) or not (hasattr(owner, "_fields") or hasattr(owner, "__dataclass_fields__")):
        return Mock()
    values = {name: large_value(hint, depth) for name, hint in fields_of(owner)}
    if hasattr(owner, "_fields"):
        return owner._make(values.values())
    thing: Any = object.__new__(owner)
    for name, value in values.items():
        object.__setattr__(thing, name, value)
    return thing


def fields_of(owner: Any) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(owner, include_extras=True)
    names = getattr(owner, "_fields", None) or owner.__dataclass_fields__
    return ((name, hints[name]) for name in names)


@pytest.mark.parametrize("owner", public_classes(), ids=lambda owner: owner.__name__)
def test_every_public_object_is_short(owner: type) -> None:
    """However much is in its fields."""
    text = repr(made(owner))
    assert len(text) < MOST, text[:MOST]
    assert text.startswith(owner.__name__)


def test_arrays_are_told_by_their_shape() -> None:
    """And a vocabulary by its size."""
    sparse = SparseVectors(np.arange(3), np.zeros(2, np.int32), np.ones(2, np.float32), ["a"] * 30_000)
    assert repr(sparse) == (
        "SparseVectors(indptr=int64 [3], indices=int32 [2], weights=float32 [2], vocabulary=<30000 entries>)"
    )
    assert repr(sparse[0]) == "SparseVector(indices=int32 [1], weights=float32 [1], vocabulary=<30000 entries>)"
    assert repr(TokenVectors(np.arange(2), np.zeros((1, 4), np.float32))) == (
        "TokenVectors(indptr=int64 [2], vectors=float32 [1, 4])"
    )


def test_options_show_what_was_chosen() -> None:
    """And not what is as by default."""

    class Chosen(Options):
        name: str
        threads: int = 0
        verify: bool = True

    assert repr(Chosen("a", verify=False)) == "Chosen(name='a', verify=False)"


def test_a_model_file_is_told_by_its_path() -> None:
    """It is no dataclass."""
    assert repr(ModelFile(Path("a.onnx"), Mock(spec=Structure))) == "ModelFile('a.onnx')"
