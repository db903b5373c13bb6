"""Training: gradient graphs made of standard operators, and the tools built on them.

The public names are imported on first use because they load PyTorch, and OrtTrainer loads transformers.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.training.trainer.module_with_loss import ModuleWithLoss as ModuleWithLoss
    from onnxtool.training.trainer.ort_trainer import OrtTrainer as OrtTrainer
    from onnxtool.training.trainer.ort_trainer import create_model_with_loss as create_model_with_loss

_NAMES = {
    "onnxtool.training.trainer.module_with_loss": ("ModuleWithLoss",),
    "onnxtool.training.trainer.ort_trainer": ("OrtTrainer", "create_model_with_loss"),
}

__all__ = [*chain(*_NAMES.values())]

__getattr__ = lazy_names(__name__, _NAMES)
