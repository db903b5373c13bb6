"""Let a child process try an untrusted tokenizer.json first, where its rules could take this process's time or memory.

Most files have no rule that can: WordPiece, BPE and Unigram over plain splits take time in proportion to a text. A
regular expression, a replacement and a table of characters come with the file, and nothing limits what the library does
for them. Such a file is tried on long runs of one character, the worst texts for rules that look back. That is no proof
for all texts: those are read under a deadline (`TextTokenizer`).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from onnxtool.errors import OnnxtoolError
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild, attempt

MAX_SECONDS = 5  # of the child's processor time, and as much again for every so many bytes of the file
_BYTES_A_TURN = 8 << 20
MAX_BYTES = 768 << 20  # of memory, beside so many times the file
_BYTES_A_BYTE = 32
_RUN = 20_000  # characters; reading them takes 10 ms, and a second with a rule that looks back over all of them
_MOST_SECONDS_A_RUN = 0.5
_MOST_GROWTH = 1_000  # characters that a token becomes in a text
_RUNS = " \na0.é中\u0301"  # one of each kind that rules tell apart
_MOST_RUNS = 24

# Longer words would be looked up in time that grows with the square of their length.
_LONGEST_WORD = 1000
_MOST_ADDED_TOKENS = 20_000
# Keys of tokenizer.json, which a vocabulary can only have with a number behind them.
_RULES = re.compile(r'"(?:Regex|String)"\s*:\s*"|"precompiled_charsmap"\s*:\s*"')
_ESCAPED_LETTER = re.compile(r"\\u00[4-7]", re.IGNORECASE)  # with which a key can be hidden; nothing writes these
_AFFIX = re.compile(r'"(?:continuing_subword_prefix|end_of_word_suffix)"\s*:')
_SHORT_AFFIX = re.compile(_AFFIX.pattern + r'\s*(?:null|"[^"\\]{0,32}")')
_WORD_LENGTH = re.compile(r'"max_input_chars_per_word"\s*:\s*(\d+)')
_harmless: set[bytes] = set()


def is_plain(content: str) -> bool:
    """Return whether a tokenizer.json has only rules that take time and memory in proportion to a text."""
    return (
        _RULES.search(content) is None
        and _ESCAPED_LETTER.search(content) is None
        and len(_AFFIX.findall(content)) == len(_SHORT_AFFIX.findall(content))
        and all(len(digits) <= 4 and int(digits) <= _LONGEST_WORD for digits in _WORD_LENGTH.findall(content))
        and content.count('"single_word"') <= _MOST_ADDED_TOKENS
    )


def require_harmless(content: str, make: Callable[[str], OnnxtoolError]) -> bool:
    """Refuse a tokenizer.json that does not load, or takes too long or too much memory for a text.

    What was tried in this process is not tried again.

    Returns:
        Whether it is plain, so that its texts need no deadline.

    Raises:
        OnnxtoolError: what `make` makes of the reason.
    """
    if is_plain(content):
        return True
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    if digest in _harmless:
        return False
    seconds, num_bytes = MAX_SECONDS * (1 + len(content) // _BYTES_A_TURN), MAX_BYTES + _BYTES_A_BYTE * len(content)
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
    """Load a tokenizer, and read and write the texts that are worst for its rules; called in the child.

    Raises:
        Exception: the library cannot load it.
        ValueError: it makes a text, or tokens, too much longer.
    """
    from tokenizers import Tokenizer

    from onnxtool.checkpoint.tokenizer_library import panics_as_exceptions

    with panics_as_exceptions():
        tokenizer = Tokenizer.from_str(content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for character in _characters(tokenizer):
        start = time.process_time()
        try:  # what a rule says of such a text is met again by a text that has it
            with panics_as_exceptions():  # the last character makes rules look back that ask for the end of a text
                tokenizer.encode(character * _RUN + ("!" if character.isalnum() else "a"))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001, S110  of no common kind
            pass
        if time.process_time() - start > _MOST_SECONDS_A_RUN:
            raise ValueError(f"its rules take too long for {_RUN:,} times {character!r}")
    with panics_as_exceptions():
        ids = list(range(min(tokenizer.get_vocab_size(), _RUN)))
        if len(tokenizer.decode(ids, skip_special_tokens=False)) > _MOST_GROWTH * len(ids):
            raise ValueError(f"its rules can write a token with {_MOST_GROWTH:,} characters")


def _characters(tokenizer: Any) -> list[str]:
    """Return the characters that texts are made of: one of each kind, and those that the rules speak of."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    patterns = "".join(text for part in parts if part for text in _patterns(json.loads(part.__getstate__())))
    return list(dict.fromkeys(_RUNS + patterns))[:_MOST_RUNS]


def _patterns(rule: Any) -> Iterator[str]:
    if isinstance(rule, dict):
        yield from (str(text) for kind, text in rule.items() if kind in ("Regex", "String"))
    for inner in rule.values() if isinstance(rule, dict) else rule if isinstance(rule, list) else ():
        yield from _patterns(inner)
