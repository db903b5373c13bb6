"""Supported settings of sentence-transformers checkpoints. Any other setting that affects results is refused.

The definitions follow sentence-transformers 6.2. Settings that do not affect vectors and scores, such as the version
that wrote the file or the similarity function, are accepted; unknown keys that sentence-transformers passes to a class
are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.chat_templates import FORMATS, NO_VARIABLES
from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.module_forms import require_known_keys, require_no_others
from onnxtool.checkpoint.sentence_modules import TRANSFORMERS, SentenceModules, as_object, is_index, positive
from onnxtool.reports import Json

WEIGHTED = "WeightedLayerPooling"
_STATES = "hidden_states"
_KEYS = frozenset(("embedding_dimension", "word_embedding_dimension", "layer_start", "num_hidden_layers"))


@dataclass(frozen=True, eq=False)
class TokenStates:
    """The hidden states of one layer, or a weighted mean over several layers.

    Attributes:
        start: the layer, with 0 for the embeddings and -1 for the last layer; the first of several.
        weights: float32 [L], for `start` and all later layers; None for one layer.
    """

    start: int
    weights: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, modules: SentenceModules, files: CheckpointFiles) -> TokenStates | None:
        """Read which layers are pooled; None for the last layer.

        Raises:
            OnnxtoolError: the layer weights are missing, have the wrong shape, or sum to 0.
        """
        if WEIGHTED in modules.kinds[1:2]:
            # sentence-transformers skips this module unless the model returns all hidden states.
            return (
                _weighted(modules, files)
                if files.read_object("config.json").get("output_hidden_states") is True
                else None
            )
        config = as_object(modules.transformer.get("modality_config"))
        layer = stated_layer(as_object(config.get("message", config.get("text"))).get("method_output_name"))
        return None if layer is None else cls(layer)

    def choose(self, torch: Any, states: Sequence[Any]) -> Any:
        """Return the states to pool from PyTorch's hidden states, each float [B, S, H]."""
        if self.weights is None:
            return states[self.start]
        weights = torch.from_numpy(self.weights).to(states[-1])
        return (weights[:, None, None, None] * torch.stack(tuple(states[self.start :]))).sum(dim=0) / weights.sum()

    def fits(self, num_states: int) -> bool:
        """Whether a model has the layers; `num_states` includes the embeddings."""
        if self.weights is not None:
            return num_states - self.start == len(self.weights)
        return -num_states <= self.start < num_states


def stated_layer(output: Json) -> int | None:
    """Return the layer of an output such as `["hidden_states", -2]`; None for any other."""
    match output:
        case [name, int(layer)] if name == _STATES and not isinstance(layer, bool):
            return layer
    return None


def _weighted(modules: SentenceModules, files: CheckpointFiles) -> TokenStates:
    stored = modules.modules[1]
    require_known_keys(stored, _KEYS)
    start = stored.settings.get("layer_start", 4)
    if not is_index(start):
        raise files.malformed(stored.file("config.json"), f"layer_start {start!r} is not a layer")
    tensors = files.read_tensors(stored.folder)
    require_no_others(stored, tensors, ("layer_weights",))
    weights = tensors.get("layer_weights")
    if weights is None or weights.ndim != 1 or not np.isfinite(weights).all() or not weights.sum():
        problem = "missing" if weights is None else f"of shape {list(weights.shape)}, not finite, or of sum 0"
        raise files.refuse(f"layer_weights in {stored.folder} of {files.label} is {problem}; it is one for each layer")
    return TokenStates(start, weights)


_FEATURES, _MASKED, _CLASSES = "feature-extraction", "fill-mask", "sequence-classification"
_CAUSAL = "text-generation"


@dataclass(frozen=True)
class _Task:
    """Default output of the transformer module, by task."""

    output: str
    name: str


_TASKS: Mapping[Json, _Task] = {
    _FEATURES: _Task("last_hidden_state", "token_embeddings"),
    _MASKED: _Task("logits", "token_embeddings"),
    _CLASSES: _Task("logits", "scores"),
    _CAUSAL: _Task("logits", "causal_logits"),
}
# Outputs of a dual encoder's transformer module: by modality, the model's method and the part of its output.
_DUAL_NAME = "sentence_embedding"
_DUAL: Mapping[str, Json] = {
    modality: {"method": f"get_{modality}_features", "method_output_name": "pooler_output"}
    for modality in ("text", "image")
}
# Arguments of from_pretrained for device, speed and weight precision.
_HARMLESS_ARGUMENTS = frozenset(
    ("attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype", "trust_remote_code", "use_fast")
)
# Arguments of tokenizer calls that have no effect or are supported: padding is masked, and texts are always truncated
# to the limit.
_HARMLESS_CALLS = frozenset(("max_length", "padding", "pad_to_multiple_of", "truncation", "return_tensors"))


# Whether a setting of the transformer's output matches the output computed here.
_Follows = Callable[[str, Json, _Task], bool]


def _is_nothing(value: Json) -> bool:
    return value is None or value is False or value == {} or value == []


def _is_harmless_arguments(value: Json) -> bool:
    return isinstance(value, dict) and value.keys() <= _HARMLESS_ARGUMENTS


def _follows_call(modules: SentenceModules, value: Json) -> bool:
    """Whether the call arguments are supported: text arguments and chat template variables."""
    if not isinstance(value, dict) or not value.keys() <= {"text", "chat_template"}:
        return _is_nothing(value)
    text, chat = value.get("text", {}), value.get("chat_template", {})
    if not isinstance(text, dict) or not isinstance(chat, dict):
        return False
    is_chat = "message" in as_object(modules.transformer.get("modality_config"))
    known = _HARMLESS_CALLS | (set() if is_chat else {"add_special_tokens"})  # a template adds them itself
    if modules.transformer.get("transformer_task") == _CAUSAL:
        known = known | {"logits_to_keep"}  # of which the last is read
    return (
        text.keys() <= known
        and text.get("truncation", True) in (True, "longest_first")
        and isinstance(text.get("add_special_tokens", True), bool)
        and ("max_length" not in text or positive(text["max_length"]) is not None)
        and chat.keys().isdisjoint(NO_VARIABLES)
    )


# Supported values of the transformer module's settings, except the task-dependent ones.
_TRANSFORMER: Mapping[str, Callable[[Json], bool]] = {
    "max_seq_length": lambda value: value is None or positive(value) is not None,
    "do_lower_case": lambda value: isinstance(value, bool),
    "unpad_inputs": lambda _value: True,  # affects how padding is computed, not the result
    "query_length": lambda value: value is None or positive(value) is not None,
    "document_length": lambda value: value is None or positive(value) is not None,
    "query_expansion": _is_nothing,  # but of late interaction
    "tokenizer_name_or_path": _is_nothing,
    **dict.fromkeys(("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs"), _is_harmless_arguments),
    **dict.fromkeys(("config_args", "config_kwargs"), _is_harmless_arguments),
}


def require_no_routes(modules: SentenceModules, files: CheckpointFiles) -> None:
    """Refuse a checkpoint with several routes if none was chosen.

    Raises:
        OnnxtoolError: it has several.
    """
    if modules.routes:
        raise files.refuse(
            f"{files.label} has the routes {', '.join(modules.routes)} (Router), but a file holds only one",
            f"pass --route {modules.routes[-1]}, and export each to its own file",
        )


def require_known_settings(modules: SentenceModules, files: CheckpointFiles, *, of_sides: bool = False) -> None:
    """Refuse unsupported settings of the transformer module and the encoder.

    Settings of the modules after it are checked when each is read.

    Args:
        modules: the checkpoint's modules.
        files: the checkpoint, for errors.
        of_sides: whether it is a dual encoder, whose sides are exported separately.

    Raises:
        OnnxtoolError: there is one that changes the answer.
    """
    if not modules.modules:  # sentence-transformers reads none of these files in this case either
        return
    require_no_routes(modules, files)
    kind = modules.modules[0].kind
    follows = _follows_side if of_sides else _follows_task
    unknown = list(_unknown_settings(modules, TRANSFORMERS[kind], follows)) if kind in TRANSFORMERS else []
    if unknown:
        raise files.refuse(f"{files.label} has settings that onnxtool does not support: {'; '.join(unknown)}")


def transformer_output(modules: SentenceModules) -> str:
    """Return the transformer module's output name for the modules after it; empty if unknown."""
    default = TRANSFORMERS.get(modules.modules[0].kind) if modules.modules else None
    task = _TASKS.get(str(modules.transformer.get("transformer_task", default)))
    return "" if task is None else task.name


def _unknown_settings(modules: SentenceModules, default: str, follows: _Follows) -> Iterator[str]:
    settings, name = modules.transformer, modules.transformer_file
    stated = settings.get("transformer_task", default)
    task = _TASKS.get(stated) if isinstance(stated, str) else None
    if task is None:
        yield f"transformer_task {stated!r} of {name}"
    for key, value in settings.items():
        if key == "transformer_task" or (task is not None and follows(key, value, task)):
            continue
        if key == "query_expansion" and modules.is_late_interaction:  # QueryExpansion reads it
            continue
        if key == "processing_kwargs" and _follows_call(modules, value):
            continue
        if key not in _TRANSFORMER or not _TRANSFORMER[key](value):
            yield f"{key} {value!r} of {name}"


def _follows_task(key: str, value: Json, task: _Task) -> bool:
    """Whether a setting of the transformer's output equals the task's default for texts."""
    if key == "module_output_name":
        return value in (None, task.name)
    if key != "modality_config" or not isinstance(value, dict):
        return False
    if "message" not in value:
        return _is_forward(value.get("text"), task)
    message = value["message"]  # takes precedence for texts if present
    is_known = _is_forward(message, task) and as_object(message).get("format", "auto") in FORMATS
    return is_known and value.keys() <= {"text", "message"}  # others have a processor, which renders differently


def _is_forward(value: Json, task: _Task) -> bool:
    settings = as_object(value)
    output = settings.get("method_output_name")
    is_layer = task is _TASKS[_FEATURES] and stated_layer(output) is not None
    return settings.get("method") == "forward" and (output in (task.output, [task.output]) or is_layer)


def _follows_side(key: str, value: Json, _task: _Task) -> bool:
    """Whether a setting for texts and images equals a dual encoder's defaults."""
    if key == "module_output_name":
        return value in (None, _DUAL_NAME)
    return key == "modality_config" and isinstance(value, dict) and value == _DUAL
