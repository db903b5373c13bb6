"""Parts that are encoded by themselves and merged: the files are those of one run, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool.encoding import (
    CorpusOptions,
    PartOptions,
    corpus_status,
    encode_corpus,
    encode_part,
    merge_parts,
    splits,
)
from onnxtool.encoding.files import scratch_folder
from onnxtool.encoding.merge import drop_texts, publish
from onnxtool.encoding.output import OutputFolder, StagedShard
from onnxtool.encoding.pipeline import EncodedWindow
from onnxtool.encoding.records import begin_run, read_run, remove_records
from onnxtool.encoding.report import PartReport
from onnxtool.encoding.shards import ShardFormat
from onnxtool.encoding.sources import Document
from onnxtool.encoding.splits import ShardName, TextWindow
from onnxtool.errors import InputError, OutputExistsError, OutputWriteError
from onnxtool.interruption import remove_unfinished
from onnxtool.reading import MOST_LINE_BYTES
from tests.encoding.corpora import (
    OPTIONS,
    collection,
    contents_of,
    dense_model,
    kill_two,
    lines_of,
    make_texts,
    part_command,
    sparse_model,
    stopped_after,
    whole,
    write_corpus,
)

pytestmark = pytest.mark.usefixtures("workers_here")


def encode(folder: Path, model: Path, corpus: Path, options: Any = OPTIONS, **part: Any) -> PartReport:
    """Encode a part into the folder `vectors`."""
    return encode_part(model, corpus, folder / "vectors", options, PartOptions(**part))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A file with all faults."""
    return collection(tmp_path, "jsonl")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt", "tsv", "folder"])
def test_parts_are_one_run(tmp_path: Path, kind: str) -> None:
    """However many there are, in whichever order, the manifest and the rejects included.

    Ids occur twice in a split, in two of them, and in two files.
    """
    model, corpus = dense_model(tmp_path), collection(tmp_path, kind)
    expected = whole(tmp_path, model, corpus)
    for count in (1, 2, 3, 7) if kind == "folder" else (3,):
        for part in random.Random(count).sample(range(count), count):  # noqa: S311  no secret
            encode(tmp_path, model, corpus, part=f"{part + 1}/{count}")
        assert merge_parts(tmp_path / "vectors").manifest
        assert contents_of(tmp_path / "vectors") == expected
        for path in [*(tmp_path / "vectors").iterdir(), *tmp_path.glob("vectors.*")]:
            path.unlink()


def test_rejects_are_lines_of_their_files(tmp_path: Path) -> None:
    """Counted from the beginning of a file that is cut, faults as repeated ids; a strict run says the same."""
    model, corpus = dense_model(tmp_path), collection(tmp_path, "jsonl")
    lines = corpus.read_bytes().split(b"\n")
    encode_corpus(model, corpus, tmp_path / "v", CorpusOptions(provider="cpu", shard_size=16, split_bytes=1000))
    rejects = [json.loads(line) for line in (tmp_path / "v.rejects.jsonl").read_text().splitlines()]
    seen: set[str] = set()
    wrong = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode()) if line.strip() else None
        except ValueError:
            wrong.append(number)
            continue
        if row is None:
            continue
        if not isinstance(row, dict) or not row.get("contents", "").strip() or row["id"] in seen:
            wrong.append(number)
        else:
            seen.add(row["id"])
    assert sorted(reject["line"] for reject in rejects) == wrong
    corpus.write_bytes(b"\n".join(line for line in lines if line.startswith(b'{"id": "1-')) + b"\n{\n")
    count = corpus.read_bytes().count(b"\n")
    with pytest.raises(InputError, match=rf"corpus\.jsonl:{count} is not JSON"):
        encode_corpus(
            model, corpus, tmp_path / "s", CorpusOptions(provider="cpu", split_bytes=1000, shard_size=16, strict=True)
        )


@pytest.mark.parametrize(
    ("sparse", "options"),
    [
        (True, {}),
        (True, {"output_format": "parquet"}),
        (False, {"output_format": "parquet", "contents": True}),
        (False, {"output_format": "jsonl"}),
        (False, {"vectors_as": "int8", "calibration": "texts.jsonl"}),
    ],
)
def test_every_format_is_that_of_one_run(tmp_path: Path, corpus: Path, sparse: bool, options: dict[str, Any]) -> None:
    """Ids that occur twice are dropped from each. Ranges are measured by the first part, and the others read them."""
    model = sparse_model(tmp_path) if sparse else dense_model(tmp_path)
    if "calibration" in options:
        texts = write_corpus(tmp_path / "texts.jsonl", make_texts(120))
        options = {**options, "calibration": texts}
    expected = whole(tmp_path, model, corpus, **options)
    for part in ("2/2", "1/2"):
        encode(tmp_path, model, corpus, replace(OPTIONS, **options), part=part)
        if "calibration" in options:
            write_corpus(tmp_path / "texts.jsonl", make_texts(120, seed=1))
    merge_parts(tmp_path / "vectors")
    assert contents_of(tmp_path / "vectors") == expected


def test_ids_that_occur_twice_are_an_error_where_that_is_asked(tmp_path: Path) -> None:
    """Which says where they are; else the first text of each is kept, and the vectors of the others are dropped."""
    model, texts = dense_model(tmp_path), make_texts(100)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    lines = corpus.read_text().splitlines()
    for place, other in ((3, 1), (70, 1), (80, 60)):
        lines[place] = json.dumps({"id": f"d{other}", "contents": texts[place]})
    corpus.write_text("\n".join(lines) + "\n")
    encode(tmp_path, model, corpus)
    places = r"corpus\.jsonl:4, corpus\.jsonl:71, corpus\.jsonl:81"
    with pytest.raises(InputError, match=f"3 lines repeat the id of an earlier line: {places}\n"):
        merge_parts(tmp_path / "vectors", strict=True)
    assert not (tmp_path / "vectors.manifest.json").exists()
    assert merge_parts(tmp_path / "vectors").num_texts == 97
    names = [line["id"] for line in lines_of(tmp_path / "vectors")]
    assert names == [f"d{place}" for place in range(100) if place not in (3, 70, 80)]
    rows = np.concatenate([np.load(path) for path in sorted((tmp_path / "vectors").glob("*.npy"))])
    kept = write_corpus(tmp_path / "kept.jsonl", [text for place, text in enumerate(texts) if place not in (3, 70, 80)])
    encode_corpus(model, kept, tmp_path / "kept", CorpusOptions(provider="cpu"))
    np.testing.assert_allclose(rows, np.load(tmp_path / "kept" / "part-00000.npy"), rtol=1e-6)
    rejects = [json.loads(line) for line in (tmp_path / "vectors.rejects.jsonl").read_text().splitlines()]
    assert [(line["line"], line["id"]) for line in rejects] == [(4, "d1"), (71, "d1"), (81, "d60")]
    assert {line["reason"] for line in rejects} == {"repeats the id of an earlier line"}


def test_a_repeated_text_is_dropped_next_to_the_longest(tmp_path: Path) -> None:
    """A written line holds a text of the most bytes, escaped, and its vector."""
    lines = [
        f"{json.dumps({'id': name, 'contents': text})}\n" for name, text in (("a", '"' * MOST_LINE_BYTES), ("b", ""))
    ]
    path, target = tmp_path / "part.jsonl", tmp_path / "target.jsonl"
    path.write_text("".join([*lines, lines[1]]))
    assert drop_texts([path], [target], [2]) == (["b"], 2)
    assert target.read_text() == "".join(lines)


def test_shards_of_several_windows_are_those_of_one_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part goes on from one shard to the next as a run does."""
    monkeypatch.setattr(splits, "WINDOW_TEXTS", 5)
    model = dense_model(tmp_path)
    expected = whole(tmp_path, model, corpus)
    for numbers in ("1", "0", "2-4"):
        encode(tmp_path, model, corpus, splits=numbers)
    assert merge_parts(tmp_path / "vectors").manifest
    assert contents_of(tmp_path / "vectors") == expected


def test_splits_that_are_done_are_not_made_again(tmp_path: Path, corpus: Path) -> None:
    """Nor after they are merged; and a run in one process goes on from what parts have done."""
    model = dense_model(tmp_path)
    first = encode(tmp_path, model, corpus, splits="0-1")
    assert (first.num_encoded_splits, first.num_encoded > 20) == (2, True)
    assert encode(tmp_path, model, corpus, splits="0, 2-3").num_encoded_splits == 2
    options = CorpusOptions(**{name: getattr(OPTIONS, name) for name in ("provider", "shard_size", "split_bytes")})
    report = encode_corpus(model, corpus, tmp_path / "vectors", options)
    assert (report.resumed, 0 < report.num_encoded < 50) == (True, True)
    assert contents_of(tmp_path / "vectors") == whole(tmp_path, model, corpus)
    assert encode(tmp_path, model, corpus).num_encoded_splits == 0
    assert merge_parts(tmp_path / "vectors").num_texts == 150


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("size", r"\(--input, in bytes: corpus.jsonl: \d+, now \d+\)"),
        ("model", r"\(--model_path: another model\)"),
        ("version", r"\(onnxtool: \S+, now 0.0.1\)"),
        ("checkpoint", r"\(other files beside the model: config_sentence_transformers.json\)"),
        ("split_bytes", r"\(--split_bytes: 2000, now 1999\)"),
        ("format", r"\(--output_format: npy, now jsonl; --contents: no, now yes; --prompt: none, now 'x: '\)"),
    ],
)
def test_what_differs_from_the_first_part_is_an_error(
    tmp_path: Path, corpus: Path, fault: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and no shard is written."""
    model, options = dense_model(tmp_path), OPTIONS
    encode(tmp_path, model, corpus, splits="0")
    before = contents_of(tmp_path / "vectors")
    if fault == "size":
        corpus.write_bytes(corpus.read_bytes() + b"\n")
    elif fault == "model":
        model.write_bytes(model.read_bytes() + b"\x32\x00")
    elif fault == "version":
        monkeypatch.setattr("onnxtool.version.__version__", "0.0.1")
    elif fault == "split_bytes":
        options = replace(OPTIONS, split_bytes=1999)
    elif fault == "format":
        options = replace(OPTIONS, output_format="jsonl", prompt="x: ")
    else:
        (tmp_path / "model" / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    with pytest.raises(OutputExistsError, match=f"was written by another command {said}") as error:
        encode(tmp_path, model, corpus, options, splits="3")
    assert "infer and encode run" in error.value.hint  # encode part has no --force
    assert contents_of(tmp_path / "vectors") == before


def test_texts_that_were_cut_are_said_where_parts_are_merged(tmp_path: Path) -> None:
    """As by a run in one process."""
    model = dense_model(tmp_path, positions=8)
    encode(tmp_path, model, write_corpus(tmp_path / "corpus.jsonl", ["a cat sat", "a b c d e f g h i j k"]))
    report = merge_parts(tmp_path / "vectors")
    assert report.num_truncated == 1
    assert report.notes == ("1 texts are longer than the model's limit, and were cut",)


def record_of(folder: Path, stem: str) -> Path:
    (path,) = (folder / "vectors.parts").glob(f"{stem}.*.json")
    return path


def test_merge_says_what_is_missing_and_wrong(tmp_path: Path, corpus: Path) -> None:
    """As ranges that --splits takes; nothing is published, and what is wrong is made again."""
    model = dense_model(tmp_path)
    encode(tmp_path, model, corpus, splits="0,2-4")
    vectors = tmp_path / "vectors" / "part-00002_00001.npy"
    content = vectors.read_bytes()
    vectors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    report = merge_parts(tmp_path / "vectors")
    assert report.to_do == "1-2"
    assert report.problems == {
        "is missing": "1",
        "has part-00002_00001.npy with other contents than were written": "2",
    }
    assert not report.manifest
    assert not (tmp_path / "vectors.manifest.json").exists()
    (tmp_path / "vectors" / "part-00000.ids.jsonl").unlink()
    record_of(tmp_path, "split-00003").write_text("{")
    assert merge_parts(tmp_path / "vectors").to_do == "0-3"
    assert encode(tmp_path, model, corpus).num_encoded_splits == 4
    assert merge_parts(tmp_path / "vectors").manifest
    assert contents_of(tmp_path / "vectors") == whole(tmp_path, model, corpus)


@pytest.mark.parametrize("value", [None, 7, -1, "", "../../secret", [], {}, 1.5, True, 1 << 80])
def test_a_record_that_is_none_is_a_split_to_do(tmp_path: Path, value: Any) -> None:
    """Whatever is in it, nothing outside of the folder is read."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    encode(tmp_path, model, corpus)
    of_split, of_shard = record_of(tmp_path, "split-00000"), record_of(tmp_path, "part-00000")
    split, record = of_split.read_text(), of_shard.read_text()
    content = json.loads(record)
    shard, (first, *rest) = content["shard"], content["shard"]["files"]
    wrong: list[Any] = [value, *({**content, key: value} for key in ("run", "shard", "texts"))]
    shards = [{**shard, key: value} for key in ("digest", "num_texts")]
    shards += [{**shard, "files": [{**first, key: value}, *rest]} for key in first]
    wrong += [{**content, "shard": one} for one in shards]
    wrong += [{**content, "texts": {**content["texts"], key: value}} for key in ("files", "packed")]
    of_splits = [value, *({**json.loads(split), key: value} for key in ("run", "num_shards", "rejects"))]
    for file, faults in ((of_shard, wrong), (of_split, of_splits)):
        for fault in faults:
            of_split.write_text(split)
            of_shard.write_text(record)
            file.write_text(json.dumps(fault))
            is_fault = fault not in (content, {**json.loads(split), "rejects": []})
            assert not is_fault or merge_parts(tmp_path / "vectors").to_do == "0", fault


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"files": []}, "has a record of 1 texts and 0 files"),
        (
            {"rejects": [{"file": "c", "line": "1", "reason": "", "id": None}]},
            "has a record that cannot be read: it.rejects[0].line",
        ),
        (
            {"rejects": [{"file": "c", "line": 1, "reason": 5, "id": None}]},
            "has a record that cannot be read: it.rejects[0].reason",
        ),
        (
            {"rejects": [{"file": "c", "line": 1, "reason": "", "id": []}]},
            "has a record that cannot be read: it.rejects[0].id",
        ),
        ({"num_texts": 2}, "has a record that cannot be read: its texts are not those of 2"),
    ],
)
def test_a_record_of_vectors_without_files_or_of_no_lines_is_a_split_to_do(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    """A manifest would promise texts that nobody finds."""
    encode(tmp_path, dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"]))
    file = record_of(tmp_path, "part-00000")
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "shard": {**record["shard"], **change}}))
    report = merge_parts(tmp_path / "vectors")
    assert [*report.problems.values()] == ["0"]
    assert next(iter(report.problems)).startswith(problem)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits of files")
def test_a_full_disk_is_the_error_of_a_part(tmp_path: Path) -> None:
    """And not one of a text, nor of the process; nothing half is left, and the way out is said."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(500))
    part = [sys.executable, "-m", "onnxtool", "encode", "part", "--quiet", "--model_path", str(model)]
    ended = subprocess.run(
        [
            "/bin/sh",
            "-c",
            'ulimit -f 8; exec "$@"',
            "-",
            *part,
            "--input",
            str(corpus),
            "--output",
            str(tmp_path / "vectors"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert re.fullmatch(r"error: cannot write .*vectors: File too large\nhint: .*make room.*\n", ended.stderr)
    assert list((tmp_path / "vectors").iterdir()) == []


def test_a_file_that_cannot_be_written_as_a_whole_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is the stage that it was written in."""

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = OutputFolder(tmp_path / "vectors")
    monkeypatch.setattr("onnxtool.encoding.output.force_to_disk", full)
    with pytest.raises(OutputWriteError, match="No space"), folder.writing():
        folder.write(folder.manifest_path, b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["vectors"]


def test_a_merge_that_is_interrupted_leaves_nothing_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it writes a shard without a text whose id occurs twice; the next one goes on."""
    model, corpus = dense_model(tmp_path), collection(tmp_path, "jsonl")

    def interrupted(*arguments: Any) -> Any:
        drop_texts(*arguments)
        raise KeyboardInterrupt

    encode(tmp_path, model, corpus)
    with monkeypatch.context() as patch:
        patch.setattr("onnxtool.encoding.merge.drop_texts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            merge_parts(tmp_path / "vectors")
    assert corpus_status(tmp_path / "vectors").half_written == ()
    assert merge_parts(tmp_path / "vectors").manifest


def test_a_signal_does_not_part_the_manifest_from_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives when the manifest is there; the records go as well, and the command ends afterwards."""
    model, corpus = dense_model(tmp_path), collection(tmp_path, "jsonl")
    encode(tmp_path, model, corpus)

    def interrupted(folder: OutputFolder) -> None:
        signal.raise_signal(signal.SIGINT)
        remove_records(folder)

    monkeypatch.setattr("onnxtool.encoding.merge.remove_records", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_parts(tmp_path / "vectors")
    assert (tmp_path / "vectors.manifest.json").is_file()
    assert not (tmp_path / "vectors.parts").exists()


def test_status_counts_texts_of_unfinished_splits(tmp_path: Path) -> None:
    """What is stored of a split counts before the split is done."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(30))
    with stopped_after(20), pytest.raises(KeyboardInterrupt):
        encode_corpus(model, corpus, tmp_path / "vectors", CorpusOptions(shard_size=10, batch_tokens=64, workers=1))
    status = corpus_status(tmp_path / "vectors")
    assert status.num_done == 0
    assert status.num_texts in (10, 20)


def test_status_counts_what_is_done(tmp_path: Path, corpus: Path) -> None:
    """The rate is that of all machines, by the times of the records."""
    model = dense_model(tmp_path)
    with pytest.raises(InputError, match="nothing is encoded in"):
        corpus_status(tmp_path / "vectors")
    first = encode(tmp_path, model, corpus, splits="0").num_encoded
    others = encode(tmp_path, model, corpus, splits="1-2").num_encoded
    now = time.time()
    for number in range(3):
        os.utime(record_of(tmp_path, f"split-{number:05d}"), (now, now + 10 * number))
    status = corpus_status(tmp_path / "vectors")
    assert (status.num_done, status.to_do, status.num_texts, status.merged) == (3, "3-4", first + others, False)
    assert status.texts_per_s == pytest.approx(others / 20, rel=1e-3)  # times of files have no more digits
    assert status.seconds_left == pytest.approx(20, rel=1e-3)
    stage = tmp_path / ".vectors.0123abcd.partial"
    stage.mkdir()
    (tmp_path / "vectors" / "part-00009.npy").write_text("{")
    assert corpus_status(tmp_path / "vectors").half_written == (stage.name,)
    encode(tmp_path, model, corpus)
    assert not stage.exists()
    assert merge_parts(tmp_path / "vectors").num_removed == 1
    merged = corpus_status(tmp_path / "vectors")
    assert (merged.merged, merged.share, merged.half_written, merged.num_done) == (True, 1, (), 5)
    (tmp_path / "vectors" / "part-00009.npy").write_text("{")
    assert merge_parts(tmp_path / "vectors").num_removed == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, corpus: Path) -> None:
    """A run with other options, or files of somebody."""
    model = dense_model(tmp_path)
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "notes.txt").write_text("mine")
    calls: tuple[Callable[[], object], ...] = (
        lambda: encode(tmp_path, model, corpus),
        lambda: merge_parts(tmp_path / "vectors"),
    )
    for call in calls:
        with pytest.raises(OutputExistsError, match=r"notes\.txt"):
            call()
    (tmp_path / "vectors" / "notes.txt").unlink()
    encode_corpus(model, corpus, tmp_path / "vectors", CorpusOptions(provider="cpu"))
    with pytest.raises(OutputExistsError, match="another command"):
        encode(tmp_path, model, corpus)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_parts_that_are_killed_and_two_of_the_same_splits(tmp_path: Path) -> None:
    """At random moments, from outside, while another process makes the same shards."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(1500))
    chance = random.Random(0)  # noqa: S311  no secret
    command = part_command(tmp_path, OPTIONS, model, corpus, tmp_path / "vectors")
    for _ in range(2):
        kill_two(command, chance, lambda: any(tmp_path.glob("vectors.parts/part-*.json")))
    encode(tmp_path, model, corpus)
    merge_parts(tmp_path / "vectors")
    assert contents_of(tmp_path / "vectors") == whole(tmp_path, model, corpus)


def test_two_writers_of_a_shard_do_not_share_a_file(tmp_path: Path) -> None:
    """Each has a stage of its own; the second shard replaces the first by the same bytes, and no stage stays."""
    npy = ShardFormat("npy", contents=False, weights="float")
    window = TextWindow((Document("d0", "a cat", "c.jsonl", 1),), ShardName(0, 0), "digest")
    folders = [OutputFolder(tmp_path / "vectors") for _ in range(2)]
    with folders[0].writing(), folders[1].writing():
        writers = [StagedShard(folder, npy, ShardName(0, 0)) for folder in folders]
        for writer in writers:
            writer.append(EncodedWindow(window, window.documents, np.ones((1, 4), np.float32), 4, 0, 0, ()))
        assert len(folders[0].half_written()) == 2
        first, second = (writer.commit("digest") for writer in writers)
        assert first == second
    assert sorted(path.name for path in (tmp_path / "vectors").iterdir()) == ["part-00000.ids.jsonl", "part-00000.npy"]
    assert [path.name for path in tmp_path.iterdir()] == ["vectors"]


def test_a_process_that_ends_at_once_removes_its_stage(tmp_path: Path) -> None:
    """That alone, and not those of other processes; and the model that it has copied."""
    with OutputFolder(tmp_path / "vectors").writing(), scratch_folder("model") as scratch:
        (scratch / "model.onnx").write_bytes(b"a copy")
        (tmp_path / ".vectors.01234567.partial").mkdir()
        remove_unfinished()
        assert not scratch.exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == [".vectors.01234567.partial", "vectors"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
def test_a_merge_waits_for_one_that_publishes(tmp_path: Path) -> None:
    """Of two machines that end together, neither fails."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    encode_part(model, corpus, tmp_path / "vectors", OPTIONS)
    with ThreadPoolExecutor() as pool:
        with OutputFolder(tmp_path / "vectors").locked():
            merging = pool.submit(merge_parts, tmp_path / "vectors")
            with pytest.raises(TimeoutError):
                merging.result(timeout=0.2)
        assert merging.result().num_texts == 1


@pytest.mark.parametrize("is_published", [False, True])
def test_a_run_publishes_nothing_of_another_command(tmp_path: Path, is_published: bool) -> None:
    """One that took the folder by force, meanwhile."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    encode_part(model, corpus, tmp_path / "vectors", OPTIONS)
    folder = OutputFolder(tmp_path / "vectors")
    run = read_run(folder)
    assert run is not None
    if is_published:
        merge_parts(tmp_path / "vectors")
    with folder.locked():
        if not is_published:
            begin_run(folder, {**run.identity, "corpus": "another"}, force=True)
        else:
            run = run._replace(identity={**run.identity, "corpus": "another"})
        with pytest.raises(OutputExistsError, match="another command"):
            publish(folder, run)
