"""A run that was stopped anywhere goes on, and its files are those of a run that was not, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxtool.encoding import CorpusOptions, encode_corpus, files, records, splits
from onnxtool.encoding.manifest import read_manifest
from onnxtool.encoding.output import OutputFolder
from onnxtool.errors import InputError, OutputExistsError, OutputWriteError
from tests.encoding.corpora import contents_of, dense_model, make_texts, sparse_model, stopped_after, write_corpus

OPTIONS = CorpusOptions(provider="cpu", shard_size=40)
RUN = """
import sys
from onnxtool.encoding import CorpusOptions, encode_corpus
encode_corpus(*sys.argv[1:], CorpusOptions(provider="cpu", shard_size=40))
"""


class _Stop(Exception):  # noqa: N818
    """What a test stops a run by."""


def _killed(model: Path, corpus: Path, output: Path, shards: int) -> bool:
    """Run in a process of its own, kill it when `shards` files are there; return whether it was still running."""
    process = subprocess.Popen([sys.executable, "-c", RUN, str(model), str(corpus), str(output)])
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if output.is_dir() and sum(path.name.startswith("part-") for path in output.iterdir()) >= shards:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    return process.wait() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_killed_twice_the_files_are_those_of_one_run(tmp_path: Path) -> None:
    """No hook in the program: the process is killed from outside when the first shards appear."""
    model = sparse_model(tmp_path)
    corpus = write_corpus(tmp_path / "corpus.jsonl", make_texts(4000))
    corpus.write_text("{\n" + corpus.read_text() + '{"id": "d7", "contents": "again"}\n')
    assert _killed(model, corpus, tmp_path / "vectors", 1)
    assert _killed(model, corpus, tmp_path / "vectors", 9)
    report = encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    assert report.resumed
    assert 0 < report.num_encoded < report.num_texts == 4000
    encode_corpus(model, corpus, tmp_path / "whole", OPTIONS)
    assert contents_of(tmp_path / "vectors") == contents_of(tmp_path / "whole")


@pytest.mark.parametrize("num_texts", [1, 41, 99])
def test_an_error_leaves_whole_shards_and_no_half_one(
    tmp_path: Path, num_texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an exception stops, also in the middle of a shard, goes on after that shard's last file."""
    monkeypatch.setattr(splits, "WINDOW_TEXTS", 16)
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    with pytest.raises(_Stop), stopped_after(num_texts, _Stop):
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    left = contents_of(tmp_path / "vectors")
    assert not [name for name in left if "partial" in name]
    assert sum(name.endswith(".npy") for name in left) == (num_texts - 1) // 40
    encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    encode_corpus(model, corpus, tmp_path / "whole", OPTIONS)
    assert contents_of(tmp_path / "vectors") == contents_of(tmp_path / "whole")


def test_what_a_killed_run_left_half_is_removed(tmp_path: Path) -> None:
    """Its stage, and a shard that the manifest does not name yet."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    before = contents_of(tmp_path / "vectors")
    stage = tmp_path / ".vectors.0123abcd.partial" / "files"
    stage.mkdir(parents=True)
    (stage / "part-00003.npy").write_bytes(b"half")
    (tmp_path / "vectors" / "part-00009.npy").write_bytes(b"unnamed")
    encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    assert contents_of(tmp_path / "vectors") == before


def test_a_finished_run_is_read_again_and_nothing_is_encoded(tmp_path: Path) -> None:
    """Its report is of the whole corpus."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    first = encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    again = encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    assert (again.num_texts, again.num_encoded, again.resumed) == (100, 0, True)
    assert "still have the same sizes" in again.notes[-1]
    assert not first.notes
    assert (again.num_tokens, again.padding_share) == (first.num_tokens, first.padding_share)


def test_an_input_that_changed_within_its_size_is_an_error_where_a_split_goes_on(tmp_path: Path) -> None:
    """A word of a shard that is done, with as many letters. Splits that are done are not read again."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["red cat", *make_texts(99)])
    with pytest.raises(_Stop), stopped_after(90, _Stop):
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    corpus.write_text(corpus.read_text().replace("red cat", "red dog", 1))
    with pytest.raises(InputError, match="the input has changed: shard 0 of split 0"):
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)


@pytest.mark.parametrize("killed", ["before", "after"])
def test_a_replacement_that_was_killed_at_its_beginning_goes_on_or_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed: str
) -> None:
    """The same command goes on once its records are there beside the earlier manifest; before, the old set stays."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    old, changed = contents_of(tmp_path / "vectors"), replace(OPTIONS, vectors_as="float16")
    parts = tmp_path / "vectors.parts"
    if killed == "before":
        parts.mkdir()
        with pytest.raises(OutputExistsError, match="another command"):
            encode_corpus(model, corpus, tmp_path / "vectors", changed)
        assert not parts.exists()
        assert contents_of(tmp_path / "vectors") == old
        return

    def stop(paths: Iterable[Path]) -> None:
        if tmp_path / "vectors.manifest.json" in (named := list(paths)):
            raise _Stop
        files.remove(named)

    with monkeypatch.context() as patched:
        patched.setattr(records, "remove", stop)
        with pytest.raises(_Stop):
            encode_corpus(model, corpus, tmp_path / "vectors", replace(changed, force=True))
    assert encode_corpus(model, corpus, tmp_path / "vectors", changed).num_encoded == 100
    assert contents_of(tmp_path / "vectors") != old
    assert not parts.exists()


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "half"])
def test_vectors_of_an_older_kind_of_digest_are_refused_by_name(tmp_path: Path, is_whole: bool) -> None:
    """It is not the input that has changed, and nothing is removed without being asked."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    with suppress(_Stop), stopped_after(1000 if is_whole else 90, _Stop):
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    path = tmp_path / ("vectors.manifest.json" if is_whole else "vectors.parts/run.json")
    content = json.loads(path.read_text())
    assert content["identity"]["versions"].pop("shard_digest")
    path.write_text(json.dumps(content))
    before = sorted((tmp_path / "vectors").iterdir())
    with pytest.raises(OutputExistsError, match="shard_digest: none, now 2") as caught:
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    assert "--force" in caught.value.hint
    assert sorted((tmp_path / "vectors").iterdir()) == before


def test_a_shard_that_is_missing_or_cut_is_an_error(tmp_path: Path) -> None:
    """Rather than a corpus with a hole."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    shard = tmp_path / "vectors" / "part-00000_00001.npy"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(OutputExistsError, match=r"part-00000_00001\.npy is missing, or its size has changed"):
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 99}', "[" * 100_000], ids=len)
def test_a_manifest_that_is_none_is_an_error(tmp_path: Path, content: str) -> None:
    """It is named, and nothing is removed."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    (tmp_path / "vectors.manifest.json").write_text(content)
    with pytest.raises(InputError, match=r"vectors\.manifest\.json is not a manifest"):
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    assert (tmp_path / "vectors.manifest.json").read_text() == content


@pytest.mark.parametrize("value", ["1", 1.5, True, -1, None, []])
def test_a_manifest_whose_counts_are_none_is_an_error(tmp_path: Path, value: Any) -> None:
    """Before they are added up."""
    shard = {"files": [], "digest": "", "num_tokens": 1, "num_padding": 0, "num_truncated": 0, "rejects": []}
    shard["num_passages"] = shard["num_empty"] = 0
    content = {"format": 1, "identity": {}, "shards": [{**shard, "num_texts": value}], "num_rejects": 0}
    (tmp_path / "m.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"not a manifest of an encoded corpus: it.shards\[0\].num_texts is"):
        read_manifest(tmp_path / "m.json")


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
def test_two_runs_never_write_into_one_folder(tmp_path: Path) -> None:
    """The second one is told; the lock leaves no file, and ends with its holder."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    with OutputFolder(tmp_path / "vectors").locked():
        with pytest.raises(OutputExistsError, match="another run is writing"):
            encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
        assert list((tmp_path / "vectors").iterdir()) == []
    assert encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS).num_texts == 1


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
def test_force_discards_nothing_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Encoding processes hold no lock on the folder, as several of them fill it; each has a stage."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    output = tmp_path / "vectors"
    with OutputFolder(output).writing():
        with pytest.raises(OutputExistsError, match=r"another run is writing into \S*vectors\n"):
            encode_corpus(model, corpus, output, replace(OPTIONS, force=True))
        assert encode_corpus(model, corpus, output, OPTIONS).num_texts == 1
    assert encode_corpus(model, corpus, output, replace(OPTIONS, force=True)).num_encoded == 1


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Without a traceback."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputWriteError, match="cannot write"):
        encode_corpus(model, corpus, tmp_path / "locked" / "vectors", OPTIONS)


def test_an_output_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    """Vectors need a folder."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    (tmp_path / "vectors").write_text("taken")
    with pytest.raises(OutputWriteError, match="cannot write"):
        encode_corpus(model, corpus, tmp_path / "vectors", OPTIONS)
    assert (tmp_path / "vectors").read_text() == "taken"
