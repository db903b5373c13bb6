"""Choose how the vectors of an exported graph are stored, with their ranges from a file or measured on texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import Prompts
from onnxtool.checkpoint.pooling_module import behind_prompts
from onnxtool.checkpoint.quantized_vectors import VectorType, few_vectors, measure_ranges, read_ranges
from onnxtool.checkpoint.text_files import read_texts
from onnxtool.errors import ExportError
from onnxtool.export.heads.head import Head
from onnxtool.export.modalities.sizes import Modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.options import ExportOptions
from onnxtool.export.signature import run_torch_tensors
from onnxtool.export.source import Source

_BATCH_SIZE = 16
_UNLIMITED = 1 << 20  # tokens, for a model without a limit


def choose_storage(
    options: ExportOptions, model: Any, head: Head, modality: Modality, source: Source
) -> tuple[VectorType, tuple[str, ...]]:
    """Return how vectors are stored, and what a user should know of the ranges.

    Raises:
        InputError: ranges or texts cannot be read.
        ExportError: texts were passed for a model that takes none, or pads them to a length of its own.
    """
    name = options.vectors_as or ""
    if options.calibration is None:
        return VectorType.of(name, None if options.ranges is None else read_ranges(options.ranges)), ()
    if not isinstance(modality, TextInputs):
        raise ExportError("--calibration measures on texts alone, and this model takes others", "pass --ranges")
    if ChatTemplate.of(source, source.sentence_modules, head.task) is not None:
        raise ExportError(
            f"{source.model_name} puts texts into a chat template, and --calibration reads them without it",
            f"export it without --vectors_as, run `onnxtool infer --input FILE --output FOLDER/ --vectors_as {name} "
            "--calibration FILE`, and pass the manifest beside the folder as --ranges",
        )
    texts = [item.contents for item in read_texts(options.calibration)]
    ranges, count = measure_ranges(_vectors(model, head, modality, source, texts))
    return VectorType.of(name, ranges), tuple(filter(None, [few_vectors(count)]))


def _vectors(
    model: Any, head: Head, text: TextInputs, source: Source, texts: Sequence[str]
) -> Iterator[NDArray[np.float32]]:
    """Yield the vectors of texts as `onnxtool infer` reads them, float32 [B, W]; texts of like length together."""
    import torch

    modules = source.sentence_modules
    before = Prompts.of(source).find(None)
    read = sorted((before + item for item in texts), key=len)
    size = _BATCH_SIZE if text.tokenizer.pad_token is not None else 1
    longest = modules.max_sequence_length or text.longest or _UNLIMITED
    num_prompt = _num_prompt(text, before, longest, add_special_tokens=modules.adds_special_tokens)
    for start in range(0, len(read), size):
        together = read[start : start + size]
        feeds = text.tokenize(together, longest=longest, add_special_tokens=modules.adds_special_tokens)
        real = feeds["attention_mask"].any(axis=1)  # a tokenizer that frames nothing may find no token in a text
        if real.any():
            mask = torch.from_numpy(feeds["attention_mask"]).to(model.device)
            states = run_torch_tensors(model, feeds)[head.source].float()
            pooled = None
            if head.leaves_prompt_out and before:
                behind = behind_prompts(feeds["attention_mask"].astype(bool), [num_prompt] * len(together))
                pooled = torch.from_numpy(behind.astype(np.int64)).to(model.device)
            yield head.reference(states, mask, pooled).cpu().numpy()[real]


def _num_prompt(text: TextInputs, prompt: str, longest: int, *, add_special_tokens: bool) -> int:
    """Return how many tokens a prompt has, without a special one at its end, as sentence-transformers counts them."""
    ids = text.tokenize([prompt], longest=longest, add_special_tokens=add_special_tokens)["input_ids"][0]
    return len(ids) - int(len(ids) > 0 and ids[-1] in text.tokenizer.all_special_ids)
