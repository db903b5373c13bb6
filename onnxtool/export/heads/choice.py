"""What an exported graph computes on top of the model: a table of heads, and which one a checkpoint wants.

A head is a sequence of steps (steps.py) over one output of the model.

Letters of shapes: B batch, S sequence, V vocabulary, W width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.heads.builder import Builder
from onnxtool.export.heads.checkpoint_modules import card_tags, encoder_class, module_list, read_embedding, read_splade
from onnxtool.export.heads.steps import Step
from onnxtool.export.signature import BATCH, Signature
from onnxtool.export.source import Source
from onnxtool.export.tasks import SPARSE_TAGS

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.export.checkpoint import Checkpoint


@dataclass(frozen=True)
class Head:
    """A head with the settings and weights of its checkpoint.

    Attributes:
        source: the output of the model that it stands on, float [B, S, N].
        output: the output of the graph that it makes, float [B, W].
        task: what a model with this head is for, whatever its checkpoint says.
        steps: what is computed, in order.
    """

    name: str
    source: str
    output: str
    task: str
    steps: tuple[Step, ...]

    def reference(self, value: Any, mask: Any) -> Any:
        """Compute the head in PyTorch: tensors [B, S, N] and int64 [B, S] to [B, W]."""
        import torch

        with torch.inference_mode():
            for step in self.steps:
                value = step.reference(value, mask)
        return value

    def width(self, before: int) -> int:
        """Return W for a model of N = `before`.

        Raises:
            CheckpointError: the modules do not fit each other or the model.
        """
        try:
            for step in self.steps:
                before = step.width(before)
        except ValueError as error:
            raise CheckpointError(
                f"the modules of this checkpoint do not fit its model: {error}",
                "the folder mixes two models; take both from one",
            ) from None
        return before

    def check(self, signature: Signature) -> None:
        """Refuse a model that cannot have this head.

        Raises:
            CheckpointError: the modules do not fit the model.
            ExportError: the model lacks the output or the mask that the head stands on.
        """
        require_output(self.name, self.source, signature)
        shape = signature.outputs[self.source]
        if len(shape) != 3:
            raise ExportError(
                f"the head {self.name} needs {self.source} of three axes, one of them the sequence; "
                f"this model gives {list(shape)}",
                "pass --head auto",
            )
        if "attention_mask" not in tuple(signature.inputs):
            raise ExportError(
                f"the head {self.name} needs an attention mask; this model takes none", "pass --head auto"
            )
        if isinstance(shape[-1], int):
            self.width(shape[-1])


@dataclass(frozen=True)
class _Row:
    """A head before its checkpoint is known."""

    name: str
    source: str
    output: str
    task: str
    read: Callable[[Source], tuple[Step, ...]]


_ROWS: tuple[_Row, ...] = (
    _Row("splade", "logits", "sparse", "sparse-encoding", read_splade),
    _Row("embedding", "last_hidden_state", "sentence_embedding", "sentence-similarity", read_embedding),
)
# `logits` and `none` put nothing on the model; the first insists on logits.
HEAD_NAMES = ("auto", "logits", *(row.name for row in _ROWS), "none")


def recognize_head(source: Source, architecture: str) -> tuple[str, str]:
    """Tell which head a checkpoint was trained with, and by what it is known.

    Args:
        source: the checkpoint.
        architecture: the class that its weights are loaded into, e.g. `BertForMaskedLM`.

    Returns:
        `splade`, `embedding` or `none`, and the reason in words.
    """
    kinds = [module.kind for module in module_list(source)]
    if "SpladePooling" in kinds:
        name, why = "splade", "modules.json names SpladePooling"
    elif "Pooling" in kinds:
        name, why = "embedding", "modules.json names Pooling"
    elif kinds:
        return "none", f"modules.json names {', '.join(kinds)}, and no pooling"
    elif not architecture.endswith("ForMaskedLM"):
        return "none", "the checkpoint does not say how it is pooled"
    else:
        if encoder_class(source) == "SparseEncoder":
            return "splade", "config_sentence_transformers.json names SparseEncoder"
        tags = [tag for tag in SPARSE_TAGS if tag in card_tags(source)]
        if not tags:
            return "none", "neither modules.json nor the model card's tags speak of pooling"
        return "splade", f"the model card's tags name {' and '.join(tags)}"
    try:
        read_head(name, source)
    except CheckpointError as error:
        return "none", error.message
    return name, why


def read_head(name: str, source: Source) -> Head | None:
    """Read the settings and weights of the head called `name`; None for the names that put nothing on the model.

    Raises:
        CheckpointError: the checkpoint does not say how it pools, or has modules that no head computes.
    """
    row = next((row for row in _ROWS if row.name == name), None)
    if row is None:
        return None
    return Head(row.name, row.source, row.output, row.task, row.read(source))


@dataclass(frozen=True)
class Choice:
    """The head that is exported.

    Attributes:
        name: one of HEAD_NAMES, and not `auto`.
        head: what it adds to the graph; None for the model's own outputs.
        why: what a user who did not choose it should know; empty where one chose, or there is nothing to say.
    """

    name: str
    head: Head | None
    why: str = ""


def choose_head(name: str, checkpoint: Checkpoint, signature: Signature) -> Choice:
    """Decide on the head: the one with that name, or, for `auto`, the one that the checkpoint was trained with.

    Raises:
        CheckpointError: the checkpoint does not say how it pools, or its modules do not fit its model.
        ExportError: the model does not have what the head stands on.
    """
    source = checkpoint.source
    if name == "auto":
        # A --task of another kind asks for what the model gives for that.
        pooled = checkpoint.task in ("sparse-encoding", "sentence-similarity")
        name, why = recognize_head(source, checkpoint.architecture) if pooled else ("none", "")
        head = read_head(name, source)
        if head is not None:
            head.check(signature)
            return Choice(name, head, f"head {name}: {why}; --head none leaves the model's own outputs")
        why = f"no head was put on: {why}" if pooled else ""
        return Choice("logits" if "logits" in signature.outputs else "none", None, why)
    if name == "logits":
        require_output(name, "logits", signature)
    head = read_head(name, source)
    if head is not None:
        head.check(signature)
    return Choice(name, head)


def require_output(head: str, output: str, signature: Signature) -> None:
    """Refuse a model without the output that a head stands on.

    Raises:
        ExportError: it does not have it.
    """
    if output not in signature.outputs:
        raise ExportError(
            f"the head {head} needs the output {output}; this model gives {', '.join(signature.outputs)}",
            "pass --head auto, or a --task whose architecture has it",
        )


def append_head(model: ir.Model, head: Head, *, keep_raw: bool = False) -> None:
    """Put `head` on the graph, in place of its outputs, or before the one that it stands on with `keep_raw`."""
    import onnx_ir as ir
    import onnx_ir.passes.common as common

    graph = model.graph
    source = next(value for value in graph.outputs if value.name == head.source)
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    if source.dtype is None:
        raise ExportError("the exporter did not type the output that the head stands on", "try the other --exporter")
    build = Builder(graph, source.dtype)
    output = source
    for step in head.steps:
        output = step.build(build, output, mask)
    if build.dtype != source.dtype:
        output = build.cast(output, source.dtype)
    output.name = head.output
    output.dtype = source.dtype
    before = source.shape[-1] if source.shape is not None else None
    output.shape = ir.Shape([BATCH, head.width(before) if isinstance(before, int) else None])
    graph.outputs[:] = [output, source] if keep_raw else [output]
    common.RemoveUnusedNodesPass()(model)  # what only the outputs before used, such as BERT's pooler
