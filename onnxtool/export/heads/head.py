"""A head: a sequence of modules on one output of the model, added to a graph and also computed in PyTorch.

Shape letters: B batch, S sequence, H hidden, N output features, V vocabulary, R vocabulary rows that are kept,
W vector width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.module_forms import POOLING_MASK, PoolingModule
from onnxtool.checkpoint.pooling_modules import LogitScore, Pooling, build_all, truncated
from onnxtool.checkpoint.pruning import WHOLE, Pruning
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.modalities.modality import BATCH
from onnxtool.export.signature import Signature
from onnxtool.graph.builder import Builder

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class GraphHead:
    """A head with its checkpoint's settings and weights.

    Attributes:
        source: the model output that it reads, float [B, S, N], or [B, N] if no module pools.
        output: the graph output that it produces, float [B, W], or [B, S, W] if tokens keep their vectors.
        task: the task of a model with this head, regardless of its checkpoint.
        modules: the modules to compute, in order.
        keeps_tokens: whether there is a vector per token, or a number ([B, S]).
        unseen_length: query length whose tokens count although the model does not see them; 0 if there are none.
        pruning: how the graph prunes its vectors; None for as computed.
        extra_heads: further heads on the same model output, whose outputs follow.
    """

    name: str
    source: str
    output: str
    task: str
    modules: tuple[PoolingModule, ...]
    keeps_tokens: bool = False
    unseen_length: int = 0
    pruning: Pruning | None = None
    extra_heads: tuple[GraphHead, ...] = ()

    @property
    def all(self) -> tuple[GraphHead, ...]:
        """This head and its extra heads."""
        return (self, *self.extra_heads)

    @property
    def leaves_prompt_out(self) -> bool:
        """Whether prompt tokens are excluded from pooling, for which the graph has the input `pooling_mask`."""
        return any(isinstance(module, Pooling) and not module.includes_prompt for module in self.modules)

    def reference(self, value: Any, mask: Any, pooled: Any = None) -> Any:
        """Compute the head in PyTorch: tensors [B, S, N] and int64 [B, S] to [B, W], or to [B, S, W].

        Tensors [B, N], from a model that pools itself, take no mask. Vectors are returned as they are before pruning.

        Args:
            value: the model output.
            mask: 0 for padding.
            pooled: int64 [B, S], 0 for prompt tokens, for a head that excludes the prompt.
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
        """Return W for a model with N = `before`.

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

    def truncated(self, dimensions: int, signature: Signature) -> GraphHead:
        """Return the head that keeps only the first `dimensions` of W numbers.

        Raises:
            ExportError: the model does not have more than that.
        """
        before = signature.outputs[self.source][-1]
        if isinstance(before, int) and self.width(before) <= dimensions:
            raise ExportError(
                f"--dimensions {dimensions} was passed, but the vectors of this model have {self.width(before)}",
                "pass a smaller number, or leave --dimensions out",
            )
        return replace(self, modules=truncated(self.modules, dimensions))

    def check(self, signature: Signature) -> None:
        """Refuse a model that does not support this head.

        Raises:
            CheckpointError: the modules do not fit the model.
            ExportError: the model lacks the output or mask that the head reads.
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
        ExportError: the output is missing.
    """
    if output not in signature.outputs:
        raise ExportError(
            f"the head {head} needs the output {output}; this model gives {', '.join(signature.outputs)}",
            "pass --head auto, or a --task whose architecture has it",
        )


def append_head(model: ir.Model, head: GraphHead, *, keep_raw: bool = False) -> None:
    """Replace the graph's outputs with those of `head`; with `keep_raw`, also keep the output that it reads."""
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
    outputs = [_build(graph, member, source, mask, pooled) for member in head.all]
    graph.outputs[:] = [*outputs, source] if keep_raw else outputs
    common.RemoveUnusedNodesPass()(model)  # what only the previous outputs used, such as BERT's pooler


def _build(graph: ir.Graph, head: GraphHead, source: ir.Value, mask: ir.Value, pooled: ir.Value | None) -> ir.Value:
    import onnx_ir as ir

    assert source.dtype is not None  # noqa: S101  checked by the caller
    build = Builder(graph, source.dtype)
    output: ir.Value = build_all(head.modules, build, source, mask, pooled)
    if output is source:  # the source keeps its own name
        output = build.op("Identity", source)
    before = source.shape[-1] if source.shape is not None else None
    width = head.width(before) if isinstance(before, int) else None
    if head.pruning is not None:
        output = output if head.modules else build.cast(output)
        output.name, output.dtype, output.shape = WHOLE, build.dtype, ir.Shape([BATCH, width])
        output = head.pruning.build(build, output)
    if build.dtype != source.dtype:
        output = build.cast(output, source.dtype)
    if source.name == head.output:
        source.name = f"{head.output}.tokens"
    output.name = head.output
    output.dtype = source.dtype
    tokens = source.shape[1:2] if head.keeps_tokens and source.shape else ()
    output.shape = ir.Shape([BATCH, *tokens, *(() if width == 0 else (width,))])
    return output


def keep_read_rows(model: Any, head: GraphHead, signature: Signature) -> tuple[GraphHead, Signature]:
    """Replace the output head [V, H] of `model` with its rows [R, H] for the tokens that `head` reads, in place.

    What the model does to logits afterward, such as Gemma's bounds, stays: it is elementwise. If the rows belong to the
    embedding table, the table itself keeps all its rows.

    Returns:
        The head and signature for logits [B, S, R]; unchanged for a head that does not score.

    Raises:
        ExportError: the output head is not a linear layer.
    """
    import torch

    score = next(iter(head.modules), None)
    if not isinstance(score, LogitScore):
        return head, signature
    output_layer = model.get_output_embeddings()
    if not isinstance(output_layer, torch.nn.Linear):
        raise ExportError(
            f"the logits of {type(model).__name__} are made by {type(output_layer).__name__}, and a reranker needs a "
            "linear layer, because only the rows for its tokens are kept",
            "pass --head none for the logits of all tokens",
        )
    rows = list(score.token_ids)
    narrowed = torch.nn.Linear(
        output_layer.in_features,
        len(rows),
        bias=output_layer.bias is not None,
        device=output_layer.weight.device,
        dtype=output_layer.weight.dtype,
    )
    with torch.no_grad():
        narrowed.weight.copy_(output_layer.weight[rows])
        if output_layer.bias is not None:
            narrowed.bias.copy_(output_layer.bias[rows])
    model.set_output_embeddings(narrowed.eval())
    shape = (*signature.outputs[head.source][:-1], len(rows))
    return (
        replace(head, modules=(score.narrowed,)),
        replace(signature, outputs={**signature.outputs, head.source: shape}),
    )
