"""Ways to damage the JSON files of a checkpoint: its tokenizer, its configuration, its modules."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.hostile.tokenizer_parts import (
    TEXT,
    bpe,
    precompiled,
    replaced,
    sequence,
    special,
    split,
    template,
    unigram,
    wordpiece,
)

_DEPTH = 10_000
ABSURD = (0, -1, -5, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, -(2**63))
# What no configuration should have at most places.
_VALUES: tuple[Any, ...] = (
    *(None, True, [], {}, "", "x", "a" * 10_000, "\x00", [[]], {"a": {}}, float("nan"), 1e308),
    *ABSURD,
)


def _tokenizer_pieces() -> dict[str, dict[str, Any]]:
    """Return parts of tokenizer.json that ask too much or lack what they name."""
    empty, long = {"Regex": "x*"}, "y" * 1_000
    around = [special("[NONE]"), TEXT]
    huge = {"[NONE]": {"id": "[NONE]", "ids": [2**40], "tokens": []}}
    flags = dict.fromkeys(("lstrip", "rstrip", "special"), True) | dict.fromkeys(("single_word", "normalized"), False)
    cut = {"strategy": "LongestFirst"}
    padded = {"pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    return {
        "catastrophic split": {"pre_tokenizer": split("(a+)+$")},
        "catastrophic replacement": {"normalizer": replaced({"Regex": "(a+)+$"}, "b")},
        "replacements that grow": {"normalizer": sequence("normalizer", [replaced(empty, long)] * 4)},
        "prefixes that grow": {"normalizer": sequence("normalizer", [{"type": "Prepend", "prepend": long}] * 2_000)},
        "broken regular expression": {"normalizer": replaced({"Regex": "(((("}, "")},
        "no charsmap": {"normalizer": precompiled(b"")},
        "charsmap of noise": {"normalizer": precompiled(bytes(range(256)) * 4)},
        "charsmap that lies": {"normalizer": precompiled(b"\xff\xff\xff\x7f" + bytes(64))},
        "template without its token": {"post_processor": template(around, around)},
        "template of a huge id": {"post_processor": template(around, around, huge)},
        "template without text": {"post_processor": template([])},
        "no unknown token": {"model": wordpiece({"a": 0})},
        "unigram without unknown": {"model": unigram([["a", -1.0]], 99)},
        "unigram of NaN": {"model": unigram([["a", 0.0], ["b", 1e308]], 0)},
        "merges of nothing": {"model": bpe({"a": 0}, ["x y"])},
        "huge ids": {
            "model": {"type": "WordLevel", "vocab": {"hello": 2**32 - 1, "[UNK]": 2**31}, "unk_token": "[UNK]"}
        },
        "huge truncation": {"truncation": {**cut, "max_length": 2**62, "stride": 2**61, "direction": "Right"}},
        "stride as long as the text": {"truncation": {**cut, "max_length": 2, "stride": 2, "direction": "Left"}},
        "huge padding": {"padding": {**padded, "strategy": {"Fixed": 2**40}, "direction": "Right"}},
        "added token of nothing": {"added_tokens": [{"id": 5, "content": "", **flags}]},
        "added token of a huge id": {"added_tokens": [{"id": 2**32 - 1, "content": "hello", "special": True}]},
    }


TOKENIZER_PIECES = _tokenizer_pieces()


def damage_document(folder: Path, choices: random.Random) -> str:
    """Damage one JSON file under `folder`, and return what was done."""
    files = sorted(path for path in folder.rglob("*.json") if path.is_file() and ".index." not in path.name)
    path = choices.choice(files)
    tokenizer = folder / "tokenizer.json"
    if tokenizer in files and choices.random() < 0.25:
        name = choices.choice(list(TOKENIZER_PIECES))
        content = json.loads(tokenizer.read_text("utf-8")) | TOKENIZER_PIECES[name]
        tokenizer.write_text(json.dumps(content), "utf-8")
        return f"tokenizer.json: {name}"
    where = path.relative_to(folder)
    kind = choices.randrange(8)
    if kind == 0:
        text = choices.choice(
            [
                "",
                "[" * _DEPTH,
                "[" * _DEPTH + "]" * _DEPTH,
                '{"a":' * _DEPTH + "1" + "}" * _DEPTH,
                "nul",
                "\ufeff{}",
                "9" * 9_999,
            ]
        )
        path.write_text(text, "utf-8")
        return f"{where}: other text"
    if kind == 1:
        data = bytearray(path.read_bytes())
        for _ in range(choices.choice((1, 5))):
            data[choices.randrange(len(data))] = choices.randrange(256)
        path.write_bytes(bytes(data))
        return f"{where}: bytes"
    if kind == 2:
        path.unlink()
        return f"{where}: gone"
    content = json.loads(path.read_text("utf-8"))
    place = _change(content, choices)
    path.write_text(json.dumps(content), "utf-8")
    return f"{where}: {place}"


def _change(content: Any, choices: random.Random) -> str:
    """Replace, remove or add one value somewhere in a tree, and return where."""
    at = ""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            return at
        key = choices.choice(keys)
        at = f"{at}.{key}"[-80:]
        inner = content[key]
        if isinstance(inner, dict | list) and inner and choices.random() < 0.8:
            content = inner
            continue
        if choices.random() < 0.2 and isinstance(content, dict):
            del content[key]
        else:
            content[key] = choices.choice(_VALUES)
        return at
