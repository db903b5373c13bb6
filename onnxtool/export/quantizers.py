"""Checkpoints with quantized weights that transformers computes with: exported as the floats they stand for."""

from __future__ import annotations

import copy
from typing import Any

from onnxtool.errors import CheckpointError
from onnxtool.export.source import Source
from onnxtool.export.weights import FLOAT_CHECKPOINT, some
from onnxtool.runtime.quiet import quiet

_MODELOPT = "hf_quant_config.json"
# By transformers, while it loads, where the configuration asks for it.
_DEQUANTIZED_ON_LOADING = ("fp8", "mxfp8", "mxfp4")


def require_known_quantizer(config: Any, source: Source) -> None:
    """Refuse a quantization that transformers would skip, and ask for floats of those that it can turn into them.

    Raises:
        CheckpointError: transformers does not know the method.
    """
    from transformers.quantizers import AutoHfQuantizer

    stated = getattr(config, "quantization_config", None)
    if stated is None and source.locate(_MODELOPT) is not None:
        stated = {"quant_method": f"modelopt ({_MODELOPT})"}
    if stated is None:
        return
    settings = stated if isinstance(stated, dict) else {}
    method = settings.get("quant_method")
    try:
        with quiet():
            known = AutoHfQuantizer.supports_quant_method(settings)
    except ValueError:  # it names no method
        known = False
    if not known:
        raise CheckpointError(
            f"{source.model_name} is quantized by {method or 'a method that config.json does not name'}, which "
            "transformers does not compute with",
            FLOAT_CHECKPOINT,
        )
    if method in _DEQUANTIZED_ON_LOADING:
        config.quantization_config = {**settings, "dequantize": True}


def is_quantized(model: Any) -> bool:
    """Whether a model computes with the kernels of a quantizer."""
    return getattr(model, "hf_quantizer", None) is not None


def as_floats(model: Any) -> Any:
    """Return a model of plain layers with the weights that those of a quantized model stand for.

    A layer that multiplies by a matrix is that matrix times the unit vectors, plus its bias. One that does something
    else as well, such as rounding its input, is not; the verification against the quantized model tells.

    Raises:
        CheckpointError: a parameter that is no linear layer's is quantized as well.
    """
    import torch

    state = dict[str, Any]()
    with torch.no_grad():
        model(**model.dummy_inputs)  # some quantizers unpack their weights at the first call
        for name, layer in model.named_modules():
            if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
                bias = layer(torch.zeros(1, layer.in_features)).float()
                state[f"{name}.weight"] = (layer(torch.eye(layer.in_features)).float() - bias).T.contiguous()
                state[f"{name}.bias"] = bias[0]
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        plain = type(model)._from_config(config, dtype=model.dtype)  # noqa: SLF001  what AutoModel.from_config calls
    wanted = plain.state_dict()
    state = {name: value for name, value in {**model.state_dict(), **state}.items() if name in wanted}
    unlike = [name for name, value in wanted.items() if name not in state or state[name].shape != value.shape]
    if unlike:
        raise CheckpointError(f"{some(unlike)} are quantized, and no linear layers of a model", FLOAT_CHECKPOINT)
    plain.load_state_dict(state)
    plain.config.use_cache = False
    return plain.eval()
