"""Reduce a tokenizer.json to some of its tokens, with ids renumbered in order.

A text whose tokens are all kept is split as before. WordPiece takes the longest token at each position. BPE applies
the merges that lead to a token, so the parts of a kept token are kept with it. Unigram chooses among pieces by their
scores, and derives that of an unknown character from the least score, so that piece is kept. Single characters, bytes
and added tokens are always kept, so no text becomes unknown that was not unknown before.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.tokenizer_guard import tokenizer_errors
from onnxtool.errors import InputError, some

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Keys of settings whose values are token ids.
_ID_KEYS = re.compile(r"(.*_)?token_(ids?|index)|(forced_decoder|bad_words)_ids|(begin_)?suppress_tokens")

Renumber = Callable[[int], int | None]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.json.

    Attributes:
        content: the parsed file.
        ids: the id of each token, including added ones.
    """

    content: Mapping[str, Any]
    ids: Mapping[str, int]

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """Parse a tokenizer.json.

        Raises:
            InputError: its model is not supported, or two of its tokens have the same id.
        """
        from tokenizers import Tokenizer

        with tokenizer_errors(_refused):
            tokenizer = Tokenizer.from_str(text)
            content, ids = json.loads(tokenizer.to_str()), tokenizer.get_vocab(with_added_tokens=True)
        kind = content["model"].get("type")
        if kind not in ("WordPiece", "BPE", "Unigram", "WordLevel"):
            raise _refused(f"its model is {kind}")
        if len({*ids.values()}) < len(ids):
            number, _ = Counter(ids.values()).most_common(1)[0]
            raise _refused(f"two of its tokens have the id {number}")
        return cls(content, ids)

    @property
    def size(self) -> int:
        """The number of ids: the largest and those below it."""
        return max(self.ids.values()) + 1

    @property
    def _model(self) -> Mapping[str, Any]:
        model: Mapping[str, Any] = self.content["model"]
        return model

    def _merged(self, first: str, second: str) -> str:
        return first + second.removeprefix(self._model.get("continuing_subword_prefix") or "")

    def kept(self, used: Collection[int]) -> NDArray[np.int64]:
        """Return the ids to keep, ascending: those in `used`, and what a tokenizer with them needs.

        Ids without a token are ignored: models have more rows than the tokenizer has tokens.
        """
        needed = dict.fromkeys((*used, *(token["id"] for token in self.content["added_tokens"])))
        _renumber_rules(self.content, lambda number: needed.setdefault(number))
        tokens = {token for token, number in self.ids.items() if number in needed or self._is_basic(token)}
        if self._model["type"] == "Unigram":
            tokens.add(min(self._model["vocab"], key=lambda piece: piece[1])[0])
        parts: dict[str, list[list[str]]] = defaultdict(list)
        for pair in self._model.get("merges", ()):
            parts[self._merged(*pair)].append(pair)
        waiting = list(tokens)
        while waiting:
            for pair in parts.get(waiting.pop(), ()):
                waiting += {*pair} - tokens
                tokens.update(pair)
        return np.array(sorted(self.ids[token] for token in tokens), np.int64)

    def _is_basic(self, token: str) -> bool:
        """Return whether a token is a character, a byte, or the unknown token."""
        model = self._model
        bare = token.removeprefix(model.get("continuing_subword_prefix") or "")
        bare = bare.removesuffix(model.get("end_of_word_suffix") or "") or bare
        unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
        return 1 in (len(token), len(bare)) or token == unknown or _BYTE.fullmatch(token) is not None

    def trimmed(self, kept_ids: NDArray[np.int64]) -> str:
        """Return the tokenizer.json with the tokens of the ids `kept_ids`, each with its place in them as its id."""
        new = renumbering(kept_ids)
        content = _renumber_rules(self.content, new)
        model = content["model"]
        if model["type"] == "Unigram":
            places = [number for number in kept_ids if number < len(model["vocab"])]
            model["unk_id"] = None if model["unk_id"] is None else new(model["unk_id"])
            model["vocab"] = [model["vocab"][number] for number in places]
        else:
            numbered = ((token, new(number)) for token, number in model["vocab"].items())
            model["vocab"] = {token: number for token, number in numbered if number is not None}
        if "merges" in model:
            tokens = model["vocab"].keys()
            model["merges"] = [pair for pair in model["merges"] if {*pair, self._merged(*pair)} <= tokens]
        for token in content["added_tokens"]:
            token["id"] = new(token["id"])
        return json.dumps(content, ensure_ascii=False, indent=2)

    def ids_of(self, tokens: Collection[str]) -> set[int]:
        """Return the ids of tokens.

        Raises:
            InputError: there is no such token.
        """
        if unknown := [token for token in tokens if token not in self.ids]:
            raise InputError(
                f"the tokenizer has no {some(list(map(repr, unknown)))}", "write tokens as tokenizer.json spells them"
            )
        return {self.ids[token] for token in tokens}


def renumbering(kept_ids: NDArray[np.int64]) -> Renumber:
    """Return the function from an id to its place in `kept_ids`, or None if it is not there."""
    return partial({int(number): place for place, number in enumerate(kept_ids)}.get)


def _renumber_rules(content: Mapping[str, Any], new: Renumber) -> dict[str, Any]:
    """Return a copy of a tokenizer.json with the ids of its post-processor and padding renumbered."""
    copy: dict[str, Any] = {**content, "model": {**content["model"]}}
    copy["added_tokens"] = [{**token} for token in content["added_tokens"]]
    copy["post_processor"] = _renumber_processor(content.get("post_processor"), new)
    if padding := content.get("padding"):
        copy["padding"] = {**padding, "pad_id": new(padding["pad_id"]) or 0}
    return copy


def _renumber_processor(rule: Any, new: Renumber) -> Any:
    if isinstance(rule, list):
        return [_renumber_processor(part, new) for part in rule]
    if not isinstance(rule, dict):
        return rule
    renumbered = {key: _renumber_processor(value, new) for key, value in rule.items()}
    if isinstance(rule.get("ids"), list):
        renumbered["ids"] = [new(number) for number in rule["ids"]]
    if rule.get("type") in ("BertProcessing", "RobertaProcessing"):
        renumbered |= {key: [rule[key][0], new(rule[key][1])] for key in ("sep", "cls")}
    return renumbered


def renumber_settings(value: Any, new: Renumber, size: int, *, is_id: bool = False) -> Any:
    """Return the content of a settings file, such as config.json, for the tokens that are kept.

    Token ids are renumbered, and `vocab_size` becomes `size`. An id that is not kept becomes null.

    Args:
        value: the content.
        new: renumbers an id.
        size: the number of kept tokens.
        is_id: whether the numbers in it are token ids, as in added_tokens.json.
    """
    if isinstance(value, list):
        return [renumber_settings(part, new, size, is_id=is_id) for part in value]
    if isinstance(value, dict):
        renumbered = {
            key: renumber_settings(part, new, size, is_id=is_id or bool(_ID_KEYS.fullmatch(key)))
            for key, part in value.items()
        }
        if isinstance(by_id := value.get("added_tokens_decoder"), dict):
            renumbered["added_tokens_decoder"] = {
                str(place): token for number, token in by_id.items() if (place := new(int(number))) is not None
            }
        return {**renumbered, "vocab_size": size} if isinstance(value.get("vocab_size"), int) else renumbered
    has_token = is_id and isinstance(value, int) and not isinstance(value, bool) and value >= 0  # -1 stands for none
    return new(value) if has_token else value


def ids_in_settings(value: Any) -> set[int]:
    """Return the token ids in a settings file."""
    ids: dict[int, None] = {}
    renumber_settings(value, lambda number: ids.setdefault(number), 0)
    return {*ids}


def _refused(reason: str) -> InputError:
    return InputError(f"this tokenizer.json cannot be cut: {reason}", "leave --vocabulary out")
