"""A head: a sequence of modules over one output of the model, put on a graph and computed in PyTorch.

Letters of shapes: B batch, S sequence, N numbers of the output, W width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.pooling_module import POOLING_MASK, PoolingModule
from onnxtool.checkpoint.pooling_modules import Pooling, truncated
from onnxtool.checkpoint.quantized_vectors import FLOATS, VectorType
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.heads.builder import Builder
from onnxtool.export.modalities.sizes import BATCH
from onnxtool.export.signature import Signature

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Head:
    """A head with the settings and weights of its checkpoint.

    Attributes:
        source: the output of the model that it reads, float [B, S, N], or [B, N] where no module pools.
        output: the output of the graph that it makes, float [B, W], or [B, S, W] where tokens keep their vectors.
        task: what a model with this head is for, whatever its checkpoint says.
        modules: what is computed, in order.
        keeps_tokens: whether there is a vector for each token, or a number ([B, S]).
        unseen_length: the length of queries of which tokens count that the model does not see; 0 where there are none.
        stored: how the vectors are stored that the graph gives; None for as they are computed.
        beside: further heads over the same output of the model, whose outputs follow.
    """

    name: str
    source: str
    output: str
    task: str
    modules: tuple[PoolingModule, ...]
    keeps_tokens: bool = False
    unseen_length: int = 0
    stored: VectorType | None = None
    beside: tuple[Head, ...] = ()

    @property
    def all(self) -> tuple[Head, ...]:
        """This head and those beside it."""
        return (self, *self.beside)

    @property
    def leaves_prompt_out(self) -> bool:
        """Whether tokens of a prompt are not pooled over, for which the graph has the input `pooling_mask`."""
        return any(isinstance(module, Pooling) and not module.includes_prompt for module in self.modules)

    def reference(self, value: Any, mask: Any, pooled: Any = None) -> Any:
        """Compute the head in PyTorch: tensors [B, S, N] and int64 [B, S] to [B, W], or to [B, S, W].

        Tensors [B, N], of a model that pools itself, take no mask. They are the vectors before they are stored.

        Args:
            value: the output of the model.
            mask: 0 for padding.
            pooled: int64 [B, S], 0 for tokens of a prompt, for a head that leaves it out.
        """
        import torch

        with torch.inference_mode():
            for module in self.modules:
                if isinstance(module, Pooling):
                    value = module.reference(torch, value, mask, pooled)
                else:
                    value = module.reference(torch, value, mask)
        return value

    def width(self, before: int) -> int:
        """Return W for a model of N = `before`.

        Raises:
            CheckpointError: the modules do not fit each other or the model.
        """
        try:
            for module in self.modules:
                before = module.width(before)
        except ValueError as error:
            raise CheckpointError(
                f"the modules of this checkpoint do not fit its model: {error}",
                "the folder mixes two models; take both from one",
            ) from None
        return before

    def truncated(self, dimensions: int, signature: Signature) -> Head:
        """Return the head that keeps the first `dimensions` of W numbers.

        Raises:
            ExportError: the model has no more of them.
        """
        before = signature.outputs[self.source][-1]
        if isinstance(before, int) and self.width(before) <= dimensions:
            raise ExportError(
                f"--dimensions {dimensions} was passed, and the vectors of this model have {self.width(before)}",
                "pass a smaller number, or leave --dimensions out",
            )
        return replace(self, modules=truncated(self.modules, dimensions))

    def stored_as(self, stored: VectorType, signature: Signature) -> Head:
        """Return the head whose vectors are stored so.

        Raises:
            InputError: they cannot be, by their width.
        """
        before = signature.outputs[self.source][-1]
        if isinstance(before, int):
            stored.columns(self.width(before))
        return replace(self, stored=stored)

    def check(self, signature: Signature) -> None:
        """Refuse a model that cannot have this head.

        Raises:
            CheckpointError: the modules do not fit the model.
            ExportError: the model lacks the output or the mask that the head reads.
        """
        require_output(self.name, self.source, signature)
        shape = signature.outputs[self.source]
        if not any(module.pools_tokens for module in self.modules):
            if isinstance(shape[-1], int):
                self.width(shape[-1])
            return
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
            for head in self.all:
                head.width(shape[-1])


def require_output(head: str, output: str, signature: Signature) -> None:
    """Refuse a model without the output that a head reads.

    Raises:
        ExportError: it does not have it.
    """
    if output not in signature.outputs:
        raise ExportError(
            f"the head {head} needs the output {output}; this model gives {', '.join(signature.outputs)}",
            "pass --head auto, or a --task whose architecture has it",
        )


def append_head(model: ir.Model, head: Head, *, keep_raw: bool = False) -> None:
    """Put `head` on the graph, in place of its outputs; with `keep_raw`, before the output that it reads."""
    import onnx_ir as ir
    import onnx_ir.passes.common as common

    graph = model.graph
    source = next(value for value in graph.outputs if value.name == head.source)
    mask = next((value for value in graph.inputs if value.name == "attention_mask"), source)
    if source.dtype is None:
        raise ExportError("the exporter did not type the output that the head reads", "try the other --exporter")
    pooled = None
    if head.leaves_prompt_out:
        pooled = ir.val(POOLING_MASK, dtype=ir.DataType.INT64, shape=mask.shape)
        graph.inputs.append(pooled)
    outputs = [_build(graph, one, source, mask, pooled) for one in head.all]
    graph.outputs[:] = [*outputs, source] if keep_raw else outputs
    common.RemoveUnusedNodesPass()(model)  # what only the outputs before used, such as BERT's pooler


def _build(graph: ir.Graph, head: Head, source: ir.Value, mask: ir.Value, pooled: ir.Value | None) -> ir.Value:
    import onnx_ir as ir

    assert source.dtype is not None  # noqa: S101  checked by the caller
    build = Builder(graph, source.dtype)
    output = source
    for module in head.modules:
        if isinstance(module, Pooling):
            output = module.build(build, output, mask, pooled)
        else:
            output = module.build(build, output, mask)
    if output is source:  # which stays under its own name
        output = build.op("Identity", source)
    dtype = source.dtype
    before = source.shape[-1] if source.shape is not None else None
    width = head.width(before) if isinstance(before, int) else None
    if head.stored is not None:
        output = output if head.modules else build.cast(output)
        output.name, output.dtype, output.shape = FLOATS, build.dtype, ir.Shape([BATCH, width])
        output = head.stored.build(build, output)
        dtype = ir.DataType.from_numpy(head.stored.dtype)
        width = None if width is None else head.stored.columns(width)
    elif build.dtype != source.dtype:
        output = build.cast(output, source.dtype)
    if source.name == head.output:
        source.name = f"{head.output}.tokens"
    output.name = head.output
    output.dtype = dtype
    tokens = source.shape[1:2] if head.keeps_tokens and source.shape else ()
    output.shape = ir.Shape([BATCH, *tokens, *(() if width == 0 else (width,))])
    return output
