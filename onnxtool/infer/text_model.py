"""A text model with everything needed to run it: session, tokenizer, limit, prompts and head.

Shape letters: B batch, N texts, S sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import EncodedText, Limit, ReadOptions, Text
from onnxtool.checkpoint.pooling_module import POOLING_MASK
from onnxtool.checkpoint.pooling_modules import normalize
from onnxtool.checkpoint.quantized_vectors import RangesLike, VectorType, given_ranges
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.vector_types import Dimensions, VectorsAs
from onnxtool.errors import InputError
from onnxtool.infer.chats import CUT, Chats, LongTexts
from onnxtool.infer.heads import AnyHead
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.heads.head import Batch, BatchRules, VectorHead
from onnxtool.infer.heads.masks import EXPORT_SPLADE, Masks
from onnxtool.infer.heads.token_vectors import TokensOfTexts
from onnxtool.infer.options import LongText, TextTask
from onnxtool.infer.static_queries import QUERY, StaticQueries
from onnxtool.infer.vectors import AnyVectors, DenseVectors, SparseVector, SparseVectors, TokenVectors, in_order
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import PAIR_KEY, PARTNER_KEY, READS_KEY, ROUTE_KEY
from onnxtool.options import checked
from onnxtool.reports import short_repr
from onnxtool.runtime.session import Session
from onnxtool.runtime.text_feeds import text_feeds


@dataclass(frozen=True)
class VectorForm:
    """Post-processing of vectors.

    Attributes:
        dimensions: number of leading dimensions to keep; None for all.
        normalizes: whether the truncated vectors are scaled to length 1 again.
        stored: the storage type; None for no change.
    """

    dimensions: int | None = None
    normalizes: bool = False
    stored: VectorType | None = None

    @classmethod
    def of(
        cls, head: AnyHead, *, vectors_as: str | None, ranges: RangesLike | None, dimensions: int | None
    ) -> VectorForm:
        """Check the requested post-processing against a model's vectors.

        Args:
            head: the model's head.
            vectors_as: one of VECTOR_TYPES; None for the model's own type.
            ranges: ranges of int8 and uint8: float32 [2, W], or a file for `read_ranges`.
            dimensions: number of dimensions to keep; None for all.

        Raises:
            InputError: the model returns no such vectors, or ranges are missing, superfluous or malformed.
        """
        if ranges is not None and vectors_as is None:
            raise InputError("ranges were passed, and vectors stay as they are", "pass vectors_as int8 or uint8")
        if vectors_as is None and dimensions is None:
            return cls()
        if head.kind == "terms":
            raise InputError(
                "the model gives term weights, but --vectors_as and --dimensions are for embeddings",
                "leave them out; --weights int stores the weights of a corpus as whole numbers",
            )
        given = head.stored if isinstance(head, Embeddings) else None
        if given is not None:
            raise InputError(
                f"the graph itself gives {given.name} vectors",
                "leave --vectors_as, --ranges and --dimensions out, or use the model exported without --vectors_as",
            )
        stored = None
        if vectors_as is not None:
            stored = VectorType.of(vectors_as, None if ranges is None else given_ranges(ranges))
        return cls(dimensions, isinstance(head, Embeddings) and head.normalizes, stored)

    def apply(self, vectors: Any) -> Any:
        """Truncate and quantize vectors of texts or tokens.

        Raises:
            InputError: they have fewer dimensions than requested, or do not fit the ranges or whole bytes.
        """
        if self.dimensions is None and self.stored is None:
            return vectors
        if isinstance(vectors, TokenVectors):
            if self.dimensions is not None:
                raise InputError(
                    "--dimensions keeps a part of an embedding, and texts have one for each token", "leave it out"
                )
            return replace(vectors, vectors=self._apply(vectors.vectors))
        assert not isinstance(vectors, SparseVectors)  # noqa: S101  refused by `of`
        return self._apply(vectors)

    def _apply(self, vectors: DenseVectors) -> NDArray[Any]:
        if self.dimensions is not None:
            if vectors.shape[1] <= self.dimensions:
                raise InputError(
                    f"--dimensions {self.dimensions} was passed, but the vectors of this model have {vectors.shape[1]}",
                    "pass a smaller number, or leave --dimensions out",
                )
            vectors = vectors[:, : self.dimensions]
            if self.normalizes:
                vectors = np.asarray(normalize(vectors), np.float32)
        return vectors if self.stored is None else self.stored.apply(vectors)


# Tasks of texts, as for encode_query and encode_document of sentence-transformers.
TASKS = (QUERY, "document")
# The vector of one text: float32 [H], its terms, or float32 [its tokens, W].
AnyVector = NDArray[np.float32] | SparseVector


class Encoding(TypedDict, total=False):
    """The arguments of `TextModel.encode`, for its overloads."""

    prompt: str | None
    task: TextTask
    long: LongTexts | LongText
    keep_special: bool
    vectors_as: VectorsAs
    ranges: RangesLike | None
    dimensions: Dimensions


@short_repr
@dataclass(frozen=True)
class TextModel:
    """A model that runs on texts. It does not change after loading, so threads may share it.

    Attributes:
        session: runs the graph.
        tokenizer: converts texts to tokens.
        folder: the checkpoint's small files.
        task: the model's task, from its metadata or deduced from its outputs.
        limit: the maximum number of tokens per text; None for no limit.
        head: the interpretation of the outputs.
        batch_rules: the graph's batching rules.
        num_ids: the number of tokens known to the graph; None if unknown.
        prompts: the checkpoint's prompts.
        limits: separate limits of queries and documents, by task, if the checkpoint has them.
        reading_notes: notes on how a file without a stamp is interpreted, by description or assumption.
        chats: renders texts as chats; None for a model that takes them as they are.
        partner_path: for a checkpoint with different models for queries and documents, the other file; None for the
            one named in the file.
        open_partner: loads that file.
    """

    session: Session
    tokenizer: TextTokenizer
    folder: CheckpointFolder
    task: str
    limit: Limit | None
    head: AnyHead
    batch_rules: BatchRules
    num_ids: int | None
    prompts: Prompts = field(default_factory=lambda: Prompts({}))
    limits: Mapping[str, Limit] = field(default_factory=dict)
    reading_notes: tuple[str, ...] = ()
    chats: Chats | None = None
    partner_path: Path | None = None
    open_partner: Callable[[ModelFile], TextModel] | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether texts are encoded as term weights."""
        return self.head.kind == "terms"

    @property
    def is_late_interaction(self) -> bool:
        """Whether texts are encoded as one vector per token."""
        return isinstance(self.head, TokensOfTexts)

    @property
    def gives_vectors(self) -> bool:
        """Whether the model encodes texts to vectors: a sentence, sparse or late-interaction encoder."""
        return isinstance(self.head, VectorHead)

    def of_task(self, task: str | None) -> TextModel:
        """Return the model that encodes texts for a task: this one, or its partner, which is loaded on first use.

        Args:
            task: `query` or `document`; None for this one.

        Raises:
            InputError: the file for these texts is missing, or does not belong to this one.
            OnnxtoolError: it cannot be loaded.
        """
        model = self.session.model
        return self if self._file_for(task) is model or self.open_partner is None else self._partner

    def prompt_notes(self, prompt: str | None, task: str | None = None) -> tuple[str, ...]:
        """Say where the prompt stands, if there is one."""
        before = self.prompts.find(prompt, task)
        where = "stands before each text" if self.chats is None else "is the system message of each text"
        return (f"{before!r} {where}",) if before else ()

    @property
    def route_note(self) -> str:
        """A note for users who state no task; empty if one file reads all texts."""
        metadata = self.session.model.metadata
        others = [task for task in TASKS if task not in metadata.get(READS_KEY, ", ".join(TASKS)).split(", ")]
        if not others:
            return ""
        return f"the route {metadata.get(ROUTE_KEY)} reads the texts; the task {others[0]} has an encoder of its own"

    def _file_for(self, task: str | None) -> ModelFile:
        return file_for(self.session.model, task, self.partner_path)

    @cached_property
    def _partner(self) -> TextModel:
        assert self.open_partner is not None  # noqa: S101  of_task asks for it
        (partner,) = (file for file in map(self._file_for, TASKS) if file is not self.session.model)
        return self.open_partner(partner)

    def tokenize(
        self, texts: str | Iterable[Text], *, prompt: str | None = None, task: TextTask = None
    ) -> list[EncodedText]:
        """Tokenize N texts, or pairs of texts, truncated to the model's limit.

        Args:
            texts: texts, and pairs of texts; or one text.
            prompt: the name of one of the checkpoint's prompts, or a text to write before each; empty for none; None
                for the task's prompt, or the checkpoint's default without a task.
            task: the texts' task, `query` or `document`; None for neither.

        Raises:
            InputError: a text is not valid Unicode, or there is no such prompt or task.
        """
        return [window for (window,) in self.windows(texts, prompt=prompt, task=task)]

    def windows(
        self,
        texts: str | Iterable[Text],
        *,
        prompt: str | None = None,
        task: TextTask = None,
        long: LongTexts | LongText = CUT,
        first: int = 1,
        with_offsets: bool = False,
    ) -> list[list[EncodedText]]:
        """Tokenize N texts, or pairs of texts, each as one or more windows within the model's limit.

        Args:
            texts: texts, and pairs of texts; or one text.
            prompt: as in `tokenize`.
            task: as in `tokenize`.
            long: handling of texts beyond the limit: `truncate`, `window` or `fail`, or LongTexts for an overlap.
            first: the number of the first text, for errors.
            with_offsets: whether to return token positions in prompt and text, which costs time.

        Raises:
            InputError: a text is not valid Unicode, has no tokens or too many, or there is no such prompt.
        """
        if (other := self._file_for(task)) is not self.session.model:
            raise InputError(
                f"{self.session.model.path} does not read texts of the task {task}: {other.path} does",
                "load that file, or take the model that of_task() gives",
            )
        texts = (texts,) if isinstance(texts, str) else tuple(texts)
        self.require_documents(task or prompt)
        before, limit, long = self.prompts.find(prompt, task), self.limit_of(task), LongTexts.of(long)
        if self.chats is not None:
            return self._prepared(self.chats.read(texts, before, limit, long, task=task, first=first), task)
        options = ReadOptions(
            with_offsets=self.head.needs_offsets or with_offsets,
            cut_side=self.head.cut_side,
            keeps_first=self.head.needs_pairs,
        )
        num_left_out = 0
        if before:
            texts = tuple(_with_prompt(before, text) for text in texts)
            if long.way == "window":
                options = replace(options, with_offsets=True, num_leading=len(before))
            num_left_out = self._num_left_out(before)
        read = long.read(self.tokenizer, texts, limit, options, first=first)
        if num_left_out:
            read = [[replace(window, num_prompt=num_left_out) for window in group] for group in read]
        return self._prepared(read, task)

    def _num_left_out(self, prompt: str) -> int:
        """Return the number of prompt tokens of a text that are excluded from pooling.

        Raises:
            InputError: the graph pools all of them, and the checkpoint does not.
        """
        in_graph = POOLING_MASK in self.session.input_names
        if self.head.includes_prompt and not in_graph:
            return 0
        if self.head.pools_in_graph and not in_graph:
            raise InputError(
                f"the checkpoint of {self.session.model.path} leaves prompts out when it pools, and the graph has no "
                f"input {POOLING_MASK}, by which it would know of them",
                "export the checkpoint again with onnxtool, or encode without a prompt (--prompt '')",
            )
        return self.tokenizer.count_prompt(prompt, self.limit)

    def _prepared(self, read: list[list[EncodedText]], task: str | None) -> list[list[EncodedText]]:
        head = self.head
        if not isinstance(head, VectorHead):
            return read
        return [[head.prepare(window, task) for window in group] for group in read]

    def task_of(self, task: str | None) -> str | None:
        """Return the default task of texts: documents in late interaction."""
        return task or ("document" if self.is_late_interaction else None)

    def limit_of(self, task: str | None) -> Limit | None:
        """Return the maximum number of tokens of a text for a task; None for no limit."""
        return self.limits.get(task or "", self.limit)

    def feeds(self, texts: Sequence[EncodedText]) -> dict[str, NDArray[Any]]:
        """Pad B texts and return the graph's inputs; a graph with a fixed batch size is filled up with the last text.

        Raises:
            InputError: the graph takes other inputs, or knows fewer tokens than the tokenizer.
        """
        return self._inputs(self._padded(texts))

    def run(self, texts: Sequence[EncodedText]) -> Batch:
        """Run B texts as one batch, in the given order. The caller must separate texts that cannot be batched.

        Raises:
            InputError: the graph takes other inputs, or knows fewer tokens than the tokenizer.
            SessionError: onnxruntime fails on them.
        """
        arrays = self._padded(texts)
        return _batch(texts, arrays, self.session.run(self._inputs(arrays)))

    def batch(self, texts: Sequence[EncodedText], outputs: Mapping[str, NDArray[Any]]) -> Batch:
        """Combine `outputs` of a run on `feeds(texts)` with its B texts, without batch padding."""
        return _batch(texts, self._padded(texts), outputs)

    def _padded(self, texts: Sequence[EncodedText]) -> dict[str, NDArray[np.int64]]:
        filled = [*texts, *[texts[-1]] * ((self.batch_rules.batch_size or 0) - len(texts))]
        return self.tokenizer.pad(filled, self.batch_rules.sequence_length)

    def _inputs(self, arrays: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        largest = arrays["input_ids"].max()
        if self.num_ids is not None and largest >= self.num_ids:
            raise InputError(
                f"the tokenizer gives token {largest}, and {self.session.model.path} knows {self.num_ids} tokens",
                "the tokenizer belongs to another model; pass --model_name with the right one",
            )
        return text_feeds(self.session.model, arrays)

    def pool(self, batch: Batch, *, keep_special: bool = False) -> AnyVectors:
        """Return the vectors of a batch: float32 [B, H] for an embedder, terms, or the token vectors of each text.

        Args:
            batch: the result of a run.
            keep_special: whether framing tokens, such as [CLS], may be terms.

        Raises:
            InputError: the model returns no vectors.
            SessionError: a value is not a finite number.
        """
        head = self._vector_head()
        return self._finished(head.finish(head.pool(batch)), keep_special=keep_special)

    @overload
    def encode(self, texts: str, **encoding: Unpack[Encoding]) -> AnyVector: ...  # type: ignore[overload-overlap]  # a string is iterable as well
    @overload
    def encode(self, texts: Iterable[str], **encoding: Unpack[Encoding]) -> AnyVectors: ...
    @checked
    def encode(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        task: TextTask = None,
        long: LongTexts | LongText = CUT,
        keep_special: bool = False,
        vectors_as: VectorsAs = None,
        ranges: RangesLike | None = None,
        dimensions: Dimensions = None,
    ) -> AnyVectors | AnyVector:
        """Return the vectors of N texts, in order, or the vector of one.

        They are float32 [N, H] for an embedder, terms for a sparse encoder, and token vectors for late interaction; for
        one text, passed as a string, float32 [H], its terms, or float32 [its tokens, W].

        Args:
            texts: N texts: a list, a tuple, an iterator, or a column of NumPy, pandas or Arrow; or a string, which is
                one text.
            prompt: as in `tokenize`.
            task: `query` or `document`, like encode_query and encode_document of sentence-transformers: uses the prompt
                of that name if `prompt` is None, and the checkpoint's length, added tokens and skipped tokens for it.
                Queries of an inference-free sparse encoder are looked up without running the model. None for neither,
                like its encode.
            long: as in `windows`.
            keep_special: whether framing tokens, such as [CLS], may be terms.
            vectors_as: storage type of embeddings: float32, float16, int8, uint8, binary or ubinary, like `precision`
                of sentence-transformers; None for the model's own type.
            ranges: for int8 and uint8, the minimum and maximum of each number, float32 [2, H]; or a file: a .npy, or
                the manifest of a corpus encoded with the same model.
            dimensions: number of leading dimensions to keep, scaled to length 1 again if the checkpoint normalizes.

        Raises:
            InputError: there are no texts, one cannot be read, or the model returns no vectors, or none that support
                this storage.
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        given = (texts,) if isinstance(texts, str) else tuple(texts)
        if not given:
            raise InputError("no texts to encode", "pass at least one")
        if (model := self.of_task(task)) is not self:
            return model.encode(
                texts, prompt=prompt, task=task, long=long, keep_special=keep_special, vectors_as=vectors_as,
                ranges=ranges, dimensions=dimensions,
            )  # fmt: skip
        form = VectorForm.of(self._vector_head(), vectors_as=vectors_as, ranges=ranges, dimensions=dimensions)
        found: AnyVectors
        if task == QUERY and self.queries is not None:
            found = self.queries.encode(given, prompt=prompt, keep_special=keep_special)
        else:
            windows = self.windows(given, prompt=prompt, task=task, long=long)
            found = form.apply(self.encode_windows(windows, keep_special=keep_special))
        return found[0] if isinstance(texts, str) else found

    def encode_windows(self, windows: Sequence[Sequence[EncodedText]], *, keep_special: bool = False) -> AnyVectors:
        """Return the vectors of N texts from the result of `windows`; see `encode`."""
        head = self._vector_head()
        flat = [window for group in windows for window in group]
        positions: list[int] = []
        parts: list[Any] = []
        for together in self.batch_rules.batches([len(text) for text in flat]):
            positions += together
            parts.append(head.pool(self.run([flat[position] for position in together])))
        pooled = in_order(parts, positions)
        if len(flat) > len(windows):
            head.require_windows()
            pooled = head.join(pooled, windows)
        return self._finished(head.finish(pooled), keep_special=keep_special)

    @cached_property
    def queries(self) -> StaticQueries | None:
        """The query lookup table; None if the model runs on queries too.

        Raises:
            InputError: the table of a checkpoint that has one cannot be read.
        """
        return StaticQueries.of(self.folder, self.tokenizer)

    def require_documents(self, prompt: str | None) -> None:
        """Refuse the query prompt if the model is only for documents.

        Raises:
            InputError: queries of this checkpoint are looked up.
        """
        if prompt == QUERY and self.folder.sentence_modules.query is not None:
            raise InputError(
                "this checkpoint encodes queries without its model, which is for documents",
                'encode queries with `onnxtool infer --prompt query`, or with encode(texts, task="query")',
            )

    @property
    def hint_of_vectors(self) -> str:
        """The hint for a model that returns no vectors."""
        usual = "encode with a model for sentence-similarity or sparse-encoding"
        if not self.session.model.stated_task:
            usual = f"say what the file is with --task, --head or --pooling, or {usual}"
        return f"{usual}, or {EXPORT_SPLADE}" if isinstance(self.head, Masks) and self.head.may_be_splade else usual

    def _vector_head(self) -> VectorHead[Any]:
        if isinstance(self.head, VectorHead):
            return self.head
        raise InputError(
            f"{self.session.model.path} is for {self.task}, and gives no vector for a text",
            f"{self.hint_of_vectors}; answer() gives what this one is for",
        )

    def _finished(self, vectors: Any, *, keep_special: bool) -> AnyVectors:
        if isinstance(vectors, TokenVectors):
            return vectors
        if isinstance(vectors, SparseVectors):
            return vectors if keep_special else vectors.without(self.tokenizer.framing_ids)
        return np.asarray(vectors)


def _with_prompt(prompt: str, text: Text) -> Text:
    """Prepend `prompt` to a text, or to the first text of a pair, like sentence-transformers."""
    return prompt + text if isinstance(text, str) else (prompt + text[0], text[1])


def _batch(
    texts: Sequence[EncodedText], arrays: Mapping[str, NDArray[np.int64]], outputs: Mapping[str, NDArray[Any]]
) -> Batch:
    """Drop the batch padding."""
    count, num_rows = len(texts), len(arrays["input_ids"])
    kept = {
        name: array[:count] if count < num_rows and array.shape[:1] == (num_rows,) else array
        for name, array in outputs.items()
    }
    return Batch(texts, arrays["input_ids"][:count], arrays["attention_mask"][:count].astype(bool), kept)


def find_file(model: ModelFile, model_name: str | None, task: str | None) -> tuple[ModelFile, str | None]:
    """Return the file that encodes texts for a task, and its checkpoint; None for the files next to it.

    A folder with one route does not describe the partner, which has its own files.

    Args:
        model: an ONNX file.
        model_name: the user's folder or id for it; None if not given.
        task: as in `file_for`.

    Raises:
        OnnxtoolError: as for `file_for`, or the folder cannot be read.
    """
    found = file_for(model, task)
    if found is model or model_name is None:
        return found, model_name
    return found, model_name if find_checkpoint_folder(model, model_name).route is not None else None


def file_for(model: ModelFile, task: str | None, partner: Path | None = None) -> ModelFile:
    """Return the file that encodes texts for a task: `model` or its partner.

    Args:
        model: an ONNX file.
        task: `query` or `document`; None for texts without a task, which any file takes.
        partner: the other file of its checkpoint; None for the one named in the file.

    Raises:
        InputError: the file is for other texts, and the one for these is missing or does not belong to it.
        ModelFileError: a file cannot be used, or names a partner that is not next to it.
    """
    path = model.path
    reads = model.metadata.get(READS_KEY)
    if task is None or reads is None or task in reads.split(", "):
        return model
    route = model.metadata.get(ROUTE_KEY)
    name = model.plain_name(PARTNER_KEY)
    if partner is None and name is None:
        raise InputError(
            f"{path} holds the route {route} of its checkpoint, which is for texts of the task {reads}, and not {task}",
            "export the checkpoint without --route, which writes the files of both",
        )
    partner = partner or path.with_name(str(name))
    if not partner.is_file():
        raise InputError(
            f"{path} is for texts of the task {reads}, and the file for {task} is not there: {partner}",
            "keep both files of the checkpoint in one folder",
        )
    other = ModelFile.open(partner)
    tasks, pair = (other.metadata.get(key, "") for key in (READS_KEY, PAIR_KEY))
    if task not in tasks.split(", ") or pair != model.metadata.get(PAIR_KEY, ""):
        raise InputError(
            f"{partner} is not the partner of {path}: they were written by two runs, of other weights, or it is "
            f"not for texts of the task {task}",
            "run the export again, which writes both",
        )
    return other
