"""The cases of the onnx package's backend tests: a model with inputs and the outputs that it must give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

LARGER = ("simple", "pytorch-converted", "pytorch-operator")
_READERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tensor_type": (onnx.TensorProto, numpy_helper.to_array),
    "sequence_type": (onnx.SequenceProto, numpy_helper.to_list),
    "optional_type": (onnx.OptionalProto, numpy_helper.to_optional),
}


@dataclass(frozen=True)
class Case:
    """A model and what is fed to it.

    Attributes:
        kind: `node`, `larger` or `fusions`.
        feeds: inputs by their names, one mapping a run.
        expected: the outputs of each run in their order; None where only onnxruntime tells them.
        attentions: how many fused attentions the graph can have.
        model_type: what onnxruntime's optimizer is told.
    """

    name: str
    kind: str
    model: onnx.ModelProto
    feeds: Sequence[dict[str, Any]]
    expected: Sequence[list[Any]] | None = None
    attentions: int = 0
    model_type: str = "bert"

    def flipped(self) -> list[dict[str, Any]]:
        """Return the first inputs with their elements in reversed order: numbers that are as legal in most graphs."""
        return [
            {name: np.flip(value).copy() if isinstance(value, np.ndarray) else value for name, value in given.items()}
            for given in self.feeds[:1]
        ]


def backend_cases(kind: str) -> Iterator[Case]:
    """Yield onnx's cases of one node each (`node`), or the larger ones (`larger`)."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(action="ignore"):  # the expected numbers of some overflow
        tests = [one for name in (LARGER if kind == "larger" else (kind,)) for one in load_model_tests(kind=name)]
    for test in tests:
        model = test.model if test.model_dir is None else onnx.load(Path(test.model_dir, "model.onnx"))
        sets = test.data_sets if test.model_dir is None else list(_stored(model, Path(test.model_dir)))
        weights = {tensor.name for tensor in model.graph.initializer}
        values = [value for value in model.graph.input if value.name not in weights]
        if test.model_dir is None or len(sets[0][0]) == len(model.graph.input):
            values = list(model.graph.input)
        feeds = [{value.name: _as_array(one) for value, one in zip(values, given, strict=False)} for given, _ in sets]
        yield Case(test.name, kind, model, feeds, [[_as_array(one) for one in outputs] for _, outputs in sets])


def _as_array(value: Any) -> Any:
    """Return a scalar or a tensor of onnx as an array; sequences and what is absent as they are."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _stored(model: onnx.ModelProto, folder: Path) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the data sets of a folder: inputs and outputs."""
    for data in sorted(folder.glob("test_data_set_*")):
        yield _read(data, "input", model.graph.input), _read(data, "output", model.graph.output)


def _read(folder: Path, kind: str, values: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    found = []
    for number, value in enumerate(values):
        path = folder / f"{kind}_{number}.pb"
        if path.exists():
            proto, convert = _READERS[str(value.type.WhichOneof("value"))]
            found.append(convert(proto.FromString(path.read_bytes())))
    return found
