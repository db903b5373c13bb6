"""Classifiers of texts and of pairs of texts, and rerankers, whose one label is the score of a pair.

Letters of shapes: B batch, L labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.pooling_module import ACTIVATIONS, Floats, activation_name, sigmoid
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, as_object
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
from onnxtool.reports import Json

_INDEX = re.compile("[0-9]{1,9}")
_SOFTMAX = ("torch.nn.Softmax", "torch.nn.modules.activation.Softmax")  # over the labels, its last axis


@dataclass(frozen=True)
class LabelNames:
    """The names of a classifier's labels."""

    names: dict[int, str]

    @classmethod
    def of(cls, folder: CheckpointFolder) -> LabelNames:
        """Read them from config.json."""
        names = folder.read("config.json").get("id2label")
        pairs = names.items() if isinstance(names, dict) else ()
        # int() reads digits of any script, and fails on thousands of them.
        return cls({int(index): str(name) for index, name in pairs if _INDEX.fullmatch(index)})

    def __getitem__(self, index: int) -> str:
        """Return the name of a label; transformers' own placeholder where it has none."""
        return self.names.get(index, f"LABEL_{index}")


@dataclass(frozen=True)
class Labels(AnswerHead[Floats]):
    """The labels of a text or of a pair, most probable first; a reading is float64 [L].

    Several labels are what the activation of a CrossEncoder gives, where the checkpoint names one. Else they are a
    softmax, or a sigmoid each where `problem_type` says that several may hold.
    """

    kind = "labels"
    takes_pairs = True

    names: LabelNames
    function: Callable[[Floats], Floats]

    @classmethod
    def of(cls, folder: CheckpointFolder) -> Labels:
        """Read names and kind of the labels.

        Raises:
            InputError: the checkpoint names an activation that is not computed here.
        """
        names, stated = LabelNames.of(folder), stated_activation(folder)
        if stated is not None:
            return cls(names, softmax if stated in _SOFTMAX else _activation(stated))
        multiple = folder.read("config.json").get("problem_type") == "multi_label_classification"
        return cls(names, sigmoid if multiple else softmax)

    def read(self, batch: Batch) -> list[Floats]:
        """Return the probability of each label."""
        return list(probabilities_of(batch.output(2, "logits"), self.function))

    def answer(self, reading: Floats, context: AnswerContext) -> Answer:
        """Answer with all labels, or the first `top_k`."""
        best = largest(reading, context.top_k or len(reading))
        return Answer(tuple(Scored(self.names[i], float(reading[i])) for i in best))


@dataclass(frozen=True)
class Scores(AnswerHead[Floats]):
    """One score for a text or a pair; a reading is float64 [1].

    Attributes:
        activation: what is applied to the logit.
    """

    kind = "scores"
    takes_pairs = True

    name: str
    activation: Callable[[Floats], Floats]

    @classmethod
    def of(cls, folder: CheckpointFolder) -> Scores:
        """Read the activation of the checkpoint."""
        return cls(LabelNames.of(folder)[0], score_activation(folder))

    def read(self, batch: Batch) -> list[Floats]:
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
        """Allow them: a document is as relevant as the best of its passages."""

    def join(self, readings: Sequence[Floats], windows: Sequence[EncodedText]) -> Floats:
        """Take the largest score over the windows (MaxP; Dai and Callan, 2019, arXiv:1905.09217)."""
        return np.asarray(np.stack(readings).max(axis=0))

    def answer(self, reading: Floats, context: AnswerContext) -> Answer:
        """Answer with the score."""
        return Answer((Scored(self.name, float(reading[0])),))


def score_activation(folder: CheckpointFolder) -> Callable[[Floats], Floats]:
    """Return what turns the logit of a checkpoint with one label into its score.

    As CrossEncoder of sentence-transformers: what config_sentence_transformers.json or config.json names, else a
    sigmoid. A regression, as transformers calls it, is not changed.

    Raises:
        InputError: it names an activation of torch.nn that is not computed here.
    """
    stated = stated_activation(folder)
    if stated is None:
        is_regression = folder.read("config.json").get("problem_type") == "regression"
        return ACTIVATIONS["Identity" if is_regression else "Sigmoid"].apply
    return _activation(stated)


def stated_activation(folder: CheckpointFolder) -> str | None:
    """Return the class that a CrossEncoder applies to logits, e.g. `torch.nn.modules.linear.Identity`; None for none.

    sentence-transformers takes no activation from other packages than torch without trust_remote_code, but its default.
    """
    config = folder.read("config.json")
    stated: tuple[Json, ...] = (
        folder.read(ENCODER_NAME).get("activation_fn"),
        as_object(config.get("sentence_transformers")).get("activation_fn"),
        config.get("sbert_ce_default_activation_function"),  # before version 4
    )
    return next((path for path in stated if isinstance(path, str) and path.startswith("torch.")), None)


def _activation(path: str) -> Callable[[Floats], Floats]:
    name = activation_name(path)
    if name is None:
        raise InputError(
            f"the checkpoint turns logits into scores by {path}, which is not computed here",
            "run it with onnxtool.open_session, and apply that yourself",
        )
    return ACTIVATIONS[name].apply
