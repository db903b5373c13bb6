"""Export a model that is called once: trace it, add the head, and compare the file with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import POOLING_MASK, some_prompts
from onnxtool.errors import ExportError
from onnxtool.export.heads.head import GraphHead, append_head, keep_read_rows
from onnxtool.export.modalities.finding import left_out_notes
from onnxtool.export.modalities.modality import (
    SEQUENCE,
    DescribedInputs,
    Modality,
    Sizes,
    size_notes,
    text_case,
    usual_sizes,
)
from onnxtool.export.modalities.pages import PageInputs
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.signature import Signature, detect_signature, run_torch_tensors, tidy, to_numpy, to_tensors
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.tracing import ExportStrategy, strategies_for, trace
from onnxtool.model_file import ModelFile, ModelPath
from onnxtool.runtime.comparison import (
    Case,
    ReferenceOutputs,
    Runner,
    require_passed,
    row_cases,
    row_errors,
    run_reference,
    verify,
)
from onnxtool.runtime.difference import TOLERANCES, Tolerance, informative
from onnxtool.runtime.session import open_session
from onnxtool.verification import Verification

_MIN_CASES = 6
_RANDOM_TOLERANCE = 1e-4  # relative to the largest value, at least 1: about as much as a file may differ


@dataclass(frozen=True)
class SingleCallPipeline:
    """A model that is called once: inputs to outputs, with a head on top.

    Attributes:
        default_attention: transformers' choice for this model.
        signature: the signature with all axes dynamic that the model leaves open.
        keep_raw: whether to keep the output that the head reads.
        specification: the target's requirements for the graph; None if it accepts any.
    """

    steps: ClassVar[int] = 0  # tokens added to those of a case

    modality: Modality
    signature: Signature
    head: GraphHead | None
    keep_raw: bool
    specification: TargetSpecification | None
    default_attention: str | None

    def strategies(self, exporter: str, *, verified: bool) -> Iterator[ExportStrategy]:
        """List the strategies; ones that fix axes come last."""
        return strategies_for(exporter, self.signature.axes, self.default_attention, verified=verified)

    def trace(self, model: Any, strategy: ExportStrategy, opset: int | None) -> tuple[ir.Model, ...]:
        """Trace the model on a sample of its modality, name everything, and add the head."""
        signature = self.signature
        if strategy.fixed:
            signature = detect_signature(model, self.modality, strategy.fixed)
            signature = signature if self.specification is None else self.specification.narrow(signature)
        sample, head = to_tensors(model, self.modality.sample(signature.sizes)), self.head
        if head is not None:
            head, signature = keep_read_rows(model, head, signature)
        graph = trace(strategy.exporter, model, sample, signature, opset, timeout_s=strategy.timeout_s)
        tidy(graph, signature, model)
        if head is not None:
            append_head(graph, head, keep_raw=self.keep_raw)
            graph.metadata_props.update({} if head.pruning is None else head.pruning.metadata)
        if isinstance(self.modality, PageInputs):
            graph.metadata_props.update(self.modality.metadata)
        return (graph,)

    def reference_outputs(self, model: Any, strategy: ExportStrategy, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Run the model on the inputs that the file will be run on: several sizes and masks, and real content.

        With `lengths`, these are texts with the given numbers of tokens, in order, and may be few.

        Inputs that PyTorch itself refuses, such as a single token for a model that halves its sequence, are left out
        and reported.

        Raises:
            ExportError: too few cases remain, or the model's outputs vary between runs.
        """
        import torch

        fixed = self._sizes(strategy)
        run = partial(self.run, model)
        cases = [text_case(self.modality, fixed, length) for length in lengths] or self.modality.cases(fixed)
        if self.head is not None:
            cases += [] if lengths else self._unseen_tokens(self.head.unseen_length, fixed)
        batches = [] if lengths or not isinstance(self.modality, TextInputs) else self.modality.batches(fixed)
        cases += batches
        if self.head is not None and self.head.leaves_prompt_out:
            cases = [replace(case, feeds=_with_prompts(case.feeds)) for case in cases]
        cases += [row for case in cases[len(cases) - len(batches) :] for row in row_cases(case)]
        before = torch.get_rng_state()
        outputs = run_reference(run, cases, name="PyTorch", refusal=ExportError, sequences=self.sequences)
        if lengths:
            return outputs
        if not torch.equal(before, torch.get_rng_state()):
            _require_same_outputs(type(model).__name__, run, outputs)
        if len(outputs.cases) < _MIN_CASES:
            raise ExportError(
                f"PyTorch itself does not run on {', '.join(outputs.refused)}; {len(outputs.cases)} cases show little",
                "this model takes few sizes; --no_verify exports it unverified",
            )
        return replace(outputs, length_effect=self._length_effect(run, fixed))

    def _length_effect(self, run: Runner, fixed: Sizes) -> float | None:
        """Return how far PyTorch's outputs for a text move if it is padded to a fixed length; None without one."""
        pair = self.modality.filled_up(fixed) if isinstance(self.modality, TextInputs) else None
        if pair is None:
            return None
        try:
            padded, alone = ((case, run(case.feeds)) for case in pair)
        except ExportError:
            return None
        errors = row_errors(alone, padded, self.sequences, TOLERANCES["fp32"], {})
        return max((error.max_abs_error for error in errors.values()), default=None)

    @property
    def sequences(self) -> frozenset[str]:
        """The outputs whose first axes are B and S."""
        heads = self.head.all if self.head else ()
        return self.signature.sequences | {head.output for head in heads if head.keeps_tokens}

    def _unseen_tokens(self, length: int, fixed: Sizes) -> list[Case]:
        """Return texts followed by tokens that the model does not see, but whose vectors count."""
        sizes = {**usual_sizes(self.modality), SEQUENCE: length, **fixed}
        if not length or sizes[SEQUENCE] != length:
            return []
        feeds = self.modality.feeds(sizes)
        if "attention_mask" not in feeds:  # it then sees all tokens
            return []
        mask = feeds["attention_mask"].copy()
        mask[0, max(1, length // 2) :] = 0
        token = None if self.specification is None else self.specification.expansion_id
        ids = feeds["input_ids"] if token is None else np.where(mask, feeds["input_ids"], token)
        feeds = {**feeds, "input_ids": ids, "attention_mask": mask}
        return [Case("tokens that the model does not see", feeds, None)]

    def run(self, model: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run the PyTorch model, with the head computed in PyTorch."""
        import torch

        tensors = run_torch_tensors(model, {name: feeds[name] for name in feeds if name != POOLING_MASK})
        if self.head is not None:
            mask, pooled = (
                torch.from_numpy(feeds[name]).to(model.device) if name in feeds else None
                for name in ("attention_mask", POOLING_MASK)
            )
            raw = {self.head.source: tensors[self.head.source]} if self.keep_raw else {}
            tensors = {head.output: head.reference(tensors[head.source], mask, pooled) for head in self.head.all} | raw
        return {name: to_numpy(tensors[name]) for name in tensors if self.head or name in self.signature.outputs}

    def verify(self, path: ModelPath, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
        """Compare the outputs of a file with the model's; a file for a target runs as its target runs it.

        Vectors that the file stores as codes or bits are compared by nearest vectors among such codes.

        Raises:
            VerificationError: an output differs by more than `tolerance`.
        """
        model, specification = ModelFile.open(path), self.specification
        run_file = (
            specification.runner(model) if specification else open_session(model, provider="cpu", frugal=True).run
        )
        dtypes = {info.name: info.dtype for info in model.structure.inputs}

        def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            # Floats are passed in the file's dtype: half precision for a half-precision model.
            return run_file(
                {
                    name: array.astype(dtypes.get(name, "float32"))
                    if np.issubdtype(array.dtype, np.floating)
                    else array
                    for name, array in feeds.items()
                }
            )

        verification = verify(run, reference, tolerance, None if self.head is None else self.head.pruning)
        require_passed(
            verification,
            "try the other --exporter; --no_verify keeps the file despite the error, and onnxtool verify FILE "
            "CHECKPOINT --layers names its first part that differs",
        )
        return verification

    def inputs(self, strategy: ExportStrategy, cases: Sequence[Case] | None) -> tuple[DescribedInputs, ...]:
        """Describe the inputs by the cases that PyTorch ran on, or by all cases if unverified."""
        return ((self.modality.recipes, self.modality.cases(self._sizes(strategy)) if cases is None else cases),)

    def links(self, path: Path) -> tuple[dict[str, str], ...]:
        """Return the graphs' metadata about each other: there is none."""
        return ({},)

    def notes(self, architecture: str, strategy: ExportStrategy) -> tuple[str, ...]:
        """Report fixed axes, with what fixed them, and missing inputs."""
        notes = size_notes(architecture, self.signature.model_sizes, strategy.fixed, "this file")
        return (*notes, *left_out_notes(self.modality, architecture))

    def _sizes(self, strategy: ExportStrategy) -> Sizes:
        """Return the sizes of the axes that are not dynamic."""
        return {**self.signature.model_sizes, **strategy.fixed}


def _require_same_outputs(
    name_of_model: str, run: Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]], outputs: ReferenceOutputs
) -> None:
    """Run a model that draws random numbers twice more: with its own seed, it draws the same ones.

    Its first outputs do not count: running may have changed the model, which is not randomness.
    """
    for case in outputs.cases:
        outputs_before = run(case.feeds)
        for name, repeated in run(case.feeds).items():
            first_run, second_run = (
                np.atleast_1d(array).astype(np.float64) for array in (outputs_before[name], repeated)
            )
            kept = informative(first_run, second_run)  # a model that masks has the same fills in both runs
            difference = (
                math.inf if kept is None else float(np.abs(first_run[kept] - second_run[kept]).max(initial=0.0))
            )
            if difference > _RANDOM_TOLERANCE * max(1.0, float(np.abs(first_run[kept]).max(initial=0.0))):
                raise ExportError(
                    f"{name_of_model} draws random numbers and answers differently each time: {name} "
                    f"by {difference:.3g} on the same input ({case.description})",
                    "a seed in its configuration makes it answer once and for all, as Reformer's hash_seed does; "
                    "--no_verify exports it unverified",
                )


def _with_prompts(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Make each text begin with a prompt of a different length, which is not pooled over."""
    return {**feeds, POOLING_MASK: some_prompts(feeds["attention_mask"].astype(bool)).astype(np.int64)}
