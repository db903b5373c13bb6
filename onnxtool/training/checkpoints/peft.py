"""Adapters as files of PEFT: a configuration, and tensors under the names that they have in a model of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from onnxtool.errors import ArtifactError
from onnxtool.training.checkpoints import Array
from onnxtool.training.checkpoints.lora import Lora

CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_peft(
    folder: Path, lora: Lora, values: Mapping[str, Array], trained: Sequence[str], base_model: str | None
) -> None:
    """Write both files into `folder`.

    Args:
        folder: an existing folder.
        lora: the adapters.
        values: all parameters by name.
        trained: the names of those that were trained.
        base_model: what the adapters belong to, where it is known.

    Raises:
        ArtifactError: a trained parameter belongs to a product with an adapter, where PEFT saves nothing else.
    """
    adapted = {adapter.module for adapter in lora.adapters}
    others = [name for name in trained if name not in lora.parameters]
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in others))
    lost = [name for name in others if name.rpartition(".")[0] in adapted | {""}]
    if lost:
        raise ArtifactError(
            f"{', '.join(lost[:5])} was trained beside the adapters, and PEFT saves it with no module of its own",
            "export the model with the adapters folded in, which has it, or train without it",
        )
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": all(adapter.inputs_first for adapter in lora.adapters),
        "target_modules": sorted(adapted),
        "modules_to_save": saved or None,
    }
    whole = [name for name in values if name.rpartition(".")[0] in saved]
    tensors = {f"{_PREFIX}{name}": np.ascontiguousarray(values[name]) for name in (*lora.parameters, *whole)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / _TENSORS, {"format": "pt"})
