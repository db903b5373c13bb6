"""What a user may ask of an export."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from onnxtool.reports import Json
from onnxtool.runtime.comparison import TOLERANCES, Tolerance

DTYPES = {"float32": "fp32", "float16": "fp16"}

# Options that no other entry of the metadata tells.
_STAMPED = ("target", "keep_raw", "opset", "text", "allow_missing_weights", "allow_pickle", "device", "atol", "rtol")


@dataclass(frozen=True)
class ExportOptions:
    """What to export and how.

    Attributes:
        output: the ONNX file, or the folder for a target that reads one; None for models/NAME.
        target: what will run the model, one of TARGET_NAMES.
        keep_raw: keep the output that the head stands on beside the head's.
        text: what to trace a model of text on, beside a text of our own.
        require_dynamic: refuse a file that fixes an axis which the model itself leaves open.
        atol: replaces the tolerance of the dtype; so does `rtol`.
    """

    model_name: str
    output: Path | None = None
    task: str = "auto"
    head: str = "auto"
    target: str = "plain"
    keep_raw: bool = False
    exporter: str = "auto"
    opset: int | None = None
    text: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    allow_missing_weights: bool = False
    allow_pickle: bool = False
    require_dynamic: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    verify: bool = True
    atol: float | None = None
    rtol: float | None = None
    force: bool = False

    @property
    def choices(self) -> dict[str, Json]:
        """What of all that goes into the file was chosen otherwise than by default, and is not in its metadata yet."""
        defaults = {option.name: option.default for option in fields(self)}
        return {name: value for name in _STAMPED if (value := getattr(self, name)) != defaults[name]}

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of the dtype, with what the user replaced."""
        base = TOLERANCES[DTYPES[self.dtype]]
        return Tolerance(
            base.atol if self.atol is None else self.atol, base.rtol if self.rtol is None else self.rtol, base.cosine
        )
