"""Prepare an export before any tracing: the checkpoint, its model, the model's inputs, and the file's outputs.

Data flows one way: the options name a checkpoint and a target (`Request`), the checkpoint gives a model and its inputs
(`_Subject`), and these determine head, pipeline and lengths (`Job`). Whatever depends on the strategy comes after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import TOKENIZER_NAME, Prompts
from onnxtool.checkpoint.module_settings import TokenStates
from onnxtool.checkpoint.pooling_modules import Pooling
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING, TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import ExportError, TargetError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.decoding.encoder_decoder import EncoderDecoderPipeline, encoder_path
from onnxtool.export.decoding.generation import GenerationPipeline
from onnxtool.export.heads.choice import (
    HeadChoice,
    check_head,
    choose_head,
    choose_no_head,
    choose_side_head,
    expanding_token,
)
from onnxtool.export.heads.head import GraphHead
from onnxtool.export.lengths import Lengths
from onnxtool.export.modalities.finding import (
    Side,
    find_both_sides,
    find_modality,
    find_side,
    give_states,
    restrict,
    scales_to_length_one,
    text_of,
    with_padding,
)
from onnxtool.export.modalities.modality import BATCH, SEQUENCE, Modality
from onnxtool.export.modalities.text import TextInputs, choose_side, longest_text
from onnxtool.export.options import DTYPES, ExportOptions
from onnxtool.export.runtime_adapters import RuntimeAdapter, find_adapters, graft
from onnxtool.export.signature import Signature, detect_signature
from onnxtool.export.single_call import SingleCallPipeline
from onnxtool.export.source import Source
from onnxtool.export.static import StaticCheckpoint
from onnxtool.export.target_specification import TargetSpecification, specify, usage_for
from onnxtool.export.targets import TARGETS, Target
from onnxtool.export.tracing import attention_of
from onnxtool.export.weights import FLOAT_CHECKPOINT, as_floats, is_quantized
from onnxtool.model_file import check_model_output, follow_link
from onnxtool.model_file.metadata import PAIR_KEY, PARTNER_KEY
from onnxtool.progress import tell
from onnxtool.runtime.difference import TOLERANCES
from onnxtool.runtime.sizes import require_short, sizes_of, split_sizes
from onnxtool.runtime.timing import Stopwatch

_WITH_CACHE = (TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE)
_ROLES = ("query", "document")
_CHAT = "What is the capital of France?\n Paris, <of> course; naïve café."

ExportPipeline = SingleCallPipeline | GenerationPipeline | EncoderDecoderPipeline
"""The pipeline for one kind of file: its strategies, tracing, reference outputs, verification, and notes."""


@dataclass(frozen=True)
class OutputPaths:
    """The output paths of an export.

    Attributes:
        root: the folder that contains all of them.
        graph: the graph file.
        files: the folder of tokenizer and configuration.
        stamp: that folder relative to the graph's, as recorded in the metadata; empty if not recorded.
    """

    root: Path
    graph: Path
    files: Path
    stamp: str


def output_paths(target: Target, output: Path | None, name: str) -> OutputPaths:
    """Return the output paths for an export of the model named `name`.

    Args:
        target: the consumer.
        output: the user's choice: a folder, or NAME.onnx if the target reads no folder; None for models/NAME.
        name: the model's own.

    Raises:
        TargetError: a file was requested, but the consumer reads a folder.
    """
    if target.takes_any_graph:
        graph = follow_link(output or Path("models") / f"{name}.onnx")
        return OutputPaths(graph.parent, graph, graph.parent / graph.stem, graph.stem)
    root = output or Path("models") / name
    graph = root / target.graph.format(name=name)
    if root.suffix == ".onnx":
        raise TargetError(
            f"{target.title} reads a folder with {graph.relative_to(root)} in it, and the output {root} is a file",
            f"pass --output {root.with_suffix('')}",
        )
    return OutputPaths(root, graph, root, "")


@dataclass(frozen=True)
class Request:
    """One file to export: its checkpoint, target and output path.

    Attributes:
        options: the user's; for a Router's two encoders, with the route and output of this one.
        stamps: metadata about the file that is exported with it; empty if there is only one.
    """

    options: ExportOptions
    source: Source
    target: Target
    paths: OutputPaths
    stamps: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: ExportOptions) -> Request:
        """Find the checkpoint, the target and the output paths.

        Raises:
            CheckpointError: the checkpoint cannot be found.
            ExportError: the head and the task contradict each other.
            TargetError: options were passed that the target decides itself.
            OutputExistsError: the output exists and `force` is not set.
        """
        source = Source.find(
            options.model_name,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            route=options.route,
            allow_pickle=options.allow_pickle,
        )
        target = TARGETS[options.target]
        if options.task not in _WITH_CACHE:
            check_head(options.head, options.task)
        overridden = [f"--{name}" for name in ("keep_raw", "dimensions") if getattr(options, name)]
        if not target.takes_any_graph and overridden:
            raise TargetError(
                f"the target {target.name} decides on what the graph gives, and {' and '.join(overridden)} was passed "
                "as well",
                "leave it out, or pass --target plain",
            )
        paths = output_paths(target, options.output, source.name)
        check_model_output(paths.graph, force=options.force)
        return cls(options, source, target, paths)

    def open(self) -> Checkpoint:
        """Open the checkpoint: a model, or a table of vectors."""
        if not self.source.is_static:
            return Checkpoint.open(self.source, task=self.options.task)
        if not self.target.takes_any_graph:
            raise TargetError(f"the target {self.target.name} takes no table of vectors", "leave --target out")
        return StaticCheckpoint.open_static(self.source, task=self.options.task)


def find_requests(options: ExportOptions) -> tuple[Request, ...]:
    """Return the exports that `options` request; for a Router's two encoders, the one that reads any text comes first.

    The first gets the output's name, and the other one appends what it reads: NAME.onnx and NAME-query.onnx.

    Raises:
        OnnxtoolError: the checkpoint cannot be found or read, or an output exists.
    """
    request = Request.of(options)
    modules, graph = request.source.sentence_modules, request.paths.graph
    routes = {modules.route_of[role]: role for role in _ROLES if role in modules.route_of}
    if len(routes) < len(_ROLES) or not modules.routes or not request.target.takes_any_graph:
        return (request,)
    first = modules.route_of.get("", "")
    first = first if first in routes else modules.route_of["document"]
    outputs = {first: graph}
    outputs |= {route: _other_path(graph, role) for route, role in routes.items() if route != first}
    requests = [Request.of(replace(options, route=route, output=output)) for route, output in outputs.items()]
    digest = hashlib.sha256()
    for request_of_route in requests:
        computed = [(module.kind, module.settings) for module in request_of_route.source.sentence_modules.modules]
        content = [request_of_route.open().weights_sha256, computed, options.head, options.choices]
        digest.update(json.dumps(content, sort_keys=True).encode())
    names = [output.name for output in outputs.values()]
    return tuple(
        replace(request_of_route, stamps={PARTNER_KEY: name, PAIR_KEY: digest.hexdigest()})
        for request_of_route, name in zip(requests, reversed(names), strict=True)
    )


def partner_paths(path: Path) -> tuple[Path, ...]:
    """Return the possible paths of the first file's partner."""
    return tuple(_other_path(path, role) for role in _ROLES)


def _other_path(path: Path, role: str) -> Path:
    """Return the path of the file for a role's texts: NAME-query.onnx next to NAME.onnx."""
    return path.with_name(f"{path.stem}-{role}{path.suffix}")


class Models:
    """Loads the model as a strategy requires; the already examined one is used for the first strategy.

    Attributes:
        adapters: those whose factors the traced model has.
    """

    def __init__(
        self,
        request: Request,
        checkpoint: Checkpoint,
        states: TokenStates | None,
        examined: Any,
        adapters: tuple[RuntimeAdapter, ...] = (),
    ) -> None:
        self._request, self._checkpoint, self._states, self._examined = request, checkpoint, states, examined
        self.adapters = adapters
        self._active: RuntimeAdapter | None = None

    def with_adapter(self, adapter: RuntimeAdapter) -> Models:
        """Return models whose references compute with one of the adapters."""
        adapted = Models(self._request, self._checkpoint, self._states, None)
        adapted._active = adapter
        return adapted

    def take(self, attention: str | None) -> Any:
        """Return a model that has not been traced, without keeping a reference to it."""
        model, self._examined = self._examined, None
        if model is not None and attention is not None and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(attention)
        elif model is None or attention is not None:
            model = self._load(attention)
        model = as_floats(model) if is_quantized(model) else model
        return graft(model, self.adapters) if self.adapters else model

    def reference(self) -> Any:
        """Load the model that files are compared with, in float32 because half precision rounds."""
        model = self._load(None)
        return model if is_quantized(model) else model.float()

    def _load(self, attention: str | None) -> Any:
        model = _load(self._request, self._checkpoint, attention)
        model = model if self._active is None else self._active.apply(model)
        if self._states is not None:
            give_states(model, self._states)
        return model


def _load(request: Request, checkpoint: Checkpoint, attention: str | None) -> Any:
    """Load the weights; the forward is the one of the side or pages to export."""
    options = request.options
    model = checkpoint.load_model(
        dtype=options.dtype,
        device=options.device,
        attention=attention,
        allow_missing_weights=options.allow_missing_weights,
        allow_unused_weights=options.allow_unused_weights,
    )
    return restrict(model, checkpoint)


@dataclass(frozen=True)
class ExportPlan:
    """Decisions about a model's export.

    Attributes:
        task: the task of the file.
        head_name: one of `ExportOptions`' heads, but not `auto`.
        head: the head to add to the graph; None for none.
        specification: the consumer's requirements; None if it accepts any graph.
        states: hidden states that the model returns instead of its last layer's; None for the last layer's.
        padding: the side on which texts are padded, as stamped; empty for the tokenizer's.
        reasons: decisions made for the user, with reasons.
    """

    task: str
    pipeline: ExportPipeline
    head_name: str = "logits"
    head: GraphHead | None = None
    specification: TargetSpecification | None = None
    states: TokenStates | None = None
    padding: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """An export, with everything that does not depend on the strategy.

    Attributes:
        tokenizer: a text model's tokenizer, or the one that accompanies another model; None if there is none.
        lengths: the text lengths that the file supports and is verified on.
    """

    request: Request
    checkpoint: Checkpoint
    models: Models
    plan: ExportPlan
    tokenizer: Any
    lengths: Lengths
    stopwatch: Stopwatch


@dataclass(frozen=True)
class _Subject:
    """A loaded model and its inputs.

    Attributes:
        side: the exported side of a dual encoder; None for other models.
    """

    request: Request
    checkpoint: Checkpoint
    model: Any
    modality: Modality
    side: Side | None

    @classmethod
    def of(cls, request: Request) -> _Subject:
        """Load the model, and determine its inputs."""
        checkpoint = request.open()
        model = _load(request, checkpoint, None)
        modality = find_modality(model, checkpoint, text=request.options.text)
        side = find_side(model, checkpoint.task)
        if (side is not None or checkpoint.is_of_pages) and not request.target.takes_any_graph:
            raise TargetError(
                f"the target {request.target.name} takes no side of an encoder of images", "leave --target out"
            )
        if side is not None:
            modality = with_padding(model, modality, side)
        return cls(request, checkpoint, model, modality, side)

    @property
    def text(self) -> TextInputs | None:
        """The text part of its inputs, or None."""
        return text_of(self.modality)

    @property
    def tokenizer(self) -> Any:
        """The text's tokenizer, or None."""
        return None if self.text is None else self.text.tokenizer


def prepare(request: Request) -> Job:
    """Load the model once, and determine everything that does not depend on the strategy.

    Raises:
        CheckpointError: the checkpoint cannot be understood or loaded.
        ExportError: an option would have no effect, or the model does not support it.
        TargetError: the consumer does not accept such a model.
        OutputExistsError: the output exists and `force` is not set.
    """
    stopwatch = Stopwatch()
    tell(f"loading {request.options.model_name}")
    subject = _Subject.of(request)
    checkpoint, text, tokenizer = subject.checkpoint, subject.text, subject.tokenizer
    lengths = _choose_lengths(subject)
    plan = _plan_with_cache(subject) if checkpoint.task in _WITH_CACHE else _plan_single_call(subject)
    _refuse_unused(subject, plan)
    if text is not None:
        if request.source.sentence_modules.takes_messages(plan.task):
            _check_chat_template(subject, plan)
    elif request.source.locate(TOKENIZER_NAME) is not None:  # for generated text, or for pages
        tokenizer = checkpoint.load_tokenizer()
    stopwatch.lap("load")
    models = Models(request, checkpoint, plan.states, subject.model, _find_adapters(subject, plan))
    return Job(request, checkpoint, models, plan, tokenizer, lengths, stopwatch)


def _find_adapters(subject: _Subject, plan: ExportPlan) -> tuple[RuntimeAdapter, ...]:
    request, checkpoint, names = subject.request, subject.checkpoint, subject.request.options.adapters
    if not names:
        return ()
    if subject.text is None or isinstance(plan.pipeline, EncoderDecoderPipeline) or request.stamps:
        raise ExportError(
            f"--adapter is for one graph that reads texts, and {request.source.model_name} becomes another",
            "export each adapter merged, as a model of its own: --model_name ADAPTER",
        )
    if is_quantized(subject.model):
        raise ExportError(f"--adapter was passed for quantized weights ({checkpoint.quantizer})", FLOAT_CHECKPOINT)
    return find_adapters(names, request.source, checkpoint, subject.model, lambda: _load(request, checkpoint, None))


def _choose_lengths(subject: _Subject) -> Lengths:
    """Choose the text lengths that the file supports.

    sentence-transformers' maximum for queries or documents replaces the tokenizer's limit, whether longer or shorter.

    Raises:
        ExportError: --max_length was passed for a model that takes no text, or none of this length.
    """
    options, text = subject.request.options, subject.text
    if text is None or all(axis.name != SEQUENCE for axis in subject.modality.axes):  # a single length, compared there
        if options.max_length is not None:
            raise ExportError("--max_length was passed for a model whose texts have no length", "leave it out")
        length = None if text is None else text.longest
        return Lengths(length, length)
    own = (subject.request.source.sentence_modules.stated_length(role) for role in _ROLES)
    longer = max((length for length in own if length is not None and length > (text.longest or length)), default=None)
    stated = text.longest
    if longer is not None:
        stated = min(longer, longest_text(subject.model, None) or longer)
    sizes = {text: sizes_of(text, [{0: BATCH, 1: SEQUENCE}]) for text in split_sizes(options.sizes)}
    require_short(sizes, (SEQUENCE,), stated, options.model_name)
    return Lengths.of(subject.model, stated, requested=options.max_length, verified=options.verify)


def _plan_with_cache(subject: _Subject) -> ExportPlan:
    """Plan for a model that generates step by step."""
    request, checkpoint = subject.request, subject.checkpoint
    if not request.target.takes_any_graph:
        usage_for(request.target, checkpoint.task)
    # Audio decoders are among transformers' sequence-to-sequence models.
    if not checkpoint.writes_from_encoder:
        return ExportPlan(TASK_WITH_CACHE, GenerationPipeline(subject.modality))
    check_model_output(encoder_path(request.paths.graph), force=request.options.force)
    pipeline = EncoderDecoderPipeline.of(subject.model, subject.modality, is_verified=request.options.verify)
    if subject.text is None or not subject.text.batches({}):
        return ExportPlan(checkpoint.task, pipeline)
    tolerance = TOLERANCES[DTYPES[request.options.dtype]]
    _, side, note = choose_side(subject.model.get_encoder(), subject.text, None, tolerance)
    return ExportPlan(checkpoint.task, pipeline, padding=side, reasons=tuple(filter(None, [note])))


def _plan_single_call(subject: _Subject) -> ExportPlan:
    """Plan for a model that answers in one call."""
    request, checkpoint, modality = subject.request, subject.checkpoint, subject.modality
    options = request.options
    signature = detect_signature(subject.model, modality)
    side = padding_note = ""
    if isinstance(modality, TextInputs) and modality.batches(signature.sizes):
        tolerance = TOLERANCES[DTYPES[options.dtype]]
        modality, side, padding_note = choose_side(subject.model, modality, signature.sequences, tolerance)
    specification = None
    if not request.target.takes_any_graph:
        specification = specify(request.target, checkpoint, signature, subject.tokenizer, options)
        choice = HeadChoice(specification.usage.head, specification.head)
        signature, modality = specification.narrow(signature), specification.fed(modality)
    else:
        choice = _choose_head(subject, signature)
    head, reasons = choice.head, tuple(filter(None, [choice.reason, padding_note]))
    states = _choose_states(subject, head, specification)
    if options.prune is not None:
        pruning = Pruning.in_graph(options.prune)
        if head is not None and head.output == pruning.output:
            head = replace(head, pruning=pruning)
        if specification is not None:
            specification = specification.with_pruning(pruning, in_graph=head is not None)
    attention = attention_of(subject.model)
    pipeline = SingleCallPipeline(modality, signature, head, options.keep_raw, specification, attention)
    task = checkpoint.task if head is None else head.task
    return ExportPlan(task, pipeline, choice.name, head, specification, states, side, reasons)


def _choose_head(subject: _Subject, signature: Signature) -> HeadChoice:
    """Choose the head if the consumer does not, and add a note for the user."""
    options, source, side = subject.request.options, subject.request.source, subject.side
    if side is not None:
        both_sides = find_both_sides(subject.model, subject.checkpoint)
        scales = scales_to_length_one(subject.model, subject.modality, both_sides, side)
        pads = subject.text is not None and subject.text.padded_length is not None
        choice = choose_side_head(options.head, side, source, signature, scales=scales, pads=pads)
    elif subject.checkpoint.is_of_pages:
        choice = choose_no_head(options.head, source)
    else:
        choice = choose_head(options.head, subject.checkpoint, signature, task=options.task)
    if choice.name == LATE_INTERACTION and subject.tokenizer is not None:
        expanding_token(source, subject.tokenizer)
    if choice.head is None or options.dimensions is None:
        return choice
    return replace(choice, head=choice.head.truncated(options.dimensions, signature))


def _refuse_unused(subject: _Subject, plan: ExportPlan) -> None:
    """Refuse options that would have no effect."""
    head, specification = plan.head, plan.specification
    options, task = subject.request.options, subject.checkpoint.task
    if task in _WITH_CACHE and options.head not in ("auto", "logits", "none"):
        raise ExportError(f"the task {task} takes no head, but --head {options.head} was passed", "leave --head out")
    if options.keep_raw and head is None:
        raise ExportError("--keep_raw keeps what a head reads, but there is no head", "leave --keep_raw out")
    if options.keep_raw and head is not None and head.name == "reranker":
        raise ExportError("--keep_raw was passed for a reranker, which reads two of the logits", "leave --keep_raw out")
    if options.dimensions is not None and (head is None or head.name != "embedding"):
        raise ExportError(
            "--dimensions keeps a part of an embedding, but this graph computes none", "leave --dimensions out"
        )
    is_told = specification is not None and specification.pruning is not None
    if options.prune is not None and not is_told and (head is None or head.name != "splade"):
        raise ExportError(
            f"--prune {options.prune} leaves out terms of a sparse encoder, but this graph computes no term weights",
            "leave --prune out; if it is a SPLADE, pass --head splade",
        )
    if options.text is not None and subject.text is None:
        raise ExportError("--text was passed for a model that takes no text", "leave --text out")


def _choose_states(
    subject: _Subject, head: GraphHead | None, specification: TargetSpecification | None
) -> TokenStates | None:
    """Make the model return the states that an embedder pools, and return them; None for its last layer's.

    Raises:
        CheckpointError: the layer weights cannot be read.
        TargetError: the consumer would pool other states.
    """
    source, task = subject.request.source, subject.checkpoint.task if head is None else head.task
    pools = head is not None and any(isinstance(module, Pooling) for module in head.modules)
    if subject.side is not None or not (pools or task == "sentence-similarity"):
        return None
    states = TokenStates.of(source.sentence_modules, source)
    if states is None or (head is None and specification is None):
        return None
    if specification is not None:
        raise TargetError(
            f"{source.model_name} does not pool the states of its last layer, and "
            f"{specification.target.title} reads these",
            "pass --target plain",
        )
    give_states(subject.model, states)
    return states


def _check_chat_template(subject: _Subject, plan: ExportPlan) -> None:
    """Render a few chats, and compare each with transformers' template and tokens.

    Raises:
        CheckpointError: the template fails, leaves out part of a pair, or renders differently here.
        TargetError: the target would use texts without the template.
    """
    source, tokenizer = subject.request.source, subject.tokenizer
    template = ChatTemplate.of(source, source.sentence_modules, plan.task)
    if template is None:
        return
    of_pairs = plan.task in (RANKING, "text-classification")
    if of_pairs:
        template.require_pairs()
    own = replace(template, source=tokenizer.get_chat_template(), special_tokens=tokenizer.special_tokens_map)
    for prompt in dict.fromkeys(("", *Prompts.of(source).by_name.values())):
        text = (_CHAT, _CHAT[::-1]) if of_pairs else _CHAT
        (rendered,) = template.render([text], prompt)
        (expected,) = own.render([text], prompt)
        if rendered != expected:
            raise source.refuse(
                f"the chat template of {source.model_name} renders differently than in transformers: "
                f"{rendered[:200]!r} instead of {expected[:200]!r}"
            )
    if plan.specification is not None and plan.specification.usage.after is not None:
        raise TargetError(
            f"{source.model_name} puts texts into a chat template, and {subject.request.target.title} would run it on "
            "them as they are",
            "pass --target plain, and read texts with `onnxtool infer` or onnxtool.load",
        )
