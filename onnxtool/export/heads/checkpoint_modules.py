"""Read from a checkpoint how it pools: the modules of sentence-transformers, with their settings and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.sentence_modules import (
    POOLING_FLAGS,
    Module,
    encoder_type,
    max_sequence_length,
    pooling_modes,
    read_modules,
    read_settings,
)
from onnxtool.errors import CheckpointError
from onnxtool.export.heads.steps import ACTIVATIONS, Dense, LayerNorm, Normalize, Pool, Splade, Step
from onnxtool.export.source import Source
from onnxtool.reports import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODULE_WEIGHTS = "model.safetensors"
_MODULE_PICKLE = "pytorch_model.bin"
UNTRANSLATED_HINT = "pass --head none, and pool after the model"
_VECTOR = "sentence_embedding"
_TRANSFORMERS = ("Transformer", "MLMTransformer")

Settings = dict[str, Json]


def module_list(source: Source) -> tuple[Module, ...]:
    """Return the modules of a sentence-transformers checkpoint; empty for any other.

    Raises:
        CheckpointError: modules.json is malformed, or names a path outside the checkpoint.
    """
    return read_modules(source.read_json, _malformed(source))


def encoder_class(source: Source) -> str:
    """Return the class of sentence-transformers that loads the checkpoint; empty where no file says it.

    Raises:
        CheckpointError: the file is malformed.
    """
    return encoder_type(source.read_json, _malformed(source))


def max_tokens(source: Source) -> int | None:
    """Return how many tokens sentence-transformers cuts a text to; None where no file says it.

    Raises:
        CheckpointError: the file is malformed.
    """
    stated = max_sequence_length(source.read_json, _malformed(source))
    return None if stated is None else stated[0]


def card_tags(source: Source) -> tuple[str, ...]:
    """Return the tags in the model card's front matter."""
    import yaml

    path = source.fetch("README.md")
    if path is None:
        return ()
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---"):
        return ()
    try:
        card = yaml.safe_load(text.split("---", 2)[1])
    except yaml.YAMLError:
        return ()  # a card is prose for people; one that does not parse tells nothing about the weights
    tags = card.get("tags") if isinstance(card, dict) else None
    return tuple(str(tag) for tag in tags) if isinstance(tags, list) else ()


def read_splade(source: Source) -> tuple[Step, ...]:
    """Read how a sparse encoder weighs terms; a checkpoint without modules does it as SPLADE v2.

    Raises:
        CheckpointError: it weighs them otherwise, or has modules that no head computes.
    """
    modules = module_list(source)
    _refuse_unknown(source, modules, {"SpladePooling", "Pooling", "Normalize", "Dropout"})
    pooling = next((module for module in modules if module.kind == "SpladePooling"), None)
    if pooling is None:
        return (Splade(),)
    settings = _settings(source, pooling)
    strategy = str(settings.get("pooling_strategy", "max"))
    activation = str(settings.get("activation_function", "relu"))
    if strategy not in Splade.STRATEGIES or activation not in Splade.ACTIVATIONS:
        raise CheckpointError(
            f"{source.model_name} weighs terms by {strategy} of {activation}, which the head splade does not do",
            UNTRANSLATED_HINT,
        )
    return (Splade(strategy, activation),)


def read_embedding(source: Source) -> tuple[Step, ...]:
    """Read what follows the transformer of a sentence encoder, in the order of modules.json.

    Raises:
        CheckpointError: it does not say how it pools, or has modules or settings that no head computes.
    """
    modules = module_list(source)
    _refuse_unknown(source, modules, set(_READERS))
    after = [module for module in modules if module.kind not in _TRANSFORMERS]
    if not after or after[0].kind != "Pooling":
        raise CheckpointError(
            f"{source.model_name} does not say how it pools: it has no modules.json with a Pooling"
            + (f" before {after[0].kind}" if after else ""),
            f"{UNTRANSLATED_HINT}; a hub model needs the network once for this file",
        )
    if sum(module.kind == "Pooling" for module in after) > 1:
        raise CheckpointError(f"{source.model_name} pools twice, and tokens can be pooled once", UNTRANSLATED_HINT)
    steps = (_READERS[module.kind](source, module, _settings(source, module)) for module in after)
    return tuple(step for step in steps if step is not None)


def _refuse_unknown(source: Source, modules: tuple[Module, ...], known: set[str]) -> None:
    unknown = sorted({module.kind for module in modules} - known - set(_TRANSFORMERS))
    if unknown:
        raise CheckpointError(
            f"{source.model_name} has the modules {', '.join(unknown)}, which no head computes",
            f"{UNTRANSLATED_HINT}; sentence-transformers runs them",
        )


def _read_pooling(source: Source, module: Module, settings: Settings) -> Step:
    modes = pooling_modes(settings)
    unknown = [mode for mode in modes if mode not in POOLING_FLAGS]
    if unknown:
        raise CheckpointError(
            f"{source.model_name} pools with {', '.join(unknown)}, which no head computes; "
            f"onnxtool knows {', '.join(POOLING_FLAGS)}",
            UNTRANSLATED_HINT,
        )
    if settings.get("include_prompt") is False:
        raise CheckpointError(
            f"{source.model_name} leaves the prompt out when it pools, and a graph does not know where a prompt ends",
            UNTRANSLATED_HINT,
        )
    return Pool(modes)


def _read_normalize(source: Source, module: Module, settings: Settings) -> Step:
    _require_vectors(source, module, settings)
    return Normalize()


def _read_dense(source: Source, module: Module, settings: Settings) -> Step:
    _require_vectors(source, module, settings)
    package, _, activation = str(settings.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if activation not in ACTIVATIONS or not package.startswith("torch.nn"):
        raise CheckpointError(
            f"{module.folder} of {source.model_name} is activated by {settings.get('activation_function')}, "
            f"which no head computes; onnxtool knows {', '.join(ACTIVATIONS)} of torch.nn",
            UNTRANSLATED_HINT,
        )
    weights = _weights(source, module)
    columns, rows = settings.get("in_features"), settings.get("out_features")
    weight = _weight(source, module, weights, "linear.weight", (rows, columns))
    bias = _weight(source, module, weights, "linear.bias", (rows,)) if settings.get("bias", True) else None
    residual = None
    if settings.get("use_residual") is True:
        residual = _identity(weight) if rows == columns else None
        residual = (
            _weight(source, module, weights, "residual.weight", (rows, columns)) if residual is None else residual
        )
    return Dense(module.folder, weight, bias, activation, residual)


def _read_layer_norm(source: Source, module: Module, settings: Settings) -> Step:
    weights, size = _weights(source, module), (settings.get("dimension"),)
    return LayerNorm(
        module.folder,
        _weight(source, module, weights, "norm.weight", size),
        _weight(source, module, weights, "norm.bias", size),
    )


def _read_nothing(source: Source, module: Module, settings: Settings) -> None:
    """Dropout is for training."""


_READERS: dict[str, Callable[[Source, Module, Settings], Step | None]] = {
    "Pooling": _read_pooling,
    "Normalize": _read_normalize,
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Dropout": _read_nothing,
}


def _require_vectors(source: Source, module: Module, settings: Settings) -> None:
    """Refuse a module of a multi-vector encoder, which works on tokens."""
    names = {settings.get("module_input_name") or _VECTOR, settings.get("module_output_name") or _VECTOR}
    if names != {_VECTOR}:
        raise CheckpointError(
            f"{module.kind} of {source.model_name} works on {', '.join(map(str, sorted(names, key=str)))}, "
            "and heads compute one vector for each text",
            UNTRANSLATED_HINT,
        )


def _weights(source: Source, module: Module) -> dict[str, Any]:
    """Read the tensors of a module, from safetensors only: a pickle can run code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = source.fetch(module.file(MODULE_WEIGHTS))
    if path is None:
        if source.fetch(module.file(_MODULE_PICKLE)) is None:
            raise CheckpointError(
                f"{module.folder} of {source.model_name} has no weights ({MODULE_WEIGHTS})",
                "the folder may be incomplete; fetch the checkpoint again",
            )
        raise CheckpointError(
            f"{module.folder} of {source.model_name} has its weights in a pickle ({_MODULE_PICKLE}) only, "
            "which can run code",
            "convert it: load it where you trust it; save_pretrained(...) of sentence-transformers writes safetensors",
        )
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise source.unreadable(error) from error


def _weight(
    source: Source, module: Module, weights: dict[str, Any], name: str, shape: tuple[Json, ...]
) -> NDArray[np.float32]:
    import torch

    tensor = weights.get(name)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
        found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise CheckpointError(
            f"{name} in {module.folder} of {source.model_name} is {found}, and its config.json says {list(shape)}",
            "the folder mixes two models; take both from one",
        )
    array: NDArray[np.float32] = tensor.float().numpy()
    return array


def _identity(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy as np

    return np.eye(len(weight), dtype=np.float32)


def _settings(source: Source, module: Module) -> Settings:
    return read_settings(module, source.read_json, _malformed(source))


def _malformed(source: Source) -> Callable[[str, str], CheckpointError]:
    def error(name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{name} of {source.model_name} is malformed: {reason}", "do not trust this checkpoint")

    return error
