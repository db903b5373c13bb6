"""The files that a tokenizer is read from are found by the names that its class gives them, and copied."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.errors import CheckpointError, OnnxtoolError
from onnxtool.export import source as vocabularies
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.sidecar_files import obsolete_sidecar_files, write_sidecar_files
from onnxtool.export.source import Source, fetch, files_of, has_vocabulary, missing_packages
from onnxtool.progress import Stage, listening


def checkpoint(folder: Path, model_type: str, *names: str) -> Source:
    """Write a configuration and files of these names, which hold nothing of use."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name in names:
        (folder / name).write_text(f"content of {name}")
    return Source.find(str(folder))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("bert", "vocab.txt"),
        ("deberta-v2", "spm.model"),
        ("rembert", "sentencepiece.model"),
        ("fsmt", "vocab-src.json"),
        ("marian", "source.spm"),
        ("prophetnet", "prophetnet.tokenizer"),
        ("luke", "entity_vocab.json"),
        ("xlm-roberta", "sentencepiece.bpe.model"),
        ("t5", "tokenizer.json"),
    ],
)
def test_a_vocabulary_is_known_by_the_name_that_its_class_gives_it(tmp_path: Path, model_type: str, name: str) -> None:
    """With the file there is a tokenizer, and without it there is none."""
    source = checkpoint(tmp_path, model_type, name)
    assert has_vocabulary(source, model_type)
    (tmp_path / name).unlink()
    assert not has_vocabulary(Source.find(str(tmp_path)), model_type)


@pytest.mark.parametrize("name", ["merges.txt", "normalizer.json", "tokenizer_config.json", "emoji.json"])
def test_what_lies_beside_a_vocabulary_is_none(tmp_path: Path, name: str) -> None:
    """Transformers would make up a vocabulary; CANINE, which hashes characters, needs none."""
    source = checkpoint(tmp_path, "whisper")
    (tmp_path / name).write_text("{}")
    assert not has_vocabulary(source, "whisper")
    assert has_vocabulary(source, "canine")


def test_a_file_outside_the_checkpoint_is_refused() -> None:
    """A tokenizer class may be the checkpoint's own code."""
    hostile = type("Tokenizer", (), {"vocab_files_names": {"vocab_file": "../elsewhere.txt"}})
    with pytest.raises(CheckpointError, match="outside its folder"):
        files_of(hostile())


def test_the_files_of_the_tokenizers_class_are_copied(tmp_path: Path) -> None:
    """DeBERTa calls its vocabulary spm.model; a chat template lies beside any tokenizer; other files stay."""
    names = ("spm.model", "chat_template.jinja", "tokenizer.json")
    source = checkpoint(tmp_path / "model", "deberta-v2", *names, "notes.txt")
    write_sidecar_files(source, object(), tmp_path / "staged", tmp_path / "output")
    copied = {path.name: path.read_text() for path in (tmp_path / "staged").iterdir()}
    assert copied.keys() == {"config.json", *names}
    assert all(copied[name] == f"content of {name}" for name in names)
    # A BERT with the tokenizer of another model, which its settings name.
    source = checkpoint(tmp_path / "bert", "bert", "spm.model", "tokenizer.json")
    (tmp_path / "bert" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "DebertaV2Tokenizer"}))
    write_sidecar_files(source, object(), tmp_path / "staged of bert", tmp_path / "output")
    assert (tmp_path / "staged of bert" / "spm.model").exists()


def test_what_a_replaced_model_left_is_found_whatever_its_tokenizer_was(tmp_path: Path) -> None:
    """Else the files of two tokenizers would lie side by side."""
    source = checkpoint(tmp_path / "model", "bert", "vocab.txt")
    existing = tmp_path / "existing"
    checkpoint(existing, "deberta-v2", "spm.model", "vocab.txt", "notes.txt")
    write_sidecar_files(source, object(), tmp_path / "staged", existing)
    assert obsolete_sidecar_files(source, tmp_path / "staged", existing) == [existing / "spm.model"]
    assert obsolete_sidecar_files(source, tmp_path / "staged", tmp_path / "model") == []


@pytest.mark.parametrize(
    ("missing", "hint"),
    [({"sentencepiece"}, "sentencepiece"), ({"sentencepiece", "google.protobuf"}, "sentencepiece protobuf")],
)
def test_a_sentencepiece_model_says_which_package_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: set[str], hint: str
) -> None:
    """Transformers asks for tiktoken instead."""
    monkeypatch.setattr(vocabularies, "_is_installed", lambda module: module not in missing)
    source = checkpoint(tmp_path, "deberta-v2", "spm.model", "model.safetensors")
    opened: Any = Checkpoint.open(source, task="fill-mask")
    with pytest.raises(CheckpointError, match="is a SentencePiece model") as error:
        opened.load_tokenizer()
    assert error.value.hint.startswith(f"pip install {hint};")


def test_no_package_is_missing_for_a_tokenizer_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is damaged, another package would not help."""
    source = checkpoint(tmp_path, "deberta-v2", "spm.model", "tokenizer.json")
    monkeypatch.setattr(vocabularies, "_is_installed", lambda _module: False)
    assert missing_packages(source, "deberta-v2") == ()


CONTENT = bytes(12_000_000)


class Hub(BaseHTTPRequestHandler):
    """Has one file of one checkpoint."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        found = self.path.endswith("/org/name/resolve/main/model.safetensors")
        self.send_response(200 if found else 404)
        self.send_header("ETag", '"1234"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("X-Error-Code", "" if found else "EntryNotFound")
        self.send_header("Content-Length", str(len(CONTENT)) if found else "0")
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(CONTENT)

    def log_message(self, *_arguments: object) -> None:
        """Stay quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve it on this machine, and give the folder of the cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_a_download_tells_how_far_it_is(hub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In megabytes, once; what is in the cache is not fetched again, and the hub's own bar is not shown."""
    heard: list[str] = []
    with listening(heard.append):
        fetch("org/name", "model.safetensors", None)
    (stored,) = hub.rglob("snapshots/*/model.safetensors")
    assert stored.stat().st_size == len(CONTENT)
    stages = [(one.name, one.done, one.total) for one in heard if isinstance(one, Stage)]
    assert (stages[0], stages[-1]) == (
        ("downloading model.safetensors, MB", 0, 12),
        ("downloading model.safetensors, MB", 12, 12),
    )
    heard.clear()
    with listening(heard.append):
        fetch("org/name", "model.safetensors", None)
    assert heard == []
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_not_there_is_for_the_reader_to_miss(hub: Path) -> None:
    """Checkpoints of several shards have no single file."""
    fetch("org/name", "pytorch_model.bin", None)
    assert not list(hub.rglob("snapshots/*/pytorch_model.bin"))


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "1_Pooling/config.json"])
def test_links_lead_to_the_blobs_of_the_hubs_cache_and_nowhere_else(tmp_path: Path, name: str) -> None:
    """What they lead to would be copied beside the graph, and published."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "ab12"
    (snapshot / name).parent.mkdir(parents=True)
    for folder in ("blobs", "blobs-of-others"):
        (snapshot.parents[1] / folder).mkdir()
        (snapshot.parents[1] / folder / "hash").write_text("{}")
    (snapshot / name).symlink_to(snapshot.parents[1] / "blobs" / "hash")
    (tmp_path / "link to ab12").symlink_to(snapshot)
    places = (snapshot, tmp_path / "link to ab12")
    for place in places:
        assert Source.find(str(place)).locate(name) == place / name
        assert CheckpointFolder(place).locate(name) == place / name
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(snapshot.parents[1] / "blobs-of-others" / "hash")
    for place in places:
        for checkpoint in (Source.find(str(place)), CheckpointFolder(place)):
            with pytest.raises(
                OnnxtoolError, match=rf"{name}: it is a link to .*blobs-of-others/hash, outside"
            ) as caught:
                checkpoint.locate(name)
            assert "copy" in caught.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_that_only_transformers_would_follow_are_refused_before(tmp_path: Path) -> None:
    """It reads more than what is looked up by name."""
    (tmp_path / "outside.py").write_text("")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "modeling.py").symlink_to("../outside.py")
    source = Source.find(str(tmp_path / "checkpoint"))
    with pytest.raises(OSError, match="it is a link") as caught:
        _ = source.arguments
    assert "copy" in source.unreadable(caught.value).hint
