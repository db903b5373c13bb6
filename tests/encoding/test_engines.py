"""All shards of a plan by worker processes: the bytes of one run, whatever becomes of the workers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from onnxtool.cli.entry import main
from onnxtool.encoding import PartOptions, RunOptions, encode_part, encode_plan, merge_parts
from onnxtool.encoding.pieces import cut_pieces
from onnxtool.encoding.plan import read_plan
from onnxtool.encoding.processes import Died, WorkerProcess
from onnxtool.encoding.sources import find_sources
from onnxtool.encoding.workers import Worker, runs_of
from onnxtool.errors import InputError, ModelFileError, OnnxtoolError, SessionError
from tests.encoding.corpora import (
    OPTIONS,
    collection,
    contents_of,
    dense_model,
    lines_of,
    make_texts,
    outcome,
    planned,
    told,
    whole,
    write_corpus,
)
from tests.encoding.poison import code_of, poisoned

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.mark.parametrize(("kind", "workers"), [("folder", 1), ("jsonl.gz", 2), ("parquet", 3)])
def test_workers_are_one_run(tmp_path: Path, kind: str, workers: int) -> None:
    """However many there are; the second run finds all done."""
    model, corpus = dense_model(tmp_path), collection(tmp_path, kind)
    plan = planned(tmp_path, model, corpus)
    with told() as seen:
        report = encode_plan(plan, RunOptions(workers=workers, threads=1))
    assert (report.workers, report.num_encoded_shards, report.num_deaths) == (workers, report.num_shards, 0)
    assert outcome(tmp_path / "vectors") == whole(tmp_path, model, corpus)
    assert (seen[-1].num_texts, seen[-1].share) == (report.num_encoded, 1.0)
    assert seen[-1].tokens_per_s
    again = encode_plan(plan)
    assert (again.workers, again.num_encoded, again.num_texts) == (0, 0, report.num_texts)


@pytest.mark.parametrize(
    ("act", "reason", "by"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "cannot be encoded: it ends the process (SIGSEGV)", "part"),
        ("raise MemoryError('no room')", "cannot be encoded: no room", "run"),
    ],
)
def test_a_text_that_ends_its_process_is_rejected_with_its_id(
    tmp_path: Path, act: str, reason: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all others are encoded as if it had not been there; two in one shard, and one in another."""
    model = dense_model(tmp_path)
    texts = make_texts(90)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    lines = corpus.read_text().splitlines()
    for place in (7, 30, 85):
        lines[place] = lines[place].replace(f'"d{place}"', f'"poison{place}"')
    corpus.write_text("\n".join(lines) + "\n")
    plan = planned(tmp_path, model, corpus, replace(OPTIONS, contents=True))
    for name, value in poisoned(tmp_path, code_of(act)).items():
        monkeypatch.setenv(name, value)
    if by == "part":
        assert encode_part(plan, PartOptions(workers=1)).num_left_out == 3
        assert merge_parts(plan).manifest
    else:
        report = encode_plan(plan, RunOptions(workers=2, threads=1))
        assert (report.num_left_out, report.num_texts, report.num_rejects) == (3, 87, 3)
    rejects = [json.loads(line) for line in (tmp_path / "vectors.rejects.jsonl").read_text().splitlines()]
    assert [(line["id"], line["line"], line["reason"]) for line in rejects] == [
        (f"poison{place}", place + 1, reason) for place in (7, 30, 85)
    ]
    assert [line["id"] for line in lines_of(tmp_path / "vectors")] == [
        f"d{place}" for place in range(90) if place not in (7, 30, 85)
    ]
    assert outcome(tmp_path / "vectors").keys() == {
        *(f"part-0000{number}.{end}" for number in range(3) for end in ("npy", "ids.jsonl")),
        ".manifest.json",
        ".rejects.jsonl",
    }


def test_workers_that_are_killed_are_started_again(tmp_path: Path) -> None:
    """From outside, at random moments: nothing is rejected, and the bytes are those of one run."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(2000))
    plan = planned(tmp_path, model, corpus)
    chance = random.Random(0)  # noqa: S311  no secret
    kills = 0
    ended = threading.Event()

    def kill() -> None:
        nonlocal kills
        while not ended.wait(0.05 + chance.random() * 0.2) and kills < 3:
            for child in _children():
                os.kill(child, signal.SIGKILL)
                kills += 1

    thread = threading.Thread(target=kill)
    thread.start()
    report = encode_plan(plan, RunOptions(workers=2, threads=1))
    ended.set()
    thread.join()
    assert (report.num_left_out, report.num_texts) == (0, 2000)
    assert report.num_deaths >= 1
    assert outcome(tmp_path / "vectors") == whole(tmp_path, model, corpus)


def _children() -> list[int]:
    """Return the workers of this process."""
    return [child for child, parent in _workers().items() if parent == os.getpid()]


def _workers(folder: str = "") -> dict[int, int]:
    """Return the workers of this machine, and their parents; with `folder`, those that run there."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (process / "stat").read_text().rpartition(")")[2].split()
            is_worker = b"onnxtool.encoding.worker" in (process / "cmdline").read_bytes()
            if is_worker and status[0] != "Z" and folder in str((process / "cwd").readlink()):
                found[int(process.name)] = int(status[1])
    return found


def test_a_driver_that_is_killed_leaves_its_workers_no_work(tmp_path: Path) -> None:
    """They end with it; the next run goes on."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(4000))
    plan = planned(tmp_path, model, corpus)
    command = [sys.executable, "-m", "onnxtool", "encode", "run", "--plan", str(plan), "--workers", "2", "--quiet"]
    driver = subprocess.Popen(command, start_new_session=True, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("vectors.parts/part-*.json")) and driver.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    while _workers(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report = encode_plan(plan, RunOptions(workers=1))
    assert (report.num_texts, report.num_encoded < 4000) == (4000, True)
    assert outcome(tmp_path / "vectors") == whole(tmp_path, model, corpus)


def test_what_a_worker_meets_is_the_error_of_the_run(tmp_path: Path) -> None:
    """Where it is no matter of a text: a changed collection, or a model that cannot be loaded."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    plan = planned(tmp_path, model, corpus)
    corpus.write_text(corpus.read_text().replace("d80", "x80"))
    with pytest.raises(InputError, match="the input has changed: shard 2"):
        encode_plan(plan, RunOptions(workers=2, threads=1))
    model.write_bytes(b"none")
    with pytest.raises(ModelFileError, match="is not a complete ONNX model"):
        encode_plan(plan, RunOptions(workers=1))


def test_a_text_is_not_convicted_by_a_single_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where it follows one that ends its process twice: this death may be somebody else's fault."""
    plan = planned(tmp_path, dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(6)))
    worker = Worker(RunOptions().worker(read_plan(plan), 1))
    deaths = [3, 3, 4]

    def run(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for place in range(order["begin"], 6):
            yield {"text": place}
            if deaths and deaths[0] == place:
                deaths.pop(0)
                raise Died("SIGKILL")

    monkeypatch.setattr(worker, "_ask", run)
    assert worker._find(0) == {3: "cannot be encoded: it ends the process (SIGKILL)"}
    assert not deaths


def test_a_worker_imports_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has put it there may be anybody who shares the plan."""
    (tmp_path / "json.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    (piece,) = cut_pieces(find_sources(write_corpus(tmp_path / "corpus.jsonl", make_texts(3)))[0])
    with closing(WorkerProcess("onnxtool.encoding.plan_worker")) as process:
        assert [*process.ask({"count": replace(piece, end=1 << 20).to_json()})] == [{"lines": 3}]


def test_a_process_that_dies_as_it_answers_has_died(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of an answer is none, and no failure of who reads it; one that cannot be started is an error."""
    (tmp_path / "half.py").write_text("print('{\"shard\": 1}\\n{\"sha', end='')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = WorkerProcess("half")
    answers = process.ask({})
    assert next(answers) == {"shard": 1}
    with pytest.raises(Died, match="exit code 0"):
        next(answers)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(OnnxtoolError, match="cannot start a process: No such file"):
        next(process.ask({}))


def test_a_shard_of_which_no_text_is_at_fault_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only together do they end the process, by memory for one; nothing is rejected then."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    lines = corpus.read_text().splitlines()
    lines[50] = lines[50].replace('"d50"', '"poison50"')
    corpus.write_text("\n".join(lines) + "\n")
    plan = planned(tmp_path, model, corpus)
    for name, value in poisoned(tmp_path, code_of("os._exit(3) if len(texts) > 1 else None")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SessionError, match="shard 1 ends the process that encodes it, and none of its texts does"):
        encode_plan(plan, RunOptions(workers=1))


def test_runs_are_of_shards_that_follow_each_other() -> None:
    """So that a packed file is not unpacked from its beginning for each; the last ones are short."""
    assert runs_of([0, 1, 2, 5, 6, 9], 1) == [[0, 1, 2], [5], [6], [9]]
    assert [len(run) for run in runs_of(range(20), 2)] == [5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    assert max(map(len, runs_of(range(100_000), 4))) == 64
    assert [number for run in runs_of(range(1000), 7) for number in run] == [*range(1000)]


@pytest.mark.parametrize("values", [{"engine": "dask"}, {"workers": -1}, {"threads": -1}, {"memory_limit": -1}])
def test_options_that_are_none_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        RunOptions(**values)


def test_the_command_says_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends with 0: the rejected lines are named in a file."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(60))
    corpus.write_text(corpus.read_text().replace('"d7"', '"poison7"'))
    plan = planned(tmp_path, model, corpus)
    for name, value in poisoned(tmp_path, code_of("os._exit(3)")).items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["encode", "run", "--plan", str(plan), "--quiet", "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "Texts that no worker can run: 1" in result.stdout


def test_an_engine_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    plan = planned(tmp_path, dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(5)))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'onnxtool\[ray\]'"):
        encode_plan(plan, RunOptions(engine="ray"))


def test_a_worker_is_told_by_lines(tmp_path: Path) -> None:
    """Parts and workers may be mixed: what has a record is done."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(150))
    plan = planned(tmp_path, model, corpus)
    encode_part(plan, PartOptions(shards="1"))
    worker = Worker(RunOptions().worker(read_plan(plan), 1))
    events: list[dict[str, Any]] = []
    worker.encode([0, 2], events.append)
    worker.close()
    assert [event["shard"] for event in events if "shard" in event] == [0, 2]
    assert merge_parts(plan).to_do == "3"
    encode_plan(plan)
    assert outcome(tmp_path / "vectors") == whole(tmp_path, model, corpus)
    assert contents_of(tmp_path / "vectors")
