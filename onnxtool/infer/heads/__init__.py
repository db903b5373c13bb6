"""Heads that interpret a model's outputs, one per module, and the head of each task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.checkpoint.token_modules import TOKEN_WEIGHTS
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.heads.embeddings import EMBEDDING, SIDE, Embeddings
from onnxtool.infer.heads.head import Answer, AnswerContext, AnswerHead, Batch, VectorHead
from onnxtool.infer.heads.labels import LabelNames, Labels, Scores
from onnxtool.infer.heads.masks import Masks, NextTokens
from onnxtool.infer.heads.spans import END, START, AnswerSpans, Entities
from onnxtool.infer.heads.terms import LexicalTerms, Terms
from onnxtool.infer.heads.token_vectors import TokensOfTexts
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import PRUNE_KEY

AnyHead = VectorHead[Any] | AnswerHead[Any]


@dataclass(frozen=True)
class OutputShapes(AnswerHead[dict[str, tuple[int, ...]]]):
    """The head of any other model: output names and shapes."""

    kind = "shapes"
    takes_pairs = True

    def read_outputs(self, batch: Batch) -> list[dict[str, tuple[int, ...]]]:
        """Return the output shapes for each text by itself, without padding."""
        size = batch.mask.shape
        readings = []
        for text in batch.texts:
            shapes = {}
            for name, array in batch.outputs.items():
                if array.shape[:2] == size:
                    shapes[name] = (1, len(text), *array.shape[2:])
                else:
                    shapes[name] = (1, *array.shape[1:]) if array.shape[:1] == size[:1] else array.shape
            readings.append(shapes)
        return readings

    def answer(self, reading: dict[str, tuple[int, ...]], context: AnswerContext) -> Answer:
        """Answer with them."""
        return Answer(outputs=reading)


def _terms(model: ModelFile, folder: CheckpointFolder, tokenizer: TextTokenizer) -> AnyHead:
    in_graph = _has_output(model, "sparse") or _has_output(model, "output_idx")
    pruning = Pruning.of_model(model) if PRUNE_KEY in model.metadata else None
    return Terms.of(folder, tokenizer, in_graph=in_graph, pruning=pruning)


def _embeddings(model: ModelFile, folder: CheckpointFolder, tokenizer: TextTokenizer) -> AnyHead:
    in_graph = _has_output(model, EMBEDDING) or _has_output(model, SIDE)
    in_graph |= not gives_states(model) and any(len(info.shape) == 2 for info in model.structure.outputs)
    return Embeddings.of(folder, in_graph=in_graph)


def _features(model: ModelFile, folder: CheckpointFolder, tokenizer: TextTokenizer) -> AnyHead:
    """A feature extractor with stated pooling is an embedder."""
    pools = folder.sentence_modules.first_of("Pooling") is not None or _has_output(model, EMBEDDING)
    return _embeddings(model, folder, tokenizer) if pools else OutputShapes()


def _labels(model: ModelFile, folder: CheckpointFolder, tokenizer: TextTokenizer) -> AnyHead:
    width = next((info.shape[1] for info in model.structure.outputs if len(info.shape) == 2), None)
    num_labels = width if isinstance(width, int) else len(LabelNames.of(folder).names)
    return Scores.of(folder) if num_labels == 1 else Labels.of(folder)


def _answer_spans(model: ModelFile, folder: CheckpointFolder, tokenizer: TextTokenizer) -> AnyHead:
    return AnswerSpans() if _has_output(model, START) and _has_output(model, END) else OutputShapes()


# By value of the metadata key onnxtool.task. Other tasks are answered with shapes.
_HEADS: dict[str, Callable[[ModelFile, CheckpointFolder, TextTokenizer], AnyHead]] = {
    "sparse-encoding": _terms,
    "sentence-similarity": _embeddings,
    LATE_INTERACTION: lambda model, folder, tokenizer: TokensOfTexts.of(
        folder, tokenizer, in_graph=_has_output(model, TOKENS)
    ),
    "feature-extraction": _features,
    "fill-mask": lambda _model, folder, tokenizer: Masks.of(folder, tokenizer),
    "text-classification": _labels,
    RANKING: lambda _model, folder, _tokenizer: Scores.of(folder, ranks=True),
    "token-classification": lambda _model, folder, _tokenizer: Entities(LabelNames.of(folder)),
    "question-answering": _answer_spans,
    "text-generation": lambda _model, _folder, tokenizer: NextTokens(tokenizer),
    "text-generation-with-past": lambda _model, _folder, tokenizer: NextTokens(tokenizer),
}


# The representations of an M3 embedder, by output.
_REPRESENTATIONS: dict[str, tuple[str, Callable[[ModelFile, CheckpointFolder, TextTokenizer], AnyHead]]] = {
    "dense": (EMBEDDING, _embeddings),
    "sparse": (TOKEN_WEIGHTS, lambda _model, _folder, tokenizer: LexicalTerms.of(tokenizer)),
    "colbert": (TOKENS, lambda _model, _folder, tokenizer: TokensOfTexts.of_m3(tokenizer)),
}


def head_for(
    task: str,
    model: ModelFile,
    folder: CheckpointFolder,
    tokenizer: TextTokenizer,
    representation: str | None = None,
) -> AnyHead:
    """Return the head that reads the outputs of `model` for `task`.

    Args:
        task: the model's task.
        model: the file.
        folder: the checkpoint's folder.
        tokenizer: the checkpoint's tokenizer.
        representation: representation of an M3 embedder, `dense`, `sparse` or `colbert`; None for the task's default,
            which is dense.

    Raises:
        InputError: a file of the checkpoint is malformed or has unsupported settings, or the model has no such
            representation.
    """
    if representation is not None:
        if representation not in _REPRESENTATIONS:
            known = ", ".join(_REPRESENTATIONS)
            raise InputError(f"no representation called {representation!r}", f"pass one of {known}")
        missing = [name for name, _ in _REPRESENTATIONS.values() if not _has_output(model, name)]
        if missing:
            raise InputError(
                f"--representation {representation} was passed, but {model.path} gives no {' and no '.join(missing)}",
                "it is for M3 embedders (bge-m3), exported with --head m3; leave it out",
            )
        return _REPRESENTATIONS[representation][1](model, folder, tokenizer)
    head = _HEADS.get(task)
    return OutputShapes() if head is None else head(model, folder, tokenizer)


def gives_states(model: ModelFile) -> bool:
    """Whether a graph returns numbers per token, float [B, S, N]."""
    return any(len(info.shape) == 3 for info in model.structure.outputs)


def _has_output(model: ModelFile, name: str) -> bool:
    return any(info.name == name for info in model.structure.outputs)
