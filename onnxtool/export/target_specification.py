"""Requirements of a target for a model's graph and files: determined before tracing, checked on the written files.

Shape letters: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import ModuleFiles
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.pooling_module import POOLING_MASK
from onnxtool.checkpoint.scores import score_function
from onnxtool.checkpoint.tasks import LATE_INTERACTION
from onnxtool.errors import OnnxtoolError, TargetError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.heads.choice import read_head, require_expanding_token, task_with_head
from onnxtool.export.heads.head import Head
from onnxtool.export.modalities.modality import BATCH, SEQUENCE, Modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.signature import Signature
from onnxtool.export.source import Source
from onnxtool.export.target import (
    DENSE,
    INFERENCE_FREE,
    SCORES,
    SPARSE,
    TOKENS,
    Delivery,
    Target,
    TargetModel,
    kind_of,
    write_json,
)
from onnxtool.graph.builder import Builder
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile
from onnxtool.model_file.domains import default_opset
from onnxtool.reports import TensorInfo
from onnxtool.runtime.session import open_session
from onnxtool.runtime.tokens import OwnTokenizer

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TargetSpecification:
    """The requirements for exporting a model for a target.

    Attributes:
        model: what the target needs to know about the model.
        inputs: the inputs that the graph declares, in order.
        ignored: those inputs that the model does not take.
        left_out: what the checkpoint provides and the target does not use; empty if it uses everything.
    """

    target: Target
    model: TargetModel
    inputs: tuple[str, ...]
    ignored: tuple[str, ...]
    left_out: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what the target's users must configure, and what it leaves out."""
        return tuple(filter(None, [self.target.instruction(self.model), self.left_out]))

    @property
    def head(self) -> Head | None:
        """The head that the graph computes; None for the model's own outputs."""
        return self.model.head

    @property
    def head_name(self) -> str:
        """The head's name for users."""
        return "none" if self.head is None else self.head.name

    @property
    def needs_module_weights(self) -> bool:
        """Whether the target computes modules with weights, such as Dense, itself."""
        return self.model.use.after is None

    def narrow(self, signature: Signature) -> Signature:
        """Return the signature without inputs the target does not feed, and the model's outputs it does not read."""
        fed = {name: shape for name, shape in signature.inputs.items() if name not in self.model.use.unfed}
        signature = replace(signature, inputs=fed)
        if self.head is not None:
            return signature
        wanted = [info.name for info in self.model.use.outputs]
        return replace(signature, outputs={name: signature.outputs[name] for name in wanted})

    def fed(self, modality: Modality) -> Modality:
        """Return the modality without inputs that the target does not feed."""
        if not isinstance(modality, TextInputs) or not self.model.use.unfed:
            return modality
        names = {name: rest for name, rest in modality.names.items() if name not in self.model.use.unfed}
        return replace(modality, names=names)

    def adapt(self, model: ir.Model) -> None:
        """Convert a graph that has the head to the target's form, in place.

        Raises:
            TargetError: an output is missing, or the target cannot read the opset.
        """
        self.target.adapt_outputs(model, self.head)
        self._select_outputs(model)
        self._declare_inputs(model)
        if self.target.batch is not None:
            _fix_batch(model, self.target.batch)
        self._check_versions(model)

    def second_graph(self, model: ir.Model) -> ir.Model | None:
        """Return the additional graph for the target, or None; call before `adapt`.

        It shares the weights of `model` in memory.
        """
        twin = self.target.second_graph(model, self.head)
        if twin is not None:
            self._declare_inputs(twin)
            self._check_versions(twin)
        return twin

    def runner(self, path: Path) -> Callable[[Mapping[str, NDArray[Any]]], Arrays]:
        """Return a function that runs the file as the target does, and returns the outputs of the head or the model.

        This verifies the file as delivered: target-only inputs are zeros, single-text graphs are called text by text,
        and terms are converted back to a vector.
        """
        session = open_session(path, provider="cpu", frugal=True)
        batch = next(info.shape[0] for info in session.model.structure.inputs)

        def run(feeds: Mapping[str, NDArray[Any]]) -> Arrays:
            filled = {**{name: np.zeros_like(feeds["input_ids"]) for name in self.ignored}, **feeds}
            filled = {self.model.use.prefix + name: array for name, array in filled.items()}
            if not isinstance(batch, int):
                return self.target.restore(session.run(filled), self.model, len(feeds["input_ids"]))
            rows = [
                self.target.restore(
                    session.run({name: array[i : i + batch] for name, array in filled.items()}), self.model, batch
                )
                for i in range(0, len(feeds["input_ids"]), batch)
            ]
            return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

        return run

    def check(self, root: Path, graph: Path) -> None:
        """Check the written files, and run the graph as the target does.

        Args:
            root: the folder of tokenizer and configuration.
            graph: the graph file.

        Raises:
            TargetError: something is missing or differs from what the target expects.
        """
        file = ModelFile.open(graph)
        title = self.target.title
        structure = file.structure
        found = tuple(info.name for info in structure.inputs)
        declared = tuple(self.model.use.prefix + name for name in self.inputs)
        self._require(found == declared, f"the graph takes {', '.join(found)}", f"{', '.join(declared)}")
        batch = self.target.batch or BATCH
        for info in structure.inputs:
            self._require(
                info.dtype == "int64" and info.shape == (batch, SEQUENCE),
                f"{info.name} is {info.dtype} {list(info.shape)}",
                f"int64 [{batch}, {SEQUENCE}]",
            )
        names = ", ".join(info.name for info in self.model.use.outputs)
        outputs = structure.outputs
        self._require(
            len(outputs) == len(self.model.use.outputs), f"the graph gives {', '.join(o.name for o in outputs)}", names
        )
        for output, wanted in zip(outputs, self.model.use.outputs, strict=True):
            self._require(_fits(output, wanted), f"an output is {_format(output)}", _format(wanted))
        missing = [name for name in self.files if not (root / name).is_file()]
        self._require(not missing, f"the folder lacks {', '.join(missing)}", ", ".join(self.files))
        session = open_session(graph, provider="cpu")
        for length in (2, 7):  # `runner` compares numbers; this checks only names, types and shapes
            array = np.ones((1, length), dtype=np.int64)
            try:
                results = session.run({name: np.zeros_like(array) if "type" in name else array for name in declared})
            except OnnxtoolError as error:
                raise TargetError(f"the graph does not run as {title} runs it: {error.message}", error.hint) from error
            for output in self.model.use.outputs:
                self._check_output(output, results[output.name])

    def write_files(self, config: Any, tokenizer: Any, folder: Path, max_length: int | None) -> None:
        """Write the files that the target reads to `folder`, which already holds the checkpoint's own files.

        Args:
            config: the PretrainedConfig.
            tokenizer: the checkpoint's.
            folder: the folder with the files.
            max_length: the maximum number of tokens in a text; None if the model does not limit it.

        Raises:
            TargetError: a setting that the target requires is missing.
        """
        self._complete_tokenizer(tokenizer, folder)
        bounds = [limit for limit in (self.model.max_tokens, max_length) if limit]
        self.target.write_files(Delivery(self.model, config, tokenizer, folder, min(bounds, default=None)))

    def check_tokens(self, own: OwnTokenizer, folder: Path, texts: Sequence[Text]) -> None:
        """Compare the tokens that the target makes from texts, using the files in `folder`, with transformers' tokens.

        Raises:
            CheckpointError: they differ.
        """
        given = [text for text in texts if self.target.reads_as_trained(text, own.tokenizer)]

        def read(texts: Sequence[Text], limit: int | None) -> list[list[int]]:
            return self.target.read_texts(folder, self.model, texts, limit)

        own.check(self.target.title, read, given, "pass --target plain, and read texts with onnxtool")

    def _complete_tokenizer(self, tokenizer: Any, folder: Path) -> None:
        """Write the tokenizer files that the target needs and the checkpoint lacks."""
        names = [name for name in self.files if "token" in name and not (folder / name).is_file()]
        if not names:
            return
        with temporary_folder() as scratch:
            tokenizer.save_pretrained(scratch)
            for name in names:
                written = scratch / name
                if written.is_file():
                    shutil.copyfile(written, folder / name)
                elif name == "special_tokens_map.json":  # transformers 5 keeps its content in tokenizer_config.json
                    write_json(folder / name, dict(tokenizer.special_tokens_map))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the folder must contain in addition to the graph."""
        return tuple(name.format(name=self.model.name) for name in self.target.files)

    def _check_output(self, wanted: TensorInfo, array: NDArray[Any]) -> None:
        fits = array.dtype == wanted.dtype and array.ndim == len(wanted.shape)
        self._require(fits, f"{wanted.name} is {array.dtype} {list(array.shape)}", _format(wanted))
        self._require(bool(np.isfinite(array).all()), f"{wanted.name} is not finite", "finite numbers")

    def _require(self, holds: bool, found: str, wanted: str) -> None:
        if not holds:
            raise TargetError(
                f"{found}, and {self.target.title} needs {wanted}",
                "try another --exporter; --target plain writes the graph as it is",
            )

    def _select_outputs(self, model: ir.Model) -> None:
        found = {str(value.name): value for value in model.graph.outputs}
        outputs = []
        for wanted in self.model.use.outputs:
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
        """Order the inputs, and declare inputs that the model ignores, because a consumer may feed them anyway."""
        found = {str(value.name): value for value in model.graph.inputs}
        for name in self.inputs:
            if name not in found:
                found[name] = ir.val(name, dtype=ir.DataType.INT64, shape=[BATCH, SEQUENCE])
        model.graph.inputs[:] = [found[name] for name in self.inputs]
        for value in model.graph.inputs:
            value.name = f"{self.model.use.prefix}{value.name}"

    def _check_versions(self, model: ir.Model) -> None:
        opset, highest = default_opset(model.opset_imports), self.target.max_opset
        if highest is not None and opset > highest:
            raise TargetError(
                f"the graph is of opset {opset}, and {self.target.title} reads up to {highest}",
                f"pass --opset {highest} or lower",
            )
        # Newer format versions add types and devices, none of which opsets up to the highest use.
        if self.target.max_ir is not None:
            model.ir_version = min(model.ir_version, self.target.max_ir)


def specify(
    target: Target, checkpoint: Checkpoint, signature: Signature, tokenizer: Any, head_name: str = "auto"
) -> TargetSpecification:
    """Determine the requirements for exporting a checkpoint for a target that does not accept any graph.

    Args:
        target: the consumer.
        checkpoint: the checkpoint.
        signature: its model's signature.
        tokenizer: the checkpoint's tokenizer.
        head_name: the head requested by the user, which must be the one that the target needs.

    Raises:
        CheckpointError: the checkpoint pools in an unsupported way.
        TargetError: the target does not accept such a model, needs something it lacks, or needs another head.
    """
    task = task_with_head(head_name, checkpoint.task)
    source, architecture = checkpoint.source, checkpoint.architecture
    inputs, outputs = tuple(signature.inputs), signature.outputs
    looks_up = source.sentence_modules.query is not None
    kind = kind_of(task, looks_up_queries=looks_up)
    trained = None if target.computes_all(kind) else _trained_head(source, kind)
    if trained is not None and trained.leaves_prompt_out:
        raise TargetError(
            f"{source.model_name} leaves the prompt out when it pools, and {target.title} tells a graph of no prompt "
            f"(it feeds no {POOLING_MASK})",
            "pass --target sentence-transformers, or --target plain for `onnxtool infer`",
        )
    modules = () if trained is None else trained.modules
    if looks_up and not any(use.kind == kind for use in target.uses):
        raise TargetError(
            f"{source.model_name} encodes queries without a model, and {target.title} would run this one on them",
            "pass --target plain",
        )
    pads_left = getattr(tokenizer, "padding_side", "right") == "left"
    use = target.use_for(task, modules, pads_left=pads_left, looks_up_queries=looks_up)
    left_out = ""
    if kind == DENSE and source.is_m3:
        left_out = f"{target.title} gets only the dense vector of this M3 embedder, no token weights or vectors"
        if not source.sentence_modules.modules:
            raise TargetError(
                f"{source.model_name} has no modules.json, by which {target.title} would know that an M3 embedder "
                "pools by the first token",
                "save it with sentence-transformers, with Pooling by cls and Normalize; or pass --target plain",
            )
    if kind == TOKENS:
        require_expanding_token(source, tokenizer)
    names = ("none", *(info.name for info in use.outputs)) if use.head == "none" else (use.head,)
    if head_name not in ("auto", *names):
        how = f"with the head {use.head}"
        if use.head == "none":
            how = f"by their {' and '.join(names[1:])}, and computes the rest itself"
        raise TargetError(
            f"{target.title} takes {use.kind} {how}; --head {head_name} was passed",
            "leave --head out, or pass --target plain",
        )
    if kind == SCORES:
        left_out = other_scores(target, source, is_single=outputs.get("logits", (0,))[-1] == 1)
    target.check_checkpoint(use, source, tokenizer)
    head = None if use.head == "none" else trained or read_head(use.head, source)
    for name in [head.source] if head else [info.name for info in use.outputs]:
        if name not in outputs:
            raise TargetError(
                f"{target.title} takes {use.kind} by their {name}; {architecture} gives {', '.join(outputs)}",
                "the weights must be of the model with that head; a base model's hidden states are not term weights"
                if kind in (SPARSE, INFERENCE_FREE)
                else "pass a --task whose architecture has it, or --target plain",
            )
    for name in ("input_ids", "attention_mask"):
        if name not in inputs:
            raise TargetError(
                f"{target.title} feeds {name}, which {architecture} does not take; it takes {', '.join(inputs)}",
                "pass --target plain",
            )
    target.check_tokenizer(tokenizer)
    declared = use.inputs(inputs)
    width = outputs["logits"][-1] if "logits" in outputs else 0
    model = TargetModel(
        source.name,
        use,
        head,
        modules,
        vocabulary_size=width if isinstance(width, int) else 0,
        max_tokens=source.sentence_modules.max_sequence_length,
    )
    ignored = tuple(name for name in declared if name not in inputs)
    return TargetSpecification(target, model, declared, ignored, left_out)


def other_scores(target: Target, source: ModuleFiles, *, is_single: bool) -> str:
    """Say where a target turns logits into other scores than the checkpoint's library does."""
    several = source.read("config.json").get("problem_type") == "multi_label_classification"
    own = score_function(source, is_single=is_single)
    theirs = target.functions[2 * several + (not is_single)] if target.functions else own
    how = f"{target.title} scores by {theirs}, and the checkpoint by {own}: ask it for logits, and apply {own} to them"
    return "" if theirs == own else how


def _trained_head(source: Source, kind: str) -> Head | None:
    """Return what a checkpoint computes after the model; a text encoder without pooling information is not pooled.

    Raises:
        CheckpointError: it has modules that onnxtool does not know.
    """
    if kind in (SPARSE, INFERENCE_FREE):
        return read_head("splade", source)
    if kind == TOKENS:
        return read_head(LATE_INTERACTION, source)
    if kind == DENSE and source.sentence_modules.find("Pooling") is not None:
        return read_head("embedding", source)
    return None


def _fix_batch(model: ir.Model, batch: int) -> None:
    """Set the batch axis to a single size, wherever it is named."""

    def fixed(shape: ir.Shape) -> ir.Shape:
        sizes = [size if isinstance(size, int) else size.value for size in shape]
        # An expression with the batch, such as its product with the sequence, is left to onnxruntime.
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
