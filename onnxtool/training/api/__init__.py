"""Train with the artifacts on stock onnxruntime; the classes and methods are onnxruntime-training's."""

from __future__ import annotations

from onnxtool.training.api.fitting import Progress, fit
from onnxtool.training.api.module import Module
from onnxtool.training.api.optimizer import Optimizer
from onnxtool.training.api.schedule import LinearLRScheduler
from onnxtool.training.api.state import CheckpointState, Parameter

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter", "Progress", "fit"]
