"""Random weights larger than a model's own, so that a wrong mask or axis shows in its outputs."""

from __future__ import annotations

import math
from typing import Any

# Parameters whose range means something (decays, time steps) keep what the model gave them.
_KEPT = ("A_log", "dt_bias", "time_", "norm.weight", "lambda", "inv_freq")


def draw_weights(model: Any, seed: int) -> None:
    """Overwrite the weights of a torch model in place, and the running statistics of its batch norms.

    A matrix gets a standard deviation of 1 / sqrt(fan in), so that activations neither vanish nor explode with depth.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or any(part in name for part in _KEPT):
                continue
            if parameter.ndim >= 2:
                scale = 0.3 if id(parameter) in embeddings else min(0.3, 1 / math.sqrt(parameter[0].numel()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for module in model.modules():
            mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor):
                mean.copy_(torch.randn(mean.shape, generator=generator) * 0.1)
                variance.copy_(0.5 + torch.rand(variance.shape, generator=generator))
