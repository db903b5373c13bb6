"""Prepare a model for differentiation: inline its own functions, and convert it to a recent opset."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.errors import GradientError
from onnxtool.model_file.domains import default_opset, settle_imports
from onnxtool.options import checked

LOWEST_OPSET = 18  # before, ScatterElements has no reduction max, and the axes of ReduceMean are an attribute


@checked
def prepare(model: ir.Model) -> None:
    """Inline the functions of `model`, and convert it to opset 18 if it is older; it is changed in place.

    Raises:
        GradientError: it cannot be converted, or a function cannot be inlined.
    """
    from onnxscript.version_converter import convert_version

    for opset_imports in (model.opset_imports, *(one.opset_imports for one in model.functions.values())):
        settle_imports(opset_imports)
    try:
        common.InlinePass()(model)
    except ValueError as error:  # such as a function of another opset than the graph
        raise GradientError(
            f"a function of the model cannot be inlined: {(str(error).splitlines() or [''])[0]}",
            "export it again, with functions of the opset of the graph or without them",
        ) from error
    opset = default_opset(model.opset_imports)
    if opset >= LOWEST_OPSET:
        return
    order = list(model.graph.initializers)
    convert_version(model, LOWEST_OPSET, fallback=True)
    # The conversion moves large ones behind small ones, and buffers of all parameters are in this order.
    initializers = model.graph.initializers
    for name in [name for name in order if name in initializers] + [name for name in initializers if name not in order]:
        model.graph.register_initializer(initializers.pop(name))
    if default_opset(model.opset_imports) < LOWEST_OPSET:
        raise GradientError(
            f"the model is of opset {opset} and cannot be converted to {LOWEST_OPSET}",
            f"export it again with opset {LOWEST_OPSET} or later",
        )


def check_prepared(model: ir.Model) -> None:
    """Refuse a model that needs `prepare` first.

    Raises:
        GradientError: the opset is too old, or nodes call functions of the model.
    """
    if default_opset(model.opset_imports) < LOWEST_OPSET:
        raise GradientError(
            f"the model is of opset {default_opset(model.opset_imports)}, and gradients need {LOWEST_OPSET}",
            "convert it with onnxtool.autodiff.prepare",
        )
    called = sorted({node.op_type for node in model.graph if node.op_identifier() in model.functions})
    if called:
        raise GradientError(
            f"the model calls functions of its own: {', '.join(called)}",
            "inline them with onnxtool.autodiff.prepare",
        )
