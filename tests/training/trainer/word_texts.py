"""Texts of made-up words, each of which is a token, and the settings that every trainer of a library is given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(f"w{number}" for number in range(95))


def tokenizer(words: Sequence[str] = WORDS, longest: int = 16) -> Any:
    """Return a tokenizer of these words, and of as many tokens as `longest` at most."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words))}
    tokens = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL[1]))
    tokens.pre_tokenizer = Whitespace()
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(names, SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, model_max_length=longest, eos_token=SPECIAL[3], **special
    )


def texts(seed: int) -> list[str]:
    """Return 16 texts of eight and four words in turns."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    return [" ".join(draw.choices(WORDS, k=(8, 4)[number % 2])) for number in range(16)]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments for three steps on the CPU of a trainer that logs every step and prints nothing."""
    quiet = {"output_dir": str(folder), "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    sizes = {"max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3}
    return {**quiet, **sizes, **changes}
