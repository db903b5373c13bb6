"""An optimized file is smaller in nodes, equal in answers, and says what was done to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import (
    FusionError,
    ModelFileError,
    OutputExistsError,
    PassError,
    VerificationError,
)
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import write_inline
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.presets import PRESETS
from onnxtool.optimize.report import OptimizeReport
from tests.optimize.passes.builders import build, ragged_feeds
from tests.optimize.passes.exports import CAPPED, export
from tests.workshop import Workshop


@pytest.fixture(scope="module")
def optimized(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OptimizeReport]:
    """A TorchScript export and the report of its optimization."""
    source = workshop.exported("tiny-encoder", exporter="torchscript")
    path = Path(shutil.copy(source, tmp_path_factory.mktemp("optimized") / "tiny.onnx"))
    return path, optimize_model(OptimizeOptions(path, require_fusion=True))


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_there_are_fewer_nodes_and_the_same_answers(
    workshop: Workshop, optimized: tuple[Path, OptimizeReport], tmp_path: Path, exporter: str
) -> None:
    """By a plain session of onnxruntime on ragged rows."""
    path, report = optimized
    if exporter == "dynamo":
        path = workshop.exported("tiny-encoder", exporter=exporter)
        report = optimize_model(OptimizeOptions(path, output=tmp_path / "o.onnx"))
    assert report.after.num_nodes < report.before.num_nodes
    feeds = ragged_feeds()
    expected, found = (
        ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for file in (path, report.output)
    )
    real = feeds["attention_mask"].astype(bool)
    np.testing.assert_allclose(found[real], expected[real], atol=2e-5, rtol=0)
    assert report.verification is not None
    assert report.verification.max_abs_error <= 1e-4
    assert report.verification.mask_effect is not None
    assert report.verification.mask_effect > 1e-2


def test_the_output_lies_beside_the_input_under_its_name(
    workshop: Workshop, optimized: tuple[Path, OptimizeReport]
) -> None:
    """NAME.onnx becomes NAME-optimized.onnx, and the input stays as it is."""
    path, report = optimized
    assert Path(report.output) == path.with_name("tiny-optimized.onnx")
    assert path.read_bytes() == workshop.exported("tiny-encoder", exporter="torchscript").read_bytes()


def test_steps_and_metadata_go_on(optimized: tuple[Path, OptimizeReport]) -> None:
    """The export's step stays, with its figures; the optimization's is added, with what each pass did."""
    path, report = optimized
    source, result = ModelFile.open(path), ModelFile.open(Path(report.output))
    assert result.steps[0] == source.steps[0]
    assert result.steps[1]["step"] == "optimize"
    assert result.steps[1]["passes"] == {step.name: step.num_changes for step in report.passes}
    assert report.verification is not None
    assert result.steps[1]["max_abs_error"] == report.verification.max_abs_error
    assert result.steps[1]["atol"] == report.verification.atol
    assert result.steps[1]["verified_on"] == report.verification.provider
    new = ("onnxtool.steps", "onnxtool.session.disabled_optimizers")
    assert {key: value for key, value in result.metadata.items() if key not in new} == {
        key: value for key, value in source.metadata.items() if key not in new
    }
    onnx.checker.check_model(report.output)


def test_an_attention_that_is_left_alone_is_noted_and_fails_where_fusion_is_required(
    workshop: Workshop, tmp_path: Path
) -> None:
    """No fused operator caps its scores as Gemma 2 does; the rest of the model is optimized, or no file is left."""
    path = tmp_path / "capped.onnx"
    write_inline(export(workshop, CAPPED, "eager"), path)
    with pytest.raises(FusionError, match="0 of 2 attentions are fused.*capped by a Tanh") as refusal:
        optimize_model(OptimizeOptions(path, require_fusion=True))
    assert "another way (--exporter)" in refusal.value.hint
    assert list(tmp_path.iterdir()) == [path]
    report = optimize_model(OptimizeOptions(path))
    note = next(step.note for step in report.passes if step.name == "attention")
    assert note.startswith("2 left alone: scores that are capped by a Tanh")
    assert report.after.num_nodes < report.before.num_nodes


def test_a_model_without_attention_fails_where_fusion_is_required(tmp_path: Path) -> None:
    """There is nothing that could have been fused."""
    path = tmp_path / "m.onnx"
    write_inline(build("g (float[B, 8] x) => (float[B, 8] y) { y = Softmax <axis=-1> (x) }"), path)
    with pytest.raises(FusionError, match="no attention was found"):
        optimize_model(OptimizeOptions(path, require_fusion=True))


def test_optimizing_an_optimized_file_changes_nothing(optimized: tuple[Path, OptimizeReport], tmp_path: Path) -> None:
    """Every pass counts 0, and the graph is the same."""
    _, first = optimized
    again = optimize_model(OptimizeOptions(Path(first.output), output=tmp_path / "twice.onnx", verify=False))
    assert {step.name: step.num_changes for step in again.passes if step.num_changes} == {}
    assert again.after.ops == first.after.ops


def test_half_precision_halves_the_file(exported: Path) -> None:
    """Within the tolerance of eleven bits; the metadata have the new dtype, the tools, and the effect of the mask."""
    report = optimize_model(OptimizeOptions(exported, precision="fp16"))
    assert report.after.size_bytes < 0.55 * report.before.size_bytes
    assert [(tensor.name, tensor.dtype) for tensor in report.after.outputs] == [
        ("last_hidden_state", "float32"),
        ("pooler_output", "float32"),
    ]
    assert report.verification is not None
    assert report.verification.cosine_min > 0.9999
    model = ModelFile.open(Path(report.output))
    assert model.metadata["onnxtool.dtype"] == "float16"
    assert f"onnxruntime {ort.__version__}" in str(model.steps[-1]["versions"])
    assert model.steps[-1]["provider"] == "cpu"
    assert float(str(model.steps[-1]["mask_effect"])) > 1e-2
    # A file of half precision is judged by that: its own rounding is no error of the passes.
    again = optimize_model(OptimizeOptions(Path(report.output)))
    assert again.verification is not None
    assert again.verification.atol == 5e-3


def test_max_error_is_a_promise(exported: Path) -> None:
    """Half precision cannot hold 1e-9."""
    with pytest.raises(VerificationError, match="cosine"):
        optimize_model(OptimizeOptions(exported, precision="fp16", max_error=1e-9))
    assert not exported.with_name("tiny-fp16.onnx").exists()


def test_passes_that_change_answers_are_caught(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more of them than may be left out, the file is not kept, and the error has the figures."""

    def damage(model: ir.Model, _context: Context) -> Outcome:
        value = next(v for name, v in model.graph.initializers.items() if name.endswith("LayerNorm.weight"))
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() * 1.01)
        return Outcome(model, 1)

    monkeypatch.setitem(PRESETS, "cpu", [Pass(f"damage {n}", damage) for n in range(4)])
    with pytest.raises(VerificationError, match="max_abs_error"):
        optimize_model(OptimizeOptions(exported))
    assert sorted(path.name for path in exported.parent.iterdir()) == ["tiny", "tiny.onnx"]


def test_external_data_goes_in_and_comes_out(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for models over 2 GB, with the bound lowered."""
    model = onnx.load(workshop.exported("tiny-encoder", exporter="torchscript"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=256)
    monkeypatch.setattr("onnxtool.optimize.attempt.MAX_INLINE_BYTES", 1_000_000)
    report = optimize_model(OptimizeOptions(tmp_path / "m.onnx"))
    assert ModelFile.open(Path(report.output)).external_locations == ("m-optimized.onnx.data",)
    assert report.after.size_bytes == pytest.approx(report.before.size_bytes, rel=0.05)
    assert ort.InferenceSession(report.output, providers=["CPUExecutionProvider"]).run(None, ragged_feeds())


def test_a_file_of_another_tool_without_metadata_is_optimized(workshop: Workshop, tmp_path: Path) -> None:
    """Heads and width can be given, or are found out."""
    model = onnx.load(workshop.exported("tiny-encoder", exporter="torchscript"))
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "m.onnx")
    report = optimize_model(OptimizeOptions(tmp_path / "m.onnx", model_type="bert", num_heads=4, hidden_size=32))
    attention = next(count for count in report.fusions if count.kind == "attention")
    assert (attention.expected, attention.found) == (2, 2)


def test_heads_that_do_not_divide_the_width_are_refused(exported: Path) -> None:
    """Before any pass runs."""
    with pytest.raises(PassError, match="32 is not a multiple of num_heads 5"):
        optimize_model(OptimizeOptions(exported, num_heads=5))


def test_heads_of_a_checkpoint_need_not_divide_its_width(exported: Path) -> None:
    """Those of mT5-small are 6 of 64 numbers each, in a model of a width of 512."""
    model = onnx.load(exported)
    next(entry for entry in model.metadata_props if entry.key == "num_heads").value = "5"
    onnx.save(model, exported)
    assert optimize_model(OptimizeOptions(exported)).verification is not None


def test_metadata_that_is_no_number_is_refused(exported: Path) -> None:
    """A model file is untrusted input."""
    model = onnx.load(exported)
    next(entry for entry in model.metadata_props if entry.key == "num_heads").value = "many"
    onnx.save(model, exported)
    with pytest.raises(ModelFileError, match="num_heads.*'many'"):
        optimize_model(OptimizeOptions(exported))


def test_an_existing_output_needs_force(exported: Path) -> None:
    """What is there stays, unless it may be replaced."""
    output = exported.with_name("tiny-optimized.onnx")
    output.write_text("precious")
    with pytest.raises(OutputExistsError):
        optimize_model(OptimizeOptions(exported))
    assert output.read_text() == "precious"
    optimize_model(OptimizeOptions(exported, force=True))
    assert numpy_helper.to_array(onnx.load(output).graph.initializer[0]).size > 0


def test_data_of_a_renamed_graph_is_not_overwritten(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph refers to its data by the name that it had."""
    monkeypatch.setattr("onnxtool.optimize.attempt.MAX_INLINE_BYTES", 1_000_000)
    path = Path(shutil.copy(workshop.exported("tiny-encoder", exporter="torchscript"), tmp_path / "m.onnx"))
    first = Path(optimize_model(OptimizeOptions(path)).output)
    renamed = first.rename(tmp_path / "m.onnx")
    data = (tmp_path / "m-optimized.onnx.data").read_bytes()
    optimize_model(OptimizeOptions(renamed, force=True))
    assert (tmp_path / "m-optimized.onnx.data").read_bytes() == data
    assert ModelFile.open(renamed).external_locations == ("m-optimized.onnx.data",)


def test_an_input_that_nothing_reads_stays(exported: Path) -> None:
    """Whoever calls the model feeds it."""
    model = onnx.load(exported)
    model.graph.input.append(onnx.helper.make_tensor_value_info("unused", onnx.TensorProto.INT64, ["batch_size"]))
    onnx.save(model, exported)
    report = optimize_model(OptimizeOptions(exported, verify=False))
    assert [tensor.name for tensor in report.after.inputs] == [tensor.name for tensor in report.before.inputs]


def test_an_output_that_a_pass_drops_is_an_error(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls the model would have to know."""

    def drop(model: ir.Model, _context: Context) -> Outcome:
        model.graph.outputs.pop()
        return Outcome(model, 0)

    monkeypatch.setitem(PRESETS, "cpu", (Pass("drop", drop),))
    with pytest.raises(PassError, match="changed the outputs"):
        optimize_model(OptimizeOptions(exported, verify=False))


def test_a_link_to_a_model_is_followed(exported: Path, tmp_path: Path) -> None:
    """A hub's cache is made of links."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.onnx").symlink_to(exported)
    report = optimize_model(OptimizeOptions(tmp_path / "links" / "model.onnx"))
    assert Path(report.output) == tmp_path / "links" / "model-optimized.onnx"


def test_half_precision_of_float_inputs_is_valid_onnx(tmp_path: Path) -> None:
    """The casts come before what reads them."""
    graph = "g (float[batch_size, 64] x) => (float[batch_size, 64] y) { y = MatMul(x, w) }"
    write_inline(build(graph, {"w": np.ones((64, 64), np.float32)}), tmp_path / "m.onnx")
    onnx.checker.check_model(optimize_model(OptimizeOptions(tmp_path / "m.onnx", precision="fp16")).output)


def test_an_attention_that_nobody_reads_is_not_expected(exported: Path) -> None:
    """It goes with the rest of what is unused, and `--require_fusion` does not ask for it."""
    model = onnx.load(exported)
    inner = [node.output[0] for node in model.graph.node if node.op_type == "Softmax"]
    whole = optimize_model(OptimizeOptions(exported)).fusions[0]
    assert whole.expected == whole.found == len(inner)
    softmax = next(node for node in model.graph.node if node.output[0] == inner[0])
    weighted = next(node for node in model.graph.node if inner[0] in node.input)
    for number, node in enumerate((softmax, weighted)):
        twin = onnx.NodeProto()
        twin.CopyFrom(node)
        twin.name = f"unused_{number}"
        twin.output[0] = f"unused_{number}"
        twin.input[:] = ["unused_0" if name == inner[0] else name for name in node.input]
        model.graph.node.append(twin)
    onnx.save(model, exported)
    report = optimize_model(OptimizeOptions(exported, require_fusion=True, force=True))
    assert report.fusions[0] == whole


def test_a_classifier_that_gives_maps_keeps_them(tmp_path: Path) -> None:
    """One of scikit-learn that onnxruntime's package ships: a sequence of maps from class to probability."""
    path = Path(ort.__file__).parent / "datasets" / "logreg_iris.onnx"
    report = optimize_model(OptimizeOptions(path, output=tmp_path / "o.onnx"))
    assert report.verification is not None
    feeds = {"float_input": np.array([[5.1, 3.5], [0.2, 7.0], [1.0, 1.0]], np.float32)}
    expected, found = (ort.InferenceSession(file).run(None, feeds) for file in (path, report.output))
    assert found[1] == expected[1]
    assert onnx.load(report.output).graph.output[1].type == onnx.load(path).graph.output[1].type
