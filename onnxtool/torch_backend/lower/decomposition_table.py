"""Which operators AOTAutograd takes apart before a graph is cut and translated."""

from __future__ import annotations

import functools

from onnxtool.torch_backend.lower.decisions import DECISIONS
from onnxtool.torch_backend.lower.fused_kernels import small_only
from onnxtool.torch_backend.lower.torch_onnx import Decompositions, decompositions_but, translations


@functools.cache
def decompositions() -> Decompositions:
    """Return the table for AOTAutograd: PyTorch's decompositions of what torch.onnx does not translate, and ours."""
    known = translations()
    table = decompositions_but(known.real | known.complex)
    for target, decided in DECISIONS.items():
        if decided.no_decomposition:
            table.pop(target, None)
        if decided.decomposition is not None:
            table[target] = decided.decomposition
        if decided.fused_kernel is not None and target in table:
            table[target] = small_only(table[target])
    return table
