"""Tell layers that a configuration does not count from weights that another head left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def surplus_layers(model: Any, unused: Iterable[str]) -> list[str]:
    """Return the weights among `unused` that belong to layers of which the model has others, or an empty list.

    A weight is of such a layer where the model has one of the same name but for its numbers
    (`stages.0.blocks.1.weight` beside `stages.0.blocks.0.weight`), or where a list of layers that its name goes
    through has none. Both are layers that the checkpoint was trained with; what remains of another head is neither.

    Args:
        model: a transformers model, loaded.
        unused: the weights of its checkpoint that it has no place for.
    """
    import torch

    known = {_pattern(name) for name in model.state_dict()}
    empty = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and not len(module)
    }
    base = f"{getattr(model, 'base_model_prefix', '')}."
    return sorted(
        weight
        for weight in unused
        # A checkpoint of the base model alone has no prefix, and a model that is the base has none.
        if any(
            (_NUMBER.search(name) and _pattern(name) in known) or not empty.isdisjoint(_lists(name))
            for name in (weight, base + weight, weight.removeprefix(base))
        )
    )


def _pattern(name: str) -> str:
    return _NUMBER.sub("#", name)


def _lists(name: str) -> Iterator[str]:
    """Yield what the numbers in a name count the members of: `decoder.block` of `decoder.block.3.weight`."""
    for match in _NUMBER.finditer(name):
        yield name[: match.start() - 1]
