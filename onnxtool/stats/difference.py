"""Say what separates two ONNX files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from onnxtool.reports import Change, Difference, Json, MappingDelta, Stats, StatsDelta, TensorInfo, to_json
from onnxtool.summary import summarize_model


def compare_models(model: Path, base: Path) -> Difference:
    """Compare the structure of the ONNX file at `model` with that at `base`. Values of weights are not compared.

    Raises:
        ModelFileError: a file or its external data is missing, malformed, or outside the folder of the file.
    """
    return compare_stats(summarize_model(model), summarize_model(base))


def compare_stats(model: Stats, base: Stats) -> Difference:
    """Compare two summaries; numbers are the model's minus the base's."""
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
    )
    return Difference(base=base, model=model, delta=delta)


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
