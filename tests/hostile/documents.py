"""Ways to damage the JSON files of a checkpoint: its tokenizer, its configuration, its modules."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

_DEPTH = 10_000
ABSURD = (0, -1, -5, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, -(2**63))
# What no configuration should have at most places.
_VALUES: tuple[Any, ...] = (
    *(None, True, [], {}, "", "x", "a" * 10_000, "\x00", [[]], {"a": {}}, float("nan"), 1e308),
    *ABSURD,
)


def _tokenizer_pieces() -> dict[str, dict[str, Any]]:
    """Return parts of tokenizer.json that ask too much or lack what they name."""
    catastrophic = {"Regex": "(a+)+$"}
    empty = {"Regex": "x*"}
    long = "y" * 1_000
    template = [{"SpecialToken": {"id": "[NONE]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"[NONE]": {"id": "[NONE]", "ids": [2**40], "tokens": []}}
    return {
        "catastrophic split": {
            "pre_tokenizer": {"type": "Split", "pattern": catastrophic, "behavior": "Isolated", "invert": False}
        },
        "catastrophic replacement": {"normalizer": {"type": "Replace", "pattern": catastrophic, "content": "b"}},
        "replacements that grow": {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": empty, "content": long}] * 4,
            }
        },
        "prefixes that grow": {
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": long}] * 2_000}
        },
        "broken regular expression": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(((("}, "content": ""}},
        "no charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        "charsmap of noise": {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(bytes(range(256)) * 4).decode(),
            }
        },
        "charsmap that lies": {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(b"\xff\xff\xff\x7f" + bytes(64)).decode(),
            }
        },
        "template without its token": {
            "post_processor": {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": {}}
        },
        "template of a huge id": {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": template,
                "pair": template,
                "special_tokens": special,
            }
        },
        "template without text": {
            "post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
        },
        "no unknown token": {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        "unigram without unknown": {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 99}},
        "unigram of NaN": {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", 1e308]], "unk_id": 0}},
        "merges of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}},
        "huge ids": {
            "model": {"type": "WordLevel", "vocab": {"hello": 2**32 - 1, "[UNK]": 2**31}, "unk_token": "[UNK]"}
        },
        "huge truncation": {
            "truncation": {"max_length": 2**62, "strategy": "LongestFirst", "stride": 2**61, "direction": "Right"}
        },
        "stride as long as the text": {
            "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 2, "direction": "Left"}
        },
        "huge padding": {
            "padding": {
                "strategy": {"Fixed": 2**40},
                "direction": "Right",
                "pad_to_multiple_of": 0,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "[PAD]",
            }
        },
        "added token of nothing": {
            "added_tokens": [
                {
                    "id": 5,
                    "content": "",
                    "single_word": False,
                    "lstrip": True,
                    "rstrip": True,
                    "normalized": False,
                    "special": True,
                }
            ]
        },
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
