"""Run one file in the onnxruntime of this process; needs nothing but numpy, from Python 3.8 on.

`worker.py MODEL FEEDS OUTPUT [KEY=VALUE ...]` opens MODEL with session options, runs it on each of the inputs in
FEEDS (`0/input_ids`, `0/attention_mask`, `1/…`) and writes the outputs likewise.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime as ort


def run(model: str, feeds_path: str, output_path: str, *options: str) -> None:
    """Write what `model` computes."""
    given = ort.SessionOptions()
    given.log_severity_level = 4
    given.intra_op_num_threads = 1
    for option in options:
        given.add_session_config_entry(*option.split("=", 1))
    session = ort.InferenceSession(model, given, providers=["CPUExecutionProvider"])
    feeds: dict[str, dict[str, Any]] = {}
    with np.load(feeds_path) as arrays:
        for key in arrays.files:
            place, name = key.split("/", 1)
            feeds.setdefault(place, {})[name] = arrays[key]
    names = [value.name for value in session.get_outputs()]
    found = {}
    for place, one in feeds.items():
        outputs = session.run(names, one)
        found.update({f"{place}/{name}": outputs[index] for index, name in enumerate(names)})
    np.savez(output_path, **found)


if __name__ == "__main__":
    run(*sys.argv[1:])
