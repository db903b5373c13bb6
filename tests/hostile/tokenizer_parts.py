"""Parts of a tokenizer.json, as the tokenizers library writes them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

Part = dict[str, Any]

# By the part that has several: what the list of them is called.
LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
TEXT: Part = {"Sequence": {"id": "A", "type_id": 0}}
SECOND_TEXT: Part = {"Sequence": {"id": "B", "type_id": 0}}


def replaced(pattern: Part, content: str) -> Part:
    """Make a normalizer or a decoder that replaces what the pattern matches."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(expression: str, behavior: str = "Isolated", *, invert: bool = False) -> Part:
    """Make a pre-tokenizer that splits at matches."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": invert}


def sequence(part: str, parts: Sequence[Part]) -> Part:
    """Make one of several, which is called `part` in the file."""
    return {"type": "Sequence", LISTS[part]: list(parts)}


def precompiled(content: bytes | str) -> Part:
    """Make a normalizer of a table of characters, from its bytes or as it is written."""
    written = content if isinstance(content, str) else base64.b64encode(content).decode()
    return {"type": "Precompiled", "precompiled_charsmap": written}


def special(token: str) -> Part:
    """Make a special token of a template."""
    return {"SpecialToken": {"id": token, "type_id": 0}}


def template(single: Sequence[Part], pair: Sequence[Part] = (), tokens: Mapping[str, Part] | None = None) -> Part:
    """Make a post-processor that puts tokens around a text."""
    parts = {"single": list(single), "pair": list(pair)}
    return {"type": "TemplateProcessing", **parts, "special_tokens": dict(tokens or {})}


def wordpiece(vocabulary: Mapping[str, int], **settings: Any) -> Part:
    """Make a model of words and their pieces."""
    return {"type": "WordPiece", "vocab": dict(vocabulary), "unk_token": "[UNK]", **settings}


def unigram(vocabulary: Sequence[Any], unknown: int | None, **settings: Any) -> Part:
    """Make a model of pieces with their logarithms of probabilities."""
    return {"type": "Unigram", "vocab": list(vocabulary), "unk_id": unknown, **settings}


def bpe(vocabulary: Mapping[str, int], merges: Sequence[str] = (), **settings: Any) -> Part:
    """Make a model of merges."""
    return {"type": "BPE", "vocab": dict(vocabulary), "merges": list(merges), **settings}
