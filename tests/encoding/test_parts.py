"""Parts of a plan, encoded anywhere and in any order, become byte for byte what one run writes."""

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
    make_plan,
    merge_parts,
    windows,
)
from onnxtool.encoding.files import write
from onnxtool.encoding.output import OutputFolder, StagedShard
from onnxtool.encoding.parts import ShardEncoder, parse_part, parse_shards, shard_ranges
from onnxtool.encoding.pipeline import EncodedWindow
from onnxtool.encoding.plan import read_plan
from onnxtool.encoding.shards import ShardFormat
from onnxtool.encoding.sources import Document
from onnxtool.encoding.windows import Window
from onnxtool.errors import InputError, OutputExistsError
from tests.encoding.corpora import (
    OPTIONS,
    SIZE,
    collection,
    dense_model,
    make_texts,
    outcome,
    planned,
    sparse_model,
    whole,
    write_corpus,
)

pytestmark = pytest.mark.usefixtures("workers_here")

RUN = """
import sys
from onnxtool.encoding import PartOptions, encode_part
encode_part(sys.argv[1], PartOptions(part=sys.argv[2]))
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A file with all faults."""
    return collection(tmp_path, "jsonl")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt", "tsv", "folder"])
def test_parts_are_one_run(tmp_path: Path, kind: str) -> None:
    """However many there are, in whichever order, the manifest and the rejects included.

    The folder has files of all other kinds; scripts/check_encoding.py splits each kind into all of these numbers.
    """
    model, corpus = dense_model(tmp_path), collection(tmp_path, kind)
    expected = whole(tmp_path, model, corpus)
    plan = planned(tmp_path, model, corpus)
    for count in (1, 2, 3, 7) if kind == "folder" else (3,):
        for part in random.Random(count).sample(range(count), count):  # noqa: S311  no secret
            encode_part(plan, PartOptions(part=f"{part + 1}/{count}"))
        assert merge_parts(plan).manifest
        assert outcome(tmp_path / "vectors") == expected
        make_plan(model, corpus, tmp_path / "vectors", OPTIONS, force=True)


def test_shards_of_several_windows_are_those_of_one_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker encodes them as does a run, which goes on from one shard to the next."""
    monkeypatch.setattr(windows, "WINDOW_TEXTS", 16)
    model = dense_model(tmp_path)
    expected = whole(tmp_path, model, corpus)
    plan = read_plan(planned(tmp_path, model, corpus))
    for numbers in ([1], [0], [2, 3]):
        assert [number for number, _ in ShardEncoder(plan, PartOptions()).encode(numbers, lambda *_: None)] == numbers
    assert merge_parts(plan.path).manifest
    assert outcome(tmp_path / "vectors") == expected


@pytest.mark.parametrize("last", [40, 80, 81])
def test_what_follows_the_last_text_is_of_the_last_shard(tmp_path: Path, last: int) -> None:
    """Also where that shard is full."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(last))
    corpus.write_text(corpus.read_text() + '{"id": "d3", "contents": "again"}\n{\n')
    plan = planned(tmp_path, model, corpus)
    encode_part(plan, PartOptions(shards=f"{(last - 1) // SIZE}"))
    encode_part(plan)
    assert merge_parts(plan).num_rejects == 2
    assert outcome(tmp_path / "vectors") == whole(tmp_path, model, corpus)


@pytest.mark.parametrize(
    ("sparse", "options"),
    [
        (True, {"gzip": True}),
        (True, {"output_format": "parquet"}),
        (False, {"output_format": "parquet", "contents": True}),
        (False, {"vectors_as": "int8", "calibration": "corpus.jsonl"}),
    ],
)
def test_every_format_is_that_of_one_run(tmp_path: Path, corpus: Path, sparse: bool, options: dict[str, Any]) -> None:
    """Ranges that were measured for the plan are in it, and are measured once."""
    model = sparse_model(tmp_path) if sparse else dense_model(tmp_path)
    if "calibration" in options:
        write_corpus(tmp_path / "texts.jsonl", make_texts(120))
        options = {**options, "calibration": tmp_path / "texts.jsonl"}
    plan = planned(tmp_path, model, corpus, replace(OPTIONS, **options))
    expected = whole(tmp_path, model, corpus, **options)
    (tmp_path / "texts.jsonl").unlink(missing_ok=True)
    for part in ("2/2", "1/2"):
        encode_part(plan, PartOptions(part=part))
    merge_parts(plan)
    assert outcome(tmp_path / "vectors") == expected


def test_shards_that_are_done_are_not_made_again(tmp_path: Path, corpus: Path) -> None:
    """Not even the model is loaded; nor after they are merged."""
    plan = planned(tmp_path, model := dense_model(tmp_path), corpus)
    first = encode_part(plan, PartOptions(shards="0-1"))
    assert (first.num_encoded_shards, first.num_encoded) == (2, 80)
    assert encode_part(plan, PartOptions(shards="0, 2-3")).num_encoded_shards == 2
    model.unlink()
    assert encode_part(plan).num_encoded_shards == 0
    merge_parts(plan)
    assert encode_part(plan).num_encoded_shards == 0
    assert merge_parts(plan).num_texts == 150


def test_a_folder_may_move_with_its_plan(tmp_path: Path) -> None:
    """To another machine, where all lies elsewhere; and model and collection may be passed."""
    (tmp_path / "here").mkdir()
    model = dense_model(tmp_path / "here")
    corpus = write_corpus(tmp_path / "here" / "corpus.jsonl", make_texts(90))
    planned(tmp_path / "here", model, corpus)
    (tmp_path / "here").rename(tmp_path / "there")
    plan = tmp_path / "there" / "vectors.plan.json"
    encode_part(plan, PartOptions(part="1/3"))
    (tmp_path / "there" / "corpus.jsonl").rename(tmp_path / "corpus.jsonl")
    encode_part(plan, PartOptions(part="2/3", input_path=tmp_path / "corpus.jsonl"))
    encode_part(plan, PartOptions(part="3/3", input_path=tmp_path / "corpus.jsonl"))
    assert merge_parts(plan).num_texts == 90


@pytest.mark.parametrize("fault", ["word", "size", "fault", "model", "version", "checkpoint"])
def test_what_has_changed_since_the_plan_is_an_error(
    tmp_path: Path, corpus: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no shard is written."""
    plan = planned(tmp_path, model := dense_model(tmp_path), corpus)
    text = corpus.read_bytes()
    if fault == "word":
        place = text.index(b'"1-145"')
        corpus.write_bytes(text[:place] + text[place:].replace(b'"1-145"', b'"1-xyz"', 1))
    elif fault == "size":
        corpus.write_bytes(text + b"\n")
    elif fault == "fault":
        corpus.write_bytes(text[:-1] + b"\n")
    elif fault == "model":
        model.write_bytes(model.read_bytes() + b"\x32\x00")
    elif fault == "version":
        with monkeypatch.context() as other:
            other.setattr("onnxtool.version.__version__", "0.0.1")
            make_plan(model, corpus, tmp_path / "vectors", OPTIONS, force=True)
    else:
        (tmp_path / "model" / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    with pytest.raises(InputError, match=r"the input has changed: shard 3|is a plan for something else: .*(another|:)"):
        encode_part(plan, PartOptions(shards="3"))
    assert list((tmp_path / "vectors").iterdir()) == []


def record_of(folder: Path, number: int) -> Path:
    (path,) = (folder / "vectors.parts").glob(f"part-{number:05d}.*.json")
    return path


def test_merge_says_what_is_missing_and_wrong(tmp_path: Path, corpus: Path) -> None:
    """As ranges that --shards takes; nothing is published, and what is wrong is made again."""
    plan = planned(tmp_path, model := dense_model(tmp_path), corpus)
    assert merge_parts(plan).to_do == "0-3"
    encode_part(plan, PartOptions(shards="0,2,3"))
    vectors = tmp_path / "vectors" / "part-00002.npy"
    content = vectors.read_bytes()
    vectors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    report = merge_parts(plan)
    assert report.to_do == "1-2"
    assert report.problems == {
        "is missing": "1",
        "has part-00002.npy with other contents than were written": "2",
    }
    assert not report.manifest
    assert not (tmp_path / "vectors.manifest.json").exists()
    (tmp_path / "vectors" / "part-00000.ids.jsonl").unlink()
    record_of(tmp_path, 3).write_text("{")
    assert merge_parts(plan).to_do == "0-3"
    assert encode_part(plan).num_encoded_shards == 4
    assert merge_parts(plan).manifest
    assert outcome(tmp_path / "vectors") == whole(tmp_path, model, corpus)


@pytest.mark.parametrize("value", [None, 7, -1, "", "../../secret", [], {}, 1.5, True, 1 << 80])
def test_a_record_that_is_none_is_a_shard_to_do(tmp_path: Path, value: Any) -> None:
    """Whatever is in it, nothing outside of the folder is read."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    plan = planned(tmp_path, model, corpus)
    encode_part(plan)
    file = record_of(tmp_path, 0)
    record = json.loads(file.read_text())
    shard, (first, *rest) = record["shard"], record["shard"]["files"]
    wrong: list[Any] = [value, *({**record, key: value} for key in ("run", "shard"))]
    shards = [{**shard, key: value} for key in ("digest", "num_texts")]
    shards += [{**shard, "files": [{**first, key: value}, *rest]} for key in first]
    for one in (*wrong, *({**record, "shard": one} for one in shards)):
        file.write_text(json.dumps(one))
        assert merge_parts(plan).to_do == "0", one


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"files": []}, "has a record of 1 texts and 0 files"),
        (
            {"rejects": [{"file": "c", "line": "1", "reason": "", "id": None}]},
            "has a record that cannot be read: its line",
        ),
        (
            {"rejects": [{"file": "c", "line": 1, "reason": 5, "id": None}]},
            "has a record that cannot be read: its reason",
        ),
        ({"rejects": [{"file": "c", "line": 1, "reason": "", "id": []}]}, "has a record that cannot be read: its id"),
    ],
)
def test_a_record_of_vectors_without_files_or_of_no_lines_is_a_shard_to_do(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    """A manifest would promise texts that nobody finds."""
    plan = planned(tmp_path, dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"]))
    encode_part(plan)
    file = record_of(tmp_path, 0)
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "shard": {**record["shard"], **change}}))
    report = merge_parts(plan)
    assert [*report.problems.values()] == ["0"]
    assert next(iter(report.problems)).startswith(problem)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits of files")
def test_a_full_disk_is_the_error_of_a_part(tmp_path: Path, corpus: Path) -> None:
    """And not one of a text, nor of the process; nothing half is left, and the way out is said."""
    plan = planned(tmp_path, dense_model(tmp_path), corpus)
    part = [sys.executable, "-m", "onnxtool", "encode", "part", "--quiet", "--plan", str(plan)]
    ended = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -f 1; exec "$@"', "-", *part], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert re.fullmatch(r"error: cannot write .*vectors: File too large\nhint: .*make room.*\n", ended.stderr)
    assert list((tmp_path / "vectors").iterdir()) == []


def test_a_file_that_cannot_be_written_as_a_whole_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name has a part that nobody finds again."""

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onnxtool.encoding.files.force_to_disk", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "record.json", b"{}", "12345678")
    assert list(tmp_path.iterdir()) == []


def test_status_counts_what_is_done(tmp_path: Path, corpus: Path) -> None:
    """The rate is that of all machines, by the times of the records."""
    plan = planned(tmp_path, dense_model(tmp_path), corpus)
    assert corpus_status(plan).num_done == 0
    encode_part(plan, PartOptions(shards="0-2"))
    now = time.time()
    for number in range(3):
        os.utime(record_of(tmp_path, number), (now, now + 10 * number))
    status = corpus_status(plan)
    assert (status.num_done, status.to_do, status.num_encoded, status.merged) == (3, "3", 120, False)
    assert status.texts_per_s == pytest.approx(4, rel=1e-3)  # times of files have no more digits
    assert status.seconds_left == pytest.approx(7.5, rel=1e-3)
    encode_part(plan)
    merge_parts(plan)
    assert (corpus_status(plan).merged, corpus_status(plan).share) == (True, 1)
    for _ in range(2):
        make_plan(tmp_path / "model.onnx", corpus, tmp_path / "vectors", OPTIONS, force=True)
        assert corpus_status(plan).num_done == 0
        encode_part(plan, PartOptions(shards="1"))


def test_status_lists_what_killed_workers_have_left_half(tmp_path: Path, corpus: Path) -> None:
    """Until they are merged; and what one of them leaves behind that, the next merge removes."""
    plan = planned(tmp_path, dense_model(tmp_path), corpus)
    name = ".part-00001.ids.jsonl.0123abcd.partial"
    (tmp_path / "vectors" / name).write_text("{")
    assert corpus_status(plan).half_written == (name,)
    encode_part(plan)
    for _ in range(2):
        (tmp_path / "vectors" / name).write_text("{")
        assert corpus_status(plan).half_written == (name,)
        assert merge_parts(plan).num_removed == 1
        assert corpus_status(plan).half_written == ()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, corpus: Path) -> None:
    """A run of infer, or files of somebody; a plan is replaced by --force alone."""
    model = dense_model(tmp_path)
    plan = planned(tmp_path, model, corpus)
    with pytest.raises(OutputExistsError, match="exists"):
        planned(tmp_path, model, corpus)
    (tmp_path / "vectors" / "notes.txt").write_text("mine")
    calls: tuple[Callable[[Path], object], ...] = (encode_part, merge_parts, corpus_status)
    for call in calls[:2]:
        with pytest.raises(OutputExistsError, match=r"notes\.txt"):
            call(plan)
    with pytest.raises(OutputExistsError, match=r"notes\.txt"):
        make_plan(model, corpus, tmp_path / "vectors", OPTIONS, force=True)
    (tmp_path / "vectors" / "notes.txt").unlink()
    encode_corpus(model, corpus, tmp_path / "vectors", CorpusOptions(provider="cpu"))
    for call in calls:
        with pytest.raises(OutputExistsError, match="belongs to a run of onnxtool infer"):
            call(plan)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_parts_that_are_killed_and_two_of_the_same_shards(tmp_path: Path) -> None:
    """At random moments, from outside, while another process makes the same shards."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(1500))
    plan = planned(tmp_path, model, corpus)
    chance = random.Random(0)  # noqa: S311  no secret
    for _ in range(2):
        both = [subprocess.Popen([sys.executable, "-c", RUN, str(plan), "1/1"]) for _ in range(2)]
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("vectors.parts/part-*.json")) and both[0].poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(chance.random() * 0.1)
        for process in both:
            process.send_signal(signal.SIGKILL)
            process.wait()
    encode_part(plan)
    merge_parts(plan)
    assert outcome(tmp_path / "vectors") == whole(tmp_path, model, corpus)


def test_two_writers_of_a_shard_do_not_share_a_file(tmp_path: Path) -> None:
    """Each has names of its own until the shard is whole; the second one replaces it by the same bytes."""
    folder, npy = OutputFolder(tmp_path), ShardFormat("npy", gzip=False, contents=False, weights="float")
    writers = [StagedShard(folder, tmp_path, npy, 0) for _ in range(2)]
    window = Window((Document("d0", "a cat", "c.jsonl", 1),), 0, "digest", 0)
    for writer in writers:
        writer.append(EncodedWindow(window, window.documents, np.ones((1, 4), np.float32), 4, 0, 0, ()))
    first, second = (writer.commit("digest") for writer in writers)
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-00000.ids.jsonl", "part-00000.npy"]


def test_an_array_of_jobs_says_which_part() -> None:
    """An array need not begin at 0, nor count by one; Kubernetes counts from 0."""
    slurm = {"SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_STEP": "2"}
    found = [parse_part("slurm", {**slurm, "SLURM_ARRAY_TASK_ID": str(task)}) for task in (5, 7, 9)]
    assert found == [(0, 3), (1, 3), (2, 3)]
    for task in ("4", "6", "11", "x"):
        with pytest.raises(InputError):
            parse_part("slurm", {**slurm, "SLURM_ARRAY_TASK_ID": task})
    assert parse_part("kubernetes", {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "4"}) == (0, 4)
    for missing in ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"):
        present = {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "4"}
        del present[missing]
        with pytest.raises(InputError, match=f"{missing} is not set"):
            parse_part("kubernetes", present)
    with pytest.raises(InputError, match="SLURM_ARRAY_TASK_ID is not set"):
        parse_part("slurm", {})
    assert parse_part("2/7", {}) == (1, 7)
    for wrong in ("0/3", "4/3", "1", "a/b", "1/0", "", "1/2/3", "-1/3"):
        with pytest.raises(InputError, match="is no part"):
            parse_part(wrong, {})


def test_ranges_of_shards_are_read_as_they_are_written() -> None:
    """Numbers that are none, or that no shard has, are refused."""
    numbers = (0, 3, 4, 5, 9)
    assert shard_ranges(numbers) == "0, 3-5, 9"
    assert parse_shards("0, 3-5, 9", 10) == numbers
    for wrong, reason in (("5-3", "names no shards"), ("", "names no"), ("a", "names no"), ("10", "no shard 10")):
        with pytest.raises(InputError, match=reason):
            parse_shards(wrong, 10)
