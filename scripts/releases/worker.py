"""Run one file in the onnxruntime of this process, or say what that reads; needs nothing but numpy, from Python 3.8 on.

`worker.py run MODEL FEEDS OUTPUT [KEY=VALUE ...]` opens MODEL with session options, runs it on each of the inputs in
FEEDS (`0/input_ids`, `0/attention_mask`, `1/…`) and writes the outputs likewise. `worker.py list` prints as JSON the
operators of com.microsoft with inputs and attributes, and which of them have kernels for the CPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import onnxruntime as ort

MICROSOFT = "com.microsoft"


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


def list_operators() -> None:
    """Print operators and kernels."""
    from onnxruntime.capi import _pybind_state as state

    operators: dict[str, list[Any]] = {}
    for schema in state.get_all_operator_schema():
        if schema.domain == MICROSOFT:
            operators[schema.name] = [len(schema.inputs), sorted(schema.attributes), False]
    for kernel in state.get_all_opkernel_def():
        if kernel.domain == MICROSOFT and kernel.provider == "CPUExecutionProvider" and kernel.op_name in operators:
            operators[kernel.op_name][2] = True
    print(json.dumps(operators))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    else:
        list_operators()
