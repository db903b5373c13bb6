"""M3 embedders (bge-m3): a text vector, a weight per token and a vector per token, from one pass.

Chen et al., 2024, arXiv:2402.03216; layout and formulas of FlagEmbedding 1.4: next to the transformer are
`sparse_linear.pt` and `colbert_linear.pt`, each a linear layer on token states.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from onnxtool.checkpoint.files import M3_FILES
from onnxtool.checkpoint.pooling_module import PoolingModule
from onnxtool.checkpoint.pooling_modules import Dense, Normalize, Pooling, read_pooling_modules
from onnxtool.checkpoint.sentence_modules import TOKENS, VECTOR
from onnxtool.checkpoint.tasks import LATE_INTERACTION
from onnxtool.checkpoint.token_modules import TOKEN_WEIGHTS, LexicalWeights, ZeroPadding
from onnxtool.errors import CheckpointError, first_line
from onnxtool.export.heads.head import Head
from onnxtool.export.pickles import load_pickle
from onnxtool.export.source import Source, refused_object

M3 = "m3"
_SPARSE, _COLBERT = M3_FILES
_STATES = "last_hidden_state"


def read_m3(source: Source) -> Head:
    """Read the head with all three outputs.

    The text vector is pooled as modules.json says; without one, it is the scaled first token, as in FlagEmbedding.
    Weights and vectors of padding are 0. Consumers must drop the vector of the first token and the weights of special
    tokens, as `infer` does: a graph does not know which tokens these are.

    Raises:
        CheckpointError: a layer is missing, or its file is not the state of a linear layer.
    """
    modules = read_pooling_modules(source.sentence_modules, Pooling) or (Pooling(("cls",)), Normalize())
    weight, bias = _read_linear(source, _SPARSE)
    if len(weight) != 1:
        raise source.refuse(f"{_SPARSE} of {source.model_name} gives {len(weight)} numbers for a token; it has to be 1")
    lexical: tuple[PoolingModule, ...] = (LexicalWeights(weight, bias),)
    projection = Dense("colbert_linear", *_read_linear(source, _COLBERT), "Identity", on_tokens=True)
    colbert = (projection, ZeroPadding(), Normalize(on_tokens=True))
    return Head(
        M3, _STATES, VECTOR, "sentence-similarity", modules,
        beside=(
            Head(M3, _STATES, TOKEN_WEIGHTS, "sparse-encoding", lexical, keeps_tokens=True),
            Head(M3, _STATES, TOKENS, LATE_INTERACTION, colbert, keeps_tokens=True),
        ),
    )  # fmt: skip


def _read_linear(source: Source, name: str) -> tuple[Any, Any]:
    """Read the weight and bias of a linear layer written by torch.save: float32 [W, H] and [W].

    The file is a zip with a pickle, which could run code. PyTorch reads it with a restricted unpickler
    (`weights_only=True`): it supports the opcodes that make tensors, numbers and containers, and fails on the name of
    any other class or function. The result is checked here: two tensors, no larger than the file.

    Raises:
        CheckpointError: the file is missing, or contains anything else.
    """
    import torch

    path = source.locate(name)
    if path is None:
        raise source.refuse(f"{source.model_name} has no {name}", f"an M3 embedder has {' and '.join(M3_FILES)}")
    try:
        content = load_pickle(path, partial(_damaged, source, name))
    except CheckpointError:
        raise
    except Exception as error:  # zip, pickle and tensors each fail differently
        if refused := refused_object(error):
            raise _damaged(source, name, f"it holds more than tensors ({refused}), which would run code") from error
        raise _damaged(source, name, first_line(error)) from error
    if content.keys() != {"weight", "bias"}:
        raise _damaged(source, name, f"it holds {sorted(map(str, content))}, and not weight and bias")
    for key, tensor in content.items():
        # A view of a few numbers may claim a huge shape.
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.is_contiguous():
            raise _damaged(source, name, f"{key} is not a plain floating-point tensor")
    weight, bias = (content[key].detach().to(torch.float32).numpy() for key in ("weight", "bias"))
    if weight.ndim != 2 or bias.shape != weight.shape[:1] or not weight.size:
        raise _damaged(source, name, f"its weight is {list(weight.shape)} and its bias {list(bias.shape)}")
    return weight, bias


def _damaged(source: Source, name: str, reason: str) -> CheckpointError:
    return source.refuse(
        f"{name} of {source.model_name} is not the state of a linear layer: {reason}",
        "fetch the checkpoint again from where you trust it; --head embedding exports only the text vectors",
    )
