"""The first release of onnxruntime that loads a model, by its IR version, its opsets and the inputs of its operators.

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
# com.microsoft is at version 1 in every release, and its operators get further inputs: operator, inputs that it had
# before, and the release in which it has more. From the schemas of 1.20 to 1.24 and of 1.31, of the operators that
# onnxtool writes; the others of these have the same inputs in all of them.
_MORE_INPUTS = (
    ("com.microsoft::GroupQueryAttention", 9, "1.22"),
    ("com.microsoft::GroupQueryAttention", 11, "1.23"),
    ("com.microsoft::GroupQueryAttention", 12, "1.31"),
    ("com.microsoft::MultiHeadAttention", 8, "1.22"),
)


def least_onnxruntime(ir_version: int, opsets: Mapping[str, int], most_inputs: Mapping[str, int]) -> str:
    """Return the first release that loads these versions and inputs; empty where the table knows of none.

    Args:
        ir_version: of the model.
        opsets: version by domain.
        most_inputs: how many inputs a node of each operator has at most.
    """
    needed = [release for operator, inputs, release in _MORE_INPUTS if most_inputs.get(operator, 0) > inputs]
    for release, max_ir, max_opset, max_ml in _RELEASES:
        if ir_version <= max_ir and opsets.get("ai.onnx", 1) <= max_opset and opsets.get("ai.onnx.ml", 1) <= max_ml:
            return max((release, *needed), key=lambda name: [int(part) for part in name.split(".")])
    return ""
