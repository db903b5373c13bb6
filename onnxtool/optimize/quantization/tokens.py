"""Compare the greedy tokens of a decoder's quantized file with those of its float32 file.

Greedy decoding yields the same text exactly if, on the text of float32, each step has the same largest logit. So all
steps of a prompt are compared in one run on the prompt and float32's tokens.

Shape letters: B prompts of P tokens each, M steps, V vocabulary, T of its tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import fixed_shape
from onnxtool.checkpoint.tasks import TASK_WITH_CACHE
from onnxtool.errors import InputError, PassError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import MAX_LENGTH_KEY, TASK_KEY
from onnxtool.optimize.report import GreedyTokens
from onnxtool.progress import tell
from onnxtool.runtime.decoding import LOGITS, Ids, StepReader, token_feeds
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from onnxtool.runtime.signature import IDS, index_bounds, num_positions

Floats = NDArray[np.float32]
Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]

_TASKS = ("text-generation", TASK_WITH_CACHE)
_NUM_PROMPTS, _MOST_STEPS, _MOST_PROMPT_TOKENS = 12, 32, 16
_TOGETHER = 4  # prompts in a run, whose logits are those of a whole vocabulary
# A file that reads what follows a token changes its logits by as much as they vary; one that does not, by rounding.
_CAUSAL = 0.01
_NUM_BEST = 64
_LARGEST = 1e9  # of outputs that are not finite


@dataclass(frozen=True)
class Continuation:
    """Prompts of one length, and the tokens that a file in float32 decodes greedily after them.

    Attributes:
        ids: int64 [B, P + M].
        feeds: the inputs for all of them but the last.
        best: int64 [B, M, T], the tokens of the largest logits of each step.
        chances: float32 [B, M, T], their logarithms, among each other.
        decided: bool [B, M], false where the two best logits are closer than float32's rounding.
    """

    ids: Ids
    feeds: Mapping[str, NDArray[Any]]
    best: Ids
    chances: Floats
    decided: NDArray[np.bool_]

    @property
    def num_steps(self) -> int:
        """M."""
        return len(self.decided[0])

    def logits_in(self, outputs: Mapping[str, NDArray[Any]]) -> Floats:
        """Return the logits of each step, float32 [B, M, V], in the outputs for `feeds`."""
        logits: Floats = outputs[LOGITS][:, -self.num_steps :].astype(np.float32, copy=False)
        return logits


@dataclass(frozen=True)
class TokenPromise:
    """The greedy tokens of a file in float32, of which a quantized file has to share some.

    Attributes:
        continuations: prompts with their tokens; layers are compared on the first of them.
        share: the least share of equal tokens.
    """

    continuations: tuple[Continuation, ...]
    share: float

    @property
    def sample(self) -> Continuation:
        """The prompts to compare layers on."""
        return self.continuations[0]

    def holds(self, tokens: GreedyTokens) -> bool:
        """Whether enough tokens are equal."""
        return tokens.share >= self.share

    def require(self, tokens: GreedyTokens, precision: str) -> None:
        """Refuse a file with too few equal tokens.

        Raises:
            PassError: there are too few.
        """
        if self.holds(tokens):
            return
        prompt, step = tokens.first_difference or (0, 0)
        raise PassError(
            f"greedy tokens in {precision}: {tokens}, and {'all' if self.share == 1 else f'{self.share:.4g} of them'} "
            f"have to be; the first different one is that of prompt {prompt}, step {step}",
            f"pass --equal_tokens {np.floor(tokens.share * 100) / 100:g} if that many suffice, or another --precision",
        )

    def count(self, run: Run) -> GreedyTokens:
        """Count the equal tokens of a file that `run` runs, with all steps of a prompt at once."""
        return self._counted(
            [continuation.logits_in(run(continuation.feeds)).argmax(axis=-1) for continuation in self.continuations]
        )

    def count_steps(self, session: Session) -> GreedyTokens:
        """Count the equal tokens of a file as it generates: each prompt alone, through its cache if it has one.

        Raises:
            SessionError: onnxruntime fails.
        """
        if not StepReader(session).has_cache:
            return self.count(session.run)

        def decode(ids: Ids, num_steps: int) -> Ids:
            next_logits, length = StepReader(session), ids.shape[1]
            return np.array([next_logits(ids[:, :end]).argmax() for end in range(length - num_steps, length)])

        tell("decoding step by step")
        continuations = self.continuations
        return self._counted(
            [
                np.stack([decode(row[None], continuation.num_steps) for row in continuation.ids])
                for continuation in continuations
            ]
        )

    def divergence(self, outputs: Mapping[str, NDArray[Any]]) -> float:
        """Return the mean Kullback-Leibler divergence of the next token from float32's, among the best ones.

        Args:
            outputs: of a file, for the feeds of the sample.
        """
        wanted = self.sample.chances
        chances = _log_softmax(np.take_along_axis(self.sample.logits_in(outputs), self.sample.best, axis=-1))
        lost = float((np.exp(wanted) * (wanted - chances)).sum(axis=-1).mean())
        return max(0.0, lost) if np.isfinite(lost) else _LARGEST

    def _counted(self, tokens: Sequence[Ids]) -> GreedyTokens:
        """Count the equal tokens, of int64 [B, M] for each of the continuations."""
        decided = np.concatenate([continuation.decided for continuation in self.continuations])
        own = np.concatenate([continuation.ids[:, -continuation.num_steps :] for continuation in self.continuations])
        equal = np.concatenate(tokens) == own
        different = np.argwhere(decided & ~equal) + 1
        return GreedyTokens(
            num_prompts=len(own),
            num_steps=own.shape[1],
            num_equal=int((decided & equal).sum()),
            num_undecided=int((~decided).sum()),
            first_difference=(int(different[0, 0]), int(different[0, 1])) if len(different) else None,
        )


def predicts_tokens(model: ModelFile) -> bool:
    """Whether a file looks like one of next-token logits: by its task or, without one, by its inputs and outputs.

    Masked language models without a task look the same; `promise_tokens` finds out that they read ahead.
    """
    task, outputs = model.metadata.get(TASK_KEY), {info.name: info for info in model.structure.outputs}
    if LOGITS not in outputs or len(outputs[LOGITS].shape) != 3 or task not in (None, *_TASKS):
        return False
    return any(info.name == IDS for info in model.structure.inputs) and fixed_shape(model) == (None, None)


def promise_tokens(model: ModelFile, texts: Sequence[Sequence[int]], share: float) -> TokenPromise | None:
    """Decode greedily after the beginnings of texts, in float32.

    Args:
        model: the file.
        texts: token ids of texts, which weights were not rounded on; empty for prompts of random ids.
        share: the least share of tokens that a quantized file has to share.

    Returns:
        promise: None for a file that reads ahead, takes other inputs, or leaves no room for tokens.

    Raises:
        SessionError: onnxruntime cannot run the file.
    """
    most = model.metadata_number(MAX_LENGTH_KEY) or num_positions(model) or _MOST_PROMPT_TOKENS + _MOST_STEPS
    length, bound = min(_MOST_PROMPT_TOKENS, most // 2), index_bounds(model).get(IDS, 0)
    if not texts and bound:
        texts = np.random.default_rng(0).integers(0, bound, (_NUM_PROMPTS, length)).tolist()
    usable = [text[:length] for text in texts if len(text) > 1]
    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    for text in usable[:: max(1, len(usable) // _NUM_PROMPTS)][:_NUM_PROMPTS]:
        by_length[len(text)].append(text)
    groups = sorted(by_length.values(), key=len, reverse=True)
    batches = [np.array(group[at : at + _TOGETHER]) for group in groups for at in range(0, len(group), _TOGETHER)]
    session = open_session(model, provider="cpu", frugal=True)
    tell("decoding greedily in float32")
    try:
        if not batches or not _is_causal(session, batches[0], bound):
            return None
    except InputError:
        return None
    num_steps = min(_MOST_STEPS, most - length)
    continuations = tuple(_decode(session, prompts, num_steps) for prompts in batches)
    return (
        TokenPromise(continuations, share)
        if any(continuation.decided.any() for continuation in continuations)
        else None
    )


def _is_causal(session: Session, prompts: Ids, bound: int) -> bool:
    """Whether a file gives the logits of tokens at each position of prompts, int64 [B, P], without reading ahead."""
    ahead, behind = (session.run(token_feeds(session.model, ids))[LOGITS] for ids in (prompts, prompts[:, :-1]))
    num_tokens, is_known = ahead.shape[2], TASK_KEY in session.model.metadata
    if ahead.shape[1] != prompts.shape[1] or num_tokens > bound or (num_tokens < bound and not is_known):
        return False
    return bool(np.abs(ahead[:, -2] - behind[:, -1]).max() <= _CAUSAL * ahead.std())


def _decode(session: Session, prompts: Ids, num_steps: int) -> Continuation:
    """Decode greedily after prompts of one length, int64 [B, P]."""
    next_logits, ids, steps = StepReader(session), prompts, []
    for _ in range(num_steps):
        logits = next_logits(ids)
        steps.append(logits.astype(np.float32))
        ids = np.concatenate([ids, logits.argmax(axis=-1)[:, None]], axis=1)
    feeds = token_feeds(session.model, ids[:, :-1])
    whole = session.run(feeds)[LOGITS][:, -num_steps:].astype(np.float32)
    best = np.partition(whole, -2, axis=-1)[..., -2:]
    changes = [np.abs(logits_of_step - whole[:, place]) for place, logits_of_step in enumerate(steps)]
    rounding = max(float(change[np.isfinite(change)].max(initial=0.0)) for change in changes)
    rounding = max(rounding, float(np.spacing(np.abs(best).max())))
    decided = (best[..., 1] - best[..., 0] > 2 * rounding) & (whole.argmax(axis=-1) == ids[:, -num_steps:])
    places = np.argpartition(whole, -min(_NUM_BEST, whole.shape[-1]), axis=-1)[..., -_NUM_BEST:]
    return Continuation(ids, feeds, places, _log_softmax(np.take_along_axis(whole, places, axis=-1)), decided)


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logarithms: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logarithms
