"""Adapters next to their base: each linear layer computes `layer(x) + x @ A @ B`, and an adapter is values of A and B.

A: [in, r] and B: [r, out] are initializers of rank r = 0, without which the base computes what it always does, and
inputs that an adapter's file overrides. B includes the scale alpha / r, or alpha / sqrt(r) of rank-stabilized LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.checkpoint.files import ADAPTER_NAME
from onnxtool.checkpoint.folder import path_parts
from onnxtool.errors import CheckpointError, ExportError, some
from onnxtool.export.adapters import PeftAdapter
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.source import Source
from onnxtool.model_file.metadata import AdapterFile, is_plain_name
from onnxtool.runtime.adapters import write_adapter

_FACTORS = ("lora_A", "lora_B")
_TRACED_RANK = 3  # any but 0 and 1, which traces treat as special
# Settings of PEFT that only affect training or which layers get factors, or that its own model already accounts for.
_ACCOUNTED = frozenset(
    (
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
        *("bias", "use_rslora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern"),
        *("rank_pattern", "alpha_pattern", "runtime_config", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "trainable_token_indices", "layer_replication", "lora_bias", "use_dora"),
    )
)


@dataclass(frozen=True)
class RuntimeAdapter:
    """An adapter of a model, which is not merged into it.

    Attributes:
        name: the last part of its folder or id.
        adapter: the adapter in PEFT's format.
        factors: A float32 [in, r] and B float32 [r, out] of each layer, by the name of the layer.
    """

    name: str
    adapter: PeftAdapter
    factors: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]

    def apply(self, model: Any) -> Any:
        """Return the model with the adapter as PEFT computes it."""
        return self.adapter.inject(model).get_base_model().eval()

    def write(self, path: Path, graph: ir.Graph) -> AdapterFile:
        """Write its file, with values for the inputs of a graph."""
        factors = {f"{layer}.{name}": pair for layer, pair in self.factors.items() for name in _FACTORS}
        dtypes = {str(value.name): value.dtype.numpy() for value in graph.inputs if value.dtype is not None}
        values = {
            name: np.ascontiguousarray(pair[name.endswith(_FACTORS[1])], dtypes[name])
            for name, pair in factors.items()
            if name in dtypes
        }
        return AdapterFile(self.name, path.name, write_adapter(path, values))


def find_adapters(
    names: Sequence[str], base: Source, checkpoint: Checkpoint, model: Any, load: Callable[[], Any]
) -> tuple[RuntimeAdapter, ...]:
    """Read adapters by PEFT, and check that they are for a model and change nothing but its linear layers.

    Args:
        names: their ids or folders.
        base: the checkpoint of the model.
        checkpoint: the same, opened.
        model: the model, as it is without an adapter.
        load: loads it again, to apply an adapter.

    Raises:
        CheckpointError: one is missing, malformed, or for another model, or changes something else.
        ExportError: two have the same name.
    """
    if base.adapter:
        raise CheckpointError(
            f"{base.model_name} is an adapter itself, which is merged, and --adapter was passed",
            "pass its base as --model_name, and both as --adapter",
        )
    adapters: dict[str, RuntimeAdapter] = {}
    own = base.read_object("config.json").get("lora_adaptations")
    for name in names:
        if isinstance(own, list) and name in own:
            raise CheckpointError(
                f"{name} is an adapter in the format of {base.model_name}'s own code (lora_adaptations in config.json)",
                "save it in PEFT's format, and pass its folder",
            )
        source = Source.find(name, trust_remote_code=base.trust_remote_code, allow_pickle=base.allow_pickle)
        if source.name.casefold() in adapters or not is_plain_name(source.name):
            raise ExportError(
                f"--adapter {name} is named {source.name}, as is another one", "rename the folder of one of them"
            )
        if not source.adapter:
            raise CheckpointError(
                f"{name} has no {ADAPTER_NAME}, and --adapter takes adapters in PEFT's format",
                "pass the folder that PEFT's save_pretrained wrote",
            )
        _require_base(source, base, checkpoint)
        adapters[source.name.casefold()] = _read_adapter(source, model, load())
    return tuple(adapters.values())


def _require_base(source: Source, base: Source, checkpoint: Checkpoint) -> None:
    """Refuse an adapter that was trained on another checkpoint: by weights if it is here, otherwise by name."""
    stated = source.adapter.get("base_model_name_or_path")
    hint = f"pass its base as --model_name, or correct base_model_name_or_path in its {ADAPTER_NAME}"
    if not isinstance(stated, str) or not stated:
        raise CheckpointError(f"the adapter {source.model_name} does not name the model it is for", hint)
    if Path(stated).is_dir():
        other = Source.find(stated, trust_remote_code=base.trust_remote_code, allow_pickle=base.allow_pickle)
        is_same = Path(stated).samefile(base.model_name) if base.is_local else other.origin == base.origin
        is_same = is_same or Checkpoint.open(other).weights_sha256 == checkpoint.weights_sha256
    else:
        is_same = path_parts(stated)[-1] == path_parts(base.origin)[-1]
    if not is_same:
        raise CheckpointError(f"the adapter {source.model_name} is for {stated}, not for {base.model_name}", hint)


def _read_adapter(source: Source, base: Any, model: Any) -> RuntimeAdapter:
    """Read the factors of an adapter from PEFT's own layers."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if source.adapter.get("peft_type") != "LORA":
        raise _inseparable(source, f"is of the kind {source.adapter.get('peft_type')}, not LORA")
    adapter = PeftAdapter.find(source)
    adapted = adapter.inject(model)
    ((key, settings),) = adapted.peft_config.items()
    inner, own = adapted.get_base_model(), base.state_dict()
    factors, changed = {}, set[str]()
    for name, tensor in inner.state_dict().items():
        layer, is_first, _ = name.partition(f".lora_A.{key}.weight")
        plain = name.replace(".base_layer.", ".")
        if is_first and isinstance(inner.get_submodule(layer).get_base_layer(), torch.nn.Linear | Conv1D):
            module = inner.get_submodule(layer)
            second = module.lora_B[key].weight.float().T * np.float32(module.scaling[key])
            factors[layer] = (tensor.float().T.numpy(), second.detach().numpy())
        elif plain in own and torch.equal(own[plain], tensor):
            own.pop(plain)
        elif not is_first and name.removesuffix(f".lora_B.{key}.weight") in factors:
            continue
        else:
            changed.add(plain)
    usual = vars(type(settings)())
    if unknown := sorted(
        name for name, value in vars(settings).items() if name not in _ACCOUNTED and value and value != usual[name]
    ):
        reason = f"has the settings {', '.join(unknown)}, which change more than a product of two matrices"
    elif changed or own:
        reason = f"changes more than linear layers: {some(sorted(changed | own.keys()))}"
    elif not factors:
        reason = "changes no layer"
    else:
        return RuntimeAdapter(source.name, adapter, factors)
    raise _inseparable(source, reason)


def _inseparable(source: Source, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter {source.model_name} {reason}, and cannot stay apart from its base",
        f"export it merged, as a model of its own: onnxtool export --model_name {source.model_name}",
    )


def graft(model: Any, adapters: Sequence[RuntimeAdapter]) -> Any:
    """Add factors with arbitrary values to each layer that an adapter has factors for, in place."""
    import torch

    numbers = torch.Generator().manual_seed(0)  # equal factors would become one initializer
    for name, (first, second) in _shapes(adapters).items():
        layer = model.get_submodule(name)
        for factor, shape in zip(_FACTORS, ((first, _TRACED_RANK), (_TRACED_RANK, second)), strict=True):
            values = torch.randn(shape, generator=numbers).to(layer.weight)
            layer.register_parameter(factor, torch.nn.Parameter(values, requires_grad=False))
        layer.register_forward_hook(lambda layer, inputs, output: output + inputs[0] @ layer.lora_A @ layer.lora_B)
    return model


def open_inputs(graph: ir.Graph, adapters: Sequence[RuntimeAdapter]) -> None:
    """Make the factors inputs of any rank, with a default of rank 0, in place.

    Layers without effect on the outputs, such as an unused pooler, are not in the trace, and neither are their factors.

    Raises:
        ExportError: the trace does more than multiply by a factor, or has no layer of an adapter.
    """
    for adapter in adapters:
        if not any(f"{name}.{_FACTORS[0]}" in graph.initializers for name in adapter.factors):
            raise ExportError(
                f"the adapter {adapter.name} changes only layers that the outputs do not depend on: "
                f"{some(adapter.factors)}",
                "leave it out, or export another --task",
            )
    for name, (first, second) in _shapes(adapters).items():
        rank = ir.SymbolicDim(f"{name}.rank")
        shapes: tuple[tuple[int | ir.SymbolicDim, ...], ...] = (first, rank), (rank, second)
        for factor, shape in zip(_FACTORS, shapes, strict=True):
            value = graph.initializers.get(f"{name}.{factor}")
            uses = [] if value is None else list(value.uses())
            if value is None or not uses:
                continue
            if value.dtype is None or any(node.op_type != "MatMul" or slot != 1 for node, slot in uses):
                raise ExportError(
                    f"the trace does not multiply by {name}.{factor} alone",
                    "pass another --exporter, or export each adapter merged, as a model of its own",
                )
            empty = np.zeros([size if isinstance(size, int) else 0 for size in shape], value.dtype.numpy())
            value.const_value, value.shape = ir.tensor(empty, name=value.name), ir.Shape(shape)
            graph.inputs.append(value)
            for node, _ in uses:
                if factor == _FACTORS[0]:  # the product has the rank as its last axis
                    node.outputs[0].shape = None


def _shapes(adapters: Sequence[RuntimeAdapter]) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of each layer that any adapter changes."""
    return {
        name: (len(first), second.shape[1]) for adapter in adapters for name, (first, second) in adapter.factors.items()
    }
