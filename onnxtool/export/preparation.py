"""What an export finds out once, before any exporter traces: the model, its inputs, the head and the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onnxtool.checkpoint.folder import TOKENIZER_NAME
from onnxtool.checkpoint.module_settings import TokenStates
from onnxtool.checkpoint.pooling_modules import Pooling
from onnxtool.checkpoint.tasks import TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import ExportError, TargetError
from onnxtool.export.chats import check_chat_template
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.heads.choice import (
    Choice,
    check_head,
    choose_head,
    choose_no_head,
    choose_side_head,
    require_expanding_token,
)
from onnxtool.export.heads.head import Head
from onnxtool.export.heads.storage import choose_storage
from onnxtool.export.lengths import Lengths
from onnxtool.export.modalities.combined import PaddedTexts
from onnxtool.export.modalities.finding import find_both_sides, find_modality, text_of
from onnxtool.export.modalities.pages import is_of_pages, restrict_to_pages
from onnxtool.export.modalities.sides import Side, find_side, restrict, scales_to_length_one, with_padding
from onnxtool.export.modalities.sizes import SEQUENCE, Modality
from onnxtool.export.modalities.text import TextInputs, longest_text
from onnxtool.export.options import ExportOptions
from onnxtool.export.pipelines import (
    EncoderDecoderPipeline,
    ExportPipeline,
    GenerationPipeline,
    SingleCallPipeline,
    encoder_path,
)
from onnxtool.export.quantizers import as_floats, is_quantized
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

Located = tuple[Source, Target, Layout]
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
            first = self.load(attention)
        return as_floats(first) if is_quantized(first) else first

    def reference(self) -> Any:
        """Load the model that files are compared with: in float32, as half precision rounds itself."""
        model = self.load(None)
        return model if is_quantized(model) else model.float()

    def load(self, attention: str | None) -> Any:
        """Load the weights again."""
        model = self._checkpoint.load_model(
            dtype=self._options.dtype,
            device=self._options.device,
            attention=attention,
            allow_missing_weights=self._options.allow_missing_weights,
            allow_unused_weights=self._options.allow_unused_weights,
        )
        model = restrict_to_pages(restrict(model, self._checkpoint.task), self._checkpoint)
        if self._states is not None:
            give_states(model, self._states)
        return model


@dataclass(frozen=True)
class Job:
    """An export under strategy: all that does not depend on the strategy.

    Attributes:
        tokenizer: that of a model of text, or that lies beside another model; None where there is none.
        lengths: how long texts are that the file is for and verified on.
        reasons: decisions that were made for the user, and why.
        references: PyTorch's outputs, by the sizes of the fixed axes and, beside the usual cases, the lengths of texts.
        stamps: what the file says of the one that is exported with it.
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
    lengths: Lengths
    reasons: tuple[str, ...]
    stopwatch: Stopwatch
    references: dict[tuple[tuple[tuple[str, int], ...], tuple[int, ...]], ReferenceOutputs] = field(
        default_factory=dict
    )
    stamps: Mapping[str, str] = field(default_factory=dict)


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


def prepare(options: ExportOptions, located: Located) -> Job:
    """Load the model once, and find out all that does not depend on the strategy; `located` is what `locate` gave.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: an option would do nothing, or the model cannot have what it asks for.
        TargetError: the consumer takes no such model.
        OutputExistsError: the output is there and `force` is not set.
    """
    stopwatch = Stopwatch()
    source, target, paths = located
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
    tokenizer = None if text is None else text.tokenizer
    lengths = _choose_lengths(options, models.first, modality, source)
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
    if text is None and source.locate(TOKENIZER_NAME) is not None:  # of what it writes, or of pages
        tokenizer = checkpoint.load_tokenizer()
    stopwatch.lap("load")
    return Job(
        options, paths, checkpoint, models, plan.pipeline, specification, plan.task, plan.head_name, tokenizer,
        lengths, plan.reasons, stopwatch,
    )  # fmt: skip


def _choose_lengths(options: ExportOptions, model: Any, modality: Modality, source: Source) -> Lengths:
    """Choose how long texts are that the file is for.

    What sentence-transformers cuts queries or documents to takes the place of the tokenizer's limit, longer or shorter.

    Raises:
        ExportError: --max_length was passed for a model that takes no texts, or none of this length.
    """
    text = text_of(modality)
    if text is None or all(axis.name != SEQUENCE for axis in modality.axes):  # of one length, and compared there
        if options.max_length is not None:
            raise ExportError("--max_length was passed for a model whose texts have no length", "leave it out")
        return Lengths.fixed(None if text is None else text.longest)
    own = (source.sentence_modules.stated_length(task) for task in ("query", "document"))
    longer = max((length for length in own if length is not None and length > (text.longest or length)), default=None)
    stated = text.longest
    if longer is not None:
        stated = min(longer, longest_text(model, None) or longer)
    return Lengths.of(model, stated, asked=options.max_length, verified=options.verify)


def locate(options: ExportOptions) -> Located:
    """Find the checkpoint, the target and where the files go.

    Raises:
        OnnxtoolError: as `prepare`, before the checkpoint is opened.
    """
    source = Source.find(
        options.model_name,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        route=options.route,
        allow_pickle=options.allow_pickle,
    )
    target = find_target(options.target)
    if options.task not in _WITH_CACHE:
        check_head(options.head, options.task)
    given = [f"--{name}" for name in ("keep_raw", "dimensions", "vectors_as") if getattr(options, name)]
    if not target.takes_any_graph and given:
        raise TargetError(
            f"the target {target.name} decides on what the graph gives, and {' and '.join(given)} was passed as well",
            "leave it out, or pass --target plain",
        )
    paths = layout(target, options.output, source.name)
    check_model_output(paths.graph, force=options.force)
    return source, target, paths


def open_checkpoint(options: ExportOptions, source: Source, target: Target) -> Checkpoint:
    """Open the checkpoint: a model, or a table of vectors."""
    if not is_static(source):
        return Checkpoint.open(source, task=options.task)
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
    specification = specify(target, checkpoint, signature, tokenizer, options.head)
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
        choice = choose_no_head(options.head, source)
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
