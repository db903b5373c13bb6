"""Load a model with its tokenizer, to encode and answer texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack, overload

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import Limit, graph_limit, limit_of_task, text_limit
from onnxtool.checkpoint.text_files import TextInput, several
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.answering import AnswerOptions, Item, answer_texts, stream_answers
from onnxtool.infer.chats import Chats, LongTexts
from onnxtool.infer.descriptions import Interpretation
from onnxtool.infer.generation.graphs import ENCODER_MASK, find_encoder
from onnxtool.infer.heads import head_for
from onnxtool.infer.heads.head import BatchRules
from onnxtool.infer.heads.token_vectors import TokensOfTexts
from onnxtool.infer.options import AdapterName, FileDescription, Long, ModelOptions, Representation, TextTask
from onnxtool.infer.report import InferReport
from onnxtool.infer.static_queries import QUERY, load_queries
from onnxtool.infer.text_model import TASKS, AnyVector, Encoding, TextModel, find_file
from onnxtool.infer.vectors import AnyVectors, TopK
from onnxtool.model_file import ModelFile, ModelPath
from onnxtool.model_file.metadata import DECODER_KEY, READS_KEY
from onnxtool.options import CheckpointName, StrPath, checked
from onnxtool.progress import tell
from onnxtool.reports import short_repr
from onnxtool.runtime.providers import Provider, Threads
from onnxtool.runtime.session import open_session
from onnxtool.runtime.signature import index_bounds
from onnxtool.runtime.text_feeds import require_named_inputs


@short_repr
class LoadedModel(TextModel):
    """A model that encodes and answers texts, created by `load`."""

    @checked
    def with_adapter(self, name: AdapterName) -> LoadedModel:
        """Return the model with another of its adapters, or the base for None; all share the memory of one session.

        Raises:
            InputError: the file has no adapter of this name.
            ModelFileError: the adapter's file is not the one that was written with the model.
            ProviderError: the model runs on a provider that takes no adapters.
        """
        base = ModelFile(self.session.model.path, self.session.model.structure)
        return replace(self, session=self.session.running(base.with_adapter(name)))

    @checked
    def answer(
        self,
        texts: str | TextInput | Iterable[Item],
        *,
        query: str | None = None,
        prompt: str | None = None,
        task: TextTask = None,
        long: LongTexts | Long = None,
        top_k: TopK = None,
    ) -> InferReport:
        """Return the model's answer for each of N texts, or pairs of texts, in order.

        Args:
            texts: N texts, with or without an id, or pairs of a query and a text; or one text.
            query: paired with every single text.
            prompt: as in `tokenize`.
            task: as in `encode`; in late interaction, None means documents, and queries are always read as queries.
            long: as in `windows`; None for windows if the task is to find something in a text, otherwise truncation.
            top_k: the maximum number of candidates per text; None for all labels of a classifier, and a few otherwise.

        Raises:
            InputError: there are no texts, one cannot be read, or the model takes no pairs or only pairs.
            SessionError: onnxruntime fails, or returns a value that is not finite.
        """
        handling = None if long is None else LongTexts.of(long)
        return answer_texts(self, tuple(several(texts)), AnswerOptions(query, prompt, task, handling, top_k))

    @checked
    def stream(
        self,
        texts: str | TextInput | Iterable[Item],
        *,
        query: str | None = None,
        options: AnswerOptions = AnswerOptions(),  # noqa: B008  frozen
        total: int = 0,
    ) -> Iterator[InferReport]:
        """Answer any number of texts like `answer`, a few hundred at a time; see `stream_answers`."""
        return stream_answers(self, several(texts), options if query is None else replace(options, query=query), total)


@checked
def load(
    model_path: ModelPath,
    *,
    model_name: CheckpointName = None,
    description: FileDescription | None = None,
    provider: Provider = "auto",
    threads: Threads = 0,
    representation: Representation = None,
    adapter: AdapterName = None,
    partner_path: StrPath | None = None,
) -> LoadedModel:
    """Load the model at `model_path` with its tokenizer.

    Args:
        model_path: the ONNX file, or an open one; its tokenizer is found next to it.
        model_name: the checkpoint's folder or hub id, instead of the files next to the model.
        description: the task and output interpretation of a file from another exporter; None to use the file and its
            checkpoint, as reported in the result's `reading_notes`.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one per core.
        representation: vector type of an M3 embedder (bge-m3): `dense`, `sparse` or `colbert`; None for dense, and for
            all other models.
        adapter: the name of one of the file's adapters; None for the base, or the one that an open file was given.
        partner_path: for a checkpoint with different models for queries and documents, the other file; None for the
            file named in this one. It is loaded when first needed.

    Raises:
        InputError: there is no tokenizer or no such adapter, the checkpoint has unsupported settings, or the graph's
            input names are swapped.
        ModelFileError: the file or its external data cannot be used.
        OptionError: the description contradicts the file's stamp, or does not apply to its outputs.
        ProviderError: the provider cannot run here; there is no silent fallback to another one.
        SessionError: onnxruntime cannot load the model.
    """
    model = ModelFile.open(model_path).with_adapter(adapter)
    if partner_path is not None and READS_KEY not in model.metadata:
        raise InputError(f"{model.path} reads queries and documents, and a partner was passed", "leave it out")
    folder = find_checkpoint_folder(model, model_name)
    loaded = _load(model, folder, description or FileDescription(), representation, provider, threads)

    def open_partner(other: ModelFile) -> LoadedModel:
        name = None if folder.route is None else model_name
        return load(other, model_name=name, provider=provider, threads=threads, representation=representation)

    return replace(loaded, partner_path=None if partner_path is None else Path(partner_path), open_partner=open_partner)


def _load(
    model: ModelFile,
    folder: CheckpointFolder,
    description: FileDescription,
    representation: Representation,
    provider: Provider,
    threads: int,
) -> LoadedModel:
    """Read the tokenizer, the task and the outputs of a model, then open its session."""
    tokenizer = TextTokenizer(folder)
    if not folder.has_settled_tokenizer:
        from onnxtool.runtime.tokens import read_with_transformers

        tokenizer = read_with_transformers(folder, tokenizer)
    task, reading = model.stated_task, None
    if not task or description.given:
        reading = Interpretation(model, folder, description)
        folder, task = reading.folder, reading.task(tokenizer.vocabulary_size)
    reads = model  # the graph that reads texts
    if DECODER_KEY in model.metadata or ENCODER_MASK in model.input_names:
        reads = find_encoder(model) or model
    require_named_inputs(reads)
    limit, limits = _limits_of(reads, folder, task, tokenizer)
    head = head_for(task, model, folder, tokenizer, representation)
    if reading is not None:
        head = reading.described(head)
    if isinstance(head, TokensOfTexts):
        head.require_room(limits.get(QUERY) or graph_limit(reads, folder))
    prompts = Prompts.of(folder)
    modules = folder.sentence_modules
    template = ChatTemplate.of(folder, modules, task) if modules.takes_messages(task) else None
    tell(f"loading {model.path}")
    session = open_session(model, provider=provider, threads=threads)
    return LoadedModel(
        session=session,
        tokenizer=tokenizer,
        folder=folder,
        task=task,
        limit=limit,
        head=head,
        batch_rules=BatchRules.of(reads),
        num_ids=index_bounds(reads).get("input_ids"),
        prompts=prompts,
        limits=limits,
        reading_notes=(*session.notes, *(reading.notes(head, task) if reading else ())),
        chats=None if template is None else Chats(template, tokenizer),
    )


def _limits_of(
    reads: ModelFile, folder: CheckpointFolder, task: str, tokenizer: TextTokenizer
) -> tuple[Limit | None, dict[str, Limit]]:
    """Return the limit of texts, and those of queries and documents, each with room for the tokenizer's own tokens."""
    limit = text_limit(reads, folder, task)
    of_tasks = ((name, limit_of_task(reads, folder, name)) for name in TASKS)
    limits = {name: own for name, own in of_tasks if own is not None}
    for each_limit in (*limits.values(), *(() if limit is None else (limit,))):
        tokenizer.require_room(each_limit)
    return limit, limits


def load_as(options: ModelOptions, model: ModelPath, model_name: CheckpointName, threads: int) -> LoadedModel:
    """Load a model as the options of a command say, with the files of a checkpoint and a number of threads."""
    return load(
        model,
        model_name=model_name,
        description=options.description,
        provider=options.provider,
        threads=threads,
        representation=options.representation,
        adapter=options.adapter,
    )


class _LoadedEncoding(Encoding, total=False):
    """The arguments of `encode`, for its overloads."""

    model_name: CheckpointName
    description: FileDescription | None
    provider: Provider
    representation: Representation
    adapter: AdapterName


@overload
def encode(model_path: StrPath, texts: str, **encoding: Unpack[_LoadedEncoding]) -> AnyVector: ...  # type: ignore[overload-overlap]  # a string is iterable as well
@overload
def encode(model_path: StrPath, texts: Iterable[str], **encoding: Unpack[_LoadedEncoding]) -> AnyVectors: ...
@checked
def encode(
    model_path: StrPath,
    texts: str | Iterable[str],
    *,
    model_name: CheckpointName = None,
    description: FileDescription | None = None,
    provider: Provider = "auto",
    representation: Representation = None,
    adapter: AdapterName = None,
    **encoding: Unpack[Encoding],
) -> AnyVectors | AnyVector:
    """Load the model at `model_path` and return the vectors of `texts`; see `load` and `LoadedModel.encode`.

    For looked-up queries, no session is opened.

    Raises:
        OnnxtoolError: the model cannot be loaded or returns no vectors, or a text cannot be read.
    """
    task, stored = encoding.get("task"), [encoding.get(name) for name in ("vectors_as", "dimensions", "ranges")]
    model, queries = ModelFile.open(model_path).with_adapter(adapter), None
    if task == QUERY and description is None and stored == [None] * 3:  # terms are never stored in another form
        queries = load_queries(model, model_name=model_name)
    if queries is not None:
        vectors = queries.encode(
            several(texts),
            prompt=encoding.get("prompt"),
            keep_special=encoding.get("keep_special", False),
            prune=encoding.get("prune"),
        )
        return vectors[0] if isinstance(texts, str) else vectors
    model, model_name = find_file(model, model_name, task)
    loaded = load(
        model, model_name=model_name, description=description, provider=provider, representation=representation
    )
    return loaded.encode(texts, **encoding)
