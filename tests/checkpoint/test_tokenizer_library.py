"""A tokenizer.json that is damaged or made to do harm ends in one error that names it, soon and in bounded memory."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from tests.infer.tiny_models import write_checkpoint

LETTERS = "a" * 45 + "!"
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")


def charsmap(said: int) -> dict[str, Any]:
    """Return a normalizer whose table of characters says how long it is, and has 4 bytes."""
    return {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(said.to_bytes(4, "little") + bytes(4)).decode(),
    }


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    """Return a normalizer that replaces what the pattern matches."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def read(folder: Path, **changed: Any) -> None:
    """Let the tokenizer of a checkpoint, with these parts changed, read 45 letters."""
    path = write_checkpoint(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changed), "utf-8")
    TextTokenizer(CheckpointFolder(folder)).encode([LETTERS])


def split(expression: str) -> dict[str, Any]:
    """Return a pre-tokenizer that splits at matches."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"pre_tokenizer": split("(a+)+$")}, "takes too long", id="split"),
        pytest.param({"pre_tokenizer": split("^(([a-z])+.)+[A-Z]$")}, "takes too long", id="nested groups"),
        pytest.param({"normalizer": replaced({"Regex": "(a|aa)+$"}, "x")}, "takes too long", id="replace"),
        pytest.param(
            {"normalizer": {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "a" * 100)] * 6}},
            "more than 10,000 times as long",
            id="growth",
        ),
        pytest.param({"normalizer": replaced({"Regex": "b*"}, "a" * 20_000)}, "10,000 times", id="empty matches"),
        pytest.param(
            {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "[UNK]"}, "added_tokens": []},
            "Missing [UNK] token",
            id="no unknown token",
        ),
        pytest.param(
            {"model": {"type": "Unigram", "vocab": [["b", -1.0]], "unk_id": None}, "added_tokens": []},
            "`unk_id` is missing",
            id="no unknown id",
        ),
        pytest.param(
            {"post_processor": {"type": "TemplateProcessing", "single": [B], "pair": [A, B], "special_tokens": {}}},
            "fails on it",
            id="template of a second text",
        ),
        pytest.param(
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "[NONE]", "type_id": 0}}, A],
                    "pair": [A, B],
                    "special_tokens": {},
                }
            },
            "no entry found",
            id="template without its token",
        ),
        pytest.param({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "non-zero", id="parts of no length"),
        pytest.param(
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "charsmap", id="short charsmap"
        ),
    ],
)
def test_a_hostile_tokenizer_ends_in_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changed: dict[str, Any], reason: str
) -> None:
    """Panics of the library are no Exception, and its regular expressions give up: neither goes past us."""
    start = time.perf_counter()
    with pytest.raises(InputError) as raised:
        read(tmp_path, **changed)
    assert time.perf_counter() - start < 10
    assert reason in raised.value.message
    assert str(tmp_path / "tokenizer.json") in raised.value.message
    assert raised.value.hint
    capfd.readouterr()  # Rust prints where it panics


@pytest.mark.parametrize("said", [64, 2**32 - 1])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_table_of_characters_that_says_too_much_is_refused(tmp_path: Path, said: int, escaped: bool) -> None:
    """The library would allocate it: 8 GB for a file of one kilobyte. An escape in the name hides nothing."""
    path = write_checkpoint(tmp_path) / "tokenizer.json"
    text = json.dumps(json.loads(path.read_text("utf-8")) | {"normalizer": charsmap(said)})
    path.write_text(text.replace("precompiled_", r"\u0070recompiled_") if escaped else text, "utf-8")
    with pytest.raises(InputError, match=f"precompiled_charsmap says {said:,} bytes and has"):
        TextTokenizer(CheckpointFolder(tmp_path))


@pytest.mark.parametrize("length", [1, 3])
def test_rules_that_let_texts_grow_a_little_are_taken(tmp_path: Path, length: int) -> None:
    """Real tokenizers replace spaces by a character of three bytes."""
    read(tmp_path, normalizer=replaced({"String": " "}, "▁" * length), pre_tokenizer=split("a+?"))
