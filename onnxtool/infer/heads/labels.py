"""Classifiers of texts and text pairs, and rerankers, whose single label scores a pair.

Shape letters: B batch, L labels.
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
_SOFTMAX = ("torch.nn.Softmax", "torch.nn.modules.activation.Softmax")  # over the last axis, the labels


@dataclass(frozen=True)
class LabelNames:
    """The names of a classifier's labels."""

    names: dict[int, str]

    @classmethod
    def of(cls, folder: CheckpointFolder) -> LabelNames:
        """Read them from config.json."""
        names = folder.read("config.json").get("id2label")
        pairs = names.items() if isinstance(names, dict) else ()
        # int() accepts digits of any script, and fails on thousands of them.
        return cls({int(index): str(name) for index, name in pairs if _INDEX.fullmatch(index)})

    def __getitem__(self, index: int) -> str:
        """Return the name of a label, or transformers' placeholder if it has none."""
        return self.names.get(index, f"LABEL_{index}")


@dataclass(frozen=True)
class Labels(AnswerHead[Floats]):
    """The labels of a text or pair, most probable first; a reading is float64 [L].

    Scores use a CrossEncoder's activation if the checkpoint names one. Otherwise they are a softmax, or independent
    sigmoids if `problem_type` is multi-label.
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
    """One score per text or pair; a reading is float64 [1].

    Attributes:
        activation: the function applied to the logit.
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
        """Allow windows: a document is as relevant as its best passage."""

    def join(self, readings: Sequence[Floats], windows: Sequence[EncodedText]) -> Floats:
        """Take the largest score over the windows (MaxP; Dai and Callan, 2019, arXiv:1905.09217)."""
        return np.asarray(np.stack(readings).max(axis=0))

    def answer(self, reading: Floats, context: AnswerContext) -> Answer:
        """Answer with the score."""
        return Answer((Scored(self.name, float(reading[0])),))


def score_activation(folder: CheckpointFolder) -> Callable[[Floats], Floats]:
    """Return the activation of a checkpoint with one label.

    Like CrossEncoder of sentence-transformers: the one named in config_sentence_transformers.json or config.json, else
    a sigmoid. transformers' regression logits are unchanged.

    Raises:
        InputError: it names an unsupported activation of torch.nn.
    """
    stated = stated_activation(folder)
    if stated is None:
        is_regression = folder.read("config.json").get("problem_type") == "regression"
        return ACTIVATIONS["Identity" if is_regression else "Sigmoid"].apply
    return _activation(stated)


def stated_activation(folder: CheckpointFolder) -> str | None:
    """Return the class that a CrossEncoder applies to logits, e.g. `torch.nn.modules.linear.Identity`; None for none.

    Without trust_remote_code, sentence-transformers uses its default instead of activations from outside torch.
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
