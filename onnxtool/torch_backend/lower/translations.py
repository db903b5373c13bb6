"""Knows which operators torch.onnx translates; kept on disk, because asking it takes a second of a process's start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from onnxtool.torch_backend.lower import torch_onnx as conversion
from onnxtool.torch_backend.lower.denylist import WRONG_TRANSLATIONS
from onnxtool.torch_backend.run.cache import Cache, versions


@dataclass(frozen=True)
class Translations:
    """Names of operators that have a translation, for real and for complex tensors."""

    real: frozenset[str]
    complex: frozenset[str]

    def has(self, node: torch.fx.Node) -> bool:
        """Whether there is a translation of the node's operator for its types."""
        is_complex = any(_is_complex(argument) for argument in (*node.args, *node.kwargs.values()))
        return conversion.name_of(node.target) in (self.complex if is_complex else self.real)


_known: list[Translations] = []  # one for the process: it is the same whatever asks


def translations() -> Translations:
    """Return what torch.onnx translates."""
    if not _known:
        _known.append(Translations(*map(frozenset, conversion.registered_names())))
    return _known[0]


def recall(cache: Cache) -> None:
    """Take what an earlier process wrote down, or write it down.

    A damaged record can make an operator stay in PyTorch, or fail to be translated and stay then; nothing worse.

    Raises:
        OutputWriteError: the folder cannot be written to.
    """
    if not cache.folder:
        return
    key = hashlib.sha256(f"{versions()} {sorted(op.name() for op in WRONG_TRANSLATIONS)}".encode()).hexdigest()
    if found := list(_names(cache.read_json(key))):
        _known[:] = _known or [Translations(*found)]
    else:
        cache.write_json(key, {"real": sorted(translations().real), "complex": sorted(translations().complex)})


def _names(record: object) -> Iterator[frozenset[str]]:
    if isinstance(record, dict) and all(isinstance(record.get(kind), list) for kind in ("real", "complex")):
        yield from (frozenset(map(str, record[kind])) for kind in ("real", "complex"))


def _is_complex(argument: object) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_is_complex, argument))
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()
