"""Building blocks for losses, models and optimizers, with the same names as in onnxruntime-training's onnxblock."""

from __future__ import annotations

from onnxtool.training.onnxblock import blocks, loss, optim
from onnxtool.training.onnxblock.block import (
    Block,
    ForwardBlock,
    TrainingBlock,
    base,
    custom_op_library,
    empty_base,
    load_checkpoint_to_model,
    save_checkpoint,
)

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
