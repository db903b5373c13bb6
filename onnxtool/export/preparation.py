"""What an export finds out once, before any exporter traces: the model, its inputs, the head and the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from onnxtool.checkpoint.pooling_modules import Pooling
from onnxtool.checkpoint.tasks import TASK_OF_PICTURES, TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.checkpoint.token_states import TokenStates
from onnxtool.errors import ExportError, TargetError
from onnxtool.export.chats import check_chat_template
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.heads.choice import Choice, choose_head, choose_no_head, choose_side_head, require_expanding_token
from onnxtool.export.heads.head import Head
from onnxtool.export.heads.storage import choose_storage
from onnxtool.export.modalities.combined import PaddedTexts
from onnxtool.export.modalities.finding import find_both_sides, find_modality, text_of
from onnxtool.export.modalities.pages import is_of_pages, restrict_to_pages
from onnxtool.export.modalities.sides import Side, find_side, restrict, scales_to_length_one, with_padding
from onnxtool.export.modalities.sizes import Modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.options import ExportOptions
from onnxtool.export.pipelines import (
    EncoderDecoderPipeline,
    ExportPipeline,
    GenerationPipeline,
    SingleCallPipeline,
    encoder_path,
)
from onnxtool.export.signature import Signature, detect_signature
from onnxtool.export.source import Source
from onnxtool.export.static import StaticCheckpoint, is_static
from onnxtool.export.target import Layout, Target, layout
from onnxtool.export.target_specification import TargetSpecification, specify
from onnxtool.export.targets import find_target
from onnxtool.export.token_states import give_states
from onnxtool.model_file import check_model_output
from onnxtool.progress import tell
from onnxtool.runtime.comparison import ReferenceOutputs
from onnxtool.runtime.timing import Stopwatch

_WITH_CACHE = (TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE)


class Models:
    """Loads the model as a strategy wants it; the one that was looked at first serves the first strategy."""

    def __init__(self, checkpoint: Checkpoint, options: ExportOptions) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._states: TokenStates | None = None
        self._first: Any = self.load(None)

    @property
    def first(self) -> Any:
        """The model that was loaded first; None once it is taken."""
        return self._first

    def give(self, states: TokenStates) -> None:
        """Let the models give other states than those of their last layer, from now on."""
        self._states = states
        if self._first is not None:
            give_states(self._first, states)

    def take(self, attention: str | None) -> Any:
        """Return a model that nothing has traced yet, and keep no reference to it."""
        first, self._first = self._first, None
        if first is not None and attention is not None and hasattr(first, "set_attn_implementation"):
            first.set_attn_implementation(attention)
        elif first is None or attention is not None:
            return self.load(attention)
        return first

    def load(self, attention: str | None) -> Any:
        """Load the weights again."""
        model = self._checkpoint.load_model(
            dtype=self._options.dtype,
            device=self._options.device,
            attention=attention,
            allow_missing_weights=self._options.allow_missing_weights,
        )
        model = restrict_to_pages(restrict(model, self._checkpoint.task), self._checkpoint)
        if self._states is not None:
            give_states(model, self._states)
        return model


@dataclass(frozen=True)
class Job:
    """An export under strategy: all that does not depend on the strategy.

    Attributes:
        tokenizer: that of a model of text; None for others.
        max_length: the most tokens a text may have; None where the model does not bound it, or takes no text.
        reasons: decisions that were made for the user, and why.
        references: PyTorch's outputs, by the sizes of the fixed axes.
    """

    options: ExportOptions
    paths: Layout
    checkpoint: Checkpoint
    models: Models
    pipeline: ExportPipeline
    specification: TargetSpecification | None
    task: str
    head_name: str
    tokenizer: Any
    max_length: int | None
    reasons: tuple[str, ...]
    stopwatch: Stopwatch
    references: dict[tuple[tuple[str, int], ...], ReferenceOutputs] = field(default_factory=dict)


@dataclass(frozen=True)
class _Plan:
    """What becomes of a model.

    Attributes:
        task: what the file is for.
        head_name: one of `ExportOptions`' heads, and not `auto`.
        head: what is put on the graph; None for nothing.
        specification: what the consumer needs; None where it takes any graph.
        reasons: decisions that were made for the user, and why.
    """

    task: str
    pipeline: ExportPipeline
    head_name: str = "logits"
    head: Head | None = None
    specification: TargetSpecification | None = None
    reasons: tuple[str, ...] = ()


def prepare(options: ExportOptions) -> Job:
    """Load the model once, and find out all that does not depend on the strategy.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: an option would do nothing, or the model cannot have what it asks for.
        TargetError: the consumer takes no such model.
        OutputExistsError: the output is there and `force` is not set.
    """
    stopwatch = Stopwatch()
    source, target, paths = locate(options)
    tell(f"loading {options.model_name}")
    checkpoint = open_checkpoint(options, source, target)
    models = Models(checkpoint, options)
    modality = find_modality(models.first, checkpoint, text=options.text)
    side = find_side(models.first, checkpoint.task)
    if side is not None or is_of_pages(checkpoint):
        _refuse_for_pictures(options, target)
    if side is not None:
        modality = with_padding(models.first, modality, side)
    text = text_of(modality)
    tokenizer, max_length = (None, None) if text is None else (text.tokenizer, text.longest)
    if checkpoint.task in _WITH_CACHE:
        plan = _plan_with_cache(options, models, checkpoint, modality, target, paths)
    else:
        plan = _plan_single_call(options, models, checkpoint, modality, target, tokenizer, side)
    specification = plan.specification
    _refuse_unused(options, checkpoint.task, plan.head, text)
    chat = None if text is None else check_chat_template(source, tokenizer, plan.task)
    if chat is not None and specification is not None and not specification.needs_module_weights:
        raise TargetError(
            f"{source.model_name} puts texts into a chat template, and {target.title} would run it on them as they are",
            "pass --target plain, and read texts with `onnxtool infer` or onnxtool.load",
        )
    stopwatch.lap("load")
    return Job(
        options, paths, checkpoint, models, plan.pipeline, specification, plan.task, plan.head_name, tokenizer,
        max_length, plan.reasons, stopwatch,
    )  # fmt: skip


def locate(options: ExportOptions) -> tuple[Source, Target, Layout]:
    """Find the checkpoint, the target and where the files go.

    Raises:
        OnnxtoolError: as `prepare`, before the checkpoint is opened.
    """
    source = Source.find(
        options.model_name,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        route=options.route,
    )
    target = find_target(options.target)
    changed = options.head != "auto" or options.keep_raw or options.dimensions or options.vectors_as
    if not target.takes_any_graph and changed:
        raise TargetError(
            f"the target {target.name} decides on the head of the graph, and --head, --keep_raw, --dimensions or "
            "--vectors_as was passed as well",
            "leave these out, or pass --target plain",
        )
    paths = layout(target, options.output, source.name)
    check_model_output(paths.graph, force=options.force)
    return source, target, paths


def open_checkpoint(options: ExportOptions, source: Source, target: Target) -> Checkpoint:
    """Open the checkpoint: a model, or a table of vectors."""
    if not is_static(source):
        return Checkpoint.open(source, task=options.task, allow_pickle=options.allow_pickle)
    if not target.takes_any_graph:
        raise TargetError(f"the target {target.name} takes no table of vectors", "leave --target out")
    return StaticCheckpoint.open_static(source, task=options.task)


def _plan_with_cache(
    options: ExportOptions, models: Models, checkpoint: Checkpoint, modality: Modality, target: Target, paths: Layout
) -> _Plan:
    """Plan for a model that writes, step by step."""
    if not target.takes_any_graph:
        target.use_for(checkpoint.task, (), pads_left=False)
    # Decoders that hear sound are among the sequence-to-sequence models of transformers.
    is_encoder_decoder = getattr(checkpoint.config, "is_encoder_decoder", False)
    if checkpoint.task != TEXT_TO_TEXT_WITH_CACHE or not is_encoder_decoder:
        return _Plan(TASK_WITH_CACHE, GenerationPipeline.of(modality))
    check_model_output(encoder_path(paths.graph), force=options.force)
    return _Plan(checkpoint.task, EncoderDecoderPipeline.of(models.first, modality))


def _refuse_for_pictures(options: ExportOptions, target: Target) -> None:
    """Refuse what encoders of pictures, and of the texts beside them, do not have."""
    if not target.takes_any_graph:
        raise TargetError(f"the target {target.name} takes no side of an encoder of pictures", "leave --target out")
    if options.vectors_as is not None:
        raise ExportError(
            "--vectors_as was passed for an encoder of pictures, whose vectors are compared as floats",
            "leave it out; a corpus of pictures is stored so by `onnxtool infer --output FOLDER/ --vectors_as`",
        )


def _plan_single_call(
    options: ExportOptions,
    models: Models,
    checkpoint: Checkpoint,
    modality: Modality,
    target: Target,
    tokenizer: Any,
    side: Side | None,
) -> _Plan:
    """Plan for a model that answers in one call."""
    signature = detect_signature(models.first, modality)
    specification = specify(target, checkpoint, signature, tokenizer)
    reasons: tuple[str, ...] = ()
    if specification is None:
        choice, reasons = _choose(options, models, checkpoint, modality, signature, tokenizer, side)
        head_name, head = choice.name, choice.head
    else:
        head_name, head, signature = specification.head_name, specification.head, specification.narrow(signature)
        modality = specification.fed(modality)
    task = checkpoint.task if head is None else head.task
    pools = head is not None and any(isinstance(module, Pooling) for module in head.modules)
    if side is None and (pools or task == "sentence-similarity"):
        _choose_states(models, checkpoint.source, head, specification)
    pipeline = SingleCallPipeline.of(models.first, modality, signature, head, specification, keep_raw=options.keep_raw)
    return _Plan(task, pipeline, head_name, head, specification, reasons)


def _choose(
    options: ExportOptions,
    models: Models,
    checkpoint: Checkpoint,
    modality: Modality,
    signature: Signature,
    tokenizer: Any,
    side: Side | None,
) -> tuple[Choice, tuple[str, ...]]:
    """Choose the head where no consumer decides on it, and say what a user should know of that."""
    source = checkpoint.source
    if side is not None:
        both = find_both_sides(models.first, checkpoint)
        scales = scales_to_length_one(models.first, modality, both, side)
        pads = isinstance(modality, PaddedTexts)
        choice = choose_side_head(options.head, side, source, signature, scales=scales, pads=pads)
    elif is_of_pages(checkpoint):
        choice = choose_no_head(options.head, source, of_pictures=checkpoint.task == TASK_OF_PICTURES)
    else:
        choice = choose_head(options.head, checkpoint, signature, task=options.task)
    head = choice.head
    reasons: tuple[str, ...] = (choice.why,) if choice.why else ()
    if head is None:
        return choice, reasons
    if tokenizer is not None:
        require_expanding_token(source, tokenizer)
    if options.dimensions is not None:
        head = head.truncated(options.dimensions, signature)
    if head.name == "embedding" and options.vectors_as is not None:
        stored, few = choose_storage(options, models.first, head, modality, source)
        head, reasons = head.stored_as(stored, signature), reasons + few
    return replace(choice, head=head), reasons


def _refuse_unused(options: ExportOptions, task: str, head: Head | None, text: TextInputs | None) -> None:
    """Refuse options that would do nothing."""
    if task in _WITH_CACHE and options.head not in ("auto", "logits", "none"):
        raise ExportError(f"the task {task} takes no head, and --head {options.head} was passed", "leave --head out")
    if options.keep_raw and head is None:
        raise ExportError("--keep_raw keeps what a head reads, and there is no head", "leave --keep_raw out")
    if options.keep_raw and head is not None and head.name == "reranker":
        raise ExportError("--keep_raw was passed for a reranker, which reads two of the logits", "leave --keep_raw out")
    if options.dimensions is not None and (head is None or head.name != "embedding"):
        raise ExportError(
            "--dimensions keeps a part of an embedding, and this graph computes none", "leave --dimensions out"
        )
    if options.vectors_as is not None and (head is None or head.name != "embedding"):
        raise ExportError(
            "--vectors_as stores the numbers of one embedding for each text, and this graph computes none",
            "leave --vectors_as out; vectors of tokens are stored so by `onnxtool infer --output FOLDER/ --vectors_as`",
        )
    if options.text is not None and text is None:
        raise ExportError("--text was passed for a model that takes no text", "leave --text out")


def _choose_states(
    models: Models, source: Source, head: Head | None, specification: TargetSpecification | None
) -> None:
    """Let the models give the states that an embedder pools, where these are not those of its last layer.

    Raises:
        CheckpointError: the weights of layers cannot be read.
        TargetError: a consumer would pool others.
    """
    states = TokenStates.of(source.sentence_modules, source)
    if states is None or (head is None and specification is None):
        return
    if specification is not None:
        raise TargetError(
            f"{source.model_name} pools other states than those of its last layer, and "
            f"{specification.target.title} reads these",
            "pass --target plain",
        )
    models.give(states)
