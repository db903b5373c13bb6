"""Files of fixed sizes lie over one file of weights, and run as the model that they were made from."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model
from onnxtool.agreement import verify
from onnxtool.errors import InputError, ModelFileError, OptionError, VerificationError
from onnxtool.graph.fixed_sizes import fix_sizes
from onnxtool.infer import load
from onnxtool.infer.chats import LongTexts
from onnxtool.infer.vectors import SparseVectors
from onnxtool.model_file import ModelFile, staged
from onnxtool.model_file.metadata import SIZES_KEY
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.report import OptimizeReport
from onnxtool.runtime import made_files
from onnxtool.runtime.environment import find_placement
from onnxtool.runtime.session import open_session
from onnxtool.runtime.sizes import best_batches
from tests.cli.entry_point import json_of, run_onnxtool
from tests.graphs import save_text
from tests.workshop import Workshop

Floats = NDArray[np.float32]

SIZES = "1x8,1x24,4x24"
TEXTS = ("a", "a short text", "one that is a little longer than the others are", "b c", "d", "e f g", "h")


def _set_of(source: Path, folder: Path, sizes: str = SIZES, **options: Any) -> tuple[Path, OptimizeReport]:
    """Make the files of some sizes in a folder with the source's tokenizer."""
    shutil.copytree(source.with_suffix(""), folder / source.stem, dirs_exist_ok=True)
    output = folder / "set.onnx"
    report = optimize_model(OptimizeOptions(source, output=output, sizes=sizes, timing=False, **options))
    return output, report


@pytest.fixture(scope="module")
def source(workshop: Workshop) -> Path:
    """An encoder that gives a vector for each token."""
    return workshop.exported("tiny-encoder", exporter="torchscript")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OptimizeReport]:
    """A set of three files."""
    return _set_of(source, tmp_path_factory.mktemp("set"))


@pytest.fixture
def copied(made: tuple[Path, OptimizeReport], tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    shutil.copytree(made[0].parent, tmp_path / "copy")
    return tmp_path / "copy" / made[0].name


def _feeds(path: Path, rows: int, tokens: int, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    draw = np.random.default_rng(seed)
    mask = (np.arange(tokens) < draw.integers(1, tokens + 1, rows)[:, None]).astype(np.int64)
    every = {"input_ids": draw.integers(5, 400, (rows, tokens)), "attention_mask": mask, "token_type_ids": 0 * mask}
    return {info.name: every[info.name] for info in ModelFile.open(path).structure.inputs}


def _assert_same(found: Iterable[Floats], expected: Iterable[Floats], real: NDArray[np.bool_]) -> None:
    """Compare all outputs, those of padding left out."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        where = real if one.ndim > 2 else slice(None)
        np.testing.assert_allclose(one[where], other[where], atol=1e-5)


def _weights(path: Path) -> set[str]:
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def test_all_files_read_one_file_of_weights_and_compute_no_sizes(made: tuple[Path, OptimizeReport]) -> None:
    output, report = made
    assert [one.file for one in report.sizes] == ["set-1x8.onnx", "set-1x24.onnx", "set-4x24.onnx"]
    for one in report.sizes:
        graph = onnx.load(output.with_name(one.file), load_external_data=False).graph
        shapes = [
            [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in (*graph.input, graph.output[0])
        ]
        assert all(shape[:2] == [*one.sizes.values()] for shape in shapes)
        assert not {"Shape", "Size", "Range"} & {node.op_type for node in graph.node}
        assert one.num_computing == 0
        assert one.verification is not None
        assert one.verification.passed
        assert _weights(output.with_name(one.file)) == _weights(output) == {"set.onnx.data"}


def test_the_set_gives_what_the_file_of_any_size_gives(made: tuple[Path, OptimizeReport]) -> None:
    """Rows and tokens are filled up, more rows than any file has are split, and what was added is cut off."""
    output, _ = made
    alone, together = ort.InferenceSession(output, providers=["CPUExecutionProvider"]), open_session(output)
    for rows, tokens in itertools.product((1, 3, 4, 9), (1, 8, 9, 24)):
        feeds = _feeds(output, rows, tokens)
        _assert_same(together.run(feeds).values(), alone.run(None, feeds), feeds["attention_mask"] != 0)
    with pytest.raises(InputError, match=r"batch_size x sequence of 1x8, 1x24, 4x24, and the inputs are 2x25"):
        together.run(_feeds(output, 2, 25))


def test_export_compares_each_size_with_pytorch_and_texts_are_encoded_by_the_set(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Texts are cut to the largest size, or refused as told."""
    checkpoint = workshop.checkpoint("tiny-splade")
    options = ExportOptions(str(checkpoint), output=tmp_path / "m.onnx", sizes="1x8,2x16", exporter="torchscript")
    report = export_model(options)
    assert [one.file for one in report.sizes] == ["m-1x8.onnx", "m-2x16.onnx"]
    together = load(tmp_path / "m.onnx")
    alone = load(workshop.exported("tiny-splade", exporter="torchscript", head="splade"))
    found, expected = (model.encode(TEXTS) for model in (together, alone))
    assert isinstance(found, SparseVectors)
    assert isinstance(expected, SparseVectors)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-5)
    long = "word " * 60
    assert [len(text) for text in together.tokenize(long)] == [16]
    assert together.limit is not None
    assert together.limit.source == "the largest of its --sizes"
    with pytest.raises(InputError, match="16"):
        together.windows(long, long=LongTexts.of("fail"))


def test_batches_have_the_least_padding_that_any_order_could_have() -> None:
    """Compared with all ways to cut the texts, sorted by length, into batches."""
    sizes, draw = ((1, 8), (1, 24), (4, 24), (3, 10)), np.random.default_rng(0)
    for _ in range(30):
        lengths = draw.integers(1, 25, 7).tolist()
        found = [*best_batches(lengths, sizes)]
        assert sorted(itertools.chain(*found)) == [*range(7)]
        costs = [_cost([lengths[place] for place in batch], sizes) for batch in found]
        ordered = sorted(lengths)
        cuts = itertools.chain.from_iterable(itertools.combinations(range(1, 7), number) for number in range(7))
        every = (sum(_cost(ordered[a:b], sizes) for a, b in itertools.pairwise((0, *cut, 7))) for cut in cuts)
        assert sum(costs) == min(every)


def _cost(lengths: Sequence[int], sizes: Sequence[tuple[int, int]]) -> float:
    return min(
        (rows * tokens for rows, tokens in sizes if rows >= len(lengths) and tokens >= max(lengths)), default=1e9
    )


def test_a_missing_or_changed_file_of_the_set_is_named(copied: Path) -> None:
    copied.with_name("set-1x24.onnx").write_bytes(copied.with_name("set-1x8.onnx").read_bytes())
    with pytest.raises(ModelFileError, match=r"set-1x24\.onnx is not the file of its set"):
        load(copied)
    copied.with_name("set-1x24.onnx").unlink()
    with pytest.raises(ModelFileError, match=r"set-1x24\.onnx is missing"):
        open_session(copied)


def _restamp(path: Path, **changes: Any) -> None:
    """State something else about each file of a set."""
    model = onnx.load(path, load_external_data=False)
    for entry in model.metadata_props:
        if entry.key == SIZES_KEY:
            entry.value = json.dumps([one | changes for one in json.loads(entry.value)])
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("sizes", [{"batch_size": 4, "sequence": 8}, {"batch_size": 10**18, "sequence": 10**18}])
def test_a_stamp_with_other_sizes_than_its_files_have_is_refused(copied: Path, sizes: dict[str, int]) -> None:
    _restamp(copied, sizes=sizes)
    with pytest.raises(InputError, match=r"set-1x8\.onnx does not have the sizes that .* states"):
        open_session(copied)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (8,)])
def test_inputs_without_a_row_or_a_token_are_refused(made: tuple[Path, OptimizeReport], shape: tuple[int, ...]) -> None:
    together = open_session(made[0])
    with pytest.raises(InputError, match="has no (batch_size|sequence)"):
        together.run({info.name: np.zeros(shape, np.int64) for info in together.model.structure.inputs})


def test_a_file_that_is_replaced_before_it_is_first_needed_is_refused(copied: Path) -> None:
    """By a later run, say, of other weights."""
    together = open_session(copied)
    together.run(_feeds(copied, 1, 8))
    copied.with_name("set-4x24.onnx").write_bytes(copied.with_name("set-1x24.onnx").read_bytes())
    with pytest.raises(ModelFileError, match=r"set-4x24\.onnx is not the file of its set"):
        together.run(_feeds(copied, 4, 24))


@pytest.mark.parametrize("name", ["../other.onnx", "/etc/passwd", ""])
def test_a_stamp_that_names_a_file_elsewhere_is_refused(copied: Path, name: str) -> None:
    _restamp(copied, file=name)
    with pytest.raises(ModelFileError, match="onnxtool.sizes of .* cannot be read"):
        open_session(copied)


def test_a_single_size_is_the_output_itself(source: Path, tmp_path: Path) -> None:
    output, report = _set_of(source, tmp_path, "2x8")
    assert [one.file for one in report.sizes] == ["set.onnx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.onnx", source.stem]
    session = ort.InferenceSession(output, providers=["CPUExecutionProvider"])
    assert [value.shape for value in session.get_inputs()] == [[2, 8]] * len(session.get_inputs())
    feeds = _feeds(source, 2, 8)
    _assert_same(session.run(None, feeds), open_session(source).run(feeds).values(), feeds["attention_mask"] != 0)


def test_a_new_run_removes_the_files_of_the_former_one(copied: Path, source: Path) -> None:
    optimize_model(OptimizeOptions(source, output=copied, sizes="1x8,2x8", timing=False, force=True))
    graphs = sorted(path.name for path in copied.parent.glob("*.onnx*"))
    assert graphs == ["set-1x8.onnx", "set-2x8.onnx", "set.onnx", "set.onnx.data.2"]
    optimize_model(OptimizeOptions(source, output=copied, timing=False, force=True))
    assert sorted(path.name for path in copied.parent.glob("*.onnx*")) == ["set.onnx"]


def test_a_set_that_is_copied_over_its_copy_stays_whole(made: tuple[Path, OptimizeReport], copied: Path) -> None:
    """As a model of sentence-transformers that is saved twice: the graph comes last."""
    with staged(copied, force=True) as staging:
        shutil.copyfile(made[0], staging.model_path)
    open_session(copied)


def test_a_new_run_leaves_only_what_was_changed_of_the_former_one(copied: Path, source: Path) -> None:
    """The others would read the weights of the next run by the same name."""
    with copied.with_name("set-1x8.onnx").open("ab") as file:
        file.write(b"\x92\x03\x00")
    optimize_model(OptimizeOptions(source, output=copied, timing=False, force=True))
    assert sorted(path.name for path in copied.parent.glob("*.onnx*")) == ["set-1x8.onnx", "set.onnx"]


def test_a_file_that_computes_something_else_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong constant would give wrong vectors at one size alone."""

    def fix_wrongly(model: ir.Model, sizes: dict[str, int]) -> int:
        result = fix_sizes(model, sizes)
        if sizes["sequence"] == 24:
            node = next(node for node in model.graph if node.op_type == "LayerNormalization")
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
        return result

    monkeypatch.setattr(made_files, "fix_sizes", fix_wrongly)
    with pytest.raises(VerificationError, match=r"differs from set\.onnx"):
        _set_of(source, tmp_path)
    assert not [*tmp_path.glob("*.onnx*")]


def test_verify_compares_each_file_of_the_set(made: tuple[Path, OptimizeReport], source: Path) -> None:
    found = verify(made[0], source)
    assert found.passed
    assert {case.description.partition(":")[0] for case in found.cases} >= {"1x8", "1x24", "4x24"}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("1x0", "'1x0' is not a size"),
        ("x", "'x' is not a size"),
        ("1x8,1x8", "says something twice"),
        ("batch_size=1,batch_size=2", "says something twice"),
        (("1x8", "batch_size=1,sequence=8"), "would have one file"),
        ("8", "does not state .* the dynamic axes .* batch_size, sequence"),
        ("batch_size=1,width=8", "does not state the sizes of exactly the dynamic axes"),
        ("1x9999", r"--sizes 1x9999 is too long: .* takes at most \d\d+ tokens"),
        ("sequence=9999,batch_size=1", "takes at most"),
    ],
)
def test_sizes_that_miss_an_axis_or_name_another_are_refused(source: Path, sizes: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        optimize_model(OptimizeOptions(source, output=source.with_name("unwritten.onnx"), sizes=sizes))


def test_sizes_are_refused_before_a_checkpoint_is_traced(workshop: Workshop, tmp_path: Path) -> None:
    options = ExportOptions(str(workshop.checkpoint("tiny-encoder")), output=tmp_path / "m.onnx", sizes="1x8,1x9999")
    with pytest.raises(OptionError, match=r"1x9999 is too long: .* takes at most \d+ tokens"):
        export_model(options)


def test_a_file_of_fixed_sizes_takes_no_others(made: tuple[Path, OptimizeReport], tmp_path: Path) -> None:
    member = made[0].with_name("set-1x8.onnx")
    with pytest.raises(OptionError, match="it has none"):
        optimize_model(OptimizeOptions(member, output=tmp_path / "m.onnx", sizes="2x8"))


def test_a_provider_is_asked_for_the_files_of_a_set(made: tuple[Path, OptimizeReport]) -> None:
    """And not for the file of any size, which such a provider does not take."""
    placement = find_placement(ModelFile.open(made[0]), "qnn")
    assert placement.model.endswith("set-1x8.onnx")
    assert not any("dynamic axes" in reason for reason in placement.reasons)


def test_sizes_may_name_their_axes(source: Path, tmp_path: Path) -> None:
    _, report = _set_of(source, tmp_path, "sequence=8,batch_size=2")
    assert report.sizes[0].sizes == {"sequence": 8, "batch_size": 2}


def test_int8_that_takes_ranges_over_a_batch_has_no_sizes_to_fill_up(source: Path, tmp_path: Path) -> None:
    """What fills up the batch would change the vectors of the texts in it."""
    with pytest.raises(VerificationError, match="differs"):
        _set_of(source, tmp_path, precision="int8", activations="dynamic")


def test_int8_with_ranges_of_its_own_for_each_token_has_sizes(source: Path, tmp_path: Path) -> None:
    output, report = _set_of(source, tmp_path, "1x8,4x16", precision="int8")
    assert all(one.verification is not None and one.verification.passed for one in report.sizes)
    assert len(_weights(output)) == 1


def test_sizes_that_depend_on_values_stay_computed(tmp_path: Path) -> None:
    """The number of elements above zero is known when the graph runs, that of all elements before."""
    body = "{ s = Shape(x) r = Reshape(x, s) z = NonZero(r) n = Shape(z) m = Size(x) y = Add(n, m) }"
    path = save_text(tmp_path / "m.onnx", f"g (float[b, t] x) => (int64[k] y) {body}")
    model = load_model(path)
    assert fix_sizes(model, {"b": 2, "t": 3}) == 1
    assert [node.op_type for node in model.graph] == ["Reshape", "NonZero", "Shape", "Add"]


def test_a_graph_without_a_mask_has_one_size_and_not_several(tmp_path: Path) -> None:
    """A mean over all tokens would count what fills them up."""
    path = save_text(
        tmp_path / "m.onnx",
        "g (float[batch, sequence, 4] x) => (float[batch, 4] y) <int64[1] a={1}> { y = ReduceMean<keepdims=0>(x, a) }",
    )
    alone = optimize_model(OptimizeOptions(path, output=tmp_path / "one.onnx", sizes="2x6", timing=False))
    assert len(alone.sizes) == 1
    with pytest.raises(VerificationError, match="differs"):
        optimize_model(OptimizeOptions(path, output=tmp_path / "set.onnx", sizes="1x6,2x6", timing=False))


def test_what_a_function_computes_from_sizes_becomes_constant(tmp_path: Path) -> None:
    graph = '<ir_version: 9, opset_import: ["" : 17, "my" : 1]> g (float[b, t] x) => (float[b, t] y) { y = my.f(x) }'
    function = "f (a) => (o) { s = Shape(a) z = ConstantOfShape(s) r = Add(a, z) o = Relu(r) }"
    text = f'{graph} <domain: "my", opset_import: ["" : 17]> {function}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert fix_sizes(model, {"b": 2, "t": 3}) == 0
    assert [node.op_type for node in model.graph.all_nodes()] == ["Add", "Relu"]
    assert not model.functions


def test_rows_that_read_each_other_are_not_split(tmp_path: Path) -> None:
    """The largest of all rows stays the largest when a row is repeated, and not when the rows run in two batches."""
    inputs = "g (float[batch, sequence] x, int64[batch, sequence] attention_mask) => "
    body = "m = Cast<to=1>(attention_mask) h = Mul(x, m)"
    path = save_text(
        tmp_path / "max.onnx",
        f"{inputs} (float[batch, sequence] y) <int64[1] a={{0}}> {{ {body} c = ReduceMax(h, a) y = Sub(h, c) }}",
    )
    with pytest.raises(VerificationError, match="differs"):
        optimize_model(OptimizeOptions(path, output=tmp_path / "set.onnx", sizes="1x6,2x6", timing=False))
    path = save_text(
        tmp_path / "scores.onnx",
        f"{inputs} (float[batch, batch] y) {{ {body} t = Transpose<perm=[1, 0]>(h) y = MatMul(h, t) }}",
    )
    optimize_model(OptimizeOptions(path, output=tmp_path / "scores-set.onnx", sizes="1x6,4x6", timing=False))
    together, rows = open_session(tmp_path / "scores-set.onnx"), np.random.default_rng(0).random((9, 6), np.float32)
    mask = np.ones((9, 6), np.int64)
    found = together.run({"x": rows[:3], "attention_mask": mask[:3]})["y"]
    np.testing.assert_allclose(found, np.inner(rows[:3], rows[:3]), rtol=1e-5)
    with pytest.raises(InputError, match="the inputs are 9x6"):
        together.run({"x": rows, "attention_mask": mask})


def test_the_command_plans_makes_lists_and_reads_the_set(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source.with_suffix(""), tmp_path / source.stem)
    command = ("optimize", source, "--sizes", "1x8", "--sizes", "2x8", "--output", "m.onnx", "--no_timing")
    plan = json_of(run_onnxtool(tmp_path, *command, "--dry_run", "--format", "json"))
    names = ["m-1x8.onnx", "m-2x8.onnx", "m.onnx", "m.onnx.data"]
    assert [Path(file["path"]).name for file in plan["files"]] == names
    run_onnxtool(tmp_path, *command)
    assert sorted(path.name for path in tmp_path.glob("m*")) == sorted(names)
    assert "batch_size 2, sequence 8 in m-2x8.onnx" in run_onnxtool(tmp_path, "stats", "m.onnx").stdout
    assert run_onnxtool(tmp_path, "infer", "m.onnx", "--text", "a text", "--text", "another").returncode == 0


def test_axes_without_names_take_a_size_by_their_place(tmp_path: Path) -> None:
    """As other exporters write them: nothing says that the axes of two inputs are the same."""
    body = "{ h = Mul(x, m) y = Relu(h) }"
    path = save_text(tmp_path / "m.onnx", f"g (float[?, ?] x, float[?, ?] m) => (float[?, ?] y) {body}")
    report = optimize_model(OptimizeOptions(path, output=tmp_path / "one.onnx", sizes="2x3", timing=False))
    assert report.sizes[0].sizes == {"x[0]": 2, "x[1]": 3, "m[0]": 2, "m[1]": 3}


def test_a_size_that_the_model_does_not_take_is_named(source: Path, tmp_path: Path) -> None:
    """More tokens than the table has positions."""
    with pytest.raises(OptionError, match=r"1x4000 is too long: .* takes at most 64 tokens"):
        _set_of(source, tmp_path, "1x4000")


def test_a_set_may_be_optimized_again(copied: Path) -> None:
    """The file of any size is optimized, and calibrated on texts of any length."""
    output = copied.with_name("int8.onnx")
    optimize_model(OptimizeOptions(copied, output=output, precision="int8", timing=False))
    assert not ModelFile.open(output).sizes
