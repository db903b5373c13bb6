"""A small tokenizer for any model of text: WordPiece over letters, digits and some words.

It has fewer entries than the model, and the ids of its special tokens are those of the model's configuration. It pads
on the left where the family does, and gives the inputs that the model takes.
"""

from __future__ import annotations

import contextlib
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.tasks import Task

# Read byte by byte, or character by character: their tokenizers need no vocabulary, and no other fits.
_WITHOUT_VOCABULARY = {"canine": "CanineTokenizer", "perceiver": "PerceiverTokenizer"}
_WORDS = (
    *("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "with", "on", "be", "by", "this", "are"),
    *("from", "at", "or", "an", "have", "not", "which", "they", "what", "when", "all", "there", "can", "more", "if"),
    *("out", "so", "about", "only", "time", "no", "model", "text", "graph", "token", "query", "document"),
)
_SPECIAL = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
_UNKNOWN = "[UNK]"
_MAX_ENTRIES = 600
_MAX_LENGTH = 256
_SMALLEST_SPARE = 2


def save_tokenizer(config: Any, model_class: Any, task: Task, folder: Path) -> None:
    """Write a tokenizer that AutoTokenizer loads, for a model of `config`, into `folder`."""
    import transformers

    own = _WITHOUT_VOCABULARY.get(config.model_type)
    if own is not None:
        getattr(transformers, own)().save_pretrained(folder)
        return
    text_config = text_part(config)
    decoder = reads_one_way(config, model_class, task)
    ids = special_ids(text_config, config)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(config, ids, decoder=decoder),
        padding_side="left" if decoder else "right",
        model_max_length=_max_length(text_config),
        model_input_names=_input_names(text_config, model_class),
        **{f"{role}_token": f"[{role.upper()}]" for role in ids},
    )
    tokenizer.save_pretrained(folder)
    # The name under which older versions of transformers know the class as well; peers run on those.
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")


def text_part(config: Any) -> Any:
    """Return the configuration of the part that reads text."""
    parts = [config]
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        parts.insert(0, config.get_text_config(decoder=False))
    parts += [part for name in ("text_config", "decoder") if (part := getattr(config, name, None)) is not None]
    return next((part for part in parts if _own_vocabulary_size(part)), config)


def vocabulary_size(config: Any) -> int:
    """Return how many rows the table of token embeddings has; 0 where there is none."""
    return _own_vocabulary_size(text_part(config))


def _own_vocabulary_size(config: Any) -> int:
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else 0


def reads_one_way(config: Any, model_class: Any, task: Task) -> bool:
    """Whether a model is a decoder alone, whose texts are padded on the left."""
    from zoo.tasks import find_task, model_classes

    if getattr(config, "is_encoder_decoder", False) or task.name == "text2text-generation":
        return False
    if task.name.startswith("text-generation") or task.has_cache:
        return True
    masked = model_classes(find_task("fill-mask"))
    causal = model_classes(find_task("text-generation"))
    encodes = model_classes(find_task("feature-extraction"))
    kind = config.model_type
    return kind in causal and kind not in masked and kind not in encodes and task.modality == "text"


def special_ids(*configs: Any) -> dict[str, int]:
    """Return role to id: as the configurations say, else the lowest free one."""
    size = vocabulary_size(configs[0])
    ids: dict[str, int] = {}
    for role in _SPECIAL:
        for config in configs:
            found = getattr(config, f"{role}_token_id", None)
            found = found[0] if isinstance(found, list) and found else found
            if isinstance(found, int) and 0 <= found < size and role not in ids and found not in ids.values():
                ids[role] = found
    free = (number for number in range(size) if number not in ids.values())
    for role in _SPECIAL:
        if role not in ids and role != "cls" and not (role == "bos" and size < 40):
            ids[role] = next(free)
    return ids


def _tokenizer(config: Any, ids: dict[str, int], *, decoder: bool) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokens = {f"[{role.upper()}]": number for role, number in ids.items()}
    size = vocabulary_size(config)
    free = (number for number in range(min(size - _SMALLEST_SPARE, _MAX_ENTRIES)) if number not in ids.values())
    tokens.update((piece, number) for piece, number in zip(_pieces(), free, strict=False))
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token=_UNKNOWN, max_input_chars_per_word=40))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first = next((role for role in ("cls", "bos") if role in ids), None)
    last = None if decoder else next(role for role in ("eos", "sep") if role in ids)
    before, after = (f"[{first.upper()}] " if first else ""), (f" [{last.upper()}]" if last else "")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} $B:1{after}{':1' if after else ''}",
        special_tokens=[(f"[{role.upper()}]", number) for role, number in ids.items()],
    )
    return tokenizer


def _pieces() -> Iterator[str]:
    """Yield pieces, those that any text needs first."""
    letters = string.ascii_lowercase + string.digits
    yield from letters
    yield from (f"##{letter}" for letter in letters)
    yield from string.punctuation
    yield from _WORDS
    yield from (f"##{first}{second}" for first in "aeiou" for second in string.ascii_lowercase)


def _max_length(text_config: Any) -> int:
    positions = [getattr(text_config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx")]
    limits = [limit for limit in positions if isinstance(limit, int) and limit > 0]
    # The first position of RoBERTa's kin is behind the padding id.
    return min([*limits, _MAX_LENGTH]) - 4


def _input_names(text_config: Any, model_class: Any) -> list[str]:
    import inspect

    accepted = inspect.signature(model_class.forward).parameters
    names = ["input_ids", "attention_mask"]
    if "token_type_ids" in accepted and (getattr(text_config, "type_vocab_size", 0) or 0) > 1:
        names.insert(1, "token_type_ids")
    return names
