"""Look up queries of an inference-free sparse encoder, without session and graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxtool.checkpoint.folder import CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.static_embeddings import SparseStaticEmbedding
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.vectors import SparseVectors
from onnxtool.model_file import ModelFile
from onnxtool.options import CheckpointName
from onnxtool.runtime.tokens import open_tokenizer

QUERY = "query"  # the name of the queries' prompt and task


@dataclass(frozen=True)
class StaticQueries:
    """The weights of query tokens. It does not change after loading, so threads may share it."""

    tokenizer: TextTokenizer
    table: SparseStaticEmbedding
    prompts: Prompts

    @classmethod
    def of(cls, folder: CheckpointFolder, tokenizer: TextTokenizer) -> StaticQueries | None:
        """Read the table; None for a checkpoint that runs its model on queries too.

        Raises:
            InputError: the table is missing, or belongs to another vocabulary.
        """
        stored = folder.sentence_modules.query
        if stored is None:
            return None
        table = SparseStaticEmbedding.read(stored)
        if len(table.weights) < len(tokenizer.vocabulary):
            raise InputError(
                f"{folder.path} has {len(table.weights)} weights for the {len(tokenizer.vocabulary)} tokens of queries",
                "the folder mixes two models; take both from one",
            )
        return cls(tokenizer, table, Prompts.of(folder))

    def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[list[int]]:
        """Return the tokens of N queries, without added special tokens."""
        before = self.prompts.text_of(prompt, QUERY)
        encoded = self.tokenizer.encode([before + text for text in texts])
        return [
            [token for token, added in zip(text.ids, text.is_special, strict=True) if not added] for text in encoded
        ]

    def encode(
        self,
        texts: Iterable[str],
        *,
        prompt: str | None = None,
        keep_special: bool = False,
        prune: str | None = None,
    ) -> SparseVectors:
        """Return the terms of N queries, in order.

        Args:
            texts: N queries.
            prompt: as in `LoadedModel.encode`; None for the prompt called `query`, if there is one.
            keep_special: whether framing tokens may be terms if a query spells them out.
            prune: as in `LoadedModel.encode`.

        Raises:
            InputError: there are no texts, one is not valid Unicode, or there is no such prompt.
        """
        texts = tuple(texts)
        if not texts:
            raise InputError("no texts to encode", "pass at least one")
        vectors = self.weigh(self.tokenize(texts, prompt=prompt))
        vectors = vectors if keep_special else vectors.without(self.tokenizer.framing_ids)
        return vectors if prune is None else vectors.pruned(prune)

    def weigh(self, queries: Sequence[Sequence[int]]) -> SparseVectors:
        """Return the terms of N >= 1 queries from their tokens."""
        rows = [self.table.apply(ids) for ids in queries]
        return SparseVectors(
            np.cumsum([0, *(len(terms) for terms, _ in rows)], dtype=np.int64),
            np.concatenate([terms for terms, _ in rows]),
            np.concatenate([weights for _, weights in rows]),
            self.tokenizer.vocabulary_of(len(self.table.weights)),
        )


def load_queries(model: ModelFile, *, model_name: CheckpointName = None) -> StaticQueries | None:
    """Load the query lookup table from the files next to a model.

    Args:
        model: the ONNX file, whose graph is not loaded.
        model_name: the checkpoint's folder or hub id, instead of the files next to the model.

    Returns:
        None for a checkpoint that runs its model on queries too.

    Raises:
        InputError: there is no tokenizer, or the table cannot be read.
        ModelFileError: its metadata names a folder that is not next to it.
    """
    folder = find_checkpoint_folder(model, model_name)
    return None if folder.sentence_modules.query is None else StaticQueries.of(folder, open_tokenizer(folder))
