"""Texts of the tokens whose embeddings are the largest and the smallest: legal, and the hardest for few bits.

Letters of shapes: V vocabulary, D width, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnxtool.graph.operators import OPERATORS
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import load_model
from onnxtool.model_file.wire import read_nodes
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.input_stamp import IDS, InputStamp

_IDS = "input_ids"
_PIECE = 1 << 14  # rows at a time: the table of a large model is a gigabyte


def extreme_case(model: ModelFile, cases: Sequence[Case]) -> Case | None:
    """Return a case like the first of several rows, of which one has the largest embeddings and another the smallest.

    Outliers of activations begin at few tokens, which random ids rarely hit. None for a model without ids, or whose
    table of them is not found or does not hold floats.
    """
    usual = next((case for case in cases if _is_full(case)), None)
    norms = _norms(model) if usual is not None else None
    if usual is None or norms is None:
        return None
    ids = usual.feeds[_IDS]
    stamp = InputStamp.read(model)
    kind = None if stamp is None else stamp.kinds.get(_IDS)
    special: list[int] = []  # tokens that stay where they are, and stand nowhere else
    if kind is not None and kind.kind == IDS:
        special = [token for token in (*kind.never, kind.first, kind.last, kind.pad) if token is not None]
        norms = norms[: kind.below]
    order = [token for token in np.argsort(norms).tolist() if token not in special]
    if len(order) < 2:
        return None
    length = ids.shape[1]
    rows = np.stack([np.resize(order[::-1][:length], length), np.resize(order[:length], length)])
    extreme = ids.copy()
    keep = np.isin(ids[:2], special)
    extreme[:2] = np.where(keep, ids[:2], rows)
    return Case("tokens of the largest and the smallest embeddings", {**usual.feeds, _IDS: extreme}, usual.valid)


def _is_full(case: Case) -> bool:
    ids = case.feeds.get(_IDS)
    is_text = ids is not None and ids.ndim == 2 and len(ids) > 1 and ids.shape[1] > 1
    return is_text and (case.valid is None or bool(case.valid.all()))


def _norms(model: ModelFile) -> NDArray[np.float32] | None:
    """Return the norms of the embeddings of all ids: float32 [V]."""
    ids, tables = {_IDS}, set[str]()
    for node in read_nodes(model.path):
        if node.op_type == "Cast" and node.inputs[0] in ids:
            ids.add(node.outputs[0])
        row = OPERATORS.get((node.domain, node.op_type))
        named = row.named(node.inputs) if row is not None else {}
        tables |= {named[table] or "" for indices, table in (row.lookups if row else ()) if named[indices] in ids}
    floats = {tensor.name for tensor in model.structure.initializers if tensor.dtype in ("float32", "float16")}
    name = next(iter(tables & floats), None)
    tensor = None if name is None else load_model(model.path).graph.initializers[name].const_value
    if tensor is None:
        return None
    table = tensor.numpy()
    pieces = [table[start : start + _PIECE].astype(np.float32) for start in range(0, len(table), _PIECE)]
    return np.concatenate([np.linalg.norm(piece, axis=1) for piece in pieces])
