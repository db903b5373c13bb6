"""Train with artifacts on stock onnxruntime, with the same classes and methods as onnxruntime-training."""

from __future__ import annotations

from onnxtool.training.api.module import Module
from onnxtool.training.api.optimizer import LinearLRScheduler, Optimizer, Progress, fit
from onnxtool.training.api.state import CheckpointState, Parameter

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter", "Progress", "fit"]
