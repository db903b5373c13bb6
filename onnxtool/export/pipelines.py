"""How a file is traced and verified, by what it computes: one call of the model, or generation with a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir

from onnxtool.errors import ExportError
from onnxtool.export.decoding.encoder_decoder import ENCODER_MASK, WITHOUT_CACHE, EncoderDecoder, trace_encoder_decoder
from onnxtool.export.decoding.encoder_decoder_verification import EncoderDecoderReference, verify_encoder_decoder
from onnxtool.export.decoding.tracing import PROMPTS, trace_with_cache
from onnxtool.export.decoding.verification import NEW_TOKENS, GenerationReference, verify_generation
from onnxtool.export.graph import tidy
from onnxtool.export.heads.head import Head, append_head
from onnxtool.export.heads.vocabulary_rows import keep_read_rows
from onnxtool.export.modalities.combined import WithDecoder
from onnxtool.export.modalities.finding import text_of
from onnxtool.export.modalities.page_inputs import PageInputs
from onnxtool.export.modalities.sizes import DECODER_SEQUENCE, Modality
from onnxtool.export.signature import Signature, detect_signature, to_tensors
from onnxtool.export.strategies import ExportStrategy, attention_of, strategies_for
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.tracing import EXPORTERS, trace
from onnxtool.export.verification import TorchReference, verify_file
from onnxtool.runtime.comparison import Case, ReferenceOutputs, Tolerance
from onnxtool.runtime.feeds import LONGEST_CASE
from onnxtool.runtime.input_stamp import IDS, MASK, InputKind
from onnxtool.verification import Verification


@dataclass(frozen=True)
class Graphs:
    """What a trace gives: the graph, and the encoder that goes before it, where that is a graph of its own."""

    model: ir.Model
    encoder: ir.Model | None = None


@dataclass(frozen=True)
class DescribedInputs:
    """What the inputs of a file hold, and the cases that it runs on."""

    kinds: Mapping[str, InputKind]
    cases: Sequence[Case]


@dataclass(frozen=True)
class SingleCallPipeline:
    """The model as it is called once: inputs to outputs, with a head on top.

    Attributes:
        default_attention: what transformers chooses for this model.
        signature: with every axis dynamic that the model leaves open.
        keep_raw: whether the output that the head reads stays beside it.
        specification: what the target makes of the graph; None where it takes any.
        left_out: inputs of the model beside text, which the file does not take.
    """

    steps: ClassVar[int] = 0  # tokens that come to those of a case

    modality: Modality
    signature: Signature
    head: Head | None
    keep_raw: bool
    specification: TargetSpecification | None
    default_attention: str | None
    left_out: tuple[str, ...]

    @classmethod
    def of(
        cls, model: Any, modality: Modality, signature: Signature, head: Head | None,
        specification: TargetSpecification | None, *, keep_raw: bool,
    ) -> SingleCallPipeline:  # fmt: skip
        """Find out about a loaded model what no strategy changes."""
        text = text_of(modality)
        left_out = () if text is None else text.left_out
        return cls(modality, signature, head, keep_raw, specification, attention_of(model), left_out)

    def strategies(self, exporter: str, *, verified: bool) -> Iterator[ExportStrategy]:
        """List the strategies; those that fix axes come last."""
        return strategies_for(exporter, self.signature.axes, self.default_attention, verified=verified)

    def trace(self, model: Any, strategy: ExportStrategy, opset: int | None) -> Graphs:
        """Trace the model on a sample of its modality, name everything, and put the head on."""
        signature = self.signature
        if strategy.fixed:
            signature = detect_signature(model, self.modality, strategy.fixed)
            signature = signature if self.specification is None else self.specification.narrow(signature)
        sample, head = to_tensors(model, self.modality.sample(signature.sizes)), self.head
        if head is not None:
            head, signature = keep_read_rows(model, head, signature)
        graph = trace(strategy.exporter, model, sample, signature, opset, timeout_s=strategy.timeout_s)
        tidy(graph, signature)
        if head is not None:
            append_head(graph, head, keep_raw=self.keep_raw)
            graph.metadata_props.update({} if head.stored is None else head.stored.metadata)
        if isinstance(self.modality, PageInputs):
            graph.metadata_props.update(self.modality.metadata)
        return Graphs(graph)

    def reference_outputs(self, model: Any, strategy: ExportStrategy, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Run the model on all cases of its modality that fit the fixed axes; with `lengths` on such texts instead."""
        sizes = {**self.signature.given, **strategy.fixed}
        return TorchReference(
            model, self.modality, self.signature.outputs, sizes, self.head, self.keep_raw
        ).reference_outputs(lengths)

    def verify(self, path: Path, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
        """Compare all outputs."""
        stored = None if self.head is None else self.head.stored
        return verify_file(path, reference, tolerance, self.specification, stored)

    def inputs(self, strategy: ExportStrategy, reference: ReferenceOutputs | None) -> DescribedInputs:
        """Describe the inputs by the cases that PyTorch runs on; unverified, by all of them."""
        sizes = {**self.signature.given, **strategy.fixed}
        return DescribedInputs(self.modality.kinds, reference.cases if reference else self.modality.cases(sizes))

    def notes(self, architecture: str, strategy: ExportStrategy) -> tuple[str, ...]:
        """Say which axes are fixed, and by whom, and which inputs are not there."""
        given, fixed = (
            ", ".join(f"{axis} {size}" for axis, size in sizes.items())
            for sizes in (self.signature.given, strategy.fixed)
        )
        notes = [f"{architecture} itself takes one size only: {given}"] if given else []
        notes += [f"fixed in this file, though {architecture} takes other sizes: {fixed}"] if fixed else []
        return (*notes, *_left_out_notes(architecture, self.left_out))


@dataclass(frozen=True)
class GenerationPipeline:
    """A decoder with its cache as inputs and outputs: one graph for prompts and for the tokens after them.

    Attributes:
        longest: the most tokens that a text may have; None where the model does not bound it.
        left_out: inputs of the model beside text, which the file does not take.
        kinds: what ids and mask hold.
    """

    steps: ClassVar[int] = NEW_TOKENS

    tokenizer: Any
    longest: int | None
    left_out: tuple[str, ...]
    kinds: Mapping[str, InputKind]

    @classmethod
    def of(cls, modality: Modality) -> GenerationPipeline:
        """Take of what goes into the model its text."""
        text = text_of(modality)
        return cls(None, None, (), {}) if text is None else cls(text.tokenizer, text.longest, text.left_out, text.kinds)

    def strategies(self, exporter: str, *, verified: bool) -> Iterator[ExportStrategy]:
        """List the strategies; TorchScript traces no caches."""
        dynamo = next(row for row in EXPORTERS if row.name == "dynamo")
        for prompts in PROMPTS if exporter in ("auto", dynamo.name) else ():
            for attention in dynamo.attentions:
                yield ExportStrategy(dynamo, attention, prompts=prompts)

    def trace(self, model: Any, strategy: ExportStrategy, opset: int | None) -> Graphs:
        """Trace the step that `generate` takes."""
        return Graphs(trace_with_cache(model, prompts=strategy.prompts, opset=opset))

    def reference_outputs(self, model: Any, strategy: ExportStrategy, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Let the model generate; with `lengths` up to so many tokens."""
        return GenerationReference(model, self.tokenizer, self.longest).reference_outputs(lengths)

    def verify(self, path: Path, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
        """Let the file generate, token by token."""
        return verify_generation(path, reference, tolerance)

    def inputs(self, _strategy: ExportStrategy, _reference: ReferenceOutputs | None) -> DescribedInputs:
        """Describe ids and mask: any number of tokens goes into the graph, after any number of tokens."""
        return DescribedInputs(self.kinds, ())

    def notes(self, architecture: str, strategy: ExportStrategy) -> tuple[str, ...]:
        """Say where prompts are slow, and which inputs are not there."""
        slow = (
            f"prompts run {strategy.prompts}: {architecture} carries states, and its prompts cannot be traced at once"
        )
        return (*((slow,) if strategy.prompts != PROMPTS[0] else ()), *_left_out_notes(architecture, self.left_out))


@dataclass(frozen=True)
class EncoderDecoderPipeline:
    """An encoder-decoder with its cache: a graph for the text, and one for the steps of the decoder.

    Attributes:
        modality: what the encoder takes.
        signature: of the whole model, with every axis dynamic that it leaves open.
        start_id: what every text of the decoder begins with.
        in_parallel: whether the decoder takes several tokens at once.
        longest: the most tokens that the decoder takes; None for no limit.
        vocabulary_size: how many ids the decoder knows.
        default_attention: what transformers chooses for this model.
        left_out: inputs of the model beside text, which the file does not take.
    """

    steps: ClassVar[int] = 0

    modality: Modality
    signature: Signature
    start_id: int
    in_parallel: bool
    longest: int | None
    vocabulary_size: int
    default_attention: str | None
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, model: Any, modality: Modality) -> EncoderDecoderPipeline:
        """Find out about a loaded model what no strategy changes.

        Raises:
            ExportError: it is no encoder-decoder of texts, or does not go with a cache.
        """
        text = text_of(modality)
        if text is None or not isinstance(modality, WithDecoder):
            raise ExportError(f"{type(model).__name__} is no encoder-decoder of texts", WITHOUT_CACHE)
        signature = detect_signature(model, modality)
        start_id = _start_of(model, modality.start_id)
        parts = EncoderDecoder.of(model, modality.encoder.sample(signature.given), start_id)
        return cls(
            modality.encoder,
            signature,
            start_id,
            parts.in_parallel,
            modality.longest,
            modality.vocabulary_size,
            attention_of(model),
            text.left_out,
        )

    def strategies(self, exporter: str, *, verified: bool) -> Iterator[ExportStrategy]:
        """List the strategies: TorchScript first where the files are verified, which takes a twentieth of the time."""
        axes = [replace(axis, is_covered=True) for axis in self.signature.axes if axis.name != DECODER_SEQUENCE]
        return strategies_for(exporter, axes, self.default_attention, verified=verified)

    def trace(self, model: Any, strategy: ExportStrategy, opset: int | None) -> Graphs:
        """Trace the encoder and a step of the decoder."""
        signature = self.signature
        if strategy.fixed:
            signature = detect_signature(model, self.modality, strategy.fixed)
        sample = self.modality.sample(signature.sizes)
        shapes = {name: signature.inputs[name] for name in sample}
        parts = EncoderDecoder(model, self.start_id, self.in_parallel)
        return Graphs(*trace_encoder_decoder(parts, sample, strategy, shapes, opset))

    def reference_outputs(self, model: Any, strategy: ExportStrategy, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Let the model generate; with `lengths` from texts of so many tokens."""
        parts = EncoderDecoder(model, self.start_id, self.in_parallel)
        reference = EncoderDecoderReference(parts, self.modality, self.verified_answer, self.vocabulary_size)
        return reference.reference_outputs({**self.signature.given, **strategy.fixed}, lengths)

    def verify(self, path: Path, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
        """Let the files generate, token by token."""
        return verify_encoder_decoder(encoder_path(path), path, reference, tolerance)

    @property
    def verified_answer(self) -> int | None:
        """The most tokens of the decoder that verification reaches; None for no limit."""
        return min(self.longest or LONGEST_CASE, LONGEST_CASE) if self.in_parallel else self.longest

    def inputs(self, _strategy: ExportStrategy, _reference: ReferenceOutputs | None) -> DescribedInputs:
        """Describe the inputs of the decoder's steps."""
        ids, mask = InputKind(IDS, self.vocabulary_size), InputKind(MASK)
        return DescribedInputs({"input_ids": ids, ENCODER_MASK: mask}, ())

    def encoder_inputs(self, strategy: ExportStrategy, reference: ReferenceOutputs | None) -> DescribedInputs:
        """Describe the inputs of the encoder by the texts that PyTorch generates from; unverified, by all of them."""
        sizes = {**self.signature.given, **strategy.fixed}
        return DescribedInputs(self.modality.kinds, reference.cases if reference else self.modality.cases(sizes))

    def notes(self, architecture: str, strategy: ExportStrategy) -> tuple[str, ...]:
        """Say which axes are fixed, and which inputs are not there."""
        sizes = {**({} if self.in_parallel else {DECODER_SEQUENCE: 1}), **self.signature.given}
        given = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        fixed = ", ".join(f"{axis} {size}" for axis, size in strategy.fixed.items())
        notes = [f"{architecture} itself takes one size only: {given}"] if given else []
        notes += [f"fixed in these files, though {architecture} takes other sizes: {fixed}"] if fixed else []
        return (*notes, *_left_out_notes(architecture, self.left_out))


def encoder_path(path: Path) -> Path:
    """Return where the encoder of the graph at `path` is: `NAME-encoder.onnx` beside `NAME.onnx`."""
    return path.with_name(f"{path.stem}-encoder{path.suffix}")


def _start_of(model: Any, otherwise: int) -> int:
    """Return what texts of the decoder begin with, as `generate` looks it up."""
    configs = (model.generation_config, model.config)
    names = ("decoder_start_token_id", "bos_token_id")
    found = (getattr(config, name, None) for name in names for config in configs)
    return next((token for token in found if isinstance(token, int)), otherwise)


ExportPipeline = SingleCallPipeline | GenerationPipeline | EncoderDecoderPipeline
"""How one kind of file is made: its strategies, a trace by one of them, reference outputs, verification, and notes."""


def _left_out_notes(architecture: str, left_out: tuple[str, ...]) -> tuple[str, ...]:
    """Say which of the model's modalities a file of text does not take; empty where it takes all."""
    if not left_out:
        return ()
    return (f"takes text alone, though {architecture} takes {' and '.join(left_out)} as well",)
