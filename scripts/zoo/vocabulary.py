"""A small tokenizer for any model of text: WordPiece over letters and digits.

It has fewer entries than the model, and the ids of its special tokens are those of the model's configuration. It pads
on the left where the family does, and gives the inputs that the model takes.
"""

from __future__ import annotations

import inspect
import string
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from zoo.tasks import Task, find_task, model_classes

# Read byte by byte, or character by character: their tokenizers need no vocabulary, and no other fits.
_WITHOUT_VOCABULARY = {"canine": "CanineTokenizer", "perceiver": "PerceiverTokenizer"}
_SPECIAL = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
_UNKNOWN = "[UNK]"
_LETTERS = string.ascii_lowercase + string.digits
_PIECES = (*_LETTERS, *(f"##{letter}" for letter in _LETTERS), *string.punctuation)  # what texts need first, first
_MAX_LENGTH = 256


def save_tokenizer(config: Any, model_class: Any, task: Task, folder: Path) -> None:
    """Write a tokenizer that AutoTokenizer loads, for a model of `config`, into `folder`."""
    own = _WITHOUT_VOCABULARY.get(config.model_type)
    if own is not None:
        getattr(transformers, own)().save_pretrained(folder)
        return
    text_config = config.get_text_config()
    decoder = reads_one_way(config, task)
    ids = special_ids(text_config, config)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(config, ids, decoder=decoder),
        padding_side="left" if decoder else "right",
        model_max_length=_max_length(text_config),
        model_input_names=_input_names(text_config, model_class),
        **{f"{role}_token": f"[{role.upper()}]" for role in ids},
    )
    tokenizer.save_pretrained(folder)


def vocabulary_size(config: Any) -> int:
    """Return how many rows the table of token embeddings has; 0 where there is none."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else 0


def reads_one_way(config: Any, task: Task) -> bool:
    """Whether a model is a decoder alone, whose texts are padded on the left."""
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
            token_id = getattr(config, f"{role}_token_id", None)
            token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
            if isinstance(token_id, int) and 0 <= token_id < size and role not in ids and token_id not in ids.values():
                ids[role] = token_id
    free = (number for number in range(size) if number not in ids.values())
    for role in _SPECIAL:
        if role not in ids and role != "cls" and not (role == "bos" and size < 40):
            ids[role] = next(free)
    return ids


def _tokenizer(config: Any, ids: dict[str, int], *, decoder: bool) -> Any:
    tokens = {f"[{role.upper()}]": number for role, number in ids.items()}
    free = (number for number in range(vocabulary_size(config) - 2) if number not in ids.values())
    tokens |= dict(zip(_PIECES, free, strict=False))
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


def _max_length(text_config: Any) -> int:
    positions = [getattr(text_config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx")]
    limits = [limit for limit in positions if isinstance(limit, int) and limit > 0]
    # The first position of RoBERTa and its variants is behind the padding id.
    return min([*limits, _MAX_LENGTH]) - 4


def _input_names(text_config: Any, model_class: Any) -> list[str]:
    accepted = inspect.signature(model_class.forward).parameters
    names = ["input_ids", "attention_mask"]
    if "token_type_ids" in accepted and (getattr(text_config, "type_vocab_size", 0) or 0) > 1:
        names.insert(1, "token_type_ids")
    return names
