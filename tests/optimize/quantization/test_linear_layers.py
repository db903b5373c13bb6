"""Products with weights in int8, and in blocks of 4 bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.graph.edit import attribute, tensor_of
from onnxtool.graph.operators import MICROSOFT
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Pass
from onnxtool.optimize.quantization.arithmetic import (
    ActivationGrid,
    Adjustment,
    Floats,
    RowGrid,
    nearest_codes,
    round_activations,
    weight_scale,
)
from onnxtool.optimize.quantization.error import row_errors
from onnxtool.optimize.quantization.int4 import find_grid, quantize_int4
from onnxtool.optimize.quantization.int8 import quantize_int8
from tests.optimize.passes.builders import (
    Arrays,
    Graph,
    Row,
    apply,
    assert_same_numbers,
    assert_twice_is_once,
    build,
    build_body,
    count,
    normal,
    of_text,
    operators,
    ragged_feeds,
    run,
    run_as_stored,
)
from tests.optimize.quantization.test_blocks import dequantize
from tests.workshop import Workshop

INT8 = quantize_int8()
INT4 = quantize_int4()
ON_CUDA = quantize_int4(provider="cuda")
X = normal(2, 5, 8)
W, B = normal(8, 12, seed=1), normal(12, seed=2)
ANY = "g (float[B, S, 8] x) => (float[B, S, 12] y)"
MATRIX = "g (float[B, 8] x) => (float[B, 12] y)"
# Each form of a layer, its bias, and how its weight lies.
FORMS: dict[str, tuple[str, Arrays]] = {
    "MatMul": (f"{ANY} {{ y = MatMul(x, w) }}", {"w": W}),
    "MatMul and Add": (f"{ANY} {{ p = MatMul(x, w) y = Add(p, b) }}", {"w": W, "b": B}),
    "Add on the left": (f"{ANY} {{ p = MatMul(x, w) y = Add(b, p) }}", {"w": W, "b": B}),
    "Gemm": (f"{MATRIX} {{ y = Gemm(x, w, b) }}", {"w": W, "b": B}),
    "transposed Gemm": (f"{MATRIX} {{ y = Gemm<transB=1>(x, w, b) }}", {"w": W.T.copy(), "b": B}),
    "FusedMatMul": (f"{ANY} {{ y = com.microsoft.FusedMatMul<transB=1>(x, w) }}", {"w": W.T.copy()}),
}
# What no quantized layer computes, with the reason, unless it is no linear layer at all.
OTHERS: dict[str, tuple[Graph, str]] = {
    "a scaled product": (of_text(f"{ANY} {{ y = com.microsoft.FusedMatMul<alpha=2.0>(x, w) }}", {"w": W}), "scaled"),
    "a scaled bias": (of_text(f"{MATRIX} {{ y = Gemm<beta=0.5>(x, w, b) }}", {"w": W, "b": B}), "scaled"),
    "a bias that widens": (
        of_text(f"{MATRIX} {{ y = Gemm(x, w, b) }}", {"w": W, "b": normal(1)}),
        "the bias is no vector",
    ),
    "doubles": (
        of_text(f"{ANY.replace('float', 'double')} {{ y = MatMul(x, w) }}", {"w": W.astype(np.float64)}),
        "not float32",
    ),
    "no weight": (
        of_text("g (float[B, S, 8] x) => (float[B, S, S] y) { t = Transpose<perm=[0,2,1]>(x) y = MatMul(x, t) }"),
        "",
    ),
    "three axes": (
        of_text("g (float[12, 12] x) => (float[1, 12, 8] y) { y = MatMul(x, w) }", {"w": normal(1, 12, 8)}),
        "",
    ),
}
ATTENTION = "g (float[B, S, 8] x, int32[B, S] m) => (float[B, S, 8] y)"
QKV: Arrays = {"w": normal(8, 24, seed=3), "b": normal(24, seed=4)}
OF_INT8, OF_INT4 = ["w_int8", "w_scale", "w_zero"], ["w_int4_blocks", "w_int4_scale", "w_int4_zero"]


def round_weight(weight: Floats) -> Floats:
    """Return the values of the int8 weight of a product, float32 [K, N], as every CPU multiplies it."""
    scale = weight_scale(weight)
    return nearest_codes(weight, scale).astype(np.float32) * scale


def in_blocks(weight: Floats, bits: int = 4) -> Floats:
    """Round a weight to blocks of so many bits and back."""
    found: Floats = dequantize(weight, find_grid(weight, bits))
    return found


def simulate(x: Floats, weight: Floats, bias: Floats | float) -> Floats:
    """Compute a layer as int8 does, in NumPy."""
    rounded = round_activations(x, float(x.min()), float(x.max()))
    result: Floats = rounded @ round_weight(weight) + bias
    return result


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_a_simulation(form: str) -> None:
    """Which rounds in NumPy; the layer of the rounded numbers is exact but for float32. The weight is in int8 alone."""
    graph, weights = FORMS[form]
    x = X.reshape(-1, 8) if "S" not in graph else X
    model = build(graph, weights)
    apply(INT8, model)
    assert "w" not in model.graph.initializers
    assert tensor_of(model.graph.initializers["w_int8"]).dtype == ir.DataType.INT8
    expected = simulate(x, W, weights.get("b", np.zeros(12, np.float32)))
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("adjustment", [Adjustment(), Adjustment(activations=ActivationGrid(np.float32(0.03), 120))])
def test_kernels_that_saturate_are_exact_where_nothing_is_too_large(num_rows: int, adjustment: Adjustment) -> None:
    """On the file as it is: neighbours that are added in 16 bits first have weights of different signs here."""
    signs = np.where(np.arange(8) % 2, -1, 1).astype(np.float32)[:, None]
    weight, x = np.abs(W) * signs, normal(num_rows, 8)
    model = build(FORMS["Gemm"][0], {"w": weight, "b": B})
    apply(quantize_int8(adjustments={"w": adjustment}), model)
    grid = adjustment.activations or ActivationGrid.over(float(x.min()), float(x.max()))
    assert grid is not None
    expected = grid.round(x) @ round_weight(weight) + B
    np.testing.assert_allclose(run_as_stored(model, {"x": x})[0], expected, atol=1e-4, rtol=0)


def test_a_kept_weight_stays() -> None:
    """By its name; the other is converted."""
    weights = {"w": normal(8, 8), "v": normal(8, 8)}
    model = build_body("p = MatMul(x, w) y = MatMul(p, v)", weights)
    assert apply(quantize_int8(frozenset({"v"})), model).num_changes == 1
    assert operators(model) == ["DynamicQuantizeMatMul", "MatMul"]


@pytest.mark.parametrize(("bias", "outputs"), [(normal(1), ""), (B, ", float[B, S, 12] p")], ids=["[1]", "read"])
def test_a_bias_that_widens_or_that_not_all_readers_have_is_added_behind(bias: Floats, outputs: str) -> None:
    """[1] added to [..., 12] is no bias of the operator, and who reads the product reads it without the bias."""
    model = build(f"{ANY[:-1]}{outputs}) {{ p = MatMul(x, w) y = Add(p, b) }}", {"w": W, "b": bias})
    names = [value.name for value in model.graph.outputs]
    apply(INT8, model)
    assert operators(model) == ["DynamicQuantizeMatMul", "Add"]
    assert [value.name for value in model.graph.outputs] == names


def test_a_tied_embedding_keeps_its_table() -> None:
    """The head gets a quantized copy."""
    graph = (
        "g (int64[B, S] i) => (float[B, S, 12] y) { e = Gather(w, i) y = com.microsoft.FusedMatMul<transB=1>(e, w) }"
    )
    model = build(graph, {"w": normal(12, 8)})
    assert apply(INT8, model).num_changes == 1
    assert operators(model) == ["Gather", "DynamicQuantizeMatMul"]
    assert sorted(model.graph.initializers) == ["w", "w_int8", "w_scale", "w_zero"]


def test_a_product_that_reads_another_one_reads_its_int8() -> None:
    """Both are written anew, the second one on top of what became of the first."""
    second = normal(12, 8, seed=7)
    model = build_body("p = MatMul(x, w) s = Add(p, b) y = MatMul(s, v)", {"w": W, "b": B, "v": second})
    assert apply(INT8, model).num_changes == 2
    expected = simulate(simulate(X, W, B), second, 0.0)
    # Of the second rounding, a number in between two steps may go the other way: a step of 0.15 times a weight.
    np.testing.assert_allclose(run(model, {"x": X})[0], expected, atol=0.5, rtol=0)


@pytest.mark.parametrize(("step", "held"), [(INT8, OF_INT8), (INT4, OF_INT4)])
def test_layers_that_share_a_weight_share_what_becomes_of_it(step: Pass, held: list[str]) -> None:
    """As those of ALBERT do."""
    model = build_body("p = MatMul(x, w) y = MatMul(p, w)", {"w": normal(8, 8)})
    assert apply(step, model).num_changes == 2
    assert sorted(model.graph.initializers) == held


@pytest.mark.parametrize(
    ("step", "attributes"),
    [(INT8, ""), (INT8, ", unidirectional=1"), (INT8, ", scale=0.3"), (ON_CUDA, "")],
    ids=["int8", "causal", "scaled", "int4"],
)
def test_a_packed_attention_is_opened(step: Pass, attributes: str) -> None:
    """The numbers are those of the packed one with what is rounded of its input and its weight rounded in NumPy."""
    graph = f"{ATTENTION} {{ y = com.microsoft.Attention<num_heads=2{attributes}>(x, w, b, m) }}"
    model = build(graph, QKV)
    feeds = {"x": X, "m": np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], np.int32)}
    x, weight = X, in_blocks(np.asarray(QKV["w"]))
    left = ["MatMulNBits", "Add"] * 3
    if step is INT8:
        x, weight = round_activations(X, float(X.min()), float(X.max())), round_weight(QKV["w"])
        left = ["DynamicQuantizeLinear", *["MatMulIntegerToFloat"] * 3]
    expected = run(build(graph, {**QKV, "w": weight}), {**feeds, "x": x})[0]
    assert apply(step, model).num_changes == 3
    assert operators(model) == [*left, "MultiHeadAttention"]
    assert not {"w", "w_query", "w_key", "w_value"} & set(model.graph.initializers)
    real = feeds["m"].astype(bool)
    np.testing.assert_allclose(run(model, feeds)[0][real], expected[real], atol=1e-4, rtol=0)


def test_an_attention_that_is_kept_stays_packed() -> None:
    """By the names of the parts of its weight, of which it is opened for any that is not; in 8 bits it is opened."""
    graph, parts = f"{ATTENTION} {{ y = com.microsoft.Attention<num_heads=2>(x, w, b, m) }}", ("query", "key", "value")
    names = [f"w_{part}" for part in parts]
    for step in (quantize_int8(frozenset(names)), quantize_int4(dict.fromkeys(names, "float32"))):
        packed = build(graph, QKV)
        assert apply(step, packed).num_changes == 0
        assert operators(packed) == ["Attention"]
    assert apply(quantize_int4(dict.fromkeys(names, "int8")), build(graph, QKV)).num_changes == 3
    opened = build(graph, QKV)
    feeds = {"x": X, "m": np.ones((2, 5), np.int32)}
    assert_same_numbers(quantize_int8(frozenset(names[:2])), opened, feeds, atol=0.5)
    assert operators(opened) == ["MatMul", "Add", "MatMul", "Add", "DynamicQuantizeMatMul", "MultiHeadAttention"]


@pytest.mark.parametrize(
    ("behind", "packed", "apart"),
    [("com.microsoft.BiasGelu(p, b)", "BiasGelu", "Gelu"), ("Sum(b, p, r)", "Sum", "Add")],
)
def test_a_bias_in_another_operator_goes_into_the_product(behind: str, packed: str, apart: str) -> None:
    """Where it costs nothing, as in a file that was optimized before; a layer that is kept keeps its operator."""
    graph = f"g (float[B, S, 8] x, float[B, S, 12] r) => (float[B, S, 12] y) {{ p = MatMul(x, w) y = {behind} }}"
    opened, kept = build(graph, {"w": W, "b": B}), build(graph, {"w": W, "b": B})
    assert_same_numbers(INT8, opened, {"x": X, "r": np.ones((2, 5, 12), np.float32)}, atol=0.3)
    assert operators(opened) == ["DynamicQuantizeMatMul", apart]
    assert apply(quantize_int8(frozenset({"w"})), kept).num_changes == 0
    assert operators(kept) == ["MatMul", packed]


def test_a_divisor_and_a_shift_change_the_numbers_as_they_say() -> None:
    """The activations are divided, the rows of the weight multiplied, and the shift is added."""
    smoothing_scale = np.array([1, 1, 4, 1, 1, 1, 9, 1], np.float32)
    model = build(*FORMS["MatMul and Add"])
    apply(quantize_int8(adjustments={"w": Adjustment(smoothing_scale, np.full(12, 0.5, np.float32))}), model)
    assert operators(model) == ["Mul", "DynamicQuantizeMatMul"]
    assert "b" not in model.graph.initializers  # the shift is in another one
    expected = simulate(X / smoothing_scale, W * smoothing_scale[:, None], B + 0.5)
    np.testing.assert_allclose(run(model, {"x": X})[0], expected, atol=1e-4, rtol=0)


def test_a_normalization_that_only_products_read_divides_by_itself() -> None:
    """At no cost; a second reader, such as a residual, makes it a node of its own."""
    norm = "n = LayerNormalization(x, g, s) p = MatMul(n, w)"
    weights = {"g": normal(8), "s": normal(8, seed=5), "w": normal(8, 8, seed=6)}
    smoothing_scale = np.linspace(1, 8, 8, dtype=np.float32)
    step = quantize_int8(adjustments={"w": Adjustment(smoothing_scale)})
    free, paid = build_body(f"{norm} y = Relu(p)", weights), build_body(f"{norm} y = Add(p, n)", weights)
    apply(step, free)
    apply(step, paid)
    assert operators(free) == ["LayerNormalization", "DynamicQuantizeMatMul", "Relu"]
    assert operators(paid) == ["LayerNormalization", "Mul", "DynamicQuantizeMatMul", "Add"]
    assert all(
        value.uses() for value in free.graph.initializers.values()
    )  # onnxruntime warns of each that nothing reads
    output = run(paid, {"x": X})[0] - run(build_body("y = LayerNormalization(x, g, s)", weights), {"x": X})[0]
    np.testing.assert_allclose(run(free, {"x": X})[0], np.maximum(output, 0), atol=1e-4, rtol=0)


SELF_ATTENTION = (
    "g (float[B, S, 8] x) => (float[B, S, 8] y) { q = MatMul(x, w) v = MatMul(x, u) "
    "a = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, v) y = MatMul(a, o) }"
)
SQUARES: Arrays = {name: normal(8, 8, seed=seed) for seed, name in enumerate("wuo", start=7)}


def test_products_of_the_same_activations_round_them_once() -> None:
    """Each with the numbers that it has alone."""
    graph = "g (float[B, S, 8] x) => (float[B, S, 12] y, float[B, S, 8] z) { y = MatMul(x, w) z = MatMul(x, u) }"
    model = build(graph, {"w": W, "u": SQUARES["u"]})
    assert apply(INT8, model).num_changes == 2
    assert operators(model) == ["DynamicQuantizeLinear", "MatMulIntegerToFloat", "MatMulIntegerToFloat"]
    y, z = run(model, {"x": X})
    np.testing.assert_allclose(y, simulate(X, W, 0.0), atol=1e-4, rtol=0)
    np.testing.assert_allclose(z, simulate(X, SQUARES["u"], 0.0), atol=1e-4, rtol=0)
    assert_twice_is_once(INT8, build(graph, {"w": W, "u": SQUARES["u"]}))


@pytest.mark.parametrize("chosen", [[], [1], [0, 1]])
def test_an_expert_may_have_no_token(chosen: list[int]) -> None:
    """The maximum of no rows has the columns of the rows in onnxruntime, and nothing fits that."""
    graph = """g (float[T, 8] x, bool[T] c) => (float[N, 12] y) {
        p = NonZero(c) i = Squeeze(p, zero) e = Gather(x, i) t = Tanh(e) y = MatMul(t, w)
    }"""
    model = build(graph, {"w": W, "zero": np.array([0])})
    x = normal(2, 8)
    apply(quantize_int8(adjustments={"w": Adjustment(activations=RowGrid(128))}), model)
    assert "Slice" in operators(model)
    mask = np.isin(np.arange(2), chosen)
    (found,) = run(model, {"x": x, "c": mask})
    assert found.shape == (len(chosen), 12)
    np.testing.assert_allclose(found, np.tanh(x[mask]) @ W, atol=0.15, rtol=0)


def test_rows_that_are_texts_need_no_such_care() -> None:
    """There is one at least, and a node in front of each product would take time."""
    model = build(f"{ANY} {{ t = Tanh(x) y = MatMul(t, w) }}", {"w": W})
    apply(quantize_int8(adjustments={"w": Adjustment(activations=RowGrid(128))}), model)
    assert "Slice" not in operators(model)


@pytest.mark.parametrize("opset", [17, 21])
def test_rows_set_to_zero_are_so_in_one_number_each(opset: int) -> None:
    """A Where over all activations, as behind the attention of a text without tokens, would be one more pass."""
    graph = """g (float[B, S, 8] x, bool[B, 1] c) => (float[B, S, 12] y) {
        n = Unsqueeze(c, last) r = Where(n, zero, x) p = MatMul(r, w) y = Add(p, b)
    }"""
    constants: Arrays = {"w": W, "b": B, "zero": np.zeros((), np.float32), "last": np.array([-1])}
    model = build(graph, constants, opset=opset)
    apply(quantize_int8(adjustments={"w": Adjustment(activations=RowGrid(128))}), model)
    (where,) = (node for node in model.graph if node.op_type == "Where")
    assert [node.op_type for node, _ in where.outputs[0].uses()] == ["Mul"]
    c = np.array([[True], [False]])
    (found,) = run(model, {"x": np.where(c[..., None], np.float32(np.nan), X), "c": c})
    np.testing.assert_array_equal(found[0], np.broadcast_to(B, (5, 12)))
    np.testing.assert_allclose(found[1], X[1] @ W + B, atol=0.1, rtol=0)


@pytest.mark.parametrize("by", ["zero", "one"])
def test_numbers_within_a_row_and_rows_of_another_number_stay_in_front(by: str) -> None:
    """A row's scale of zero would be wrong for both."""
    shape = "B, S, 8" if by == "zero" else "B, S"
    graph = f"""g (float[B, S, 8] x, bool[{shape}] c) => (float[B, S, 12] y) {{
        {"n = Identity(c)" if by == "zero" else "n = Unsqueeze(c, last)"} r = Where(n, number, x) y = MatMul(r, w)
    }}"""
    constants: Arrays = {"w": W, "number": np.array(by == "one", np.float32), "last": np.array([-1])}
    model = build(graph, constants)
    apply(quantize_int8(adjustments={"w": Adjustment(activations=RowGrid(128))}), model)
    c = X > 0 if by == "zero" else X[..., 0] > 0
    (found,) = run(model, {"x": X, "c": c})
    expected = np.where(c if by == "zero" else c[..., None], constants["number"], X) @ W
    np.testing.assert_allclose(found, expected, atol=0.15, rtol=0)


def test_the_product_of_the_values_divides_what_attention_gives() -> None:
    """At no cost, and with the numbers of a division after the attention; its bias and shift are divided as well."""
    graph = SELF_ATTENTION.replace("v = MatMul(x, u)", "p = MatMul(x, u) v = Add(p, c)")
    weights = {**SQUARES, "c": normal(8, seed=11)}
    smoothing_scale = np.linspace(1, 8, 8, dtype=np.float32)
    adjustments = {"o": Adjustment(smoothing_scale), "u": Adjustment(shift=np.full(8, 0.5, np.float32))}
    free = build(graph, weights)
    apply(quantize_int8(adjustments=adjustments), free)
    assert operators(free).count("Mul") == 0
    two_readers = graph.replace("y = MatMul(a, o)", "n = MatMul(a, o) y = Add(n, a)")
    paid = build(two_readers, weights)
    apply(quantize_int8(adjustments=adjustments), paid)
    assert operators(paid).count("Mul") == 1
    attended = build(graph.replace("y = MatMul(a, o)", "y = Identity(a)"), weights)
    apply(quantize_int8(adjustments={"u": adjustments["u"]}), attended)
    output = run(paid, {"x": X})[0] - run(attended, {"x": X})[0]
    np.testing.assert_allclose(run(free, {"x": X})[0], output, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["kept", "used repeatedly", "read twice"])
def test_values_that_others_depend_on_are_not_divided(case: str) -> None:
    """A layer in float32, a weight with one scale for two uses, and values that a second node reads."""
    graph, kept = SELF_ATTENTION, frozenset({"u"} if case == "kept" else ())
    if case == "used repeatedly":
        graph = graph.replace("MatMul(x, w)", "MatMul(x, u)")
    if case == "read twice":
        graph = graph.replace("(q, q, v)", "(q, v, v)")
    smoothing_scale = np.linspace(1, 8, 8, dtype=np.float32)
    model, plain = build(graph, SQUARES), build(graph, SQUARES)
    apply(quantize_int8(kept, {"o": Adjustment(smoothing_scale)}), model)
    assert operators(model).count("Mul") == 1
    assert row_errors(run(model, {"x": X})[0], run(plain, {"x": X})[0], None).max() < 0.01


@pytest.mark.parametrize(("step", "most"), [(INT8, 0.03), (INT4, 0.17)], ids=["int8", "int4"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_export_runs(workshop: Workshop, exporter: str, step: Pass, most: float) -> None:
    """Every row points about where it did in float32, as far as its bits go through two layers of random weights."""
    model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    expected = run(model, ragged_feeds())[0]
    num_changes = apply(step, model).num_changes
    products = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits")
    assert num_changes == sum(count(model, name, MICROSOFT) for name in products) >= 12
    real = ragged_feeds()["attention_mask"].astype(bool)
    assert row_errors(run(model, ragged_feeds())[0], expected, real).max() < most


@pytest.mark.parametrize("step", [INT8, ON_CUDA], ids=["int8", "int4"])
def test_a_square_weight_and_its_transpose_are_stored_apart(step: Pass) -> None:
    """They have one name in the graph and one shape, and other columns."""
    body = "y = MatMul(x, w) z = Gemm<transB=1>(x, w)"
    weight, x = normal(32, 32), normal(3, 32, seed=1)
    model = build(f"g (float[B, 32] x) => (float[B, 32] y, float[B, 32] z) {{ {body} }}", {"w": weight})
    assert apply(step, model).num_changes == 2
    for found, one in zip(run(model, {"x": x}), (weight, weight.T), strict=True):
        expected = simulate(x, one, 0.0) if step is INT8 else x @ in_blocks(one)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)  # sums of floats in another order


def test_a_weight_that_is_an_output_of_the_graph_stays() -> None:
    """Whoever asks for it gets it as it was."""
    model = build("g (float[B, 8] x) => (float[B, 12] y, float[8, 12] w) { y = MatMul(x, w) }", {"w": W})
    assert apply(INT8, model).num_changes == 1
    np.testing.assert_array_equal(run(model, {"x": X[0]})[1], W)


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_the_weight_in_blocks(form: str) -> None:
    """Dequantized by NumPy. On the CPU activations are rounded to int8 as well, on CUDA they are not."""
    graph, weights = FORMS[form]
    x = X.reshape(-1, 8) if "S" not in graph else X
    expected = x @ in_blocks(W) + weights.get("b", np.zeros(12, np.float32))
    for step, atol in ((INT4, 0.05), (ON_CUDA, 1e-5)):  # half of 1/127 of the largest activation, 8 times; float32
        model = build(graph, weights)
        apply(step, model)
        assert sorted(model.graph.initializers) == sorted({*OF_INT4, *weights} - {"w"})
        assert tensor_of(model.graph.initializers["w_int4_blocks"]).dtype == ir.DataType.UINT8
        np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kept", [{}, {"w": "int8"}])
def test_a_width_that_no_block_divides_is_padded(kept: dict[str, str]) -> None:
    """As onnxruntime expects it: K of 40, N of 7."""
    weight, bias, x = normal(40, 7, seed=4), normal(7, seed=5), normal(2, 3, 40)
    graph = "g (float[B, S, 40] x) => (float[B, S, 7] y) { p = MatMul(x, w) y = Add(p, b) }"
    model = build(graph, {"w": weight, "b": bias})
    apply(quantize_int4(kept, provider="cuda"), model)
    expected = x @ in_blocks(weight, 8 if kept else 4) + bias
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=1e-5, rtol=0)


def test_what_the_operator_is_told_follows_the_provider() -> None:
    """Integer layers and a bias inside on the CPU; neither on CUDA."""
    for step, level, names in ((INT4, 4, ["MatMulNBits"]), (ON_CUDA, None, ["MatMulNBits", "Add"])):
        model = build(*FORMS["MatMul and Add"])
        apply(step, model)
        assert operators(model) == names
        assert attribute(next(iter(model.graph)), "accuracy_level") == level


def test_layers_are_kept_in_8_bits_and_in_float32() -> None:
    """By the names of their weights."""
    weights = {"w": normal(8, 8), "v": normal(8, 8), "u": normal(8, 8)}
    model = build_body("p = MatMul(x, w) q = MatMul(p, v) y = MatMul(q, u)", weights)
    assert apply(quantize_int4({"v": "int8", "u": "float32"}), model).num_changes == 2
    assert operators(model) == ["MatMulNBits", "MatMulNBits", "MatMul"]
    first, second, _ = model.graph
    assert [attribute(node, "bits") for node in (first, second)] == [4, 8]
    assert "u" in model.graph.initializers


_FORMS = {name: of_text(*form) for name, form in FORMS.items()}
ROWS = (
    Row(INT4, fires=_FORMS, after="MatMulNBits", stays=OTHERS, atol=None),
    Row(
        INT8,
        fires=_FORMS,
        after="DynamicQuantizeMatMul",
        stays={
            **OTHERS,
            "an old opset": (of_text(*FORMS["MatMul"], 9), "opset below 11"),  # its Split takes lengths as an attribute
            # MultiHeadAttention reads lengths for a mask in another way.
            "lengths for a mask": (
                of_text(
                    f"{ATTENTION} {{ y = com.microsoft.Attention<num_heads=2>(x, w, b, m) }}".replace(", S] m", "] m"),
                    QKV,
                ),
                "the mask of the attention is no matrix",
            ),
        },
        atol=None,
    ),
)
