"""Use the tokenizers library with files that may be damaged or malicious.

The library raises bare Exception for any problem with a file. If its Rust code panics, because of a template without
its tokens or a regular expression that gives up, it raises an error that is not an Exception.

An untrusted tokenizer.json is tried in a child process first if its rules could exhaust time or memory.

Most files have no such rule: WordPiece, BPE and Unigram with short pieces take time proportional to the text. Regular
expressions, replacements and character tables come with the file, and the library does not limit their cost. Such a
file is tried on long runs of one character, the worst texts for rules that backtrack. That proves nothing about other
texts, so texts are tokenized under a deadline (`TextTokenizer`).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onnxtool.errors import OnnxtoolError, first_line
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild, attempt

MAX_SECONDS = 5  # the child's CPU time, and as much again for each block of the file, in bytes
_BYTES_PER_TURN = 8 << 20
MAX_BYTES = 768 << 20  # memory, plus a multiple of the file size
_MEMORY_PER_BYTE = 32
_RUN = 20_000  # characters; tokenizing them takes 10 ms, and a second with a rule that backtracks over all of them
_MAX_SECONDS_PER_RUN = 0.5
_MAX_GROWTH = 1_000  # characters that a token may become in a text
_RUNS = " \na0.é中\u0301"  # one of each kind that rules tell apart
_MAX_RUNS = 24

# Looking up longer words takes time quadratic in their length.
_LONGEST_WORD = 1000
_MAX_ADDED_TOKENS = 20_000
_MAX_PARTS = 200  # each passes over the whole text
# Keys of tokenizer.json; in a vocabulary they would be followed by a number.
_RULES = re.compile(r'"(?:Regex|String)"\s*:\s*"|"precompiled_charsmap"\s*:\s*"')
_ESCAPED_LETTER = re.compile(r"\\u00[4-7]", re.IGNORECASE)  # escapes that could hide a key; no writer produces them
_AFFIX = re.compile(r'"(?:continuing_subword_prefix|end_of_word_suffix|prepend)"\s*:')
_SHORT_AFFIX = re.compile(_AFFIX.pattern + r'\s*(?:null|"[^"\\]{0,32}")')
# Unigram looks up each piece that begins at each character, so time grows with the length of its pieces; SentencePiece
# makes none of more than 16 characters, and runs of spaces are longer.
_LONG_PIECE = re.compile(r'\[\s*"(?:[^"\\]|\\.){257}')
_WORD_LENGTH = re.compile(r'"max_input_chars_per_word"\s*:\s*(\d+)')
_harmless: set[bytes] = set()
_PANIC = "PanicException"  # pyo3's, which does not export it


@contextmanager
def tokenizer_errors(make: Callable[[str], OnnxtoolError]) -> Iterator[None]:
    """Convert failures of the library in the block with `make`; other errors pass through."""
    try:
        with panics_as_exceptions():
            yield
    except Exception as error:
        if type(error) is not Exception and type(error.__cause__).__name__ != _PANIC:  # Python's, such as a TypeError
            raise
        raise make(first_line(error)) from error


@contextmanager
def panics_as_exceptions() -> Iterator[None]:
    """Convert Rust panics in the block to RuntimeError, for callers that handle other libraries' errors."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise RuntimeError(_reason_of_panic(error)) from error


def _reason_of_panic(error: BaseException) -> str:
    """Explain a panic of the library."""
    text = first_line(error)
    if "retry-limit" in text:
        return "a regular expression in it takes too long for a text and was aborted"
    return f"the tokenizers library fails on it: {text}"


def is_plain(content: str) -> bool:
    """Return whether all rules of a tokenizer.json take time and memory proportional to the text."""
    return (
        _RULES.search(content) is None
        and _ESCAPED_LETTER.search(content) is None
        and len(_AFFIX.findall(content)) == len(_SHORT_AFFIX.findall(content))
        and all(len(digits) <= 4 and int(digits) <= _LONGEST_WORD for digits in _WORD_LENGTH.findall(content))
        and ('"Unigram"' not in content or _LONG_PIECE.search(content) is None)
        and content.count('"single_word"') <= _MAX_ADDED_TOKENS
        and content.count('"type"') <= _MAX_PARTS
    )


def require_harmless(content: str, make: Callable[[str], OnnxtoolError]) -> bool:
    """Refuse a tokenizer.json that does not load, or takes too much time or memory for a text.

    Each file is tried only once per process.

    Returns:
        Whether it has only plain rules, so that texts need no deadline.

    Raises:
        OnnxtoolError: the error that `make` creates from the reason.
    """
    if is_plain(content):
        return True
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    if digest in _harmless:
        return False
    seconds, num_bytes = (
        MAX_SECONDS * (1 + len(content) // _BYTES_PER_TURN),
        MAX_BYTES + _MEMORY_PER_BYTE * len(content),
    )
    try:
        with GuardedChild(f"{__name__}:try_tokenizer", ("tokenizers",), {"TOKENIZERS_PARALLELISM": "false"}) as child:
            attempt(child, content, seconds=seconds, num_bytes=num_bytes)
    except ChildError as error:
        raise make(str(error)) from None
    except ChildEndedError as error:
        raise make(f"it {error.reason(seconds, num_bytes)}") from None
    _harmless.add(digest)
    return False


def try_tokenizer(content: str) -> None:
    """Load a tokenizer, then encode and decode the worst texts for its rules; called in the child.

    Raises:
        Exception: the library cannot load it.
        ValueError: it makes texts or tokens too long.
    """
    from tokenizers import Tokenizer

    with panics_as_exceptions():
        tokenizer = Tokenizer.from_str(content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for unit in (*_characters(tokenizer), max(tokenizer.get_vocab(), key=len, default="a")):
        start = time.process_time()
        try:  # a rule's literal text triggers it again
            with panics_as_exceptions():  # the last character makes rules anchored at the end of a text backtrack
                tokenizer.encode((unit * _RUN)[:_RUN] + ("!" if unit.isalnum() else "a"))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001, S110  of no common kind
            pass
        if time.process_time() - start > _MAX_SECONDS_PER_RUN:
            raise ValueError(f"its rules take too long for {_RUN // len(unit):,} times {unit[:20]!r}")
    with panics_as_exceptions():
        ids = list(range(min(tokenizer.get_vocab_size(), _RUN)))
        if len(tokenizer.decode(ids, skip_special_tokens=False)) > _MAX_GROWTH * len(ids):
            raise ValueError(f"its rules can write a token with {_MAX_GROWTH:,} characters")


def _characters(tokenizer: Any) -> list[str]:
    """Return the characters to test: one of each kind, and those mentioned in the rules."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    patterns = "".join(text for part in parts if part for text in _patterns(json.loads(part.__getstate__())))
    return list(dict.fromkeys(_RUNS + patterns))[:_MAX_RUNS]


def _patterns(rule: Any) -> Iterator[str]:
    if isinstance(rule, dict):
        yield from (str(text) for kind, text in rule.items() if kind in ("Regex", "String"))
    for inner in rule.values() if isinstance(rule, dict) else rule if isinstance(rule, list) else ():
        yield from _patterns(inner)
