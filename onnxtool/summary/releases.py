"""The first release of onnxruntime that loads a model, by its IR version and opsets.

Each release is built with one release of ONNX and refuses what is newer. Which of ONNX goes with which of onnxruntime
is in its documentation (https://onnxruntime.ai/docs/reference/compatibility.html) up to 1.18, and from there on in the
pull requests that updated it (#24945 for ONNX 1.18 in 1.23, #26202 for 1.19 in 1.24, #27601 for 1.21 in 1.25); the IR
version and opsets of each release of ONNX are in its own table (onnx.helper.VERSION_TABLE).
"""

from __future__ import annotations

from collections.abc import Mapping

# Release, the highest IR version, and the highest opsets of ai.onnx and of ai.onnx.ml.
_RELEASES = (
    ("1.0", 6, 11, 2),
    ("1.3", 7, 12, 2),
    ("1.6", 7, 13, 2),
    ("1.8", 7, 14, 2),
    ("1.10", 8, 15, 2),
    ("1.11", 8, 16, 2),
    ("1.12", 8, 17, 3),
    ("1.14", 8, 18, 3),
    ("1.15", 9, 19, 3),
    ("1.17", 9, 20, 4),
    ("1.18", 10, 21, 5),
    ("1.21", 10, 22, 5),
    ("1.23", 11, 23, 5),
    ("1.24", 12, 24, 5),
    ("1.25", 13, 26, 5),
)


def least_onnxruntime(ir_version: int, opsets: Mapping[str, int]) -> str:
    """Return the first release that loads these versions; empty where the table knows of none.

    Other domains do not count: com.microsoft is at version 1 in every release.
    """
    for release, max_ir, max_opset, max_ml in _RELEASES:
        if ir_version <= max_ir and opsets.get("ai.onnx", 1) <= max_opset and opsets.get("ai.onnx.ml", 1) <= max_ml:
            return release
    return ""
