"""A whole corpus by worker processes: the bytes of one run, whatever becomes of the workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from onnxtool.encoding import CorpusProgress, PartOptions, RunOptions, corpus_status, encode_part, encode_parts
from onnxtool.encoding.encoder import EncodingTask
from onnxtool.encoding.progress import Event
from onnxtool.encoding.workers import LocalWorkers
from onnxtool.errors import InputError, ModelFileError, SessionError
from onnxtool.progress import listening
from tests.encoding.corpora import (
    OPTIONS,
    SIZE,
    SPLIT,
    collection,
    contents_of,
    dense_model,
    make_texts,
    whole,
    write_corpus,
)
from tests.encoding.poison import code_of, poisoned

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def poison(corpus: Path, *places: int) -> None:
    """Call some texts so that workers fail at them."""
    lines = corpus.read_text().splitlines()
    for place in places:
        lines[place] = lines[place].replace(f'"d{place}"', f'"poison{place}"')
    corpus.write_text("\n".join(lines) + "\n")


def test_workers_are_one_run(tmp_path: Path) -> None:
    """However many there are; the second run finds all done."""
    model, corpus = dense_model(tmp_path), collection(tmp_path, "folder")
    seen: list[Any] = []
    with listening(seen.append):
        report = encode_parts(model, corpus, tmp_path / "vectors", OPTIONS, RunOptions(processes=2, workers=1))
    assert (report.processes, report.num_encoded_splits) == (2, report.num_splits)
    assert contents_of(tmp_path / "vectors") == whole(tmp_path, model, corpus)
    progress = [stage for stage in seen if isinstance(stage, CorpusProgress)][-1]
    assert (progress.num_texts, round(progress.share, 6)) == (report.num_encoded, 1)
    assert progress.tokens_per_s
    again = encode_parts(model, corpus, tmp_path / "vectors", OPTIONS)
    assert (again.processes, again.num_encoded, again.num_texts) == (0, 0, report.num_texts)


def test_a_process_that_dies_is_an_error_that_names_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their shard; finished shards are kept, and without the text the same command goes on to the end."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    poison(corpus, 40)
    for name, value in poisoned(tmp_path, code_of("os.abort()")).items():
        monkeypatch.setenv(name, value)
    place = tmp_path / "vectors"
    with pytest.raises(SessionError, match="was ended by SIGABRT while it encoded shard part-00001, texts d37 to d52"):
        encode_part(model, corpus, place, OPTIONS, PartOptions(processes=1, workers=1))
    (tmp_path / "sitecustomize.py").unlink()
    before = corpus_status(place).num_texts
    report = encode_parts(model, corpus, place, OPTIONS)
    assert (report.num_texts, report.num_encoded) == (90, 90 - before)


def _workers(folder: str | None = None) -> list[int]:
    """Return the workers of this process, or those that run in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (process / "stat").read_text().rpartition(")")[2].split()
            is_worker = b"spawn_main" in (process / "cmdline").read_bytes()
            is_ours = int(status[1]) == os.getpid() if folder is None else str((process / "cwd").readlink()) == folder
            if is_worker and status[0] != "Z" and is_ours:
                found.append(int(process.name))
    return found


def test_a_worker_that_is_killed_ends_the_run_and_the_next_one_resumes(tmp_path: Path) -> None:
    """From outside, until nothing is left to do: the bytes are those of one run."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(800))
    chance = random.Random(0)  # noqa: S311  no secret
    kills = 0
    ended = threading.Event()

    def kill() -> None:
        nonlocal kills
        while not ended.wait(0.05 + chance.random() * 0.2) and not kills:
            if list(tmp_path.glob("vectors.parts/part-*")):
                for child in _workers():
                    os.kill(child, signal.SIGKILL)
                    kills += 1

    thread = threading.Thread(target=kill)
    thread.start()
    run = RunOptions(processes=2, workers=1)
    with pytest.raises(SessionError, match="an encoding process was ended by SIGKILL while it "):
        encode_parts(model, corpus, tmp_path / "vectors", OPTIONS, run)
    ended.set()
    thread.join()
    report = encode_parts(model, corpus, tmp_path / "vectors", OPTIONS, run)
    assert (report.num_texts, report.num_encoded < 800) == (800, True)
    assert contents_of(tmp_path / "vectors") == whole(tmp_path, model, corpus)


def test_a_driver_that_is_killed_leaves_its_workers_no_work(tmp_path: Path) -> None:
    """They end with it; the next run goes on."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(1500))
    options = ["--provider", "cpu", "--shard_size", str(SIZE), "--split_bytes", str(SPLIT), "--processes", "2"]
    places = ["--model_path", str(model), "--input", str(corpus), "--output", str(tmp_path / "vectors")]
    command = [sys.executable, "-m", "onnxtool", "encode", "run", "--quiet", *places, *options]
    driver = subprocess.Popen(command, start_new_session=True, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("vectors.parts/part-*.json")) and driver.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert _workers(str(tmp_path))
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    for process in (driver.pid, *map(int, children)):  # not the workers, which end by themselves
        os.kill(process, signal.SIGKILL)
    driver.wait()
    while _workers(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report = encode_parts(model, corpus, tmp_path / "vectors", OPTIONS, RunOptions(processes=1))
    assert (report.num_texts, report.num_encoded < 1500) == (1500, True)
    assert contents_of(tmp_path / "vectors") == whole(tmp_path, model, corpus)


# How slow each of these is where a signal arrives, in the driver or in a worker.
SLOW = {
    "the launch of a process": ("multiprocessing.process", "BaseProcess.start", 1, "onnxtool"),
    "a model that is loaded": ("pathlib", "Path.is_file", 60, "spawn_main"),
    "a record that is forced to the disk": ("os", "fsync", 1, "spawn_main"),
}


@pytest.mark.parametrize("place", SLOW)
def test_a_signal_ends_a_run_while_its_workers_start(tmp_path: Path, place: str) -> None:
    """Within some seconds, and with one line: nothing that is half started is waited for."""
    module, name, seconds, process = SLOW[place]
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(30))
    code = f"""
import os, sys, time, {module}
if "{process}" in " ".join(sys.orig_argv):
    usual = {module}.{name}
    def slow(*arguments, **named):
        result = usual(*arguments, **named)
        if any("encoding/workers" in frame.f_code.co_filename for frame in frames()):
            try:
                open("slow", "x").close()
            except FileExistsError:
                return result
            time.sleep({seconds})
        return result
    def frames():
        frame = sys._getframe()
        while frame:
            yield frame
            frame = frame.f_back
    {module}.{name} = slow
"""
    variables = {**os.environ, **poisoned(tmp_path, code)}
    places = ["--model_path", str(model), "--input", str(corpus), "--output", str(tmp_path / "vectors")]
    command = [sys.executable, "-m", "onnxtool", "encode", "run", "--quiet", "--provider", "cpu", *places]
    driver = subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "slow").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.terminate()
    assert driver.communicate(timeout=60)[1] == "error: interrupted by SIGTERM\n"
    assert driver.returncode == 143
    assert not _workers(str(tmp_path))
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.usefixtures("workers_here")
def test_what_a_worker_meets_is_the_error_of_the_run(tmp_path: Path) -> None:
    """Where it is no matter of a text: a file that is damaged, or a model that cannot be loaded."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl.gz", make_texts(90))
    corpus.write_bytes(corpus.read_bytes()[:-9])
    with pytest.raises(InputError, match="is damaged after line"):
        encode_parts(model, corpus, tmp_path / "vectors", OPTIONS)
    model.write_bytes(b"none")
    with pytest.raises(ModelFileError, match="is a text file, and no ONNX model"):
        encode_parts(model, corpus, tmp_path / "vectors", OPTIONS)


def test_processes_end_with_their_connections(tmp_path: Path) -> None:
    """As after an error of another one, or an interruption; the next call starts another process."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(30))
    task = EncodingTask(model, corpus, tmp_path / "vectors", OPTIONS)
    events: list[Event] = []
    with closing(LocalWorkers(task, RunOptions(processes=1, workers=1), events.append)) as workers:
        assert workers.open().missing[0] == 0
        assert _workers()
        workers.close()
        assert not _workers()
        workers.encode([0])
        assert sum(event.splits for event in events) == 1


@pytest.mark.usefixtures("workers_here")
def test_an_engine_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(5))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'onnxtool-cli\[ray\]'"):
        encode_parts(model, corpus, tmp_path / "vectors", OPTIONS, RunOptions(engine="ray"))
