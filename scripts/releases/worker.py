"""Run one file in the onnxruntime of this process; needs nothing but numpy, from Python 3.8 on.

`worker.py MODEL FEEDS OUTPUTS [KEY=VALUE ...]` opens MODEL with session options, runs it on the inputs in each file of
the folder FEEDS, and writes the outputs into the folder OUTPUTS, under the same names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort


def run(model: str, feeds: str, outputs: str, *options: str) -> None:
    """Write what `model` computes."""
    given = ort.SessionOptions()
    given.log_severity_level = 4
    given.intra_op_num_threads = 1
    for option in options:
        given.add_session_config_entry(*option.split("=", 1))
    session = ort.InferenceSession(model, given, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for path in Path(feeds).iterdir():
        with np.load(path) as arrays:
            found = session.run(names, dict(arrays))
        np.savez(Path(outputs) / path.name, **dict(zip(names, found)))  # noqa: B905  Python 3.8 has no strict


if __name__ == "__main__":
    run(*sys.argv[1:])
