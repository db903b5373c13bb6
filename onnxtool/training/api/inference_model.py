"""Make an inference model from an eval model and trained parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray

from onnxtool.errors import ArtifactError
from onnxtool.model_file import ModelFile, save_model, staged


def export_inference_model(
    eval_model: Path, parameters: Mapping[str, NDArray[Any]], outputs: Sequence[str], path: Path
) -> None:
    """Write a model that computes `outputs`, values of the eval model, with the parameters as initializers.

    Raises:
        ArtifactError: the eval model has no value with that name.
        OutputWriteError: it cannot be written.
    """
    model = ir.load(ModelFile.open(eval_model).path)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    for name in outputs:
        if name not in values:
            close = get_close_matches(name, values, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "look at its values with onnxtool stats"
            raise ArtifactError(f"{eval_model} has no value called {name!r}", hint)
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in outputs)
    common.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        name = str(value.name)
        if name in parameters or not (value.uses() or value.is_graph_output()):
            graph.inputs.remove(value)
        if name in parameters and value.uses():
            value.const_value = ir.tensor(parameters[name], name=name)
            graph.register_initializer(value)
    with staged(path, force=True) as staging:
        save_model(model, staging)
