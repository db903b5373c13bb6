"""The ONNX backend of sentence-transformers 5, which lacks modules by whose names version 6 saves classes.

`sentence_transformers.models` has had these classes under one name in all versions so far.
"""

from __future__ import annotations

from pathlib import Path

from onnxtool.checkpoint.sentence_modules import MODULES_NAME, as_list, as_object
from onnxtool.export.sidecar_files import write_json
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.reading import read_json

_PACKAGE = "sentence_transformers"
_LASTING = ("Dense", "Dropout", "LayerNorm", "Normalize", "Pooling", "Transformer")


class OptimumSpecification(TargetSpecification):
    """A folder whose modules have names that every version finds."""

    def files(self, folder: Path, longest: int | None) -> None:
        """Write modules.json with lasting names."""
        super().files(folder, longest)
        path = folder / MODULES_NAME
        if path.is_file():
            modules = [as_object(entry) for entry in as_list(read_json(path))]
            write_json(path, [{**entry, "type": _lasting(str(entry.get("type")))} for entry in modules])


def _lasting(name: str) -> str:
    kind = name.rpartition(".")[2]
    return f"{_PACKAGE}.models.{kind}" if name.startswith(f"{_PACKAGE}.") and kind in _LASTING else name


SPECIFICATION = OptimumSpecification
