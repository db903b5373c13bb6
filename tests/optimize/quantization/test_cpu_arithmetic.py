"""What an int8 model computes on CPUs of other classes than this one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.errors import ModelFileError, PassError
from onnxtool.graph.edit import tensor_of
from onnxtool.guarded import ChildEndedError
from onnxtool.model_file.weights import write_inline
from onnxtool.optimize.options import ACTIVATIONS
from onnxtool.optimize.quantization.activations import open_written
from onnxtool.optimize.quantization.arithmetic import LARGEST_PAIR, Codes, Floats
from onnxtool.optimize.quantization.cpu_arithmetic import (
    EXACT,
    PER_ROW,
    SATURATING,
    by_arithmetic,
    figures_of,
    largest_pair,
    require_small_pairs,
)
from onnxtool.optimize.quantization.int8 import quantize_int8, to_int8
from onnxtool.runtime import probation
from onnxtool.runtime.session import open_session
from tests.optimize.passes.builders import apply, build, normal, operators, run_as_stored
from tests.optimize.quantization.test_linear_layers import FORMS, W

# Rows of very different sizes, one of zeros and one of one sign: a scale per row is not the scale of all.
ROWS = (normal(5, 8, seed=3) * np.array([1, 50, 1e-3, 0, 1], np.float32)[:, None]).astype(np.float32)
ROWS[4] = np.abs(ROWS[4])


def dynamic_layer(form: str, opset: int) -> tuple[ir.Model, Floats, Floats]:
    """Return a layer in int8, its inputs, and what these give with one scale for all rows or one for each row."""
    graph, weights = FORMS[form]
    model = build(graph, weights, opset=opset)
    assert apply(quantize_int8(), model).num_changes == 1
    return model, ROWS.reshape(5, 1, 8) if "S" in graph else ROWS, weights.get("b", np.zeros(12, np.float32))


def rounded(values: Floats) -> Floats:
    """Round values to uint8 with one scale and zero point, as DynamicQuantizeLinear is defined, and back."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    scale = np.float32((high - low) / 255) or np.float32(1)
    zero = np.rint(-low / scale)
    found: Floats = ((np.clip(np.rint(values / scale) + zero, 0, 255) - zero) * scale).astype(np.float32)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opset", [17, 21])
def test_both_arithmetics_of_dynamic_products_are_computed(form: str, opset: int) -> None:
    """By NumPy: activations rounded together or row by row, times the weight as it was rounded."""
    model, x, bias = dynamic_layer(form, opset)
    assert "DynamicQuantizeMatMul" in operators(model)
    computed = by_arithmetic(model)
    codes, scale = (tensor_of(model.graph.initializers[f"w_{part}"]).numpy() for part in ("int8", "scale"))
    weight = codes.astype(np.float32) * scale
    together = rounded(ROWS) @ weight + bias
    apart = np.concatenate([rounded(row[None]) for row in ROWS]) @ weight + bias
    assert not np.allclose(together, apart, atol=1e-3)
    for name, expected in ((EXACT, together), (PER_ROW, apart)):
        assert "DynamicQuantizeMatMul" not in operators(computed[name])
        found = run_as_stored(computed[name], {"x": x})[0].reshape(-1, 12)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert "DynamicQuantizeMatMul" in operators(model)  # it is left as it was


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_only_a_kernel_that_rounds_activations_itself_differs(activations: str) -> None:
    """The error counts the worst of the arithmetics; with scales in the graph there is one for all CPUs."""
    model = build("g (float[B, 8] x) => (float[B, 12] y) { y = MatMul(x, w) }", {"w": W})
    found = to_int8(model, [{"x": ROWS}], activations=activations)
    assert tuple(found.errors) == ((EXACT, PER_ROW) if activations == "dynamic" else (EXACT,))
    assert found.report.error == max(found.errors.values())


def test_an_error_of_one_arithmetic_alone_keeps_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is within the bound where products are exact, and beyond it row by row, stays in float32."""
    body = "p = MatMul(x, w) q = Relu(p) y = MatMul(q, v)"
    weights = {"w": normal(16, 16, seed=1), "v": normal(16, 16, seed=2)}
    model = build(f"g (float[B, 16] x) => (float[B, 16] y) {{ {body} }}", weights)
    feeds = [{"x": normal(6, 16, seed=4)}]

    def with_a_bad_weight(given: ir.Model) -> dict[str, ir.Model]:
        """Multiply, where rows are rounded by the kernel, the columns of the first weight by other numbers."""
        found = by_arithmetic(given)
        for held in found[PER_ROW].graph.initializers.values() if PER_ROW in found else ():
            if str(held.name).startswith("w_scale"):
                scale = tensor_of(held).numpy() * np.linspace(1, 3, 16, dtype=np.float32)
                held.const_value = ir.tensor(scale, name=held.name)
        return found

    assert not to_int8(model, feeds, 0.02, activations="dynamic").report.kept
    monkeypatch.setattr("onnxtool.optimize.quantization.bounded.by_arithmetic", with_a_bad_weight)
    found = to_int8(model, feeds, 0.02, activations="dynamic")
    assert [layer.name for layer in found.report.kept] == ["w"]
    assert found.report.error <= 0.02


@pytest.mark.parametrize(
    ("codes", "largest"),
    [
        ([[127], [1]], 128),
        ([[127], [2]], 129),
        ([[100], [-127], [127]], 127),  # of two signs, and one without a neighbour
        ([[0], [127], [127], [0]], 127),  # neighbours are two of one pair
        ([[-70], [-70]], 140),
        ([[-128], [0]], 128),
        ([[5]], 5),
    ],
)
def test_the_largest_sum_of_neighbours_of_one_sign_is_found(codes: Codes, largest: int) -> None:
    """Neighbours in even and odd places, of one sign."""
    assert largest_pair(np.array(codes, np.int8)) == largest


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_a_written_file_whose_products_saturate_is_refused(activations: str, tmp_path: Path) -> None:
    """The weights of every operator are read from the file; those for exact CPUs have larger neighbours."""
    weights: dict[str, Floats] = {"w": np.abs(normal(64, 64, seed=1)) + 2, "v": np.abs(normal(64, 64, seed=2)) + 2}
    body = "p = MatMul(x, w) q = Relu(p) y = MatMul(q, v)"
    feeds = [{"x": np.abs(normal(6, 64)) + 1}]
    for exact in (False, True):
        model = build(f"g (float[B, 64] x) => (float[B, 64] y) {{ {body} }}", weights)
        write_inline(to_int8(model, feeds, activations=activations, exact=exact).outcome.model, tmp_path / "m.onnx")
        if not exact:
            require_small_pairs(tmp_path / "m.onnx")
            continue
        with pytest.raises(PassError, match=f"two neighbours in the weight w_int8.*above {LARGEST_PAIR}") as caught:
            require_small_pairs(tmp_path / "m.onnx")
        assert "--cpu vnni" in str(caught.value.hint)


def test_the_figures_of_the_report() -> None:
    """What was not computed apart is the same as exact; what the file is not for has no figure."""
    assert figures_of({EXACT: 0.1}, small_pairs=True) == {EXACT: 0.1, SATURATING: 0.1, PER_ROW: 0.1}
    assert figures_of({EXACT: 0.1, PER_ROW: 0.2}, small_pairs=False) == {EXACT: 0.1, SATURATING: None, PER_ROW: 0.2}


def test_a_graph_that_stands_for_another_cpu_is_not_refused_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are float32, many times the file of int8 by which the memory of an unknown file is limited."""
    model, values, _ = dynamic_layer("MatMul", 17)
    monkeypatch.setattr(probation, "needs_probation", lambda _model: True)
    monkeypatch.setattr(probation, "_ending", lambda _model: ChildEndedError("memory"))
    other = by_arithmetic(model)[PER_ROW]
    assert open_written(other, tmp_path).run({"x": values})["y"].shape == (5, 1, 12)
    write_inline(other, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match="takes more than"):
        open_session(tmp_path / "m.onnx", provider="cpu")
