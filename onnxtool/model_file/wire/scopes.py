"""Say which part of a model a node or a weight belongs to, by the names that exporters give them.

TorchScript names a node `/bert/encoder/layer.0/attention/self/MatMul`, dynamo notes the scopes in the node's metadata,
and both call a weight as the checkpoint does: `bert.encoder.layer.0.attention.self.query.weight`. All three belong to
the part `bert.encoder.layer.0`: the scope up to its first number, or its first two names where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable

SCOPES_KEY = b"pkg.torch.onnx.name_scopes"

# What dynamo writes for a node that belongs to no module.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_NAMES_WITHOUT_NUMBER = 2
_MAX_LENGTH = 200


def scope_of_node(name: str, scopes: str, inputs: Iterable[str]) -> str:
    """Return the part that a node belongs to, by its scopes, its name or the weights that it reads; empty for none."""
    if scopes:
        # A list as Python prints it: ['', 'bert', 'bert.encoder', …, 'the node itself'].
        parents = scopes.strip("[]").split(", ")[:-1]
        parent = parents[-1].strip("'\"") if parents else ""
        return "" if parent == _NO_MODULE else _part(parent)
    if "/" in name:
        return _part(name.rpartition("/")[0])
    for source in inputs:
        if "/" not in source and (part := scope_of_weight(source)):
            return part
    return ""


def scope_of_weight(name: str) -> str:
    """Return the part that an initializer belongs to by its name; empty where that is no path."""
    if "::" in name:  # a name that an exporter made up, such as onnx::MatMul_1344
        return ""
    return _part(name.rpartition("/" if "/" in name and "." not in name else ".")[0])


def _part(scope: str) -> str:
    names = [name for name in scope.replace("/", ".").split(".") if name]
    number = next((index for index, name in enumerate(names) if name.isdecimal()), _NAMES_WITHOUT_NUMBER - 1)
    return ".".join(names[: number + 1])[:_MAX_LENGTH]
