"""Prepare an export before any exporter traces: the checkpoint, its model, what goes into it, and what the file gives.

One direction: the options name a checkpoint and a target (`Request`), the checkpoint gives a model and its inputs
(`_Subject`), and these decide on head, pipeline and lengths (`Job`). What depends on the strategy comes after.
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
from onnxtool.checkpoint.tasks import RANKING, TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import ExportError, TargetError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.decoding.encoder_decoder import EncoderDecoderPipeline, encoder_path
from onnxtool.export.decoding.generation import GenerationPipeline
from onnxtool.export.heads.choice import (
    Choice,
    check_head,
    choose_head,
    choose_no_head,
    choose_side_head,
    require_expanding_token,
)
from onnxtool.export.heads.head import Head, choose_storage
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
from onnxtool.export.modalities.modality import SEQUENCE, Modality
from onnxtool.export.modalities.text import TextInputs, longest_text
from onnxtool.export.options import ExportOptions
from onnxtool.export.signature import Signature, detect_signature
from onnxtool.export.single_call import SingleCallPipeline
from onnxtool.export.source import Source
from onnxtool.export.target import Layout, Target, find_target, layout
from onnxtool.export.target_specification import TargetSpecification, specify
from onnxtool.export.weights import as_floats, is_quantized
from onnxtool.model_file import check_model_output
from onnxtool.model_file.metadata import PAIR_KEY, PARTNER_KEY
from onnxtool.progress import tell
from onnxtool.runtime.timing import Stopwatch

_WITH_CACHE = (TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE)
_ROLES = ("query", "document")
_CHAT = "What is the capital of France?\n Paris, <of> course; naïve café."

ExportPipeline = SingleCallPipeline | GenerationPipeline | EncoderDecoderPipeline
"""How one kind of file is made: its strategies, a trace by one of them, reference outputs, verification, and notes."""


@dataclass(frozen=True)
class Request:
    """One file to export: of which checkpoint, for which target, and where to.

    Attributes:
        options: those of the user; of a Router's two encoders, with the route and the output of this one.
        stamps: what the file says of the one that is exported with it; empty where there is one export.
    """

    options: ExportOptions
    source: Source
    target: Target
    paths: Layout
    stamps: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: ExportOptions) -> Request:
        """Find the checkpoint, the target and where the files go.

        Raises:
            CheckpointError: the checkpoint cannot be found.
            ExportError: the head and the task contradict each other.
            TargetError: options were passed on which the target decides.
            OutputExistsError: the output is there and `force` is not set.
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
                f"the target {target.name} decides on what the graph gives, and {' and '.join(given)} was passed as "
                "well",
                "leave it out, or pass --target plain",
            )
        paths = layout(target, options.output, source.name)
        check_model_output(paths.graph, force=options.force)
        return cls(options, source, target, paths)

    def open(self) -> Checkpoint:
        """Open the checkpoint: a model, or a table of vectors."""
        if not self.source.is_static:
            return Checkpoint.open(self.source, task=self.options.task)
        from onnxtool.export.static import StaticCheckpoint

        if not self.target.takes_any_graph:
            raise TargetError(f"the target {self.target.name} takes no table of vectors", "leave --target out")
        return StaticCheckpoint.open_static(self.source, task=self.options.task)


def find_requests(options: ExportOptions) -> tuple[Request, ...]:
    """Return the exports that `options` ask for: of a Router's two encoders, first the one that reads any text.

    That one has the output's name, and the other one what it reads behind it: NAME.onnx and NAME-query.onnx.

    Raises:
        ExportError: ranges of numbers would be measured for each side, and be others.
        OnnxtoolError: the checkpoint cannot be found or read, or an output is there.
    """
    request = Request.of(options)
    modules, graph = request.source.sentence_modules, request.paths.graph
    routes = {modules.route_of[role]: role for role in _ROLES if role in modules.route_of}
    if len(routes) < len(_ROLES) or not modules.routes or not request.target.takes_any_graph:
        return (request,)
    if options.calibration is not None:
        raise ExportError(
            "--calibration measures the range of each number, and queries and documents of this checkpoint have "
            "encoders of their own: their codes could not be compared",
            "export one route with --calibration, and both with --ranges",
        )
    first = modules.route_of.get("", "")
    first = first if first in routes else modules.route_of["document"]
    outputs = {first: graph}
    outputs |= {route: _other_path(graph, role) for route, role in routes.items() if route != first}
    requests = [Request.of(replace(options, route=route, output=output)) for route, output in outputs.items()]
    digest = hashlib.sha256()
    for one in requests:
        computed = [(module.kind, module.settings) for module in one.source.sentence_modules.modules]
        content = [one.open().weights_sha256, computed, options.head, options.choices]
        digest.update(json.dumps(content, sort_keys=True).encode())
    names = [output.name for output in outputs.values()]
    return tuple(
        replace(one, stamps={PARTNER_KEY: name, PAIR_KEY: digest.hexdigest()})
        for one, name in zip(requests, reversed(names), strict=True)
    )


def partner_paths(path: Path) -> tuple[Path, ...]:
    """Return where the partner of the first file may go."""
    return tuple(_other_path(path, role) for role in _ROLES)


def _other_path(path: Path, role: str) -> Path:
    """Return where the file for the texts of a role goes: NAME-query.onnx beside NAME.onnx."""
    return path.with_name(f"{path.stem}-{role}{path.suffix}")


class Models:
    """Loads the model as a strategy wants it; the one that was examined serves the first strategy."""

    def __init__(self, request: Request, checkpoint: Checkpoint, states: TokenStates | None, examined: Any) -> None:
        self._request, self._checkpoint, self._states, self._examined = request, checkpoint, states, examined

    def take(self, attention: str | None) -> Any:
        """Return a model that nothing has traced yet, and keep no reference to it."""
        model, self._examined = self._examined, None
        if model is not None and attention is not None and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(attention)
        elif model is None or attention is not None:
            model = self._load(attention)
        return as_floats(model) if is_quantized(model) else model

    def reference(self) -> Any:
        """Load the model that files are compared with: in float32, as half precision rounds itself."""
        model = self._load(None)
        return model if is_quantized(model) else model.float()

    def _load(self, attention: str | None) -> Any:
        model = _load(self._request, self._checkpoint, attention)
        if self._states is not None:
            give_states(model, self._states)
        return model


def _load(request: Request, checkpoint: Checkpoint, attention: str | None) -> Any:
    """Load the weights; the forward is that of the side or the pages that are exported."""
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
class Plan:
    """What becomes of a model.

    Attributes:
        task: what the file is for.
        head_name: one of `ExportOptions`' heads, and not `auto`.
        head: what is put on the graph; None for nothing.
        specification: what the consumer needs; None where it takes any graph.
        states: those that the model gives instead of its last layer's; None for these.
        reasons: decisions that were made for the user, and why.
    """

    task: str
    pipeline: ExportPipeline
    head_name: str = "logits"
    head: Head | None = None
    specification: TargetSpecification | None = None
    states: TokenStates | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """An export, with all that does not depend on the strategy.

    Attributes:
        tokenizer: that of a model of text, or that lies beside another model; None where there is none.
        lengths: how long texts are that the file is for and verified on.
    """

    request: Request
    checkpoint: Checkpoint
    models: Models
    plan: Plan
    tokenizer: Any
    lengths: Lengths
    stopwatch: Stopwatch


@dataclass(frozen=True)
class _Subject:
    """A loaded model and what goes into it.

    Attributes:
        side: the side of a dual encoder that is exported; None for other models.
    """

    request: Request
    checkpoint: Checkpoint
    model: Any
    modality: Modality
    side: Side | None

    @classmethod
    def of(cls, request: Request) -> _Subject:
        """Load the model, and find out what it takes."""
        checkpoint = request.open()
        model = _load(request, checkpoint, None)
        modality = find_modality(model, checkpoint, text=request.options.text)
        side = find_side(model, checkpoint.task)
        if side is not None or checkpoint.is_of_pages:
            _refuse_for_pictures(request)
        if side is not None:
            modality = with_padding(model, modality, side)
        return cls(request, checkpoint, model, modality, side)

    @property
    def text(self) -> TextInputs | None:
        """The part of its inputs that is text; None where there is none."""
        return text_of(self.modality)

    @property
    def tokenizer(self) -> Any:
        """That of the text; None where there is none."""
        return None if self.text is None else self.text.tokenizer


def prepare(request: Request) -> Job:
    """Load the model once, and find out all that does not depend on the strategy.

    Raises:
        CheckpointError: the checkpoint cannot be understood or loaded.
        ExportError: an option would do nothing, or the model cannot have what it asks for.
        TargetError: the consumer takes no such model.
        OutputExistsError: the output is there and `force` is not set.
    """
    stopwatch = Stopwatch()
    tell(f"loading {request.options.model_name}")
    subject = _Subject.of(request)
    checkpoint, text, tokenizer = subject.checkpoint, subject.text, subject.tokenizer
    lengths = _choose_lengths(subject)
    plan = _plan_with_cache(subject) if checkpoint.task in _WITH_CACHE else _plan_single_call(subject)
    _refuse_unused(subject, plan.head)
    if text is not None:
        _check_chat_template(subject, plan)
    elif request.source.locate(TOKENIZER_NAME) is not None:  # of what it writes, or of pages
        tokenizer = checkpoint.load_tokenizer()
    stopwatch.lap("load")
    models = Models(request, checkpoint, plan.states, subject.model)
    return Job(request, checkpoint, models, plan, tokenizer, lengths, stopwatch)


def _choose_lengths(subject: _Subject) -> Lengths:
    """Choose how long texts are that the file is for.

    What sentence-transformers cuts queries or documents to replaces the tokenizer's limit, longer or shorter.

    Raises:
        ExportError: --max_length was passed for a model that takes no texts, or none of this length.
    """
    options, text = subject.request.options, subject.text
    if text is None or all(axis.name != SEQUENCE for axis in subject.modality.axes):  # of one length, compared there
        if options.max_length is not None:
            raise ExportError("--max_length was passed for a model whose texts have no length", "leave it out")
        return Lengths.fixed(None if text is None else text.longest)
    own = (subject.request.source.sentence_modules.stated_length(role) for role in _ROLES)
    longer = max((length for length in own if length is not None and length > (text.longest or length)), default=None)
    stated = text.longest
    if longer is not None:
        stated = min(longer, longest_text(subject.model, None) or longer)
    return Lengths.of(subject.model, stated, asked=options.max_length, verified=options.verify)


def _plan_with_cache(subject: _Subject) -> Plan:
    """Plan for a model that writes, step by step."""
    request, checkpoint = subject.request, subject.checkpoint
    if not request.target.takes_any_graph:
        request.target.use_for(checkpoint.task, (), pads_left=False)
    # Decoders that hear sound are among the sequence-to-sequence models of transformers.
    if not checkpoint.writes_from_encoder:
        return Plan(TASK_WITH_CACHE, GenerationPipeline(subject.modality))
    check_model_output(encoder_path(request.paths.graph), force=request.options.force)
    pipeline = EncoderDecoderPipeline.of(subject.model, subject.modality, is_verified=request.options.verify)
    return Plan(checkpoint.task, pipeline)


def _refuse_for_pictures(request: Request) -> None:
    """Refuse what encoders of pictures, and of the texts beside them, do not have."""
    if not request.target.takes_any_graph:
        raise TargetError(
            f"the target {request.target.name} takes no side of an encoder of pictures", "leave --target out"
        )
    if request.options.vectors_as is not None:
        raise ExportError(
            "--vectors_as was passed for an encoder of pictures, whose vectors are compared as floats",
            "leave it out; a corpus of pictures is stored so by `onnxtool infer --output FOLDER/ --vectors_as`",
        )


def _plan_single_call(subject: _Subject) -> Plan:
    """Plan for a model that answers in one call."""
    request, checkpoint, modality = subject.request, subject.checkpoint, subject.modality
    options = request.options
    signature = detect_signature(subject.model, modality)
    specification = None
    if not request.target.takes_any_graph:
        specification = specify(request.target, checkpoint, signature, subject.tokenizer, options.head)
        choice = Choice(specification.head_name, specification.head)
        signature, modality = specification.narrow(signature), specification.fed(modality)
    else:
        choice = _choose_head(subject, signature)
    head, reasons = choice.head, tuple(filter(None, [choice.why]))
    states = _choose_states(subject, head, specification)
    if head is not None and head.name == "embedding" and options.vectors_as is not None:
        stored, few = choose_storage(options, subject.model, head, modality, request.source)
        head, reasons = head.stored_as(stored, signature), reasons + few
    pipeline = SingleCallPipeline.of(subject.model, modality, signature, head, specification, options)
    task = checkpoint.task if head is None else head.task
    return Plan(task, pipeline, choice.name, head, specification, states, reasons)


def _choose_head(subject: _Subject, signature: Signature) -> Choice:
    """Choose the head where no consumer decides on it, and say what a user should know of that."""
    options, source, side = subject.request.options, subject.request.source, subject.side
    if side is not None:
        both = find_both_sides(subject.model, subject.checkpoint)
        scales = scales_to_length_one(subject.model, subject.modality, both, side)
        pads = subject.text is not None and subject.text.padded_length is not None
        choice = choose_side_head(options.head, side, source, signature, scales=scales, pads=pads)
    elif subject.checkpoint.is_of_pages:
        choice = choose_no_head(options.head, source)
    else:
        choice = choose_head(options.head, subject.checkpoint, signature, task=options.task)
    if choice.head is not None and subject.tokenizer is not None:
        require_expanding_token(source, subject.tokenizer)
    if choice.head is None or options.dimensions is None:
        return choice
    return replace(choice, head=choice.head.truncated(options.dimensions, signature))


def _refuse_unused(subject: _Subject, head: Head | None) -> None:
    """Refuse options that would do nothing."""
    options, task = subject.request.options, subject.checkpoint.task
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
    if options.text is not None and subject.text is None:
        raise ExportError("--text was passed for a model that takes no text", "leave --text out")


def _choose_states(
    subject: _Subject, head: Head | None, specification: TargetSpecification | None
) -> TokenStates | None:
    """Let the model give the states that an embedder pools, and return them; None for those of its last layer.

    Raises:
        CheckpointError: the weights of layers cannot be read.
        TargetError: a consumer would pool others.
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
            f"{source.model_name} pools other states than those of its last layer, and "
            f"{specification.target.title} reads these",
            "pass --target plain",
        )
    give_states(subject.model, states)
    return states


def _check_chat_template(subject: _Subject, plan: Plan) -> None:
    """Render a few chats, and compare each with the template and the tokens that the tokenizer of transformers has.

    Raises:
        CheckpointError: the template fails, leaves out a part of a pair, or renders otherwise here.
        TargetError: the target would run texts as they are.
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
        (ours,) = template.render([text], prompt)
        (theirs,) = own.render([text], prompt)
        if ours != theirs:
            raise source.refuse(
                f"the chat template of {source.model_name} renders otherwise here than in transformers: {ours[:200]!r} "
                f"instead of {theirs[:200]!r}"
            )
    if plan.specification is not None and not plan.specification.needs_module_weights:
        raise TargetError(
            f"{source.model_name} puts texts into a chat template, and {subject.request.target.title} would run it on "
            "them as they are",
            "pass --target plain, and read texts with `onnxtool infer` or onnxtool.load",
        )
