"""A target's contract for one model: made before tracing, put on the graph, and checked on the files.

Letters of shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.errors import OnnxtoolError, TargetError
from onnxtool.export.heads.checkpoint_modules import max_tokens, module_list
from onnxtool.export.heads.choice import Head, read_head
from onnxtool.export.heads.steps import Step
from onnxtool.export.signature import BATCH, SEQUENCE, Signature
from onnxtool.export.source import Source
from onnxtool.export.targets.files import check_tokenizer
from onnxtool.export.targets.sparse_terms import TERM_OUTPUT, append_terms, as_vectors
from onnxtool.export.targets.table import DENSE, KINDS, OTHER, PLAIN, SPARSE, Target, Use
from onnxtool.model_file import ModelFile
from onnxtool.reports import TensorInfo
from onnxtool.runtime.session import open_session

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from onnxtool.export.checkpoint import Checkpoint

    Arrays = dict[str, NDArray[Any]]

_BATCHED = "-batched"


@dataclass(frozen=True)
class Contract:
    """What the graph of one model must be for one target.

    Attributes:
        name: the model's.
        use: how the target uses it.
        head: what the graph computes, or None for the model's own outputs.
        steps: what the checkpoint was trained with; the target computes those that the head does not.
        inputs: what the graph declares, in order.
        ignored: those of them that the model does not take.
        vocabulary_size: how many terms the model weighs; 0 where it weighs none.
        max_tokens: what sentence-transformers cuts texts to; None where no file says it.
    """

    target: Target
    name: str
    use: Use
    head: Head | None
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    ignored: tuple[str, ...]
    vocabulary_size: int = 0
    max_tokens: int | None = None

    @property
    def gives_terms(self) -> bool:
        """Whether the graph gives the terms of a text, and not a vector."""
        return any(info.name == TERM_OUTPUT for info in self.use.outputs)

    @property
    def head_name(self) -> str:
        """The head as users call it."""
        return "none" if self.head is None else self.head.name

    def narrow(self, signature: Signature) -> Signature:
        """Return the signature with those outputs only that the target reads, where it reads the model's own."""
        if self.head is not None:
            return signature
        wanted = [info.name for info in self.use.outputs]
        return replace(signature, outputs={name: signature.outputs[name] for name in wanted})

    def adapt(self, model: ir.Model) -> None:
        """Bring a graph with the head on it into the form of the target, in place.

        Raises:
            TargetError: it lacks an output, or is of an opset that the target cannot read.
        """
        if self.gives_terms and self.head is not None:
            append_terms(model, self.head.output, with_texts=False)
        self._select_outputs(model)
        self._declare_inputs(model)
        if self.target.batch is not None:
            _fix_batch(model, self.target.batch)
        self._check_versions(model)

    def batched(self, model: ir.Model) -> ir.Model | None:
        """Return a second graph for many texts at once, where the target's own takes one; to call before `adapt`.

        It shares the weights of `model` in memory, and says of each term which text it is of.
        """
        if self.target.batch is None or self.head is None:
            return None
        twin = model.clone()
        append_terms(twin, self.head.output, with_texts=True)
        self._declare_inputs(twin)
        self._check_versions(twin)
        return twin

    def batched_path(self, graph: Path) -> Path:
        """Return where the second graph goes: NAME-batched.onnx beside the first."""
        return graph.with_name(f"{self.name}{_BATCHED}.onnx")

    def runner(self, path: Path) -> Callable[[Mapping[str, NDArray[Any]]], Arrays]:
        """Return a function that runs the file as the target does, and gives the outputs of the head or the model.

        So the file is verified as it is delivered: inputs that only the target has are zeros, a graph of one text is
        called text by text, and terms are put back into a vector.
        """
        session = open_session(path, provider="cpu", frugal=True)
        batch = next(info.shape[0] for info in session.model.structure.inputs)

        def run(feeds: Mapping[str, NDArray[Any]]) -> Arrays:
            filled = {**{name: np.zeros_like(feeds["input_ids"]) for name in self.ignored}, **feeds}
            if not isinstance(batch, int):
                return self._restore(session.run(filled), len(filled["input_ids"]))
            rows = [
                self._restore(session.run({name: array[i : i + batch] for name, array in filled.items()}), batch)
                for i in range(0, len(filled["input_ids"]), batch)
            ]
            return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

        return run

    def check(self, root: Path, graph: Path) -> None:
        """Check the written files against the contract, and run the graph as the target does.

        Args:
            root: the folder of tokenizer and configuration.
            graph: the graph file.

        Raises:
            TargetError: something is missing or otherwise than the target expects.
        """
        file = ModelFile.open(graph)
        title = self.target.title
        structure = file.structure
        found = tuple(info.name for info in structure.inputs)
        self._require(found == self.inputs, f"the graph takes {', '.join(found)}", f"{', '.join(self.inputs)}")
        batch = self.target.batch or BATCH
        for info in structure.inputs:
            self._require(
                info.dtype == "int64" and info.shape == (batch, SEQUENCE),
                f"{info.name} is {info.dtype} {list(info.shape)}",
                f"int64 [{batch}, {SEQUENCE}]",
            )
        names = ", ".join(info.name for info in self.use.outputs)
        outputs = structure.outputs
        self._require(
            len(outputs) == len(self.use.outputs), f"the graph gives {', '.join(o.name for o in outputs)}", names
        )
        for output, wanted in zip(outputs, self.use.outputs, strict=True):
            self._require(_fits(output, wanted), f"an output is {_format(output)}", _format(wanted))
        missing = [name for name in self.files if not (root / name).is_file()]
        self._require(not missing, f"the folder lacks {', '.join(missing)}", ", ".join(self.files))
        session = open_session(graph, provider="cpu")
        for length in (2, 7):  # numbers are compared by `runner`; here it is about names, types and shapes
            array = np.ones((1, length), dtype=np.int64)
            try:
                answers = session.run({name: np.zeros_like(array) if "type" in name else array for name in self.inputs})
            except OnnxtoolError as error:
                raise TargetError(f"the graph does not run as {title} runs it: {error.message}", error.hint) from error
            for output in self.use.outputs:
                self._check_answer(output, answers[output.name])

    @property
    def files(self) -> tuple[str, ...]:
        """What must lie in the folder beside the graph."""
        return tuple(name.format(name=self.name) for name in self.target.files)

    def _check_answer(self, wanted: TensorInfo, answer: NDArray[Any]) -> None:
        fits = answer.dtype == wanted.dtype and answer.ndim == len(wanted.shape)
        self._require(fits, f"{wanted.name} is {answer.dtype} {list(answer.shape)}", _format(wanted))
        self._require(bool(np.isfinite(answer).all()), f"{wanted.name} is not finite", "finite numbers")

    def _require(self, holds: bool, found: str, wanted: str) -> None:
        if not holds:
            raise TargetError(
                f"{found}, and {self.target.title} needs {wanted}",
                "try another --exporter; --target plain writes the graph as it is",
            )

    def _restore(self, outputs: Mapping[str, NDArray[Any]], batch_size: int) -> Arrays:
        if not self.gives_terms or self.head is None:
            return dict(outputs)
        return {self.head.output: as_vectors(outputs, batch_size, self.vocabulary_size)}

    def _select_outputs(self, model: ir.Model) -> None:
        import onnx_ir as ir
        import onnx_ir.passes.common as common

        from onnxtool.export.heads.builder import Builder

        found = {str(value.name): value for value in model.graph.outputs}
        outputs = []
        for wanted in self.use.outputs:
            if wanted.name not in found:
                raise TargetError(
                    f"{self.target.title} reads the output {wanted.name}; this model gives {', '.join(found)}",
                    "pass a --task whose architecture has it, or --target plain",
                )
            value = found[wanted.name]
            dtype = ir.DataType.from_numpy(np.dtype(wanted.dtype))
            if value.dtype != dtype:
                shape = value.shape
                value.name = f"{wanted.name}.{value.dtype}"
                value = Builder(model.graph, dtype).cast(value, dtype)
                value.name, value.dtype, value.shape = wanted.name, dtype, shape
            outputs.append(value)
        model.graph.outputs[:] = outputs
        common.RemoveUnusedNodesPass()(model)

    def _declare_inputs(self, model: ir.Model) -> None:
        """Order the inputs, and declare those that the model ignores: a consumer may feed them all the same."""
        import onnx_ir as ir

        found = {str(value.name): value for value in model.graph.inputs}
        for name in self.inputs:
            if name not in found:
                found[name] = ir.val(name, dtype=ir.DataType.INT64, shape=[BATCH, SEQUENCE])
        model.graph.inputs[:] = [found[name] for name in self.inputs]

    def _check_versions(self, model: ir.Model) -> None:
        opset, highest = model.opset_imports[""], self.target.max_opset
        if highest is not None and opset > highest:
            raise TargetError(
                f"the graph is of opset {opset}, and {self.target.title} reads up to {highest}",
                f"pass --opset {highest} or lower",
            )
        # Newer versions of the format add types and devices, none of which an opset up to the highest has.
        if self.target.max_ir is not None:
            model.ir_version = min(model.ir_version, self.target.max_ir)


def make_contract(target: Target, checkpoint: Checkpoint, signature: Signature, tokenizer: Any) -> Contract | None:
    """Work out what the graph of a checkpoint must be for a target; None for `plain`, which takes it as it is.

    Raises:
        CheckpointError: the checkpoint pools as onnxtool cannot.
        TargetError: the target takes no such model, or needs something of it that it does not have.
    """
    if target.name == PLAIN:
        return None
    source, task, architecture = checkpoint.source, checkpoint.task, checkpoint.architecture
    kind, inputs, outputs = KINDS.get(task, OTHER), tuple(signature.inputs), signature.outputs
    steps = () if target.computes_all(kind) else trained_steps(source, kind)
    use = target.use_for(task, steps, pads_left=getattr(tokenizer, "padding_side", "right") == "left")
    needed = "logits" if use.head == "splade" else "last_hidden_state" if use.head == "embedding" else ""
    for name in [needed] if needed else [info.name for info in use.outputs]:
        if name not in outputs:
            raise TargetError(
                f"{target.title} takes {use.kind} by their {name}; {architecture} gives {', '.join(outputs)}",
                "the weights must be of the model with that head; a base model's hidden states are no term weights"
                if kind == SPARSE
                else "pass a --task whose architecture has it, or --target plain",
            )
    for name in ("input_ids", "attention_mask"):
        if name not in inputs:
            raise TargetError(
                f"{target.title} feeds {name}, which {architecture} does not take; it takes {', '.join(inputs)}",
                "pass --target plain",
            )
    check_tokenizer(target, tokenizer)
    declared = target.inputs(kind, inputs)
    head = None if use.head == "none" else read_head(use.head, source)
    width = outputs["logits"][-1] if "logits" in outputs else 0
    return Contract(
        target,
        source.name,
        use,
        head,
        steps,
        declared,
        tuple(name for name in declared if name not in inputs),
        vocabulary_size=width if isinstance(width, int) else 0,
        max_tokens=max_tokens(source),
    )


def trained_steps(source: Source, kind: str) -> tuple[Step, ...]:
    """Return what a checkpoint computes after the model; a text encoder that does not say it is not pooled.

    Raises:
        CheckpointError: it has modules that onnxtool does not know.
    """
    if kind == SPARSE:
        head = read_head("splade", source)
    elif kind == DENSE and any(module.kind == "Pooling" for module in module_list(source)):
        head = read_head("embedding", source)
    else:
        head = None
    return () if head is None else head.steps


def _fix_batch(model: ir.Model, batch: int) -> None:
    """Set the batch axis to one size, wherever it is named."""
    import onnx_ir as ir

    def fixed(shape: ir.Shape) -> ir.Shape:
        sizes = [size if isinstance(size, int) else size.value for size in shape]
        # An expression of the batch, such as its product with the sequence, is left for onnxruntime to work out.
        return ir.Shape([batch if s == BATCH else None if isinstance(s, str) and BATCH in s else s for s in sizes])

    values = [output for graph in model.graphs() for node in graph for output in node.outputs]
    for value in [*model.graph.inputs, *values]:
        if value.shape is not None:
            value.shape = fixed(value.shape)


def _fits(output: TensorInfo, wanted: TensorInfo) -> bool:
    same = (output.name, output.dtype, len(output.shape)) == (wanted.name, wanted.dtype, len(wanted.shape))
    return same and all(w is None or f == w for f, w in zip(output.shape, wanted.shape, strict=True))


def _format(info: TensorInfo) -> str:
    sizes = ", ".join("…" if size is None else str(size) for size in info.shape)
    return f"{info.name} {info.dtype} [{sizes}]"
