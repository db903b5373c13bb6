"""Classifiers of texts and text pairs, and rerankers, whose single label scores a pair.

Shape letters: B batch, L labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.module_forms import ACTIVATIONS, Floats, sigmoid
from onnxtool.checkpoint.pooling_modules import Activation
from onnxtool.checkpoint.scores import score_function
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import (
    Answer,
    AnswerContext,
    AnswerHead,
    Batch,
    largest,
    probabilities_of,
    require_finite,
    softmax,
)
from onnxtool.infer.report import Scored

_INDEX = re.compile("[0-9]{1,9}")


def unchanged(logits: Floats) -> Floats:
    """Return the logits as scores."""
    return logits


_FUNCTIONS: dict[str, Callable[[Floats], Floats]] = {"Identity": unchanged, "Sigmoid": sigmoid, "Softmax": softmax}
_RANDOM = "RReLU"  # in a CrossEncoder


@dataclass(frozen=True)
class LabelNames:
    """The names of a classifier's labels."""

    names: dict[int, str]

    @classmethod
    def of(cls, folder: CheckpointFolder) -> LabelNames:
        """Read them from config.json."""
        names = folder.read_object("config.json").get("id2label")
        pairs = names.items() if isinstance(names, dict) else ()
        # int() accepts digits of any script, and fails on thousands of them.
        return cls({int(index): str(name) for index, name in pairs if _INDEX.fullmatch(index)})

    def __getitem__(self, index: int) -> str:
        """Return the name of a label, or transformers' placeholder if it has none."""
        return self.names.get(index, f"LABEL_{index}")


@dataclass(frozen=True)
class Labels(AnswerHead[Floats]):
    """The labels of a text or pair, largest score first; a reading is float64 [L].

    Attributes:
        function: the function applied to the logits; see `score_function`.
    """

    kind = "labels"
    has_candidates = True
    takes_pairs = True

    names: LabelNames
    function: Callable[[Floats], Floats]

    @classmethod
    def of(cls, folder: CheckpointFolder) -> Labels:
        """Read the names and the kind of the labels.

        Raises:
            InputError: the checkpoint names an unsupported activation.
        """
        return cls(LabelNames.of(folder), _function_of(folder, is_single=False))

    def read_outputs(self, batch: Batch) -> list[Floats]:
        """Return the score of each label."""
        logits = batch.output(2, "logits")
        if logits.shape[1] == 1:
            raise InputError("the model gives one logit, where its file says several", "pass --task text-ranking")
        return list(probabilities_of(logits, self.function))

    def answer(self, reading: Floats, context: AnswerContext) -> Answer:
        """Answer with all labels, or the first `top_k`."""
        best = largest(reading, context.top_k or len(reading))
        return Answer(tuple(Scored(self.names[i], float(reading[i])) for i in best))


@dataclass(frozen=True)
class Scores(AnswerHead[Floats]):
    """One score per text or pair; a reading is float64 [1].

    Attributes:
        activation: the function applied to the logit.
    """

    kind = "scores"
    takes_pairs = True

    name: str
    activation: Callable[[Floats], Floats]

    @classmethod
    def of(cls, folder: CheckpointFolder, *, ranks: bool = False) -> Scores:
        """Read the activation of the checkpoint; see `score_function`."""
        return cls(LabelNames.of(folder)[0], _function_of(folder, is_single=True, ranks=ranks))

    def read_outputs(self, batch: Batch) -> list[Floats]:
        """Return the score of each text or pair."""
        logits = batch.output(2, "logits")
        if logits.shape[1] != 1:
            raise InputError(
                f"the model gives {logits.shape[1]} logits, where its file says one",
                "pass --task text-classification for a file of another exporter, or export it again",
            )
        scores = np.asarray(self.activation(logits.astype(np.float64)))
        require_finite(scores, "score")
        return list(scores)

    def require_windows(self) -> None:
        """Allow windows: a document is as relevant as its best passage."""

    def join(self, readings: Sequence[Floats], windows: Sequence[EncodedText]) -> Floats:
        """Take the largest score over the windows (MaxP; Dai and Callan, 2019, arXiv:1905.09217)."""
        return np.asarray(np.stack(readings).max(axis=0))

    def answer(self, reading: Floats, context: AnswerContext) -> Answer:
        """Answer with the score."""
        return Answer((Scored(self.name, float(reading[0])),))


def _function_of(folder: CheckpointFolder, *, is_single: bool, ranks: bool = False) -> Callable[[Floats], Floats]:
    """Return the function that turns the logits of a checkpoint into scores.

    Raises:
        InputError: onnxtool does not compute it.
    """
    name = score_function(folder, is_single=is_single, ranks=ranks)
    if name in ACTIVATIONS and name not in (*_FUNCTIONS, _RANDOM):
        from onnxtool.runtime.computed_modules import compute

        return partial(compute, (Activation(name),))
    if name not in _FUNCTIONS:
        raise InputError(
            f"the checkpoint turns logits into scores by {name}, which is not computed here",
            "run it with onnxtool.open_session, and apply that yourself",
        )
    return _FUNCTIONS[name]
