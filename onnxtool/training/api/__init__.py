"""Train with artifacts on stock onnxruntime; classes and methods are those of onnxruntime-training."""

from __future__ import annotations

from onnxtool.training.api.module import Module
from onnxtool.training.api.optimizer import LinearLRScheduler, Optimizer, Progress, fit
from onnxtool.training.api.state import CheckpointState, Parameter

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter", "Progress", "fit"]
