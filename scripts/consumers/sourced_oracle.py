"""Oracle AI Database, one text at a time, by its documentation: the metadata, the axes, the version of onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from exchange import Model
from onnxruntime import InferenceSession, SessionOptions
from onnxruntime_extensions import get_library_path

PACKAGE = "onnxruntime"


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Open the file with the input and the output that the metadata names."""
    if file:
        return None
    folder = Path(job["folder"])
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["function"] == "embedding"  # noqa: S101  it refuses others
    options = SessionOptions()
    options.register_custom_ops_library(get_library_path())
    session = InferenceSession(str(folder / job["graph"]), options, providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
    output, (name,) = metadata["embeddingOutput"], metadata["input"]
    assert set(shapes) == {name, output}  # noqa: S101  ORA-54408
    fixed = {value: [size for size in shape if isinstance(size, int)] for value, shape in shapes.items()}
    assert all(len(shapes[value]) - len(sizes) <= 1 for value, sizes in fixed.items())  # noqa: S101  ORA-54426
    assert len(fixed[output]) == 1  # noqa: S101  ORA-54423
    return lambda texts, _size, _role: [
        session.run([output], {name: np.array([text], dtype=object)})[0][0].tolist() for text in texts
    ]
