"""What an exported file computes, and how it is traced and proven: the model as it is called, or with its cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onnxtool.export.decoding.proof import GenerationProver, prove_generation
from onnxtool.export.decoding.tracing import PROMPTS, trace_with_cache
from onnxtool.export.graph import tidy
from onnxtool.export.heads.choice import Head, append_head
from onnxtool.export.modalities.finding import text_of
from onnxtool.export.modalities.sizes import Modality
from onnxtool.export.signature import Signature, detect_signature, to_tensors
from onnxtool.export.targets.contracts import Contract
from onnxtool.export.tracing import EXPORTERS, trace
from onnxtool.export.verification import Prover, prove
from onnxtool.export.ways import Way, attention_of, ways_to_trace
from onnxtool.runtime.comparison import Answers, Tolerance
from onnxtool.verification import Verification

if TYPE_CHECKING:
    import onnx_ir as ir


class Recipe(Protocol):
    """How one kind of file is made."""

    def ways(self, exporter: str, *, proven: bool) -> Iterator[Way]:
        """List the ways to trace it with `exporter`, the most useful file first; `proven` where it will be."""
        ...

    def trace(self, model: Any, way: Way, opset: int | None) -> ir.Model:
        """Trace `model`, which is loaded as `way` wants it, into a graph that is ready to be saved.

        Raises:
            ExportError: it cannot be traced in this way.
        """
        ...

    def ask(self, model: Any, way: Way) -> Answers:
        """Ask a model that was loaded anew what a file traced in this way has to answer."""
        ...

    def prove(self, path: Path, answers: Answers, tolerance: Tolerance) -> Verification:
        """Compare the file at `path` with the answers.

        Raises:
            VerificationError: it differs by more than `tolerance`.
        """
        ...

    def notes(self, architecture: str, way: Way) -> tuple[str, ...]:
        """Say what a user has to know of a file traced in this way."""
        ...


@dataclass(frozen=True)
class OneCall:
    """The model as it is called once: inputs to outputs, with a head on top.

    Attributes:
        default_attention: what transformers chooses for this model.
        signature: with every axis dynamic that the model leaves open.
        keep_raw: whether the output that the head stands on stays beside it.
        contract: what the target makes of the graph; None where it takes it as it is.
        left_out: what the model takes beside the text that the file takes.
    """

    modality: Modality
    signature: Signature
    head: Head | None
    keep_raw: bool
    contract: Contract | None
    default_attention: str | None
    left_out: tuple[str, ...]

    @classmethod
    def of(
        cls, model: Any, modality: Modality, signature: Signature, head: Head | None, contract: Contract | None, *,
        keep_raw: bool,
    ) -> OneCall:  # fmt: skip
        """Find out about a loaded model what no way changes."""
        text = text_of(modality)
        left_out = () if text is None else text.left_out
        return cls(modality, signature, head, keep_raw, contract, attention_of(model), left_out)

    def ways(self, exporter: str, *, proven: bool) -> Iterator[Way]:
        """List the ways; those that fix axes stand last."""
        return ways_to_trace(exporter, self.signature.axes, self.default_attention, proven=proven)

    def trace(self, model: Any, way: Way, opset: int | None) -> ir.Model:
        """Trace the model on a sample of its modality, name everything, and put the head on."""
        signature = self.signature
        if way.fixed:
            signature = detect_signature(model, self.modality, way.fixed)
            signature = signature if self.contract is None else self.contract.narrow(signature)
        sample = to_tensors(model, self.modality.sample(signature.sizes))
        graph = trace(way.exporter, model, sample, signature, opset, patience_s=way.patience_s)
        tidy(graph, signature)
        if self.head is not None:
            append_head(graph, self.head, keep_raw=self.keep_raw)
        return graph

    def ask(self, model: Any, way: Way) -> Answers:
        """Run the model on all cases of its modality that fit the fixed axes."""
        sizes = {**self.signature.given, **way.fixed}
        return Prover(model, self.modality, self.signature.outputs, sizes, self.head, self.keep_raw).ask()

    def prove(self, path: Path, answers: Answers, tolerance: Tolerance) -> Verification:
        """Compare all outputs."""
        return prove(path, answers, tolerance, self.contract)

    def notes(self, architecture: str, way: Way) -> tuple[str, ...]:
        """Say which axes are fixed, and by whom, and which inputs are not there."""
        given, fixed = (
            ", ".join(f"{axis} {size}" for axis, size in sizes.items()) for sizes in (self.signature.given, way.fixed)
        )
        notes = [f"{architecture} itself takes one size only: {given}"] if given else []
        notes += [f"fixed in this file, though {architecture} takes other sizes: {fixed}"] if fixed else []
        return (*notes, *_left_out_notes(architecture, self.left_out))


@dataclass(frozen=True)
class WithCache:
    """A decoder with its cache as inputs and outputs: one graph for prompts and for the tokens after them.

    Attributes:
        longest: the most tokens that a text may have; None where the model does not bound it.
        left_out: what the model takes beside the text that the file takes.
    """

    tokenizer: Any
    longest: int | None
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, modality: Modality) -> WithCache:
        """Take of what goes into the model its text."""
        text = text_of(modality)
        return cls(None, None, ()) if text is None else cls(text.tokenizer, text.longest, text.left_out)

    def ways(self, exporter: str, *, proven: bool) -> Iterator[Way]:
        """List the ways; TorchScript traces no caches."""
        dynamo = next(row for row in EXPORTERS if row.name == "dynamo")
        for prompts in PROMPTS if exporter in ("auto", dynamo.name) else ():
            for attention in dynamo.attentions:
                yield Way(dynamo, attention, prompts=prompts)

    def trace(self, model: Any, way: Way, opset: int | None) -> ir.Model:
        """Trace the step that `generate` takes."""
        return trace_with_cache(model, prompts=way.prompts, opset=opset)

    def ask(self, model: Any, way: Way) -> Answers:
        """Let the model generate."""
        return GenerationProver(model, self.tokenizer, self.longest).ask()

    def prove(self, path: Path, answers: Answers, tolerance: Tolerance) -> Verification:
        """Let the file generate, token by token."""
        return prove_generation(path, answers, tolerance)

    def notes(self, architecture: str, way: Way) -> tuple[str, ...]:
        """Say where prompts are slow, and which inputs are not there."""
        slow = f"prompts run {way.prompts}: {architecture} carries states, and its prompts cannot be traced at once"
        return (*((slow,) if way.prompts != PROMPTS[0] else ()), *_left_out_notes(architecture, self.left_out))


def _left_out_notes(architecture: str, left_out: tuple[str, ...]) -> tuple[str, ...]:
    """Say which of the model's modalities a file of text does not take; empty where it takes all."""
    if not left_out:
        return ()
    return (f"takes text alone, though {architecture} takes {' and '.join(left_out)} as well",)
