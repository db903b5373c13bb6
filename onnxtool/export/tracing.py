"""Trace a PyTorch model into an onnx_ir model: through transformers.exporters (dynamo) or TorchScript.

The one module that knows the quirks of these two. Tested with torch 2.13 and transformers 5.23.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.errors import ExportError
from onnxtool.export.signature import Signature
from onnxtool.runtime.quiet import quiet

if TYPE_CHECKING:
    import onnx_ir as ir

# Newer opsets than this are not written by torch's TorchScript exporter with all of its operators.
_TORCHSCRIPT_OPSET = 17


@dataclass(frozen=True)
class Exporter:
    """One way to trace.

    Attributes:
        attentions: the attention implementations to load the model with, in the order to try them; None leaves the
            choice to transformers.
        trace: (model, sample inputs as tensors, signature, opset or None) -> graph.
    """

    name: str
    attentions: tuple[str | None, ...]
    trace: Callable[[Any, Mapping[str, Any], Signature, int | None], ir.Model]


def trace(
    exporter: Exporter, model: Any, sample: Mapping[str, Any], signature: Signature, opset: int | None
) -> ir.Model:
    """Trace `model` on `sample` (input name to tensor, no dynamic axis of size 1) with the signature's axes dynamic.

    Raises:
        ExportError: the model cannot be traced, or not at this opset.
    """
    with quiet() as said:
        try:
            graph = exporter.trace(model, sample, signature, opset)
        except Exception as error:
            raise ExportError(
                f"{exporter.name} cannot trace {type(model).__name__}: {_reason(error)}",
                "try the other --exporter" + (f"\n{said.getvalue()[-2000:]}" if said.getvalue() else ""),
            ) from error
    found = graph.opset_imports.get("", 0)
    if opset is not None and found != opset:
        raise ExportError(
            f"{exporter.name} wrote opset {found}, not {opset}", "leave --opset out, or try --exporter torchscript"
        )
    return graph


def _trace_dynamo(model: Any, sample: Mapping[str, Any], signature: Signature, opset: int | None) -> ir.Model:
    from torch.export import Dim
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    axes = {
        name: {axis: Dim.DYNAMIC for axis, size in enumerate(signature.inputs[name]) if isinstance(size, str)}
        for name in sample
    }
    config = OnnxConfig(dynamic=True, dynamic_shapes=axes, opset_version=opset)
    graph: ir.Model = OnnxExporter().export(model, dict(sample), config=config).program
    return graph


def _trace_torchscript(model: Any, sample: Mapping[str, Any], signature: Signature, opset: int | None) -> ir.Model:
    import onnx_ir as ir
    import torch

    outputs = tuple(signature.outputs)
    axes = {
        name: {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in (signature.inputs | signature.outputs).items()
    }
    with tempfile.TemporaryDirectory() as folder, _strides_of_contiguous_tensors():
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            _as_module(model, tuple(sample), outputs),
            tuple(sample.values()),
            path,
            input_names=list(sample),
            output_names=list(outputs),
            dynamic_axes=axes,
            opset_version=opset or _TORCHSCRIPT_OPSET,
            do_constant_folding=True,
            dynamo=False,
        )
        return ir.external_data.load_to_model(ir.load(path))


@contextlib.contextmanager
def _strides_of_contiguous_tensors() -> Iterator[None]:
    """Let `as_strided` see contiguous tensors, which is how ONNX lays them out; Longformer's windows are made by it.

    Of a view, the strides that it asks for are those of the view's own memory; each is scaled to what it would be.
    """
    import torch

    original = torch.Tensor.as_strided

    def as_strided(tensor: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if tensor.is_contiguous() or storage_offset or len(stride) != tensor.dim():
            return original(tensor, size, stride, storage_offset)
        contiguous = tensor.contiguous()
        pairs = zip(stride, tensor.stride(), contiguous.stride(), strict=True)
        return original(contiguous, size, [int(wanted * after // before) for wanted, before, after in pairs])

    torch.Tensor.as_strided = as_strided
    try:
        yield
    finally:
        torch.Tensor.as_strided = original


def _as_module(model: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """Give `model` positional inputs and a tuple of outputs, which is all that TorchScript traces."""
    import torch

    class Positional(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            result = self.model(**dict(zip(inputs, tensors, strict=True)))
            return (result,) if isinstance(result, torch.Tensor) else tuple(result[name] for name in outputs)

    return Positional().eval()


EXPORTERS: tuple[Exporter, ...] = (
    Exporter("dynamo", (None, "eager"), _trace_dynamo),
    # onnxruntime's attention fusions know the shape of eager attention under TorchScript.
    Exporter("torchscript", ("eager",), _trace_torchscript),
)
EXPORTER_NAMES = ("auto", *(exporter.name for exporter in EXPORTERS))


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
