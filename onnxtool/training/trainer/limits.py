"""Arguments and models that OrtTrainer does not support, each refused with the way out."""

from __future__ import annotations

import torch
from transformers import Trainer, TrainingArguments

from onnxtool.errors import TrainingError
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss

_TORCHRUN = "start the script with torchrun for DistributedDataParallel, or use transformers' Trainer"


def check_request(args: TrainingArguments, model: torch.nn.Module | None) -> None:
    """Refuse arguments and models for another compiler, or for a distribution that splits the model.

    Args:
        args: of the Trainer.
        model: the model to train; None if `model_init` will make it.

    Raises:
        TrainingError: one of them is not supported.
    """
    if args.torch_compile:
        raise TrainingError(
            f"torch_compile asks for the compiler {args.torch_compile_backend!r}",
            "leave torch_compile out of the TrainingArguments: OrtTrainer compiles the training step itself",
        )
    if args.deepspeed:
        raise TrainingError("DeepSpeed splits the model, and OrtTrainer compiles it whole", _TORCHRUN)
    if args.fsdp:
        raise TrainingError("FSDP splits the model, and OrtTrainer compiles it whole", _TORCHRUN)
    if isinstance(model, ModuleWithLoss):
        raise TrainingError(
            "the model is a ModuleWithLoss already", "give OrtTrainer the original, model.module: it wraps it itself"
        )
    if hasattr(model, "_orig_mod"):
        raise TrainingError(
            "the model comes from torch.compile",
            "give OrtTrainer the model as it was before, model._orig_mod: it compiles the training step itself",
        )


def check_distribution(trainer: Trainer) -> None:
    """Refuse every use of several devices except DistributedDataParallel, which has the whole model on each of them.

    Raises:
        TrainingError: the Trainer is set up for another one.
    """
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend.value != "NO":
        raise TrainingError(
            f"accelerate is set to compile with {plugin.backend.value}",
            "set the compiler in `accelerate config`, or ACCELERATE_DYNAMO_BACKEND, to no",
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise TrainingError("accelerate is set to split the model, and OrtTrainer compiles it whole", _TORCHRUN)
    if trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers:
        raise TrainingError("the model lies on several devices, and OrtTrainer compiles it whole", _TORCHRUN)
    if trainer.args.n_gpu > 1:
        raise TrainingError(
            f"one process would train on {trainer.args.n_gpu} devices",
            "start the script with torchrun, one process per device, or select one device with CUDA_VISIBLE_DEVICES",
        )
