"""Summarize one ONNX file, for whoever describes it: `stats`, and `optimize` before and after."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from onnxtool.model_file import ModelFile
from onnxtool.reports import Stats
from onnxtool.summary.duplicates import count_duplicate_bytes


def summarize_model(path: Path) -> Stats:
    """Summarize the structure of the ONNX file at `path`.

    Raises:
        ModelFileError: the file or its external data is missing, malformed, or outside the folder of the file.
    """
    model = ModelFile.open(path)
    structure = model.structure
    initializer_bytes: Counter[str] = Counter()
    for tensor in structure.initializers:
        initializer_bytes[tensor.dtype] += tensor.size_bytes
    return Stats(
        path=str(path),
        size_bytes=model.size_bytes,
        ir_version=structure.ir_version,
        producer=structure.producer,
        opsets=structure.opsets,
        num_nodes=structure.num_nodes,
        num_inputs=len(structure.inputs),
        num_outputs=len(structure.outputs),
        num_initializers=len(structure.initializers),
        num_parameters=sum(tensor.num_elements for tensor in structure.initializers),
        inputs=structure.inputs,
        outputs=structure.outputs,
        ops=structure.ops,
        metadata=structure.metadata,
        initializer_bytes=dict(sorted(initializer_bytes.items(), key=lambda item: (-item[1], item[0]))),
        duplicate_bytes=count_duplicate_bytes(model),
        num_functions=structure.num_functions,
        num_subgraphs=structure.num_subgraphs,
    )
