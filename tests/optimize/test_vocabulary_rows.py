"""Graphs whose vocabulary is cut, run by onnxruntime with the ids renumbered, against the whole graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from onnxtool.errors import PassError
from onnxtool.model_file.weights import load_model, write_inline
from onnxtool.optimize.vocabulary_rows import VocabularyRows
from tests.graphs import save_text

V, H = 12, 4
KEPT = np.array([0, 1, 3, 4, 7, 10])
IDS = np.array([[1, 3, 10, 0], [7, 7, 4, 1]])


class Graph(NamedTuple):
    """A graph in ONNX's text form, its weights by name and shape, and the weights that are to be cut."""

    text: str
    weights: Mapping[str, tuple[int, ...] | NDArray[Any]]
    cut: set[str]
    over: bool = False


def numbers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


TABLE = {"table": (V, H)}
GRAPHS = {
    "a table": Graph(
        "g (int64[B, S] input_ids) => (float[B, S, H] y) { y = Gather (table, input_ids) }", TABLE, {"table"}
    ),
    "a tied head": Graph(
        f"""g (int64[B, S] input_ids) => (float[B, {V}] y) {{
            x = Gather (table, input_ids)  flipped = Transpose <perm = [1, 0]> (table)  logits = MatMul (x, flipped)
            biased = Add (bias, logits)  positive = Relu (biased)  most = ReduceMax <keepdims = 0> (positive, axis)
            more = Add (most, one)  y = Log (more) }}""",
        {**TABLE, "bias": (V,), "axis": numbers(1), "one": np.array(1, np.float32)}, {"table", "bias"}, over=True,
    ),
    "a head of its own": Graph(
        f"""g (int64[B, S] input_ids) => (float[B, S, {V}] y) {{
            x = Gather (table, input_ids)  flat = Reshape (x, rows)  logits = Gemm <transB = 1> (flat, head, bias)
            y = Reshape (logits, shape) }}""",
        {**TABLE, "head": (V, H), "bias": (V,), "rows": numbers(-1, H), "shape": numbers(-1, 4, V)},
        {"table", "head", "bias"}, over=True,
    ),
    "ids that are compared": Graph(  # as RoBERTa counts positions
        """g (int64[B, S] input_ids) => (float[B, S, H] y) {
            small = Cast <to = 6> (input_ids)  padding = Equal (small, pad)  real = Not (padding)
            ones = Cast <to = 7> (real)  sums = CumSum (ones, axis)  places = Mul (sums, ones)
            x = Gather (table, input_ids)  p = Gather (positions, places)  y = Add (x, p) }""",
        {**TABLE, "positions": (V, H), "pad": np.array(7, np.int32), "axis": np.array(1)}, {"table"},
    ),
    "a width that is the same": Graph(
        f"""g (int64[B, S] input_ids) => (float[B, S, {V}] y) {{
            x = Gather (wide, input_ids)  z = MatMul (x, square)  y = Add (z, other) }}""",
        {"wide": (V, V), "square": (V, V), "other": (V,)}, {"wide"},
    ),
    "weights of terms": Graph(  # an inference-free encoder
        f"""g (int64[B, S] input_ids) => (float[B, {V}] y) {{
            shape = Shape (input_ids)  batch = Gather (shape, first)  size = Concat <axis = 0> (batch, width)
            zeros = ConstantOfShape <value = float[1] {{0.0}}> (size)
            counts = ScatterElements <axis = 1> (zeros, input_ids, real)  found = Greater (counts, none)
            factor = Cast <to = 1> (found)  y = Mul (factor, terms) }}""",
        {"terms": (V,), "first": numbers(0), "width": numbers(V), "real": np.ones((2, 4), np.float32),
         "none": np.array(0, np.float32)}, {"terms"}, over=True,
    ),
    "rows with scales": Graph(
        """g (int64[B, S] input_ids) => (float[B, S, H] y) {
            codes = Gather (rows, input_ids)  steps = Gather (scale, input_ids)  x = Cast <to = 1> (codes)
            y = Mul (x, steps) }""",
        {"rows": np.arange(V * H, dtype=np.int8).reshape(V, H), "scale": (V, 1)}, {"rows", "scale"},
    ),
    "rows that are dequantized": Graph(
        """g (int64[B, S] input_ids) => (float[B, S, H] y) {
            x = DequantizeLinear <axis = 0> (rows, scale)  y = Gather (x, input_ids) }""",
        {"rows": np.arange(V * H, dtype=np.int8).reshape(V, H), "scale": (V,)}, {"rows", "scale"},
    ),
    "answers by two tokens": Graph(  # of a reranker over a language model
        """g (int64[B, S] input_ids) => (float[B, S, two] y) {
            x = Gather (table, input_ids)  flipped = Transpose (table)  logits = MatMul (x, flipped)
            y = Gather <axis = 2> (logits, answers) }""",
        {**TABLE, "answers": numbers(10, 4)}, {"table"},
    ),
}  # fmt: skip


def save(path: Path, graph: Graph) -> Path:
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.standard_normal(given, np.float32) if isinstance(given, tuple) else given
        for name, given in graph.weights.items()
    }
    return save_text(path, graph.text, arrays)


def run(path: Path, ids: NDArray[np.int64]) -> NDArray[Any]:
    (found,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"input_ids": ids})
    return np.asarray(found)


def num_bytes(model: ir.Model) -> int:
    """Return the bytes of the weights that are cut in any graph."""
    tensors = {name: one.const_value for name, one in model.graph.initializers.items()}
    names = set().union(*(graph.cut for graph in GRAPHS.values()))
    return sum(tensor.nbytes for name, tensor in tensors.items() if tensor is not None and name in names)


@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_of_kept_ids_are_equal_bit_by_bit(tmp_path: Path, name: str) -> None:
    """And only what is the vocabulary is cut, by the bytes of its rows."""
    graph = GRAPHS[name]
    path = save(tmp_path / "m.onnx", graph)
    model = load_model(path)
    rows = VocabularyRows(model, ["y"] if graph.over else [])
    assert {str(table.name) for table in rows.tables} == graph.cut
    assert rows.compared <= {*KEPT.tolist()}
    before = num_bytes(model)
    gone = rows.bytes_beyond(len(KEPT))
    rows.cut(KEPT)
    write_inline(model, tmp_path / "cut.onnx")
    assert num_bytes(load_model(tmp_path / "cut.onnx")) == before - gone < before
    expected = run(path, IDS)
    found = run(tmp_path / "cut.onnx", np.searchsorted(KEPT, IDS))
    np.testing.assert_array_equal(expected[..., KEPT] if graph.over else expected, found)


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ("five = Constant <value_int = 5> ()  id = Mod (input_ids, five)  y = Gather (table, id)", "Mod"),  # hashed
        ("x = Gather (table, input_ids)  t = Transpose (table)  z = MatMul (x, t)  y = Softmax (z)", "Softmax"),
        ("x = Gather (table, input_ids)  t = Transpose (table)  z = MatMul (x, t)  y = MatMul (z, table)", "MatMul"),
        (
            "x = Gather (table, input_ids)  t = Transpose (table)  z = MatMul (x, t)  y = ReduceMax (z, last)",
            "ReduceMax",
        ),
        ("x = Cast <to = 9> (input_ids)  y = Cast <to = 1> (x)", "Cast"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, nodes: str, kind: str) -> None:
    """Whatever it does, its result could be another."""
    path = save(
        tmp_path / "m.onnx",
        Graph(f"g (int64[B, S] input_ids) => (float[B, S, H] y) {{ {nodes} }}", {**TABLE, "last": numbers(-1)}, set()),
    )
    with pytest.raises(PassError, match=rf"cannot be cut: {kind} "):
        VocabularyRows(load_model(path), [])


def test_an_id_that_no_token_has_is_never_looked_up(tmp_path: Path) -> None:
    """A column that the graph takes must be there."""
    model = load_model(save(tmp_path / "m.onnx", GRAPHS["answers by two tokens"]))
    rows = VocabularyRows(model, [])
    with pytest.raises(PassError, match="Gather"):
        rows.cut(KEPT[:-1])
