"""A Router with an encoder of queries and one of documents becomes two files, both or none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onnxtool import ExportOptions, export_model
from onnxtool.errors import CheckpointError, ExportError, OutputExistsError
from onnxtool.export.report import ExportReport
from onnxtool.export.run import plan_export
from onnxtool.export.verification import ExportVerifier
from onnxtool.model_file import ModelFile
from tests.retrieval.checkpoints import CASES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Router that sentence-transformers has saved, with documents as its default."""
    folder = tmp_path_factory.mktemp("router")
    next(case for case in CASES if case.name == "Router of two encoders").make(folder / "router", folder / "base")
    return folder / "router"


def export(checkpoint: Path, output: Path, **options: Any) -> ExportReport:
    """Export by the exporter that is quickest."""
    return export_model(ExportOptions(str(checkpoint), output=output, exporter="torchscript", **options))


@pytest.fixture(scope="module")
def report(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """The export of both."""
    return export(checkpoint, tmp_path_factory.mktemp("pair") / "m.onnx")


def test_one_command_writes_both_files(report: ExportReport) -> None:
    """Each is verified, and has the modules of its route beside it."""
    folder, other = Path(report.output).parent, report.partner
    assert other is not None
    assert other.partner is None
    assert sorted(path.name for path in folder.iterdir()) == ["m", "m-query", "m-query.onnx", "m.onnx"]
    assert (report.output, other.output) == (str(folder / "m.onnx"), str(folder / "m-query.onnx"))
    assert report.verification is not None
    assert other.verification is not None
    for one, pooling in ((report, "document_1_Pooling"), (other, "query_1_Pooling")):
        listed = json.loads((Path(one.files) / "modules.json").read_text())
        assert [module["path"] for module in listed] == ["", pooling, "1_Normalize"]


def test_each_file_names_the_other_one(report: ExportReport) -> None:
    """With its own route, what that reads, and one digest for both."""
    assert report.partner is not None
    keys = ("route", "reads", "partner", "pair_sha256")
    stamps = [[one.metadata[f"onnxtool.{key}"] for key in keys] for one in (report, report.partner)]
    digest = stamps[0][-1]
    assert len(digest) == 64
    assert stamps == [
        ["document", "document", "m-query.onnx", digest],
        ["query", "query", "m.onnx", digest],
    ]


def test_the_digest_is_of_all_that_the_vectors_depend_on(
    checkpoint: Path, report: ExportReport, tmp_path: Path
) -> None:
    """The same for the same export, and another one for other settings of a module of one side."""
    key = "onnxtool.pair_sha256"
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert export(copy, tmp_path / "same.onnx", verify=False).metadata[key] == report.metadata[key]
    (copy / "query_1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "max"}')
    assert export(copy, tmp_path / "other.onnx", verify=False).metadata[key] != report.metadata[key]


def test_where_one_side_fails_no_file_is_left(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One alone would name a partner that is not there."""
    seen: list[str] = []

    verify = ExportVerifier.verify

    def fail_second(verifier: ExportVerifier, file: ModelFile, *rest: Any) -> Any:
        seen.append(file.path.name)
        if file.path.name == "m-query.onnx":
            raise ExportError("the second one differs", "")
        return verify(verifier, file, *rest)

    monkeypatch.setattr(ExportVerifier, "verify", fail_second)
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="the second one differs"):
        export(checkpoint, tmp_path / "out" / "m.onnx")
    assert seen[:2] == ["m.onnx", "m-query.onnx"]
    assert list((tmp_path / "out").iterdir()) == []


def test_neither_file_is_replaced_unasked(checkpoint: Path, tmp_path: Path) -> None:
    """Before anything is loaded, as for one file."""
    (tmp_path / "m-query.onnx").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"m-query\.onnx"):
        export(checkpoint, tmp_path / "m.onnx")
    with pytest.raises(OutputExistsError, match=r"m-query\.onnx"):
        plan_export(ExportOptions(str(checkpoint), output=tmp_path / "m.onnx"))
    assert (tmp_path / "m-query.onnx").read_text() == "mine"


def test_a_plan_lists_the_files_of_both(checkpoint: Path, report: ExportReport, tmp_path: Path) -> None:
    """Those that an export writes, but for what a tokenizer of its architecture needs."""
    plan = plan_export(ExportOptions(str(checkpoint), output=tmp_path / "m.onnx"))
    planned = {Path(file.path).relative_to(tmp_path) for file in plan.files}
    folder = Path(report.output).parent
    written = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert planned <= written
    assert {path.name for path in written - planned} <= {"vocab.txt"}


def test_a_route_that_is_chosen_is_one_file(checkpoint: Path, tmp_path: Path) -> None:
    """It says what it reads, and names no other."""
    report = export(checkpoint, tmp_path / "q.onnx", route="query", verify=False)
    assert report.partner is None
    assert report.metadata["onnxtool.reads"] == "query"
    assert "onnxtool.partner" not in report.metadata
    assert not (tmp_path / "q-document.onnx").exists()


def test_what_goes_with_one_file_only_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Consumers of one graph."""
    with pytest.raises(CheckpointError, match="has the routes query, document") as caught:
        export(checkpoint, tmp_path / "m", target="vespa")
    assert "--route" in caught.value.hint


def test_sides_that_cannot_be_compared_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Another pooling may give vectors of another width."""
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    pooling = {"embedding_dimension": 32, "pooling_mode": ["cls", "mean"]}
    (copy / "query_1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ExportError, match="sentence_embedding of 32 and sentence_embedding of 64"):
        export(copy, tmp_path / "m.onnx", verify=False)
    assert not (tmp_path / "m.onnx").exists()
