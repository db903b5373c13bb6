"""A model in int4 keeps the promise of its error, and says which layers that took into higher precision."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import PassError
from onnxtool.graph.edit import attribute
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Context
from onnxtool.optimize.quantization import int4
from onnxtool.optimize.quantization.activations import Feeds, open_written
from onnxtool.optimize.quantization.bounded import Quantized
from onnxtool.optimize.quantization.calibration import make_calibration
from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.quantization.int4 import quantize_int4, to_int4
from tests.optimize.passes.builders import Arrays, build, build_body, count, normal
from tests.optimize.quantization.test_int8 import BODY, FEEDS, errors_of, layers


def bits(result: Quantized) -> list[int]:
    """Return those of each layer in their order; 32 for float32."""
    layers = [node for node in result.outcome.model.graph if node.op_type in ("MatMul", "MatMulNBits")]
    return [attribute(node, "bits", 32) for node in layers]


def test_without_a_bound_all_layers_are_int4() -> None:
    """And the error is the one that a session outside measures; the model that went in stays."""
    model = layers()
    result = to_int4(model, FEEDS)
    assert (result.report.num_layers, result.report.kept, bits(result)) == (2, (), [4, 4])
    assert count(model, "MatMul") == 2
    # The two run with other graph optimizations.
    assert result.report.error == pytest.approx(errors_of(result.outcome, model, FEEDS), rel=1e-3)
    assert 0 < result.report.mean_error < result.report.error < 0.1


def test_the_layer_that_costs_most_error_gets_8_bits() -> None:
    """One weight of a block that is always multiplied with zero takes the grid from all others of its block."""
    model = layers(10.0)
    feeds: list[Feeds] = [{"x": given["x"] * np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32)} for given in FEEDS]
    free = to_int4(model, feeds)
    result = to_int4(model, feeds, max_error=free.report.error / 4)
    assert [(layer.name, layer.precision) for layer in result.report.kept] == [("w", "int8")]
    assert bits(result) == [8, 4]
    assert result.report.error <= free.report.error / 4 < (result.report.kept[0].error or 0)


def test_a_small_bound_leaves_layers_in_float32() -> None:
    """When all have 8 bits already."""
    eight = errors_of_8_bits()
    result = to_int4(layers(), FEEDS, max_error=0.9 * eight)
    assert sorted(bits(result)) == [8, 32]
    assert {layer.precision for layer in result.report.kept} == {"int8", "float32"}
    assert result.report.error <= 0.9 * eight


def errors_of_8_bits() -> float:
    """Return the error of both layers with 8 bits, which is within the bound of the test above but for the margin."""
    converted = quantize_int4({"w": "int8", "v": "int8"}).apply(layers(), Context())
    return errors_of(converted, layers(), FEEDS)


def test_a_bound_that_no_int4_holds_ends_with_the_best_that_was_reached() -> None:
    """With all layers but one in float32."""
    with pytest.raises(PassError, match=r"int4 cannot hold an error of 1e-09: with 1 of 2 layers .* it is \d"):
        to_int4(layers(), FEEDS, max_error=1e-9)


def test_channels_that_carry_more_lose_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the calibration inputs say of them is used."""
    model = build_body(BODY, {"w": normal(8, 8, seed=1), "v": normal(8, 8, seed=2)})
    feeds: list[Feeds] = [{"x": one["x"] * np.array([9, 1, 1, 1, 1, 1, 1, 9], np.float32)} for one in FEEDS]
    informed = to_int4(model, feeds).report.mean_error
    monkeypatch.setattr(int4, "_activations", lambda *_: {})
    assert informed < 0.9 * to_int4(model, feeds).report.mean_error


@pytest.mark.parametrize(
    ("max_error", "tables", "expected"),
    [(None, "int4", "int4"), (0.005, "int4", "int8"), (1e-5, "int4", ""), (None, "int8", "int8")],
)
def test_embeddings_get_as_few_bits_as_the_error_allows(max_error: float | None, tables: str, expected: str) -> None:
    """Four, eight, or all of them; not four for runtimes without the operator for them."""
    table = np.round(normal(2000, 32), 1)
    graph = "g (int64[B, S] i) => (float[B, S, 32] y) { e = Gather(t, i) p = MatMul(e, w) y = Add(p, e) }"
    model = build(graph, {"t": table, "w": 1e-3 * normal(32, 32, seed=1)})
    generator = np.random.default_rng(0)
    feeds: list[Feeds] = [{"i": generator.integers(0, 2000, (4, 6))} for _ in range(3)]
    result = to_int4(model, feeds, max_error, tables=tables)
    assert (result.report.embedding_precision, result.report.num_embeddings) == (expected, int(bool(expected)))
    operators = {node.op_type for node in result.outcome.model.graph}
    assert ("GatherBlockQuantized" in operators) == (expected == "int4")
    assert ("embeddings stay in float32" in result.report.note) == (not expected)


def test_a_large_table_gets_fewer_bits_before_small_layers_do() -> None:
    """Layers in 4 bits would use the bound up, and the table, thirty times their size, would need 8."""
    body = "e = Gather(t, i) p = MatMul(e, w) q = MatMul(p, v) y = Add(q, e)"
    weights: Arrays = {"t": normal(2000, 32), "w": normal(32, 32, seed=1) / 8, "v": normal(32, 32, seed=2) / 6}
    generator = np.random.default_rng(0)
    feeds: list[Feeds] = [{"i": generator.integers(0, 2000, (4, 6))} for _ in range(3)]
    report = to_int4(build(f"g (int64[B, S] i) => (float[B, S, 32] y) {{ {body} }}", weights), feeds, 0.02).report
    assert report.embedding_precision == "int4"
    assert [layer.precision for layer in report.kept] == ["int8"]
    assert report.error <= 0.02


def held_out(path: Path, folder: Path, num_texts: int) -> tuple[Feeds, ...]:
    """Return inputs made of paragraphs of Python's documentation."""
    paragraphs = [" ".join(part.split()) for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n")]
    wanted = [text for text in paragraphs if 40 < len(text) < 600]
    (folder / "texts.txt").write_text("\n".join(wanted[:: len(wanted) // num_texts][:num_texts]), encoding="utf-8")
    return make_calibration(path, folder / "texts.txt").feeds


@pytest.mark.slow
def test_the_promise_holds_for_trained_weights(trained_of_all_words: Path, tmp_path: Path) -> None:
    """Half a hundredth, on texts that it was not calibrated on, with layers in 4 bits and in 8."""
    fused = trained_of_all_words.with_name("fused.onnx")
    model = load_model(fused)
    result = to_int4(model, make_calibration(fused).feeds, max_error=0.005)
    assert 0 < len(result.report.kept) < result.report.num_layers == 12
    assert {layer.precision for layer in result.report.kept} == {"int8"}
    exact, converted = open_written(model, tmp_path), open_written(result.outcome.model, tmp_path)
    worst = max(
        output_errors(converted.run(given), exact.run(given), padding_mask(given), {}).max()
        for given in held_out(fused, tmp_path, 100)
    )
    assert worst <= 0.005


def test_what_int4_leaves_is_in_float16_and_the_error_is_that_of_both(tmp_path: Path) -> None:
    """Scales included; a session outside measures the same error of the written file."""
    body = "e = Gather(t, i) p = MatMul(e, w) q = Tanh(p) y = MatMul(q, v)"
    weights: Arrays = {"t": normal(2000, 32), "w": normal(32, 32, seed=1) / 8, "v": normal(32, 32, seed=2) / 6}
    original, path = tmp_path / "m.onnx", tmp_path / "half.onnx"
    ir.save(build(f"g (int64[B, S] i) => (float[B, S, 32] y) {{ {body} }}", weights), original)
    samples = tmp_path / "samples.npz"
    np.savez(samples, i=np.random.default_rng(0).integers(0, 2000, (4, 6)))
    options = OptimizeOptions(
        original, output=path, precision="int4_fp16", sample_inputs=samples, max_error=0.05, timing=False
    )
    report = optimize_model(options)
    assert report.quantization is not None
    assert report.quantization.kept == ()
    types = {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.FLOAT not in types.values()
    found, wanted = (
        onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        .run(None, dict(np.load(samples)))[0]
        .reshape(-1, 32)
        for file in (path, original)
    )
    cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    assert report.quantization.error == pytest.approx(1 - cosines.min(), rel=0.05)
    with pytest.raises(PassError, match="int4 cannot hold an error of 1e-07"):
        optimize_model(replace(options, max_error=1e-7, force=True))
