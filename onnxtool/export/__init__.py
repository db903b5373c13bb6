"""Export a checkpoint to a file: load, trace, add a head, save, verify, stamp; use the first strategy that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.export.options import DTYPES as DTYPES
    from onnxtool.export.options import ExportOptions as ExportOptions
    from onnxtool.export.run import export_model as export_model

_MODULES = {
    "DTYPES": "onnxtool.export.options",
    "ExportOptions": "onnxtool.export.options",
    "export_model": "onnxtool.export.run",
}

__all__ = ["DTYPES", "ExportOptions", "export_model"]

__getattr__ = lazy_names(__name__, _MODULES)
