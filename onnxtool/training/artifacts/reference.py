"""Loss and gradients of a model in PyTorch, the reference of its training graph.

Dropout is enabled and scales its input, but drops nothing. So both sides need no common random numbers, and a missing
scale in the backward pass is detected. Letters: B samples, S tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.training.checkpoints.lora import Lora

_SEED = 20


@dataclass(frozen=True)
class LossSetting:
    """A loss on one output.

    Attributes:
        name: a member of LossType.
        output: the name of the output.
        class_axis: of a cross entropy, 1 or -1.
        ignore_index: of a cross entropy; None if no label is ignored.
        shift: whether the logits at a token are for the label of the next one.
    """

    name: str
    output: str
    class_axis: int = -1
    ignore_index: int | None = None
    shift: bool = False


@dataclass(frozen=True)
class TorchStep:
    """The results of PyTorch.

    Attributes:
        labels: the labels or targets.
        loss: in training mode.
        eval_loss: in eval mode.
        own_loss: the loss that the model itself computes for these labels, in eval mode; None if it computes none.
        gradients: by the name of the parameter, with all names of a tied one, or of the input.
    """

    labels: NDArray[Any]
    loss: float
    eval_loss: float
    own_loss: float | None
    gradients: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class TorchModel:
    """A transformers model with inputs for it.

    Attributes:
        model: in float32, on the CPU.
        sample: its inputs by name, as tensors.
    """

    model: Any
    sample: Mapping[str, Any]

    def inputs(self) -> dict[str, NDArray[Any]]:
        """Return the sample as arrays."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.sample.items()}

    def step(
        self,
        setting: LossSetting,
        trained: Collection[str],
        inputs: Collection[str] = (),
        adapters: Mapping[str, Any] | None = None,
    ) -> TorchStep:
        """Compute loss and gradients, also those of `inputs`, and of the `adapters` that `adapted` has given.

        Batch normalizations whose parameters are not `trained` stay in eval mode.
        """
        import torch

        model = self.model.eval()
        with torch.no_grad():
            logits = self._output(setting.output, self.sample)
            labels = _labels(logits, setting)
            eval_loss = float(_loss(logits, labels, setting))
            own = self._own_loss(labels, setting)
        model.train()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not {  # noqa: SLF001 - there is no other
                f"{name}.weight",
                f"{name}.bias",
            } & set(trained):
                module.eval()
        model.zero_grad(set_to_none=True)
        leaves = {name: self.sample[name].detach().clone().requires_grad_() for name in inputs}
        with _scaling_dropout():
            loss = _loss(self._output(setting.output, {**self.sample, **leaves}), labels, setting)
            loss.backward()
        leaves |= adapters or {}
        gradients = {
            name: leaf.grad.numpy()
            for name, leaf in (*model.named_parameters(remove_duplicate=False), *leaves.items())
            if leaf.grad is not None
        }
        return TorchStep(labels.numpy(), loss.item(), eval_loss, own, gradients)

    def _output(self, name: str, sample: Mapping[str, Any]) -> Any:
        result = self.model(**sample)
        return result if not isinstance(result, Mapping) else result[name]

    def _own_loss(self, labels: Any, setting: LossSetting) -> float | None:
        """Return the loss that the model computes from labels; None if it takes no labels, or other labels."""
        import torch

        if setting.output != "logits":
            return None
        given = labels.reshape(-1) if setting.name == "MSELoss" and labels.shape[-1] == 1 else labels
        try:
            loss = self.model(**self.sample, labels=given).loss
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError):
            return None
        return float(loss) if isinstance(loss, torch.Tensor) else None


def _labels(logits: Any, setting: LossSetting) -> Any:
    """Draw labels for logits [B, C] or [B, S, C], a third of them ignored; or targets of the same shape."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    if setting.name != "CrossEntropyLoss":
        targets = torch.rand(logits.shape, generator=generator)
        return targets.round() if setting.name == "BCEWithLogitsLoss" else targets
    sizes = list(logits.shape)
    classes = sizes.pop(setting.class_axis)
    labels = torch.randint(classes, sizes, generator=generator)
    if setting.ignore_index is not None and labels.numel() > 2:
        flat = labels.reshape(-1)
        flat[2::3] = setting.ignore_index
    return labels


def _loss(logits: Any, labels: Any, setting: LossSetting) -> Any:
    """Compute a loss of LossType in PyTorch."""
    from torch.nn import functional

    if setting.name == "CrossEntropyLoss":
        if setting.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        ignored = -100 if setting.ignore_index is None else setting.ignore_index
        return functional.cross_entropy(logits.movedim(setting.class_axis, 1), labels, ignore_index=ignored)
    functions: dict[str, Any] = {
        "MSELoss": functional.mse_loss,
        "L1Loss": functional.l1_loss,
        "BCEWithLogitsLoss": functional.binary_cross_entropy_with_logits,
    }
    return functions[setting.name](logits, labels)


@contextmanager
def adapted(model: TorchModel, lora: Lora | None, values: Mapping[str, NDArray[Any]]) -> Iterator[Mapping[str, Any]]:
    """Add `alpha / r * B(A(x))` to what modules return for x, while the block runs; give A and B by name."""
    import torch

    hooks: list[Any] = []
    adapters: dict[str, Any] = {}
    scale = 1.0 if lora is None else lora.scale
    for adapter in () if lora is None else lora.adapters:
        down, up = (torch.tensor(values[name], requires_grad=True) for name in (adapter.down, adapter.up))

        def hook(_module: Any, inputs: Any, output: Any, *, down: Any = down, up: Any = up) -> Any:
            return output + scale * (inputs[0] @ down.t() @ up.t())

        hooks.append(model.model.get_submodule(adapter.module).register_forward_hook(hook))
        adapters |= {adapter.down: down, adapter.up: up}
    try:
        yield adapters
    finally:
        for handle in hooks:
            handle.remove()


@contextmanager
def _scaling_dropout() -> Iterator[None]:
    """Let dropout scale its input, and drop nothing."""
    from torch.nn import functional

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002 - PyTorch's name
        return input / (1 - p) if training and p < 1 else input

    original = functional.dropout
    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = original
