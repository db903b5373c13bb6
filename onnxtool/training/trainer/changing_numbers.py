"""Numbers of a loss that a schedule changes: tensors while a step runs, so that no step is compiled for its number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


class ChangingNumbers:
    """Passes Python numbers that changed since an earlier step to the compiled step as float32 tensors [].

    TorchDynamo compiles the value of a module's number into the graph. The weights of the regularizers of
    sentence-transformers' SpladeLoss, for example, grow at every step. A number that never changes stays what it is,
    because a loss may decide by it.
    """

    def __init__(self, loss: object, model: torch.nn.Module) -> None:
        """Find the modules whose numbers are watched.

        Args:
            loss: a module, or modules by name; anything else has no numbers.
            model: whose modules are not watched: a layer may need its number as a number.
        """
        parts: Iterable[Any] = loss.values() if isinstance(loss, Mapping) else (loss,)
        of_model = set(model.modules())
        found = (module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules())
        self._modules = [module for module in found if module not in of_model]
        self._first: dict[tuple[int, str], float] = {}
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Put the tensors in the place of the numbers, and the numbers back at the end."""
        changed: list[tuple[dict[str, Any], str, float, torch.Tensor]] = []
        for index, module in enumerate(self._modules):
            attributes = vars(module)
            for name, value in attributes.items():
                key = index, name
                if type(value) is float and (key in self._tensors or self._first.setdefault(key, value) != value):
                    tensor = self._tensors.setdefault(key, torch.empty(()))
                    changed.append((attributes, name, value, tensor.fill_(value)))
        try:
            for attributes, name, _, tensor in changed:
                attributes[name] = tensor
            yield
        finally:
            for attributes, name, value, _ in changed:
                attributes[name] = value
