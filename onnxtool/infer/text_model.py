"""A text model with everything needed to run it: session, tokenizer, limit, prompts and head.

Shape letters: B batch, N texts, S sequence, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import EncodedText, Limit, ReadOptions, Text
from onnxtool.checkpoint.module_forms import POOLING_MASK
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.quantized_vectors import RangesLike
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.vector_types import Dimensions, Prune, VectorsAs
from onnxtool.errors import InputError
from onnxtool.infer.chats import CUT, Chats, LongTexts
from onnxtool.infer.heads import AnyHead
from onnxtool.infer.heads.head import Batch, BatchRules, VectorForm, VectorHead
from onnxtool.infer.heads.masks import EXPORT_SPLADE, Masks
from onnxtool.infer.heads.token_vectors import TokensOfTexts
from onnxtool.infer.options import LongText, TextTask
from onnxtool.infer.static_queries import QUERY, StaticQueries
from onnxtool.infer.vectors import AnyVectors, SparseVector, SparseVectors, TokenVectors, in_order
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import READS_KEY, ROUTE_KEY
from onnxtool.options import CheckpointName, checked
from onnxtool.reports import short_repr
from onnxtool.runtime.running import Session
from onnxtool.runtime.text_feeds import text_feeds

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
    prune: Prune


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
        before = self._prompt(prompt, task)
        role = "stands before each text" if self.chats is None else "is the system message of each text"
        return (f"{before!r} {role}",) if before else ()

    @property
    def adapter_notes(self) -> tuple[str, ...]:
        """Say with which adapter the model runs, if with one."""
        adapter = self.session.model.adapter
        return () if adapter is None else (f"the model runs with the adapter in {adapter.name}",)

    @property
    def route_note(self) -> str:
        """A note for users who state no task; empty if one file reads all texts."""
        metadata = self.session.model.metadata
        other_tasks = [task for task in TASKS if task not in metadata.get(READS_KEY, ", ".join(TASKS)).split(", ")]
        if not other_tasks:
            return ""
        route = metadata.get(ROUTE_KEY)
        return f"the route {route} reads the texts; the task {other_tasks[0]} has an encoder of its own"

    def _file_for(self, task: str | None) -> ModelFile:
        return self.session.model.for_task(task, self.partner_path)

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
        texts = sources = (texts,) if isinstance(texts, str) else tuple(texts)
        self.require_documents(task or prompt)
        before, limit, long = self._prompt(prompt, task), self.limit_of(task), LongTexts.of(long)
        if self.chats is not None:
            return self._prepared(self.chats.tokenize(texts, before, limit, long, task=task, first=first), task)
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
        encoded = long.tokenize(self.tokenizer, texts, limit, options, first=first)
        if (stated := self.session.model.text_input) is not None:
            self._require_readable(texts, long, first)
            originals = sources if stated.prompt else texts
            pairs = zip(encoded, originals, strict=True)
            return [[replace(window, source=text) for window in group] for group, text in pairs]
        if num_left_out:
            encoded = [[replace(window, num_prompt=num_left_out) for window in group] for group in encoded]
        return self._prepared(encoded, task)

    def _require_readable(self, texts: Sequence[Text], long: LongTexts, first: int) -> None:
        """Refuse what a graph that reads texts would read otherwise, or not at all."""
        if long.way == "window":
            raise InputError(
                f"{self.session.model.path} has its tokenizer in it, and cuts a long text itself",
                "leave --long out, or export the model without --tokenizer in_graph",
            )
        for number, text in enumerate(texts, first):
            if "\0" in text or (not isinstance(text, str) and any("\0" in part for part in text)):
                raise InputError(
                    f"text {number} has the character NUL, at which onnxruntime's Python ends it", "remove it"
                )

    def _prompt(self, prompt: str | None, task: str | None) -> str:
        """Return the prompt before each text.

        Raises:
            InputError: it is another one than the graph's own, or there is no such prompt.
        """
        stated = self.session.model.text_input
        if stated is None or not stated.prompt:
            return self.prompts.text_of(prompt, task)
        if (prompt is None and task is None) or (requested := self.prompts.text_of(prompt, task)) == stated.prompt:
            return stated.prompt
        raise InputError(
            f"{self.session.model.path} writes {stated.prompt!r} before each text itself, and "
            + (f"{requested!r} was asked for" if requested else "no prompt was asked for"),
            "export the model once for each prompt (--prompt), or without --tokenizer in_graph",
        )

    def _num_left_out(self, prompt: str) -> int:
        """Return the number of prompt tokens of a text that are excluded from pooling.

        Raises:
            InputError: the graph pools all of them, and the checkpoint does not.
        """
        stated = self.session.model.text_input
        if stated is not None and stated.prompt:
            return 0  # the graph does it
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

    def _prepared(self, encoded: list[list[EncodedText]], task: str | None) -> list[list[EncodedText]]:
        head = self.head
        if not isinstance(head, VectorHead):
            return encoded
        return [[head.prepare(window, task) for window in group] for group in encoded]

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

    def _padded(self, texts: Sequence[EncodedText]) -> dict[str, NDArray[Any]]:
        rows, length = self.batch_rules.padded(len(texts), max(map(len, texts)))
        filled = [*texts, *[texts[-1]] * (rows - len(texts))]
        arrays: dict[str, NDArray[Any]] = {**self.tokenizer.pad(filled, length)}
        if (stated := self.session.model.text_input) is not None:
            from onnxtool.runtime.text_graph import text_arrays

            sources = [text.source for text in filled if text.source is not None]
            if any(isinstance(text, str) != (len(stated.names) == 1) for text in sources) or len(sources) < len(filled):
                needs = ("single texts", "in_graph"), ("pairs of texts (--query)", "pairs_in_graph")
                (takes, _), (_, other) = needs if len(stated.names) == 1 else needs[::-1]
                raise InputError(
                    f"{self.session.model.path} takes {takes}",
                    f"pass these, or export the model with --tokenizer {other}",
                )
            arrays |= text_arrays(stated.names, sources)
        return arrays

    def _inputs(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
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
        head = self.vector_head()
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
        prune: Prune = None,
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
            prune: `RULE:NUMBER`, to leave out terms of sparse vectors (`top_k:64`, `max_active_dims:64`,
                `max_ratio:0.4`, `alpha_mass:0.6`, `abs_value:1`), or to merge token vectors of documents
                (`pool_factor:2`); None for all.

        Raises:
            InputError: there are no texts, one cannot be read, or the model returns no vectors, or none that support
                this storage.
            SessionError: onnxruntime fails, or returns a value that is not finite.
        """
        contents = (texts,) if isinstance(texts, str) else tuple(texts)
        if not contents:
            raise InputError("no texts to encode", "pass at least one")
        model = self.of_task(task)
        head, pruning = model.vector_head(), model.pruning_for(prune, task)
        form = VectorForm.of(head, vectors_as=vectors_as, ranges=ranges, dimensions=dimensions, pruning=pruning)
        vectors: AnyVectors
        if task == QUERY and model.queries is not None:
            vectors = model.queries.encode(contents, prompt=prompt, keep_special=keep_special, prune=prune)
        else:
            windows = model.windows(contents, prompt=prompt, task=task, long=long)
            vectors = form.apply(model.encode_windows(windows, keep_special=keep_special))
        return vectors[0] if isinstance(texts, str) else vectors

    def pruning_for(self, rule: str | None, task: str | None) -> str | None:
        """Check a rule for texts of a task as their head does; the graph prunes no queries that are looked up.

        Raises:
            InputError: as for `VectorHead.pruning_for`.
        """
        if rule is not None and task == QUERY and self.queries is not None:
            return str(Pruning.of_kind(rule, "terms"))
        return self.vector_head().pruning_for(rule, self.task_of(task))

    def encode_windows(self, windows: Sequence[Sequence[EncodedText]], *, keep_special: bool = False) -> AnyVectors:
        """Return the vectors of N texts from the result of `windows`; see `encode`."""
        head = self.vector_head()
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

    def vector_head(self) -> VectorHead[Any]:
        """Return the head of a model that gives vectors.

        Raises:
            InputError: it gives none.
        """
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
    texts: Sequence[EncodedText], arrays: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
) -> Batch:
    """Drop the batch padding."""
    count, num_rows = len(texts), len(arrays["input_ids"])
    kept = {
        name: array[:count] if count < num_rows and array.shape[:1] == (num_rows,) else array
        for name, array in outputs.items()
    }
    return Batch(texts, arrays["input_ids"][:count], arrays["attention_mask"][:count].astype(bool), kept)


def find_file(model: ModelFile, model_name: CheckpointName, task: str | None) -> tuple[ModelFile, str | None]:
    """Return the file that encodes texts for a task, and its checkpoint; None for the files next to it.

    A folder with one route does not describe the partner, which has its own files.

    Args:
        model: an ONNX file.
        model_name: the user's folder or id for it; None if not given.
        task: as in `ModelFile.for_task`.

    Raises:
        OnnxtoolError: as for `ModelFile.for_task`, or the folder cannot be read.
    """
    file = model.for_task(task)
    named = None if model_name is None else os.fspath(model_name)
    if file is not model and named is not None and find_checkpoint_folder(model, named).route is None:
        named = None
    return file, named
