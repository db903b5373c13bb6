"""Rules that change the scores of the next token, in the order of transformers' `generate`, and the token chosen.

Letters of shapes: V vocabulary. All are of one text: an answer does not depend on the texts beside it.

transformers 5.23, `_get_logits_processor` and generation/logits_process.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.infer.generation.settings import GenerationSettings, Ids

Scores = NDArray[np.float32]
Tokens = NDArray[np.int64]
Processor = Callable[[Tokens, Scores], Scores]
"""Takes the tokens so far int64 [S] and scores float32 [V], and returns the scores, which may be the same array."""

_NEVER = np.float32(-np.inf)


@dataclass(frozen=True)
class TextBounds:
    """What the rules know of one text.

    Attributes:
        num_prompt: tokens of the decoder before the first that is written.
        max_length: the most tokens of the decoder, prompt included.
        encoder_ids: what the encoder read; None for a decoder alone.
    """

    num_prompt: int
    max_length: int
    encoder_ids: Ids | None = None


def processors_for(settings: GenerationSettings, bounds: TextBounds) -> list[Processor]:
    """Return the rules for one text, in their order."""
    return list(_processors(settings, bounds))


def _processors(settings: GenerationSettings, bounds: TextBounds) -> Iterator[Processor]:
    ends = list(settings.eos_token_id)
    encoder_ids = bounds.encoder_ids
    if settings.sequence_bias:
        yield _biased(settings.sequence_bias)
    if encoder_ids is not None and settings.encoder_repetition_penalty != 1:
        read = np.unique(encoder_ids)
        yield lambda _tokens, scores: _penalized(scores, read, 1 / settings.encoder_repetition_penalty)
    if settings.repetition_penalty != 1:
        yield lambda tokens, scores: _penalized(scores, np.unique(tokens), settings.repetition_penalty)
    if size := settings.no_repeat_ngram_size:
        yield lambda tokens, scores: _without_ngrams(scores, tokens, tokens, size)
    if encoder_ids is not None and (encoder_size := settings.encoder_no_repeat_ngram_size):
        array = np.array(encoder_ids)
        yield lambda tokens, scores: _without_ngrams(scores, array, tokens, encoder_size)
    words = [word for word in settings.bad_words_ids if not (len(word) == 1 and word[0] in ends)]
    if words:
        yield _biased([(word, -np.inf) for word in words])
    least = max(settings.min_length, bounds.num_prompt + settings.min_new_tokens)
    if ends and least > bounds.num_prompt:
        yield lambda tokens, scores: _without(scores, ends) if len(tokens) < least else scores
    if (first := settings.forced_bos_token_id) is not None:
        yield lambda tokens, scores: _only(scores, [first]) if len(tokens) == 1 else scores
    if last := list(settings.forced_eos_token_id):
        yield lambda tokens, scores: _only(scores, last) if len(tokens) == bounds.max_length - 1 else scores
    if settings.remove_invalid_values:
        yield lambda _tokens, scores: np.nan_to_num(scores)
    if settings.exponential_decay_length_penalty is not None and ends:
        yield _decaying(*settings.exponential_decay_length_penalty, ends, bounds.num_prompt)
    if suppressed := list(settings.suppress_tokens):
        yield lambda _tokens, scores: _without(scores, suppressed)
    if unsuited := list(settings.begin_suppress_tokens):
        begin = bounds.num_prompt + (bounds.num_prompt <= 1 and settings.forced_bos_token_id is not None)
        yield lambda tokens, scores: _without(scores, unsuited) if len(tokens) == begin else scores
    if settings.do_sample:
        yield from _warpers(settings)
    if settings.renormalize_logits:
        yield lambda _tokens, scores: _log_softmax(scores)


def _warpers(settings: GenerationSettings) -> Iterator[Processor]:
    """The rules of sampling alone."""
    if settings.temperature != 1:
        yield lambda _tokens, scores: scores / np.float32(settings.temperature)
    if settings.top_k:
        yield lambda _tokens, scores: _top_k(scores, settings.top_k)
    if settings.top_p < 1:
        yield lambda _tokens, scores: _top_p(scores, settings.top_p)
    if (least := settings.min_p) is not None:
        yield lambda _tokens, scores: _likelier(scores, lambda chances: chances >= np.float32(least) * chances.max())
    if settings.typical_p < 1:
        yield lambda _tokens, scores: _typical(scores, settings.typical_p)
    if 0 < settings.epsilon_cutoff < 1:
        yield lambda _tokens, scores: _likelier(scores, lambda chances: chances >= settings.epsilon_cutoff)
    if 0 < settings.eta_cutoff < 1:
        yield lambda _tokens, scores: _eta(scores, settings.eta_cutoff)


def choose(scores: Scores, settings: GenerationSettings, generator: np.random.Generator | None) -> int:
    """Return the best token, the first of equal ones; or one drawn by `generator`."""
    if not settings.do_sample or generator is None:
        return int(scores.argmax())
    chances = _softmax(scores.astype(np.float64)).cumsum()
    return int(min(np.searchsorted(chances, generator.random() * chances[-1], side="right"), len(scores) - 1))


def _penalized(scores: Scores, tokens: Tokens, penalty: float) -> Scores:
    known = tokens[tokens < len(scores)]
    found = scores[known]
    scores = scores.copy()
    scores[known] = np.where(found < 0, found * np.float32(penalty), found / np.float32(penalty))
    return scores


def _without(scores: Scores, tokens: Sequence[int]) -> Scores:
    scores = scores.copy()
    scores[list(tokens)] = _NEVER
    return scores


def _only(scores: Scores, tokens: Sequence[int]) -> Scores:
    forced = np.full_like(scores, _NEVER)
    forced[list(tokens)] = 0
    return forced


def _without_ngrams(scores: Scores, source: Tokens, tokens: Tokens, size: int) -> Scores:
    """Forbid what would make the last `size` tokens a run that `source` has."""
    if len(tokens) + 1 < size or len(source) < size:
        return scores
    windows = np.lib.stride_tricks.sliding_window_view(source, size)
    same = (windows[:, :-1] == tokens[len(tokens) - size + 1 :]).all(axis=1)
    return _without(scores, windows[same, -1].tolist())


def _biased(biases: Sequence[tuple[Ids, float]]) -> Processor:
    def bias(tokens: Tokens, scores: Scores) -> Scores:
        scores = scores.copy()
        for sequence, value in biases:
            *before, last = sequence
            stands = not before or (len(before) < len(tokens) and tokens[-len(before) :].tolist() == before)
            if stands and last < len(scores):
                scores[last] += np.float32(value)
        return scores

    return bias


def _decaying(start: int, factor: float, ends: Sequence[int], num_prompt: int) -> Processor:
    def decay(tokens: Tokens, scores: Scores) -> Scores:
        over = len(tokens) - start - num_prompt
        if over <= 0:
            return scores
        scores = scores.copy()
        found = scores[list(ends)]
        with np.errstate(invalid="ignore"):
            raised = found + np.abs(found) * np.float32(factor**over - 1)
        scores[list(ends)] = np.where(np.isfinite(found), raised, found)
        return scores

    return decay


def _softmax(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    shifted = np.exp(scores - scores.max())
    chances: NDArray[np.floating] = shifted / shifted.sum()
    return chances


def _log_softmax(scores: Scores) -> Scores:
    shifted = scores - scores.max()
    logs: Scores = shifted - np.log(np.exp(shifted).sum())
    return logs


def _top_k(scores: Scores, count: int) -> Scores:
    if count >= len(scores):
        return scores
    return np.where(scores < np.partition(scores, -count)[-count], _NEVER, scores)


def _top_p(scores: Scores, part: float) -> Scores:
    order = np.argsort(scores, kind="stable")
    summed = _softmax(scores[order]).cumsum()
    removed = summed <= np.float32(1 - part)
    removed[-1] = False
    scores = scores.copy()
    scores[order[removed]] = _NEVER
    return scores


def _likelier(scores: Scores, keeps: Callable[[NDArray[np.floating]], NDArray[np.bool_]]) -> Scores:
    """Keep the tokens whose probabilities `keeps` keeps, and the best one."""
    kept = keeps(_softmax(scores))
    kept[scores.argmax()] = True
    return np.where(kept, scores, _NEVER)


def _typical(scores: Scores, mass: float) -> Scores:
    logs = _log_softmax(scores)
    with np.errstate(invalid="ignore"):
        entropy = -np.nansum(np.exp(logs) * logs)
    surprise = np.abs(-logs - entropy)
    order = np.argsort(surprise, kind="stable")
    summed = _softmax(scores[order]).cumsum()
    last = min(int((summed < mass).sum()), len(scores) - 1)
    kept = surprise <= surprise[order[last]]
    kept[order[0]] = True
    return np.where(kept, scores, _NEVER)


def _eta(scores: Scores, epsilon: float) -> Scores:
    def keeps(chances: NDArray[np.floating]) -> NDArray[np.bool_]:
        real = chances[chances > 0]
        entropy = -(real * np.log(real)).sum()
        return chances >= min(epsilon, float(np.sqrt(epsilon) * np.exp(-entropy)))

    return _likelier(scores, keeps)
