"""Load a model with all that it takes to run texts through it: session, tokenizer, limits, and how it is read.

Letters of shapes: B batch, N texts, S sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.infer.answers import AnswerRule
from onnxtool.infer.batches import Batch, BatchRules
from onnxtool.infer.pooled import dense_vectors, sparse_vectors
from onnxtool.infer.tasks import deduce_task, rule_for, stated_task
from onnxtool.infer.vectors import DenseVectors, SparseVectors
from onnxtool.model_file import ModelFile
from onnxtool.runtime.feeds import index_bounds
from onnxtool.runtime.session import Session, open_session
from onnxtool.texts.checkpoint_folder import CheckpointFolder, find_checkpoint_folder
from onnxtool.texts.feeds import text_feeds
from onnxtool.texts.limits import Limit, text_limit
from onnxtool.texts.tokenizer import EncodedText, Text, TextTokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model that texts can be run through. Nothing of it changes after loading: threads may share it.

    Attributes:
        session: runs the graph.
        tokenizer: turns texts into tokens.
        folder: the checkpoint's small files.
        task: what the model is for, as its metadata says, else as deduced from its outputs.
        limit: the most tokens of a text; None where there is no limit.
        rule: how the outputs are read.
        batch_rules: what the graph takes at once.
        num_ids: how many tokens the graph knows; None where that does not show.
    """

    session: Session
    tokenizer: TextTokenizer
    folder: CheckpointFolder
    task: str
    limit: Limit | None
    rule: AnswerRule
    batch_rules: BatchRules
    num_ids: int | None

    @property
    def is_sparse(self) -> bool:
        """Whether texts are encoded as weights of terms."""
        return self.rule.kind == "terms"

    def tokenize(self, texts: Sequence[Text]) -> list[EncodedText]:
        """Read N texts, or pairs of texts, each cut to the model's limit.

        Raises:
            InputError: a text is no Unicode text.
        """
        return self.tokenizer.encode(texts, self.limit)

    def feeds(self, texts: Sequence[EncodedText]) -> dict[str, NDArray[Any]]:
        """Pad B texts and return the inputs of the graph; a graph of a fixed batch gets the last text again.

        Raises:
            InputError: the graph takes other inputs, or knows fewer tokens than the tokenizer.
        """
        filled = [*texts, *[texts[-1]] * ((self.batch_rules.batch_size or 0) - len(texts))]
        arrays = self.tokenizer.pad(filled, self.batch_rules.sequence_length)
        largest = arrays["input_ids"].max()
        if self.num_ids is not None and largest >= self.num_ids:
            raise InputError(
                f"the tokenizer gives token {largest}, and {self.session.model.path} knows {self.num_ids} tokens",
                "the tokenizer belongs to another model; pass --model_name with the right one",
            )
        return text_feeds(self.session.model, arrays)

    def run(self, texts: Sequence[EncodedText]) -> Batch:
        """Run B texts as one batch, in the order given. Texts that must not run together are the caller's to part.

        Raises:
            InputError: the graph takes other inputs, or knows fewer tokens than the tokenizer.
            SessionError: onnxruntime fails on them.
        """
        return self.batch(texts, self.session.run(self.feeds(texts)))

    def batch(self, texts: Sequence[EncodedText], outputs: dict[str, NDArray[Any]]) -> Batch:
        """Put `outputs` of a run on `feeds(texts)` together with its B texts, without what filled the batch up."""
        arrays = self.tokenizer.pad(texts, self.batch_rules.sequence_length)
        num_rows = max(len(texts), self.batch_rules.batch_size or 0)
        return Batch(
            texts,
            arrays["input_ids"],
            arrays["attention_mask"].astype(bool),
            {name: _without_filling(array, len(texts), num_rows) for name, array in outputs.items()},
        )

    def pool(self, batch: Batch, *, keep_special: bool = False) -> DenseVectors | SparseVectors:
        """Return one vector for each text of a batch: float32 [B, H] of an embedder, terms of a sparse encoder.

        Args:
            batch: what a run gave.
            keep_special: whether tokens that frame a text, such as [CLS], may be terms.

        Raises:
            InputError: the model gives no vectors.
            SessionError: a value is not a finite number.
        """
        if self.rule.kind == "terms":
            vectors = sparse_vectors(batch, self.folder, self.tokenizer)
            return vectors if keep_special else vectors.without(self.tokenizer.framing_ids)
        if self.rule.kind == "similarities":
            return dense_vectors(batch, self.folder)[0]
        raise InputError(
            f"{self.session.model.path} is for {self.task}, and gives no vector for a text",
            "encode with a model for sentence-similarity or sparse-encoding; answer() gives what this one is for",
        )

    def encode(self, texts: Sequence[str], *, keep_special: bool = False) -> DenseVectors | SparseVectors:
        """Return the vectors of N texts, in their order: float32 [N, H] of an embedder, terms of a sparse encoder.

        Raises:
            InputError: there are no texts, or the model gives no vectors.
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        if not texts:
            raise InputError("no texts to encode", "pass at least one")
        read = self.tokenize(texts)
        places: list[int] = []
        parts: list[Any] = []
        for together in self.batch_rules.batches([len(text) for text in read]):
            places += together
            parts.append(self.pool(self.run([read[place] for place in together]), keep_special=keep_special))
        order = np.argsort(places)
        if isinstance(parts[0], SparseVectors):
            return SparseVectors.concatenate(parts).take(order)
        return np.asarray(np.concatenate(parts)[order], np.float32)


def load(
    model_path: Path | str,
    *,
    model_name: str | None = None,
    provider: str = "auto",
    threads: int = 0,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> LoadedModel:
    """Load the model at `model_path` with its tokenizer.

    Args:
        model_path: the ONNX file; its tokenizer is found beside it.
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one a core.
        on_progress: is told what is being done.

    Raises:
        InputError: there is no tokenizer.
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here; the model never runs on another one than asked for.
        SessionError: onnxruntime cannot load the model.
    """
    path = Path(model_path)
    model = ModelFile.open(path)
    folder = find_checkpoint_folder(model, model_name)
    tokenizer = TextTokenizer(folder)
    task = stated_task(model) or deduce_task(model, folder, tokenizer.vocabulary_size)
    limit = text_limit(model, folder, task)
    if limit is not None:
        tokenizer.require_room(limit)
    on_progress(f"loading {path}")
    return LoadedModel(
        session=open_session(path, provider=provider, threads=threads),
        tokenizer=tokenizer,
        folder=folder,
        task=task,
        limit=limit,
        rule=rule_for(task, model, folder),
        batch_rules=BatchRules.of(model),
        num_ids=index_bounds(model).get("input_ids"),
    )


def _without_filling(array: NDArray[Any], num_texts: int, num_rows: int) -> NDArray[Any]:
    return array[:num_texts] if num_texts < num_rows and array.shape[:1] == (num_rows,) else array
