"""Text: ids, masks and token types, as the model's tokenizer names them.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxtool.errors import ExportError
from onnxtool.export.modalities.modality import BATCH, SEQUENCE, TOKENIZER_FILE, Axis, Feeds, Sizes, disagreement, run
from onnxtool.export.signature import run_torch_tensors, to_numpy
from onnxtool.model_file.metadata import NO_PADDING
from onnxtool.runtime.comparison import Case, row_cases, row_errors
from onnxtool.runtime.difference import OutputError, Tolerance
from onnxtool.runtime.input_cases import FeedShape, padding_alone, verification_shapes
from onnxtool.runtime.recipes import IDS, MASK, Recipe

_MASK = "attention_mask"
_SAMPLE_TEXTS = ("onnxtool traces a model on two texts of different lengths", "the second is shorter")
_TEXTS = (
    "what is AI?",
    "Sparse retrieval weighs the terms of the whole vocabulary, so that a query meets documents that use other words.",
    "Ein Satz auf Deutsch, 12345, naïve café — and some punctuation: (a), [b]; {c}!",
)
_LONGEST_SAMPLE = 128
_UNLIMITED = 10**6
_MIN_FIXED = 12  # tokens of a fixed length that leaves room for padding
PADDING_SIDES = ("right", "left")
FEW_IDS = 256  # number to draw from if the model does not say how many ids it knows
_FIXED_SEQUENCE = 512  # for a model without a limit, in a file that cannot leave the length open


@dataclass(frozen=True)
class TextInputs:
    """Tokenized text.

    Attributes:
        names: the inputs common to tokenizer and model, in the tokenizer's order, with the shape per token: `()` for
            ids [B, S], `(4,)` for boxes [B, S, 4].
        bounds: input name to the number of ids it may hold.
        longest: the maximum number of tokens the model accepts; None for no limit.
        end_id: the end token for models that look for it (BART's classifiers); None if they do not.
        text: a text to trace the model on, next to our own.
        batch_axis: the name of axis B.
        left_out: the model's non-text inputs that are not included: `images`, `sound`.
        padded_length: the length that all texts are padded to, for an encoder whose result depends on padding (SigLIP);
            None for others.
        pad_id: the id that onnxtool pads with.
        sides: the sides of the padding on which the outputs for a text are the same as for the text alone.
    """

    tokenizer: Any
    names: Mapping[str, tuple[int, ...]]
    bounds: Mapping[str, int]
    longest: int | None
    end_id: int | None
    text: str | None = None
    batch_axis: str = BATCH
    left_out: tuple[str, ...] = ()
    padded_length: int | None = None
    pad_id: int = 0
    sides: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, tokenizer: Any, accepted: Sequence[str], *, text: str | None = None) -> TextInputs:
        """Determine what the tokenizer provides and the model takes; `accepted` are the parameters of its forward.

        Raises:
            CheckpointError: the tokenizer does not run.
            ExportError: they have no ids in common.
        """
        tokens = run(lambda: tokenizer(["a"]), "tokenizer", TOKENIZER_FILE)
        offered = {name: np.asarray(array).shape[2:] for name, array in tokens.items()}
        if "input_ids" not in accepted and "inputs" in accepted:  # Perceiver's name for them
            offered = {{"input_ids": "inputs"}.get(name, name): token_shape for name, token_shape in offered.items()}
        config = text_config(model)
        # DeBERTa takes token types and ignores them.
        ignored = {"token_type_ids"} if getattr(config, "type_vocab_size", None) == 0 else set()
        names = {name: token_shape for name, token_shape in offered.items() if name in accepted and name not in ignored}
        if not {"input_ids", "inputs"} & set(names):
            raise disagreement(model, accepted, "tokenizer", offered)
        ids = vocabulary_size(model) or FEW_IDS
        _check_vocabulary(tokenizer, model)
        bounds = {"input_ids": ids, "inputs": ids, "token_type_ids": getattr(config, "type_vocab_size", None) or 2}
        pad_id = next((i for i in (tokenizer.pad_token_id, token_of("pad", config, ids)) if i is not None), 0)
        end_id, longest = token_of("eos", config, ids), longest_text(model, tokenizer)
        return cls(tokenizer, names, bounds, longest, end_id, text, pad_id=pad_id)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """B and S; only B if texts are padded to one length."""
        longest = min(self.longest or _FIXED_SEQUENCE, _FIXED_SEQUENCE)
        sequence, other = (8, 11) if longest >= 11 else (longest, longest - 1)
        batch = Axis(self.batch_axis, 2, 3, may_fail=False, when_fixed=1)
        # A power of two, which suits windows and Fourier transforms.
        fixed = 1 << (longest.bit_length() - 1)
        length = Axis(SEQUENCE, sequence, other, is_covered=self._is_covered, when_fixed=fixed)
        return (batch, length) if self.padded_length is None else (batch,)

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make random ids without padding."""
        return self._fill(FeedShape.full(sizes[self.batch_axis], self._sizes(sizes)[SEQUENCE]), seed)

    def sample(self, fixed: Sizes) -> Feeds:
        """Tokenize two texts of different lengths, so that there is padding and no axis of size 1."""
        texts = (self.text or _SAMPLE_TEXTS[0], _SAMPLE_TEXTS[1])[: fixed.get(self.batch_axis, 2)]
        return self.tokenize(texts, self._sizes(fixed).get(SEQUENCE))

    def cases(self, fixed: Sizes) -> list[Case]:
        """Rows of all lengths, padding on either side, other ids in the padding, another mask, real text."""
        fixed = self._sizes(fixed)
        shapes = [self._fixed(shape, fixed) for shape in verification_shapes(self.longest)]
        cases = [self._case(shape, self._fill(shape, seed)) for seed, shape in enumerate(shapes)]
        if _MASK in self.names:
            ragged = next(case for case, shape in zip(cases, shapes, strict=True) if shape.is_ragged)
            alone = self._fixed(padding_alone(self.longest), fixed)
            cases += [self._other_padding(ragged), _everything_attended(ragged)]
            cases += [self._case(alone, self._fill(alone, len(cases)))]
        tokens = self.tokenize(_TEXTS[: fixed.get(self.batch_axis, len(_TEXTS))], fixed.get(SEQUENCE))
        mask = tokens.get(_MASK)
        return [*cases, Case("real text", tokens, None if mask is None else mask.astype(bool))]

    def batches(self, fixed: Sizes) -> list[Case]:
        """Texts that share a batch, padded on each of `sides`; for none, texts of one length. None with fixed sizes."""
        if _MASK not in self.names or self.padded_length is not None or {self.batch_axis, SEQUENCE} & fixed.keys():
            return []
        if self.sides:
            return [self.padded(side) for side in self.sides]
        shape = next(shape for shape in verification_shapes(self.longest) if shape.batch_size > 1)
        return [self._case(replace(shape, description="texts of one length"), self._fill(shape, 0))]

    def padded(self, side: str) -> Case:
        """Texts of different lengths, padded on a side with the token that onnxtool pads with."""
        shapes = verification_shapes(self.longest)
        shape = next(shape for shape in shapes if shape.is_ragged and shape.padding == side)
        case = self._case(replace(shape, description=f"a batch padded {side}"), self._fill(shape, len(shapes)))
        name = "input_ids" if "input_ids" in self.names else "inputs"
        return replace(case, feeds={**case.feeds, name: np.where(shape.mask, case.feeds[name], self.pad_id)})

    def filled_up(self, fixed: Sizes) -> tuple[Case, Case] | None:
        """Return texts padded to a fixed length, three times theirs, and one alone; None if no length is fixed."""
        length = fixed.get(SEQUENCE, 0)
        if length < _MIN_FIXED or self.padded_length is not None:
            return None
        feeds = self.feeds({self.batch_axis: 2, **fixed})
        is_text = np.arange(length) < length // 3
        is_text = is_text[::-1] if self.tokenizer.padding_side == "left" else is_text
        fill = {name: self.pad_id if name in ("input_ids", "inputs") else 0 for name in feeds}
        padded = {name: np.where(is_text, array, fill[name]) for name, array in feeds.items()}
        valid = np.broadcast_to(is_text, next(iter(padded.values())).shape)
        alone = {name: array[:1, is_text] for name, array in feeds.items()}
        case = Case("texts padded to the fixed length", padded, valid)
        return case, Case("a text alone", alone, valid[:1, is_text], case.description, (0,))

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Masks, and ids below their bounds; text ids end with the end token."""
        return {
            name: Recipe(MASK)
            if "mask" in name
            else Recipe(IDS, self.bounds.get(name, 2), last=self.end_id if name == "input_ids" else None)
            for name in self.names
        }

    def tokenize(
        self,
        texts: Sequence[str],
        sequence_length: int | None = None,
        *,
        longest: int = _LONGEST_SAMPLE,
        add_special_tokens: bool = True,
    ) -> Feeds:
        """Tokenize `texts` into int64 [B, S] arrays, padded to the longest or to `sequence_length`, cut to `longest`.

        For a tokenizer without a padding token (GPT-2), the first text is repeated, which needs no padding.
        """
        can_pad = self.tokenizer.pad_token is not None
        options = {
            "padding": ("max_length" if sequence_length else True) if can_pad else False,
            "truncation": True,
            "max_length": sequence_length or min(longest, self.longest or longest),
            "return_tensors": "np",
            **({} if add_special_tokens else {"add_special_tokens": False}),
        }
        rows = list(texts) if can_pad else [texts[0]] * len(texts)
        encoded = run(lambda: self.tokenizer(rows, **options), "tokenizer", TOKENIZER_FILE)
        encoded = {"inputs": encoded["input_ids"], **encoded}
        return {name: np.asarray(encoded[name], dtype=np.int64) for name in self.names}

    def _sizes(self, sizes: Sizes) -> Sizes:
        return sizes if self.padded_length is None else {**sizes, SEQUENCE: self.padded_length}

    @property
    def _is_covered(self) -> bool:
        return self.longest is not None and verification_shapes(self.longest)[0].sequence_length == self.longest

    def _fixed(self, shape: FeedShape, fixed: Sizes) -> FeedShape:
        sequence = fixed.get(SEQUENCE, shape.sequence_length)
        lengths = tuple(length and max(1, length * sequence // shape.sequence_length) for length in shape.lengths)
        if fixed.get(self.batch_axis):
            lengths = (min(lengths),)  # the shortest row, which has padding if any row does
        description = shape.description if not fixed else f"{shape.description}, {len(lengths)} x {sequence}"
        return replace(shape, description=description, lengths=lengths, sequence_length=sequence)

    def _case(self, shape: FeedShape, feeds: Feeds) -> Case:
        return Case(shape.description, feeds, shape.mask if _MASK in self.names else None)

    def _fill(self, shape: FeedShape, seed: int) -> Feeds:
        """Draw ids from the whole vocabulary, including in padding, so that an unapplied mask is detected."""
        generator, rows = np.random.default_rng(seed), (shape.batch_size, shape.sequence_length)
        return {
            name: self.recipes[name].draw((*rows, *token_shape), shape.mask, generator).astype(np.int64)
            for name, token_shape in self.names.items()
        }

    def _other_padding(self, case: Case) -> Case:
        assert case.valid is not None  # noqa: S101  only cases with a mask come here
        feeds = dict(case.feeds)
        name = "input_ids" if "input_ids" in feeds else "inputs"
        feeds[name] = np.where(case.valid, feeds[name], (feeds[name] + 1) % self.bounds[name])
        if self.end_id is not None:
            feeds[name] = np.where(~case.valid & (feeds[name] == self.end_id), case.feeds[name], feeds[name])
        return Case(f"{case.description}, other ids in the padding", feeds, case.valid, like=case.description)


def _everything_attended(case: Case) -> Case:
    feeds = {**case.feeds, _MASK: np.ones_like(case.feeds[_MASK])}
    return Case(f"{case.description}, padding attended", feeds, None)


def longest_text(model: Any, tokenizer: Any) -> int | None:
    """Return how many tokens the model accepts according to configuration and tokenizer; None for no limit."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    limits = [positions, getattr(tokenizer, "model_max_length", None)]
    # RoBERTa and similar models start counting positions after the padding id.
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    padding_id = getattr(embeddings, "padding_idx", None)
    if isinstance(positions, int) and padding_id is not None:
        limits.append(positions - padding_id - 1)
    # transformers writes "no limit" as 1e30, and XLNet as -1.
    numbers = [limit for limit in limits if isinstance(limit, int | float) and not isinstance(limit, bool)]
    return min((int(limit) for limit in numbers if 1 <= limit < _UNLIMITED), default=None)


def vocabulary_size(model: Any) -> int | None:
    """Return how many ids the model knows: the smaller of its embedding size and its configured number.

    None if neither is available, as for CANINE, which hashes characters.
    """
    sizes = [getattr(text_config(model), "vocab_size", None)]
    with contextlib.suppress(AttributeError, NotImplementedError):
        sizes.append(getattr(model.get_input_embeddings(), "num_embeddings", None))
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    return min(known, default=None)


def _check_vocabulary(tokenizer: Any, model: Any) -> None:
    size = vocabulary_size(model)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if size is not None and largest >= size:
        raise ExportError(
            f"the tokenizer gives ids up to {largest}, and {type(model).__name__} knows {size} (0 to {size - 1})",
            "take the tokenizer that the model was trained with, or call model.resize_token_embeddings(len(tokenizer)) "
            "and train what is new",
        )


def text_config(model: Any) -> Any:
    """Return the text part of a model's configuration."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def token_of(role: str, config: Any, ids: int) -> int | None:
    """Return the id that a configuration names for a role, e.g. `eos`; None for none below `ids`."""
    token_id = getattr(config, f"{role}_token_id", None)
    return token_id if isinstance(token_id, int) and 0 <= token_id < ids else None


def choose_side(
    model: Any, text: TextInputs, sequences: frozenset[str] | None, tolerance: Tolerance
) -> tuple[TextInputs, str, str]:
    """Run a text alone and padded in a batch, and set the tokenizer's side, and so that of all files that are written.

    The tokenizer's own side is preferred. Models that count positions from the start of the row (BERT, GPT-2) need
    padding on the right; classifiers that read the last position (XLNet) need it on the left.

    Args:
        model: a transformers model, or its encoder.
        text: its inputs.
        sequences: as in ReferenceOutputs.
        tolerance: the allowed difference.

    Returns:
        The inputs with the sides that are right; the chosen side, NO_PADDING if texts of different lengths must not
        share a batch; and a note for the user, empty for the tokenizer's own side.
    """
    own = text.tokenizer.padding_side
    errors = {side: list(_errors(model, text, side, sequences, tolerance)) for side in PADDING_SIDES}
    sides = tuple(side for side, side_errors in errors.items() if all(error.passed for error in side_errors))
    side = own if own in sides else next(iter(sides), NO_PADDING)
    if sides:
        text.tokenizer.padding_side = side
    moved = f"moves the outputs for a text by {max((error.max_abs_error for error in errors[own]), default=0.0):.2g}"
    note = f"texts are padded on the {side}, although the tokenizer pads on the {own}: that {moved}"
    if not sides:
        note = f"only texts of the same length share a batch: padding {moved}"
    return replace(text, sides=sides), side, "" if side == own else note


def _errors(
    model: Any, text: TextInputs, side: str, sequences: frozenset[str] | None, tolerance: Tolerance
) -> Iterator[OutputError]:
    """Yield how far each output for a text alone is from the one in a batch; nothing if the model refuses either."""
    batch = text.padded(side)
    try:
        runs = [
            (case, {name: to_numpy(value) for name, value in run_torch_tensors(model, case.feeds).items()})
            for case in (batch, *row_cases(batch)[:1])
        ]
    except ExportError:
        return
    yield from row_errors(runs[-1], runs[0], sequences, tolerance, {}).values()
