"""Describe an ONNX file, without reading its weights, or the difference between two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire.topology import read_topology
from onnxtool.options import NOTHING, Many, Option, Options, StrPath, checked
from onnxtool.reports import Json, TensorInfo, to_json
from onnxtool.summary import summarize_file
from onnxtool.summary import summarize_model as summarize_model
from onnxtool.summary.duplicates import hash_weights
from onnxtool.summary.figures import Change, Difference, MappingDelta, Stats, StatsDelta, Weight
from onnxtool.summary.wiring import compare_wiring


class Settings(Options):
    """The gates to check.

    Attributes:
        fail_if: gates. Relative gates from a configuration file are only checked if there is a base.
    """

    fail_if: Annotated[
        Many[str],
        Option(
            "Exit with 1 if this holds: a figure of the JSON report, one of > >= < <= == !=, and a number; with a "
            "sign, and optionally %, the number is relative to BASE. E.g. 'num_nodes>500', 'ops.MatMul!=98', "
            "'size_bytes>+5%', 'count(delta.inputs.removed)>0'. Texts are compared with == and !=: "
            "'license!=apache-2.0'. May be given several times.",
            metavar="EXPR",
        ),
    ] = NOTHING
    allowed_licenses: Annotated[
        Many[str],
        Option(
            "Exit with 1 unless the license of MODEL is one of these: an SPDX id, or the name of another license. An "
            "unknown license never matches. May be given several times.",
            metavar="ID",
        ),
    ] = NOTHING
    weights: Annotated[
        bool, Option("Compare the weights with BASE by their data, not only dtype and shape; reads both files.")
    ] = True


@checked
def compare_models(model: StrPath, base: StrPath, *, weights: bool = True) -> Difference:
    """Compare the ONNX file at `model` with the one at `base`.

    Args:
        model: the reviewed file.
        base: the file to compare it with.
        weights: whether to compare the data of the weights, by hash; each file is then read completely.

    Raises:
        ModelFileError: a file or its external data is missing, malformed, or outside the folder of the file.
    """
    files = ModelFile.open(model), ModelFile.open(base)
    after, before = map(summarize_file, files)
    of_model, of_base = (_weights_of(file, hashed=weights) for file in files)
    difference = compare_stats(after, before, of_model, of_base)
    now, then = (read_topology(file.path) for file in files)
    edges = compare_wiring(now, then, of_model, of_base)
    return difference._replace(delta=difference.delta._replace(edges=edges))


def compare_stats(
    model: Stats,
    base: Stats,
    weights: Mapping[str, Weight] | None = None,
    base_weights: Mapping[str, Weight] | None = None,
) -> Difference:
    """Compare two summaries; numeric differences are the model's value minus the base's.

    Args:
        model: the reviewed model.
        base: the model to compare it with.
        weights: the model's initializers by name; without them and `base_weights`, none are compared.
        base_weights: the base's.
    """
    after, before = weights or {}, base_weights or {}
    initializers, renamed = _compare_weights(after, before)
    delta = StatsDelta(
        num_nodes=model.num_nodes - base.num_nodes,
        num_initializers=model.num_initializers - base.num_initializers,
        num_parameters=model.num_parameters - base.num_parameters,
        size_bytes=model.size_bytes - base.size_bytes,
        duplicate_bytes=model.duplicate_bytes - base.duplicate_bytes,
        ops=_compare_mappings(model.ops, base.ops),
        inputs=_compare_mappings(_by_name(model.inputs), _by_name(base.inputs)),
        outputs=_compare_mappings(_by_name(model.outputs), _by_name(base.outputs)),
        opsets=_compare_mappings(model.opsets, base.opsets),
        metadata=_compare_mappings(model.metadata, base.metadata),
        num_attentions=model.num_attentions - base.num_attentions,
        weights=initializers,
        hashed=any(weight.sha256 for weight in after.values()),
        num_not_hashed=sum(
            weight.size_bytes > 0 and not weight.sha256 and _describe(weight) == _describe(before[name])
            for name, weight in after.items()
            if name in before
        ),
        renamed=renamed,
        layers=_compare_mappings(
            {name: to_json(layer) for name, layer in model.layers.items()},
            {name: to_json(layer) for name, layer in base.layers.items()},
        ),
        functions=_compare_mappings(
            {function.name: to_json(function) for function in model.functions},
            {function.name: to_json(function) for function in base.functions},
        ),
    )
    return Difference(base=base, model=model, delta=delta)


def _weights_of(file: ModelFile, *, hashed: bool) -> dict[str, Weight]:
    """Return the initializers of a model by name; if bodies of If and Loop share a name, the last one."""
    hashes = hash_weights(file) if hashed else {}
    return {
        tensor.name: Weight(tensor.name, tensor.dtype, tensor.dims, tensor.size_bytes, hashes.get(tensor.name, ""))
        for tensor in file.structure.initializers
    }


def _compare_weights(model: Mapping[str, Weight], base: Mapping[str, Weight]) -> tuple[MappingDelta, dict[str, str]]:
    """Compare initializers by name; with hashes, an initializer whose name alone changed is listed as renamed."""
    gone = {_content(base[name]): name for name in sorted(base.keys() - model.keys(), reverse=True)}
    renamed = {}
    for name in sorted(model.keys() - base.keys()):
        content = _content(model[name])
        if content is not None and content in gone:
            renamed[gone.pop(content)] = name
    new_names = frozenset(renamed.values())
    delta = _compare_mappings(
        {name: _describe(weight) for name, weight in model.items() if name not in new_names},
        {name: _describe(weight) for name, weight in base.items() if name not in renamed},
    )
    return delta, dict(sorted(renamed.items()))


def _content(weight: Weight) -> tuple[str, tuple[int, ...], str] | None:
    return (weight.dtype, weight.shape, weight.sha256) if weight.sha256 else None


def _describe(weight: Weight) -> Json:
    described: dict[str, Json] = {"dtype": weight.dtype, "shape": list(weight.shape)}
    return described | {"sha256": weight.sha256} if weight.sha256 else described


def _by_name(tensors: Iterable[TensorInfo]) -> dict[str, Json]:
    return {tensor.name: {"dtype": tensor.dtype, "shape": to_json(tensor.shape)} for tensor in tensors}


def _compare_mappings(model: Mapping[str, Json], base: Mapping[str, Json]) -> MappingDelta:
    return MappingDelta(
        added={name: model[name] for name in sorted(model.keys() - base.keys())},
        removed={name: base[name] for name in sorted(base.keys() - model.keys())},
        changed={
            name: Change(before=base[name], after=model[name])
            for name in sorted(model.keys() & base.keys())
            if model[name] != base[name]
        },
    )
