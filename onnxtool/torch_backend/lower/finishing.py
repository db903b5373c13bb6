"""Makes a translated model ready for a session: constants folded, nodes fused and corrected, no unused inputs."""

from __future__ import annotations

import onnx_ir as ir
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.errors import CompilationError
from onnxtool.graph.exact_rules import exact_optimizer
from onnxtool.torch_backend.lower.decisions import ONNX_CORRECTIONS, RACY_ONNX
from onnxtool.torch_backend.lower.onnx_fusions import fuse
from onnxtool.torch_backend.lower.torch_onnx import quiet
from onnxtool.torch_backend.run.sessions import INPUTS_KEY, NUM_NODES_KEY


def racy_nodes(model: ir.Model) -> list[str]:
    """Return the names of nodes whose result depends on the order in which threads run."""
    found: list[str] = []
    for node in model.graph:
        body = model.functions.get(node.op_identifier())
        if any(_is_racy(inner) for inner in (node, *(body or ()))):
            found.append(node.name or "")
    return found


def _is_racy(node: ir.Node) -> bool:
    attribute = node.attributes.get(RACY_ONNX.get((node.domain, node.op_type), ""))
    return attribute is not None and attribute.as_string() != "none"


def finish(model: ir.Model, num_inputs: int, num_outputs: int, *, optimize: bool) -> ir.Model:
    """Return `model` with the positions of the inputs that it takes, and its number of nodes, in its metadata.

    Raises:
        CompilationError: its inputs and outputs are not those of the graph.
    """
    if (len(model.graph.inputs), len(model.graph.outputs)) != (num_inputs, num_outputs):
        raise CompilationError(
            f"the converter made {len(model.graph.inputs)} inputs and {len(model.graph.outputs)} outputs of "
            f"{num_inputs} and {num_outputs}",
            "a converter keeps the placeholders and the outputs of the graph, in their order",
        )
    if optimize:
        from onnxscript import optimizer

        with unset_fake_temporarily(), quiet(), exact_optimizer():
            optimizer.optimize(model, onnx_shape_inference=False)
            fuse(model)
    for node in list(model.graph):
        if not node.domain and (correct := ONNX_CORRECTIONS.get(node.op_type)):
            correct(model.graph, node)
    _separate_outputs(model.graph)
    inputs = list(model.graph.inputs)
    used = [index for index, value in enumerate(inputs) if value.uses()]
    model.graph.inputs.clear()
    model.graph.inputs.extend(inputs[index] for index in used)
    model.metadata_props[INPUTS_KEY] = " ".join(map(str, used))
    model.metadata_props[NUM_NODES_KEY] = str(len(model.graph))
    return model


def _separate_outputs(graph: ir.Graph) -> None:
    """Give each output a value of its own: onnxruntime takes no input as an output, and no value twice."""
    seen: set[int] = set()
    for index, value in enumerate(graph.outputs):
        if id(value) not in seen and not value.is_graph_input() and not value.is_initializer():
            seen.add(id(value))
            continue
        copy = ir.Value(name=f"{value.name}_output_{index}", shape=value.shape, type=value.type)
        graph.append(ir.Node("", "Identity", [value], outputs=[copy], name=f"{value.name}:output_{index}"))
        graph.outputs[index] = copy
        seen.add(id(copy))
