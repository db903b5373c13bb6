"""The workload of a benchmark: generated inputs of one shape, or texts in batches.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.benchmarking.options import DEFAULT_BATCH_SIZES, DEFAULT_LENGTHS, BenchmarkOptions
from onnxtool.benchmarking.report import StageTimes, TokenLengths
from onnxtool.checkpoint.folder import CheckpointFolder, find_checkpoint_folder
from onnxtool.checkpoint.limits import Text, graph_limit
from onnxtool.errors import InputError
from onnxtool.infer.loading import LoadedModel
from onnxtool.model_file import ModelFile
from onnxtool.runtime.input_cases import FeedShape, fixed_sizes, input_cases, names_of_ids, sized_feeds
from onnxtool.runtime.timing import Stopwatch

Feeds = Mapping[str, NDArray[Any]]

_STAGE_BATCHES, _STAGES_S = 30, 5.0  # the most that the stages are timed
_MAX_TEXTS = 4096  # more would have the same lengths, and take memory


@dataclass(frozen=True)
class Workload:
    """The batches of one shape, run in turns.

    Attributes:
        sequence_length: S; for texts, the largest.
        batches: inputs of B rows each.
        masks: bool [B, S] of each batch, false on padding.
        texts: the texts of each batch; empty for generated inputs.
        tokens: None for generated inputs.
        has_tokens: whether the model takes token ids.
    """

    batch_size: int
    sequence_length: int
    batches: tuple[Feeds, ...]
    masks: tuple[NDArray[np.bool_], ...]
    texts: tuple[tuple[str, ...], ...] = ()
    tokens: TokenLengths | None = None
    has_tokens: bool = True

    @property
    def name(self) -> str:
        """The name in gates."""
        return f"{self.batch_size}x{self.sequence_length}"

    @property
    def description(self) -> str:
        """Description for progress messages."""
        if self.tokens is None:
            return f"{self.batch_size} x {self.sequence_length}"
        return f"{len(self.batches)} batches of {self.batch_size} texts"

    @property
    def tokens_per_batch(self) -> float | None:
        """Average number of tokens per batch; for texts, only real ones; None if there are no tokens."""
        if not self.has_tokens:
            return None
        if self.tokens is None:
            return float(self.batch_size * self.sequence_length)
        return float(np.mean([mask.sum() for mask in self.masks]))


@dataclass(frozen=True)
class TextReader:
    """Texts of a benchmark, in the order in which they are run.

    Attributes:
        num_given: number of texts to draw from.
    """

    model: LoadedModel
    texts: tuple[str, ...]
    num_given: int

    @classmethod
    def draw(cls, model: LoadedModel, options: BenchmarkOptions) -> TextReader:
        """Draw the texts to run if there are very many; their order is random too."""
        texts = [text.contents for text in options.texts]
        # A file may be sorted by length, so its first batches would not be representative.
        drawn = random.Random(options.seed).sample(texts, min(len(texts), _MAX_TEXTS))  # noqa: S311 - no secret
        return cls(model, tuple(drawn), len(texts))

    def workload(self, batch_size: int) -> Workload:
        """Make batches of `batch_size` texts; the last one is filled up from the first texts.

        Raises:
            InputError: a text has no token, or the graph is fixed to another batch size.
        """
        rules, path = self.model.batch_rules, self.model.session.model.path
        if rules.batch_size not in (None, batch_size):
            raise InputError(
                f"{path} is fixed to batches of {rules.batch_size}; {batch_size} was asked for",
                f"pass --batch_size {rules.batch_size}, or export the model with dynamic axes",
            )
        groups = tuple(_groups(self.texts, batch_size))
        encoded = [self.model.tokenize(texts) for texts in groups]
        flat = [text for group in encoded for text in group][: len(self.texts)]
        if not all(len(text) for text in flat):
            raise InputError("a text has no tokens", "leave empty texts out of --input")
        padded = [self.model.tokenizer.pad(group, rules.sequence_length) for group in encoded]
        masks = [arrays["attention_mask"].astype(bool) for arrays in padded]
        return Workload(
            batch_size,
            max(mask.shape[1] for mask in masks),
            tuple(self.model.feeds(group) for group in encoded),
            tuple(masks),
            groups,
            _token_lengths([len(text) for text in flat], masks, sum(text.truncated for text in flat)),
        )

    def time_stages(self, workload: Workload) -> StageTimes:
        """Time the stages of batches one after the other, as the library computes them.

        Raises:
            InputError: the model's outputs do not fit its task.
        """
        model, has_vectors = self.model, True
        batches: list[dict[str, float]] = []
        end = time.perf_counter() + _STAGES_S
        for place in range(_STAGE_BATCHES + 1):  # the first one allocates
            texts = workload.texts[place % len(workload.texts)]
            watch = Stopwatch()
            encoded = model.tokenize(texts)
            feeds = model.feeds(encoded)
            watch.lap("tokenize")
            batch = model.batch(encoded, model.session.run(feeds))
            watch.lap("run")
            if has_vectors:
                try:
                    model.pool(batch)
                    watch.lap("pool")
                except InputError:
                    has_vectors = False
            batches.append(watch.laps_ms)
            if len(batches) > 1 and time.perf_counter() >= end:
                break
        return StageTimes.of(batches[1:])


def _groups(texts: Sequence[str], batch_size: int) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(texts), batch_size):
        batch = list(texts[start : start + batch_size])
        yield tuple(batch + [texts[place % len(texts)] for place in range(batch_size - len(batch))])


def _token_lengths(lengths: Sequence[int], masks: Sequence[NDArray[np.bool_]], num_truncated: int) -> TokenLengths:
    return TokenLengths(
        num_texts=len(lengths),
        num_truncated=num_truncated,
        min=min(lengths),
        median=float(np.median(lengths)),
        p95=float(np.percentile(lengths, 95)),
        max=max(lengths),
        mean=float(np.mean(lengths)),
        padding_share=1.0 - sum(int(mask.sum()) for mask in masks) / sum(mask.size for mask in masks),
    )


def random_workloads(model: ModelFile, options: BenchmarkOptions) -> Iterator[Workload]:
    """Generate random inputs for every shape, the same ones for the same seed.

    Raises:
        InputError: the model has inputs for which none can be generated.
    """
    stated = model.text_input
    has_tokens = bool(stated or names_of_ids(model))
    if stated is not None:
        from onnxtool.runtime.text_graph import text_arrays

        text_of = _texts_of_lengths(model, is_pair=len(stated.names) > 1)
    for batch_size in options.batch_sizes:
        for length in options.sequence_lengths:
            shape = FeedShape.full(batch_size, length)
            if stated is None:
                feeds = sized_feeds(model, shape, seed=options.seed, given=options.given)
            else:
                feeds = text_arrays(stated.names, [text_of(length)] * batch_size)
            yield Workload(batch_size, length, (feeds,), (shape.mask,), has_tokens=has_tokens)


def _texts_of_lengths(model: ModelFile, *, is_pair: bool) -> Callable[[int], Text]:
    """Return what makes a text, or a pair, of a number of tokens."""
    from onnxtool.checkpoint.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(find_checkpoint_folder(model))
    (shortest,) = tokenizer.encode([("a", "a") if is_pair else "a"])

    def text_of(length: int) -> Text:
        text = " ".join(["a"] * max(1, length - len(shortest) + 1))
        return ("a", text) if is_pair else text

    return text_of


def sample_workloads(model: ModelFile, options: BenchmarkOptions) -> list[Workload]:
    """Read samples; samples with the same sizes are the batches of one shape.

    Raises:
        InputError: a file cannot be read, or does not fit the model.
    """
    ids = names_of_ids(model)
    by_size: dict[tuple[int, int], list[Feeds]] = defaultdict(list)
    for case in input_cases(model, given=options.given):
        sizes = next((case.feeds[name].shape for name in ids if case.feeds[name].ndim == 2), None)
        first = next((array.shape[0] for array in case.feeds.values() if array.ndim), 1)
        by_size[(first, 1) if sizes is None else (sizes[0], sizes[1])].append(case.feeds)
    return [
        Workload(*size, tuple(batches), tuple(np.ones(size, bool) for _ in batches), has_tokens=bool(ids))
        for size, batches in by_size.items()
    ]


def fit_sizes(model: ModelFile, options: BenchmarkOptions) -> BenchmarkOptions:
    """Time a model that leaves no choice at its sizes: by its stamp, its graph, or the shapes that are given.

    An image or an audio clip has the length 1.

    Raises:
        InputError: other sizes were asked for.
        ModelFileError: the stamp cannot be used.
    """
    if model.text_input is not None:
        return options
    fixed, lengths = fixed_sizes(model, options.given), options.sequence_lengths
    batches = _sizes(model, "--batch_size", fixed.batch_size, options.batch_sizes, DEFAULT_BATCH_SIZES)
    if fixed.sequence_length is not None or lengths == DEFAULT_LENGTHS:
        length = fixed.usual_length or fixed.sequence_length
        lengths = _sizes(model, "--sequence_length", length, lengths, DEFAULT_LENGTHS)
    return replace(options, batch_sizes=batches, sequence_lengths=lengths)


def _sizes(
    model: ModelFile, option: str, fixed: int | None, sizes: tuple[int, ...], usual: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the requested size, or the only possible one."""
    if fixed is None or sizes == (fixed,):
        return sizes
    if sizes != usual:
        raise InputError(
            f"the inputs of {model.path} are fixed to {option} {fixed}; {', '.join(map(str, sizes))} was asked for",
            f"pass {option} {fixed}, or export the model with dynamic axes",
        )
    return (fixed,)


def check_lengths(model: ModelFile, options: BenchmarkOptions) -> None:
    """Refuse lengths that the model cannot take, before anything is timed.

    Raises:
        InputError: a length is beyond the graph's limit.
    """
    limit = graph_limit(model, _folder_of(model))
    longest = max(options.sequence_lengths)
    if limit is not None and longest > limit.tokens:
        raise InputError(
            f"{model.path} takes at most {limit.tokens} tokens ({limit.source}); {longest} were asked for",
            "leave that length out of --sequence_length",
        )


def _folder_of(model: ModelFile) -> CheckpointFolder | None:
    """Return the checkpoint's folder if it exists; generated inputs need no tokenizer."""
    try:
        return find_checkpoint_folder(model)
    except InputError:
        return None
