"""Inputs and outputs that are not tensors, as named arrays: sequences, optionals and maps.

Element `i` of the sequence `s` is `s[i]`, the keys and values of the map `m` are `m.keys` and `m.values`, and an
optional is what it holds, or not there; an output also has `s.length`. What compares arrays needs to know no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.reports import TensorInfo

NESTED = ("sequence", "map", "optional")  # what their dtypes begin with
_ELEMENT = re.compile(r"\[(\d+)\]")


def is_nested(info: TensorInfo) -> bool:
    """Whether an input or output is not a tensor."""
    return info.dtype.startswith(NESTED)


def flattened(name: str, value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the named arrays of an onnxruntime output; the output itself if it is a tensor."""
    if isinstance(value, Mapping):
        yield f"{name}.keys", np.array(list(value.keys()))
        yield f"{name}.values", np.array(list(value.values()))
    elif value is None or isinstance(value, list):
        # Its shape says how many elements there are, or that there is no sequence: shapes are compared exactly.
        yield f"{name}.length", np.zeros(() if value is None else len(value), np.int64)
        for number, element in enumerate(value or ()):
            yield from flattened(f"{name}[{number}]", element)
    else:
        yield name, np.asarray(value)


def nested(info: TensorInfo, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Assemble an onnxruntime input from the arrays under its name."""
    return _nested(info.name, info.dtype, arrays)


def is_part(name: str, info: TensorInfo) -> bool:
    """Whether `name` is the name of an array in a nested input."""
    return is_nested(info) and (name == info.name or name.startswith((f"{info.name}[", f"{info.name}.")))


def _nested(name: str, dtype: str, arrays: Mapping[str, NDArray[Any]]) -> Any:
    kind, _, element = dtype.partition("(")
    element = element.removesuffix(")")
    own = [key for key in arrays if key.startswith(name)]
    if kind == "optional":
        return _nested(name, element, arrays) if own else None
    if kind == "map":
        keys, values = (arrays[f"{name}.{part}"].tolist() for part in ("keys", "values"))
        return dict(zip(keys, values, strict=True))
    if kind == "sequence":
        found = (_ELEMENT.match(key[len(name) :]) for key in own)
        places = sorted({int(match[1]) for match in found if match})
        return [_nested(f"{name}[{place}]", element, arrays) for place in places]
    return arrays[name]
