"""Make one tiny checkpoint on disk, and check that PyTorch can run it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from zoo.processors import feature_extractor, save_image_processor
from zoo.running import run_once
from zoo.shrinking import shrink
from zoo.tasks import Task, model_classes
from zoo.vocabulary import save_tokenizer, vocabulary_size

_MOST_PARAMETERS = 60_000_000
# Parameters whose range means something (decays, time steps) keep what the model gave them.
_KEPT = ("A_log", "dt_bias", "time_", "norm.weight", "lambda", "inv_freq")


class NotRunnableError(Exception):
    """A model type of which no tiny model can be built, saved, loaded and run; the message says why."""


def make_checkpoint(task: Task, model_type: str, folder: Path, *, effort: str = "all", seed: int = 0) -> None:
    """Write a checkpoint of `model_type` for `task` to `folder`, which is replaced, and run it once.

    `effort` is one of EFFORTS.

    Raises:
        NotRunnableError: with the reason.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        model_class = getattr(transformers, model_classes(task)[model_type])
        model = _build(model_class, task, effort, seed)
        model.save_pretrained(folder)
        _save_processors(model.config, model_class, task, folder)
        del model
        run_once(task, folder)
    except Exception as error:  # anything may go wrong in a model that fits badly
        shutil.rmtree(folder, ignore_errors=True)
        raise NotRunnableError(f"{type(error).__name__}: {first_line(error)}") from error


def _build(model_class: Any, task: Task, effort: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = shrink(model_class.config_class(), effort)
    for part in (config, config.get_text_config()):
        if task.is_generative and getattr(part, "is_decoder", None) is False and not config.is_encoder_decoder:
            part.is_decoder = True  # encoders that can be used as decoders see what follows otherwise
    decoder = getattr(config, "decoder", None)
    if task.is_generative and decoder is not None and hasattr(decoder, "add_cross_attention"):
        decoder.is_decoder = decoder.add_cross_attention = True  # a pair of models that were made apart
    if model_class.__name__.endswith("EncoderModel"):
        config.is_encoder_decoder = False  # the encoder alone of a type that has a decoder as well
    if task.name.endswith("-classification"):
        config.num_labels = 3
    with torch.device("meta"):
        size = _count(model_class(config))
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters are not small")
    model = model_class(config)
    _draw_weights(model, seed)
    return model.eval()


def _draw_weights(model: Any, seed: int) -> None:
    """Overwrite the weights of a torch model in place, and the running statistics of its batch norms.

    They are larger than its own, so that a wrong mask or axis shows in its outputs.
    A matrix gets a standard deviation of 1 / sqrt(fan in), so that activations neither vanish nor explode with depth.
    """
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


def _save_processors(config: Any, model_class: Any, task: Task, folder: Path) -> None:
    if task.modality == "image":
        save_image_processor(config, folder)
    if task.modality == "audio":
        feature_extractor(config).save_pretrained(folder)
    if task.modality == "text" or (task.name == "automatic-speech-recognition" and vocabulary_size(config)):
        save_tokenizer(config, model_class, task, folder)


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def first_line(error: BaseException) -> str:
    """Return the first line of a message, no longer than a table can bear."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]
