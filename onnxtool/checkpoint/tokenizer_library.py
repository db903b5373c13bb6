"""Call the tokenizers library with files that may be damaged or made to do harm.

The library raises bare Exception for whatever is wrong with a file. Where its Rust code panics, because of a template
without its tokens or a regular expression that gives up, it raises an error that is no Exception at all.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from onnxtool.errors import OnnxtoolError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PANIC = "PanicException"  # of pyo3, which exports it nowhere
# A text may become so many times as long before it is split into tokens. Byte-level ones are twice as long, those
# with a mark for each space three times.
_MOST_GROWTH = 10_000.0
# The table of characters of a normalizer, in base64. The library allocates what its first four bytes say.
_CHARACTER_MAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")  # with which that name can be hidden; nothing writes letters so
# What a regular expression has that may match between two letters.
_EMPTY_MATCHES = ("*", "?", "{", "|", "^", "$", "\\")


@contextmanager
def tokenizer_errors(make: Callable[[str], OnnxtoolError]) -> Iterator[None]:
    """Raise what `make` makes of the reason where the library fails in the block; errors of others go through."""
    try:
        with panics_as_exceptions():
            yield
    except Exception as error:
        if type(error) is not Exception and type(error.__cause__).__name__ != _PANIC:  # Python's, such as a TypeError
            raise
        raise make(first_line(error)) from error


@contextmanager
def panics_as_exceptions() -> Iterator[None]:
    """Raise RuntimeError where Rust code panics in the block, for callers that handle what other libraries raise."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise RuntimeError(_reason_of_panic(error)) from error


def require_character_maps(content: bytes, make: Callable[[str], OnnxtoolError]) -> None:
    """Refuse a tokenizer.json whose table of characters says that it is larger than it is; the library trusts it.

    Raises:
        OnnxtoolError: what `make` makes of the reason.
    """
    if _ESCAPED_LETTER.search(content):
        try:
            content = json.dumps(json.loads(content), ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError) as error:
            raise make(f"not JSON: {first_line(error)}") from None
    for found in _CHARACTER_MAP.finditer(content):
        stored = found[1].replace(b"\\/", b"/")
        try:
            said = int.from_bytes(base64.b64decode(stored[:8], validate=True)[:4], "little")
        except ValueError:
            continue  # the library refuses what is no base64
        if said > len(stored):
            raise make(f"its precompiled_charsmap says {said:,} bytes and has {len(stored) * 3 // 4:,}")


def require_bounded(tokenizer: Tokenizer, make: Callable[[str], OnnxtoolError]) -> None:
    """Refuse a tokenizer whose rules, one behind the other, can make a short text fill the memory.

    Raises:
        OnnxtoolError: what `make` makes of the reason.
    """
    growth = 1.0
    for component in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if component is not None:
            # A component is pickled as its part of tokenizer.json; all of that file would take long to parse.
            growth *= _growth(json.loads(component.__getstate__()))
    if growth > _MOST_GROWTH:
        raise make(f"its rules can make a text more than {_MOST_GROWTH:,.0f} times as long")


def _reason_of_panic(error: BaseException) -> str:
    """Say what a panic of the library means."""
    text = first_line(error)
    if "retry-limit" in text:
        return "a regular expression in it takes too long for a text, and was given up"
    return f"the tokenizers library fails on it: {text}"


def _growth(rule: Any) -> float:
    """Return how many times as long a normalizer or pre-tokenizer can make a text, in bytes."""
    if not isinstance(rule, dict):
        return 1.0
    growth = 1.0
    for inner in (*(rule.get("normalizers") or ()), *(rule.get("pretokenizers") or ())):
        growth = min(growth * _growth(inner), 2 * _MOST_GROWTH)
    kind = rule.get("type")
    if kind == "ByteLevel":
        return 2.0  # a byte becomes a character of two
    if kind == "Metaspace":
        return 1.0 + len(str(rule.get("replacement", "")).encode())
    if kind == "Replace":
        pattern, content = rule["pattern"], len(rule["content"].encode())
        if "String" in pattern:
            given = len(pattern["String"].encode())
            return max(1.0, content / given) if given else 1.0 + content
        may_be_empty = any(mark in pattern["Regex"] for mark in _EMPTY_MATCHES)
        return 1.0 + content if may_be_empty else max(1.0, float(content))
    return growth


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
