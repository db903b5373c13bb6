"""Figures of one ONNX file, for `stats` and for `optimize` before and after."""

from __future__ import annotations

from collections import Counter

from onnxtool.model_file import ModelFile
from onnxtool.model_file.domains import ALIAS
from onnxtool.model_file.metadata import STEPS_KEY, License, parse_steps
from onnxtool.model_file.wire import Structure
from onnxtool.options import StrPath
from onnxtool.summary.duplicates import find_duplicates
from onnxtool.summary.figures import FunctionFigures, Layer, Stats, Weight
from onnxtool.summary.releases import Usage, least_onnxruntime

NO_SCOPE = "(no scope)"  # nodes and weights outside any named module
_MAX_LARGEST = 10
_MAX_DUPLICATES = 20
# The operators that result from each kind of fusion.
FUSED_OPERATORS: dict[str, frozenset[str]] = {
    "attention": frozenset(
        f"com.microsoft::{name}"
        for name in (
            *("Attention", "DecoderAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention"),
            *("GroupQueryAttention", "LongformerAttention", "MultiHeadAttention", "PackedAttention"),
            *("PackedMultiHeadAttention", "PagedAttention", "QAttention", "QOrderedAttention"),
            *("QOrderedLongformerAttention", "SparseAttention"),
        )
    ),
    "layer_normalization": frozenset(
        {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
        | {"com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization"}
        | {"com.microsoft::EmbedLayerNormalization"}
    ),
    "gelu": frozenset({"Gelu"} | {f"com.microsoft::{name}" for name in ("Gelu", "BiasGelu", "FastGelu", "QuickGelu")}),
}
"""Kind to operators, named as in `Stats.ops`; an operator of ONNX has no domain in its name."""


def summarize_model(path: StrPath) -> Stats:
    """Summarize the structure of the ONNX file at `path`.

    Raises:
        ModelFileError: the file or its external data is missing, malformed, or outside the folder of the file.
    """
    return summarize_file(ModelFile.open(path))


def summarize_file(model: ModelFile) -> Stats:
    """Summarize the structure of a model that is already open.

    Raises:
        ModelFileError: its weights cannot be read.
    """
    structure = model.structure
    initializer_bytes: Counter[str] = Counter()
    parameters = Counter(structure.constants)
    for tensor in structure.initializers:
        initializer_bytes[tensor.dtype] += tensor.size_bytes
        parameters[tensor.dtype] += tensor.num_elements
    duplicates = find_duplicates(model)
    license_ = License.of_file(structure.metadata)
    return Stats(
        path=str(model.path),
        size_bytes=model.size_bytes,
        ir_version=structure.ir_version,
        producer=structure.producer,
        opsets=structure.opsets,
        num_nodes=structure.num_nodes,
        num_inputs=len(structure.inputs),
        num_outputs=len(structure.outputs),
        num_initializers=len(structure.initializers),
        num_parameters=sum(parameters.values()),
        inputs=structure.inputs,
        outputs=structure.outputs,
        ops=structure.ops,
        metadata=model.metadata,
        initializer_bytes=_largest_first(initializer_bytes),
        duplicate_bytes=sum(duplicate.size_bytes for duplicate in duplicates),
        num_functions=len(structure.functions),
        num_subgraphs=structure.num_subgraphs,
        external_bytes=model.size_bytes - model.path.stat().st_size,
        domains=_domains(structure),
        parameters=_largest_first(parameters),
        attribute_bytes=structure.attribute_bytes,
        num_attentions=sum(count for op, count in structure.ops.items() if is_attention(op)),
        min_onnxruntime=_least_onnxruntime(structure),
        largest=_largest(structure),
        duplicates=duplicates[:_MAX_DUPLICATES],
        layers=_layers(structure),
        functions=tuple(
            FunctionFigures(f"{function.domain}::{function.name}", sum(function.ops.values()), function.opsets)
            for function in structure.functions
        ),
        steps=parse_steps(structure.metadata.get(STEPS_KEY, "[]")) or (),
        license=license_.id,
        license_name=license_.name,
        license_link=license_.link,
    )


def _least_onnxruntime(structure: Structure) -> str:
    usages = {operator: Usage() for function in structure.functions for operator in function.ops}
    for operator, inputs in structure.most_inputs.items():
        usages[operator] = Usage(inputs, structure.given_inputs[operator], structure.attributes[operator])
    return least_onnxruntime(structure.ir_version, structure.opsets, usages)


def _largest_first(amounts: Counter[str]) -> dict[str, int]:
    return dict(sorted(amounts.items(), key=lambda item: (-item[1], item[0])))


def _domains(structure: Structure) -> dict[str, int]:
    domains: Counter[str] = Counter()
    for op, count in structure.ops.items():
        domain, separator, _ = op.rpartition("::")
        domains[domain if separator else ALIAS] += count
    return _largest_first(domains)


def _largest(structure: Structure) -> tuple[Weight, ...]:
    tensors = sorted(structure.initializers, key=lambda tensor: (-tensor.size_bytes, tensor.name))[:_MAX_LARGEST]
    return tuple(Weight(tensor.name, tensor.dtype, tensor.dims, tensor.size_bytes) for tensor in tensors)


def _layers(structure: Structure) -> dict[str, Layer]:
    """Return nodes and bytes of each part of the model, in natural order: layer 2 before layer 10."""
    scopes = sorted({*structure.scopes, *structure.scope_bytes} - {""}, key=_by_numbers)
    layers = {scope: Layer(structure.scopes.get(scope, 0), structure.scope_bytes.get(scope, 0)) for scope in scopes}
    unscoped = Layer(structure.scopes.get("", 0), structure.scope_bytes.get("", 0))
    return layers | {NO_SCOPE: unscoped} if layers and any(unscoped) else layers


def _by_numbers(scope: str) -> tuple[tuple[bool, int, str], ...]:
    return tuple(
        # Python refuses to parse thousands of digits, and no layer has such a number.
        (False, int(part), "") if part.isascii() and part.isdecimal() and len(part) < 10 else (True, 0, part)
        for part in scope.split(".")
    )


def is_attention(operator: str) -> bool:
    """Whether an operator computes a whole attention; ONNX's does, and so does one of the same name in any domain."""
    return f"com.microsoft::{operator.rpartition(':')[2]}" in FUSED_OPERATORS["attention"]
