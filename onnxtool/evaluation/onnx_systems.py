"""ONNX files that search a collection: by cached document vectors, or by scores of pairs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.text_files import TextInput
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.encoding.manifest import file_sha256
from onnxtool.encoding.reading import Shard, by_document, read_shards
from onnxtool.encoding.sources import find_sources
from onnxtool.errors import NO_SPACE, InputError, OutputExistsError, OutputWriteError
from onnxtool.evaluation.collection import Collection
from onnxtool.evaluation.options import (
    COSINE,
    DENSE,
    DOT,
    LATE_INTERACTION,
    MAXSIM,
    MEANMAXSIM,
    SIMILARITIES,
    SPARSE,
    EvaluateOptions,
)
from onnxtool.evaluation.systems import SHARD_TEXTS, Reranking, System, VectorSystem
from onnxtool.infer.chats import LongTexts
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.heads.head import VectorHead
from onnxtool.infer.heads.token_vectors import TokensOfTexts
from onnxtool.infer.loading import LoadedModel, load
from onnxtool.infer.static_queries import QUERY
from onnxtool.model_file import ModelFile
from onnxtool.progress import tell


class OnnxVectors(VectorSystem):
    """An ONNX file that returns vectors. Document vectors are cached."""

    def __init__(self, path: Path, model: LoadedModel, options: EvaluateOptions) -> None:
        super().__init__(options)
        self.name, self.size_bytes = str(path), ModelFile.open(path).size_bytes
        self._model = model
        self._documents = model.of_task("document")
        self._path = self._documents.session.model.path
        self.kind = SPARSE if model.is_sparse else LATE_INTERACTION if model.is_late_interaction else DENSE
        self.similarity = _similarity(model)
        head = model.head
        self._stored = head.stored if isinstance(head, Embeddings) else None
        self.reading_notes = (
            *model.reading_notes,
            *([head.note] if isinstance(head, VectorHead) and head.note else ()),
        )

    def encode_queries(self, texts: Sequence[str]) -> Any:
        """Return vectors of texts, with the checkpoint's prompt and limit for queries."""
        return self._restored(
            self._model.encode(
                texts, task=QUERY, dimensions=self._options.dimensions, keep_special=self._options.keep_special
            )
        )

    def shards(self, collection: Collection, rejects: Counter[str]) -> Iterator[Shard]:
        """Yield vectors of documents, encoding those that are not cached."""
        options, is_partner = self._options, self._documents is not self._model
        says_itself = self._documents.session.model.stated_task != ""
        corpus_options = CorpusOptions(
            model_name=None if is_partner and self._documents.folder.route is None else options.model_name,
            task="document",
            head=None if says_itself else options.description.as_head,
            pooling=options.pooling,
            normalize=options.normalize,
            representation=options.representation,
            long=options.long,
            overlap=options.overlap,
            provider=options.provider,
            workers=options.workers,
            threads=options.threads,
            dimensions=options.dimensions,
            keep_special=options.keep_special and self.kind == SPARSE,
            output_format="parquet" if self.kind == SPARSE else "npy",
            contents=False,
            shard_size=SHARD_TEXTS,
        )
        folder = options.cache_folder / self._key(collection, corpus_options)
        try:
            try:
                report = encode_corpus(self._path, collection.corpus, folder, corpus_options)
            except OutputExistsError:  # of another version of something
                again = replace(corpus_options, force=True)
                report = encode_corpus(self._path, collection.corpus, folder, again)
        except (OutputExistsError, OutputWriteError) as error:
            is_full = isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_SPACE
            way = ", or wait for the run that writes there" if isinstance(error, OutputExistsError) else ""
            raise type(error)(
                error.message, f"pass another --cache{', or make room there' if is_full else way}"
            ) from error
        rejects.update(report.rejects)
        if report.num_passages:
            self.note = f"documents are read as {report.num_passages} passages, of which the best one counts"
        elif report.num_truncated:
            num_long = report.num_truncated
            self.note = f"{num_long} documents are longer than the model takes, and cut; --long window reads each whole"
        try:
            for shard in read_shards(folder, self._documents.tokenizer.vocabulary):
                restored = shard._replace(vectors=self._restored(shard.vectors))
                yield by_document(restored) if options.long == "window" else restored
        except InputError as error:
            raise InputError(error.message, f"remove {folder}, or pass another --cache") from error

    def _restored(self, vectors: Any) -> Any:
        return vectors if self._stored is None else self._stored.restore(vectors)

    def _key(self, collection: Collection, options: CorpusOptions) -> str:
        """Name the folder of vectors after the contents of their inputs."""
        model = ModelFile.open(self._path)
        files = [self._path, *(self._path.parent / location for location in model.external_locations)]
        sources, _ = find_sources(collection.corpus)
        tell("reading the collection")
        stated = {
            "model": [file_sha256(path) for path in files],
            "corpus": [(source.name, file_sha256(source.path)) for source in sources],
            "checkpoint": str(self._documents.folder.path.resolve()),
            **{name: str(value) for name, value in vars(options).items() if name != "workers"},
        }
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
        return f"{self._path.stem[:60]}-{digest[:16]}"


class OnnxReranker(Reranking):
    """An ONNX file that scores pairs of a query and a document."""

    def __init__(self, path: Path, model: LoadedModel, options: EvaluateOptions) -> None:
        super().__init__(options)
        self.name, self.size_bytes = str(path), ModelFile.open(path).size_bytes
        self._model, self.reading_notes = model, model.reading_notes

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the score of each pair."""
        asked = [TextInput(document, query=query) for query, document in pairs]
        long = LongTexts(self._options.long, self._options.overlap)
        answers = self._model.answer(asked, long=long).answers
        self._num_cut += sum(answer.truncated for answer in answers)
        return [answer.candidates[0].score for answer in answers]


def open_model(path: Path, options: EvaluateOptions) -> System:
    """Load an ONNX file that searches.

    Raises:
        OnnxtoolError: it cannot be loaded, or returns neither vectors nor scores of pairs.
    """
    LongTexts(options.long, options.overlap)  # refuses an overlap without windows before anything is encoded
    tell(f"loading {path}")
    model = load(
        path,
        model_name=options.model_name,
        description=options.description,
        provider=options.provider,
        threads=options.threads,
        representation=options.representation,
        partner_path=options.partner,
    )
    if options.candidates is not None and model.head.kind != "scores":
        raise InputError(
            f"--candidates is for rerankers, and {path} is for {model.task}", "leave it out: all documents are searched"
        )
    if model.gives_vectors:
        return OnnxVectors(path, model, options)
    if model.head.kind == "scores":
        return OnnxReranker(path, model, options)
    raise InputError(
        f"{path} is for {model.task}, and neither gives vectors nor scores pairs of a query and a document",
        f"{model.hint_of_vectors}, or evaluate a model for late interaction or ranking",
    )


def _similarity(model: LoadedModel) -> str:
    """Return the similarity function stated in the checkpoint.

    Raises:
        InputError: it names an unknown one.
    """
    head = model.head
    if isinstance(head, TokensOfTexts):
        return MEANMAXSIM if head.is_mean else MAXSIM
    stated = model.folder.sentence_modules.encoder.get("similarity_fn_name")
    if stated is None:
        return DOT if model.is_sparse else COSINE
    if stated not in SIMILARITIES or (model.is_sparse and stated != DOT):
        raise InputError(
            f"the checkpoint compares vectors by {stated!r}",
            f"it is one of {', '.join(SIMILARITIES)}, or for terms dot",
        )
    return str(stated)
