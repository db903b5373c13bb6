"""Inputs to calibrate a model on: texts through its own tokenizer, or random ids if it has none.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import CheckpointFolder, find_checkpoint_folder
from onnxtool.checkpoint.limits import PLAIN, Limit, ReadOptions, Text, fixed_shape, text_limit
from onnxtool.checkpoint.module_forms import POOLING_MASK
from onnxtool.checkpoint.tasks import RANKING
from onnxtool.checkpoint.text_files import read_texts
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import TASK_KEY
from onnxtool.optimize.quantization.activations import Feeds
from onnxtool.optimize.quantization.tokens import predicts_tokens
from onnxtool.optimize.verification import accepted_cases
from onnxtool.runtime.decoding import CACHE, POSITIONS
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs
from onnxtool.runtime.signature import index_bounds, is_mask
from onnxtool.runtime.text_feeds import require_named_inputs, text_feeds

OWN_TEXTS = Path(__file__).with_name("calibration_texts.jsonl")
"""Questions, news, code, recipes, law, letters, short and long, for users who have no texts."""

_BATCH_SIZE = 8
_MOST_TEXTS = 256  # more hardly change the figures
MOST_TOKENS = Limit(128, "calibration")
_LONGEST_RANDOM = 64
_OF_PAIRS = (RANKING, "text-classification")  # chat templates of these have a query and a document


@dataclass(frozen=True)
class Calibration:
    """Inputs to calibrate on.

    Attributes:
        feeds: arrays by input name, one mapping per run.
        num_texts: number of texts in them; 0 for random ids.
        note: a remark for the report; may be empty.
        held_out: token ids of the texts that weights are not rounded on.
    """

    feeds: tuple[Feeds, ...]
    num_texts: int
    note: str = ""
    held_out: tuple[tuple[int, ...], ...] = ()


def make_calibration(path: Path, texts_path: Path | None = None, given: GivenInputs = NO_INPUTS) -> Calibration:
    """Make inputs for a model: from samples, from texts in a file, from onnxtool's own texts, or at random.

    Args:
        path: the ONNX file; its tokenizer is found next to it.
        texts_path: one text per line, or JSON Lines with `id` and `contents`; 256 of them are enough.
        given: samples to calibrate on, or shapes of random inputs.

    Raises:
        InputError: the file cannot be read, there is no tokenizer for its texts, or it does not fit the model.
        ModelFileError: the model cannot be read.
    """
    model = ModelFile.open(path)
    if given.samples:
        feeds = tuple(case.feeds for case in accepted_cases(model, given=given))
        return Calibration(feeds, 0, f"calibrated on {len(feeds)} of {len(given.samples)} samples")
    try:
        _require_text_inputs(model)
        folder = find_checkpoint_folder(model)
    except InputError as error:
        if texts_path is not None:
            raise
        return _random_calibration(model, error.message, given)
    texts = tuple(text.contents for text in read_texts(texts_path or OWN_TEXTS))
    used = texts[:: -(-len(texts) // _MOST_TEXTS)]  # spread over the file, because it may be sorted
    note = "" if len(used) == len(texts) else f"calibrated on {len(used)} of {len(texts)} texts"
    feeds, held_out = _text_feeds(model, folder, used)
    return Calibration(feeds, len(used), note, held_out)


def text_feeds_of(model: ModelFile, texts: Sequence[Text]) -> tuple[Feeds, ...]:
    """Return inputs for `texts`, in batches of similar lengths.

    Raises:
        InputError: the model takes inputs other than texts, or has no tokenizer next to it.
    """
    _require_text_inputs(model)
    return _text_feeds(model, find_checkpoint_folder(model), texts)[0]


def _require_text_inputs(model: ModelFile) -> None:
    known = {"input_ids", "attention_mask", "token_type_ids", POOLING_MASK}
    if predicts_tokens(model):  # with an empty cache
        known |= {POSITIONS, *(info.name for info in model.structure.inputs if info.name.startswith(CACHE))}
    unknown = [info.name for info in model.structure.inputs if info.name not in known]
    if unknown or not any(info.name == "input_ids" for info in model.structure.inputs):
        inputs = ", ".join(info.name for info in model.structure.inputs)
        raise InputError(f"{model.path} takes {inputs}, which texts alone do not give", "leave the texts out")
    require_named_inputs(model)


def _random_calibration(model: ModelFile, reason: str, given: GivenInputs) -> Calibration:
    cases = accepted_cases(model, longest=_LONGEST_RANDOM, given=given)
    feeds = tuple(case.feeds for case in cases if not case.has_empty_rows)
    return Calibration(feeds, 0, f"calibrated on random inputs, which says little of real ones: {reason}")


def _text_feeds(
    model: ModelFile, folder: CheckpointFolder, texts: Sequence[Text]
) -> tuple[tuple[Feeds, ...], tuple[tuple[int, ...], ...]]:
    """Return inputs for `texts`, and the ids of those that weights are not rounded on, as `record` leaves them out."""
    # Imported here, because a model without texts needs no tokenizer.
    from onnxtool.runtime.tokens import open_tokenizer

    tokenizer = open_tokenizer(folder)
    limit = text_limit(model, folder, "sentence-similarity")
    limit = MOST_TOKENS if limit is None else min(MOST_TOKENS, limit)
    tokenizer.require_room(limit)
    batch_size, sequence_length = fixed_shape(model)
    may_pad = any(is_mask(info) for info in model.structure.inputs) or sequence_length is not None
    size = batch_size or (_BATCH_SIZE if may_pad else 1)
    written, options = as_chats(model, folder, texts)
    encoded = sorted((text for text in tokenizer.encode(written, limit, options) if len(text)), key=len)
    bound = index_bounds(model).get("input_ids")
    period = 2 if size == 1 and predicts_tokens(model) else size
    fitted = [text for place, text in enumerate(encoded) if not place % period % 2]
    known = {text.ids for text in fitted}
    held_out = [text.ids for text in encoded if text.ids not in known]
    encoded = fitted if period > size else encoded
    feeds = []
    for start in range(0, len(encoded), size):
        together = encoded[start : start + size]
        together += [together[-1]] * (size - len(together)) if batch_size else []
        arrays = tokenizer.pad(together, sequence_length)
        if bound is not None and arrays["input_ids"].max() >= bound:
            raise InputError(
                f"the tokenizer gives token {arrays['input_ids'].max()}, and {model.path} knows {bound} tokens",
                "the tokenizer belongs to another model; pass the right one",
            )
        feeds.append(text_feeds(model, arrays))
    return tuple(feeds), tuple(held_out)


def as_chats(
    model: ModelFile, folder: CheckpointFolder, texts: Sequence[Text], prompt: str = ""
) -> tuple[Sequence[Text], ReadOptions]:
    """Apply the checkpoint's chat template, if any, and a prompt; the query of a single document is the text before it.

    Args:
        model: the file.
        folder: of its checkpoint.
        texts: texts, and pairs of texts.
        prompt: a text before each, or the system message.
    """
    task = model.metadata.get(TASK_KEY, "")
    template = ChatTemplate.of(folder, folder.sentence_modules, task)
    if template is None:
        return [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts], PLAIN
    before: Sequence[Text] = (texts[-1], *texts)
    items = [
        (query, text) if task in _OF_PAIRS and isinstance(query, str) and isinstance(text, str) else text
        for query, text in zip(before, texts, strict=False)
    ]
    return template.render(items, prompt), ReadOptions(adds_special=False)
