"""What translates a graph of ATen operators into an ONNX model, by name or as a function of the user."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from onnxtool.errors import CompilationError
from onnxtool.torch_backend.lower.exporter import export
from onnxtool.torch_backend.lower.torch_onnx import translate

if TYPE_CHECKING:
    from onnxtool.torch_backend.options import Converter

SWITCH = "ONNXRT_CHANGE_REWRITER"


CONVERTERS: dict[str, Converter] = {"fx": translate, "export": export}
"""The default, and the one that ONNXRT_CHANGE_REWRITER=1 takes in its place."""


def resolve_converter(converter: Converter | str) -> tuple[str, Converter]:
    """Return the name and the function of a converter, or of the other one where the environment asks for it.

    Raises:
        CompilationError: there is no converter of that name.
    """
    wanted = os.environ.get(SWITCH, "0")
    if wanted not in ("", "0"):
        converter = tuple(CONVERTERS)[1] if wanted == "1" else wanted
    if callable(converter):
        return f"{converter.__module__}.{getattr(converter, '__qualname__', repr(converter))}", converter
    if converter not in CONVERTERS:
        raise CompilationError(
            f"unknown converter {converter!r}", f"use one of {', '.join(CONVERTERS)}, or pass a function"
        )
    return converter, CONVERTERS[converter]
