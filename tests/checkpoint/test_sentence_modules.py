"""What sentence-transformers writes is read in every form of its versions, once, and nothing outside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.sentence_modules import SentenceModules, stays_inside
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.reports import Json
from tests.infer.tiny_models import write_checkpoint


def described(folder: Path, **files: Json) -> SentenceModules:
    """Write `files`, called by their names without suffix, and read what they describe."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return CheckpointFolder(folder).sentence_modules


def test_modules_are_known_by_their_class(tmp_path: Path) -> None:
    """Packages moved between versions."""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    transformer, pooling = described(
        tmp_path,
        modules=[
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling", "path": "1_Pooling"},
        ],
    ).modules
    assert (transformer.kind, transformer.folder, transformer.file("x")) == ("Transformer", "", "x")
    assert (pooling.kind, pooling.settings, pooling.file("x")) == ("Pooling", {"pooling_mode": "cls"}, "1_Pooling/x")


def test_a_checkpoint_of_another_library_has_no_modules(tmp_path: Path) -> None:
    """And says nothing of its encoder or the length of its texts."""
    assert described(tmp_path) == SentenceModules()


@pytest.mark.parametrize(
    "content",
    [{}, [1], [{"type": "Pooling"}], [{"type": "a.Pooling", "path": "../x"}], [{"type": 3, "path": ""}],
     [{"type": "P", "path": "/x"}]],
)  # fmt: skip
def test_malformed_modules_are_refused(tmp_path: Path, content: Json) -> None:
    """The error names the file; a path in it must stay below the folder."""
    with pytest.raises(InputError, match=r"modules\.json is malformed"):
        described(tmp_path, modules=content)


def test_the_first_file_that_says_anything_of_the_transformer_decides(tmp_path: Path) -> None:
    """As in sentence-transformers 6.2: an empty one is passed over, and of the others the first counts alone."""
    old: Json = {"max_seq_length": 75, "do_lower_case": True}
    assert described(tmp_path).max_sequence_length is None
    read = described(tmp_path, sentence_bert_config={}, sentence_xlnet_config=old)
    assert (read.max_sequence_length, read.transformer_file) == (75, "sentence_xlnet_config.json")
    assert read.lower_cases
    read = described(tmp_path, sentence_bert_config={"do_lower_case": False}, sentence_xlnet_config=old)
    assert read.max_sequence_length is None
    assert not read.lower_cases


def test_texts_are_lower_cased_by_a_file_of_an_old_name(tmp_path: Path) -> None:
    """Where sentence-transformers reads it, too."""
    folder = write_checkpoint(tmp_path)
    texts = ["The CAT"]
    assert TextTokenizer(CheckpointFolder(folder)).encode(texts)[0].ids == (2, 1, 1, 3)
    (folder / "sentence_roberta_config.json").write_text('{"do_lower_case": true}')
    assert TextTokenizer(CheckpointFolder(folder)).encode(texts)[0].ids == (2, 10, 6, 3)


def test_the_encoder_says_what_it_is(tmp_path: Path) -> None:
    """Since version 5."""
    assert described(tmp_path).encoder_class == ""
    assert described(tmp_path, config_sentence_transformers={"model_type": "SparseEncoder"}).encoder_class == (
        "SparseEncoder"
    )


def test_each_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it, and however often."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    folder = CheckpointFolder(tmp_path)
    assert folder.read("config.json") == {"model_type": "bert"}
    monkeypatch.setattr(Path, "read_bytes", None)
    assert folder.read("config.json") == {"model_type": "bert"}


@pytest.mark.parametrize("path", ["", "1_Pooling", "a/b", "a..b"])
def test_paths_below_the_checkpoint_are_taken(path: str) -> None:
    """The checkpoint's own folder among them."""
    assert stays_inside(path)


@pytest.mark.parametrize("path", ["..", "a/../..", "/etc", "a\\b", "C:x", "a\0b"])
def test_paths_that_leave_the_checkpoint_are_not(path: str) -> None:
    """In the notation of any system."""
    assert not stays_inside(path)
