"""Low-rank adapters in a checkpoint: describe them, and fold what they learned into the weights.

The adapter of a product y = x W with I inputs and O outputs is y += alpha / r * B(A(x)), with A [r, I] and B [O, r] as
in PEFT. A checkpoint property describes the adapters, so any checkpoint can be exported in PEFT's format: a
configuration, and tensors under the names they have in a PEFT model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from onnxtool.errors import ArtifactError, CheckpointError
from onnxtool.reading import parse_json
from onnxtool.reports import short_repr
from onnxtool.training.checkpoints import Array, Checkpoint, Property

_PROPERTY = "onnxtool.lora"


@dataclass(frozen=True)
class Adapter:
    """The adapter of a weight.

    Attributes:
        module: the product's name in PEFT, which is the weight's name without `.weight`.
        weight: the name of the weight.
        inputs_first: whether the weight is [I, O], as in GPT-2, instead of [O, I], as in PyTorch's linear layer.
    """

    module: str
    weight: str
    inputs_first: bool

    @property
    def down(self) -> str:
        """The name of A."""
        return f"{self.module}.lora_A.weight"

    @property
    def up(self) -> str:
        """The name of B."""
        return f"{self.module}.lora_B.weight"


@short_repr
@dataclass(frozen=True)
class Lora:
    """A model's adapters, in the order of their weights."""

    rank: int
    alpha: float
    adapters: tuple[Adapter, ...]

    @property
    def scale(self) -> float:
        """The factor applied to B(A(x))."""
        return self.alpha / self.rank

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all A and B."""
        return tuple(name for adapter in self.adapters for name in (adapter.down, adapter.up))

    def to_properties(self) -> dict[str, Property]:
        """Return the checkpoint properties that describe the adapters."""
        rows = [[adapter.module, adapter.weight, adapter.inputs_first] for adapter in self.adapters]
        return {_PROPERTY: json.dumps({"rank": self.rank, "alpha": self.alpha, "adapters": rows})}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Lora | None:
        """Read the adapters from a checkpoint's properties; None if there are none.

        Raises:
            CheckpointError: the property was changed, or does not fit the parameters.
        """
        text = checkpoint.properties.get(_PROPERTY)
        if text is None:
            return None
        try:
            found = _parsed(parse_json(str(text)))
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(f"{type(error).__name__} {error}"[:200]) from error
        parameters = {
            name: array.shape for group in (checkpoint.trainable, checkpoint.frozen) for name, array in group.items()
        }
        for adapter in found.adapters:
            shapes = [parameters.get(name) for name in (adapter.weight, adapter.down, adapter.up)]
            weight = shapes[0] or ()
            outputs_first = weight[::-1] if adapter.inputs_first else weight
            if shapes[1:] != [(found.rank, *outputs_first[1:]), (*outputs_first[:1], found.rank)]:
                raise _damaged(f"{adapter.module} has the shapes {shapes}")
        return found

    def folded(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the weights by name with their adapters folded in: W + alpha / r B A."""
        result = {}
        for adapter in self.adapters:
            change = (values[adapter.up] @ values[adapter.down]) * np.float32(self.scale)
            result[adapter.weight] = values[adapter.weight] + (change.T if adapter.inputs_first else change)
        return result


def _parsed(document: Any) -> Lora:
    """Check types and numbers; raise if any is wrong."""
    rank, alpha = int(document["rank"]), float(document["alpha"])
    adapters = tuple(Adapter(str(module), str(weight), bool(first)) for module, weight, first in document["adapters"])
    if rank < 1 or not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"rank {rank}, alpha {alpha}")
    return Lora(rank, alpha, adapters)


def _damaged(why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's note of its adapters ({_PROPERTY}) does not fit its parameters: {why}",
        "it was changed by hand; take the checkpoint of a Module or of onnxtool artifacts",
    )


CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_peft(
    folder: Path, lora: Lora, values: Mapping[str, Array], trained: Sequence[str], base_model: str | None
) -> None:
    """Write both files to `folder`.

    Args:
        folder: an existing folder.
        lora: the adapters.
        values: all parameters by name.
        trained: the names of the trained parameters.
        base_model: the base model of the adapters, if known.

    Raises:
        ArtifactError: a trained parameter belongs to a product with an adapter, for which PEFT saves only the adapter.
    """
    adapted = {adapter.module for adapter in lora.adapters}
    others = [name for name in trained if name not in lora.parameters]
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in others))
    lost = [name for name in others if name.rpartition(".")[0] in adapted | {""}]
    if lost:
        raise ArtifactError(
            f"{', '.join(lost[:5])} was trained along with the adapters, and PEFT has no separate module to save it in",
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
