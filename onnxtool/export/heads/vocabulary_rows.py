"""Leave out of a causal language model the rows of its output head that no score reads.

Letters of shapes: B batch, S sequence, H hidden, V vocabulary, R rows that are kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onnxtool.checkpoint.pooling_modules import LogitScore
from onnxtool.errors import ExportError
from onnxtool.export.heads.head import Head
from onnxtool.export.signature import Signature


def keep_read_rows(model: Any, head: Head, signature: Signature) -> tuple[Head, Signature]:
    """Replace the output head [V, H] of `model` by its rows [R, H] for the tokens that `head` reads, in place.

    What the model makes of logits, such as Gemma's bounds, stays: it is computed for each of them alone. Where the
    rows are those of the table of embeddings, this keeps all of its own.

    Returns:
        The head and the signature for logits [B, S, R]; as they were given for a head that scores nothing.

    Raises:
        ExportError: the output head is no linear layer.
    """
    import torch

    score = next(iter(head.modules), None)
    if not isinstance(score, LogitScore):
        return head, signature
    whole = model.get_output_embeddings()
    if not isinstance(whole, torch.nn.Linear):
        raise ExportError(
            f"the logits of {type(model).__name__} are made by {type(whole).__name__}, and a reranker needs a linear "
            "layer, of which the rows for its tokens are kept",
            "pass --head none for the logits of all tokens",
        )
    rows = list(score.token_ids)
    kept = torch.nn.Linear(
        whole.in_features, len(rows), bias=whole.bias is not None, device=whole.weight.device, dtype=whole.weight.dtype
    )
    with torch.no_grad():
        kept.weight.copy_(whole.weight[rows])
        if whole.bias is not None:
            kept.bias.copy_(whole.bias[rows])
    model.set_output_embeddings(kept.eval())
    shape = (*signature.outputs[head.source][:-1], len(rows))
    return (
        replace(head, modules=(score.narrowed,)),
        replace(signature, outputs={**signature.outputs, head.source: shape}),
    )
