"""Trace a PyTorch model into an onnx_ir model: through transformers.exporters (dynamo) or TorchScript.

The only module with workarounds for these two exporters. Tested with torch 2.13 and transformers 5.23.
"""

from __future__ import annotations

import gc
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtool.errors import ExportError
from onnxtool.export.signature import Signature
from onnxtool.export.torchscript import trace_torchscript
from onnxtool.graph.exact_rules import exact_optimizer
from onnxtool.model_file.domains import default_opset
from onnxtool.runtime.quiet import quiet, quiet_stdout_descriptor


@dataclass(frozen=True)
class Exporter:
    """A tracer of PyTorch models.

    Attributes:
        attentions: the attention implementations to load the model with, in the order to try them; None leaves the
            choice to transformers.
        trace: (model, sample inputs as tensors, signature, opset or None) -> graph.
    """

    name: str
    attentions: tuple[str | None, ...]
    trace: Callable[[Any, Mapping[str, Any], Signature, int | None], ir.Model]


def trace(
    exporter: Exporter,
    model: Any,
    sample: Mapping[str, Any],
    signature: Signature,
    opset: int | None,
    *,
    timeout_s: float | None = None,
) -> ir.Model:
    """Trace `model` on `sample` (input name to tensor, no dynamic axis of size 1) with the signature's axes dynamic.

    Raises:
        ExportError: the model cannot be traced, or not at this opset, or not in `timeout_s`.
    """
    return guarded(
        lambda: exporter.trace(model, sample, signature, opset),
        subject=f"{exporter.name} cannot trace {type(model).__name__}",
        exporter=exporter.name,
        opset=opset,
        hint="try the other --exporter",
        timeout_s=timeout_s,
    )


def guarded(
    run: Callable[[], ir.Model],
    *,
    subject: str,
    exporter: str,
    opset: int | None,
    hint: str,
    timeout_s: float | None = None,
) -> ir.Model:
    """Run a trace with nothing printed and no garbage collected.

    Args:
        run: the trace.
        subject: what the error says failed, e.g. `dynamo cannot trace BertModel`.
        exporter: which exporter writes the graph.
        opset: what it has to be of; None for the exporter's own.
        hint: the way out of a failure.
        timeout_s: how long it may take; None for as long as it takes.

    Raises:
        ExportError: the trace failed, or gave another opset.
    """
    with quiet() as said, quiet_stdout_descriptor(), _garbage_kept(), _deadline(timeout_s):
        try:
            graph = run()
        except Exception as error:  # exporters fail with whatever an operator, a guard or a pass of theirs raises
            printed = said.getvalue()[-2000:]
            raise ExportError(f"{subject}: {reason_of(error)}", f"{hint}\n{printed}" if printed else hint) from error
    found = default_opset(graph.opset_imports)
    if opset is not None and found != opset:
        raise ExportError(
            f"{exporter} wrote opset {found}, not {opset}", "leave --opset out, or try --exporter torchscript"
        )
    return graph


@contextmanager
def _deadline(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, where the system can interrupt Python code."""
    is_possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not is_possible:
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect no garbage while the block runs: a trace makes millions of objects that live as long as it does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _trace_dynamo(model: Any, sample: Mapping[str, Any], signature: Signature, opset: int | None) -> ir.Model:
    from torch.export import Dim
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    axes = {
        name: {axis: Dim.DYNAMIC for axis, size in enumerate(signature.inputs[name]) if isinstance(size, str)}
        for name in sample
    }
    config = OnnxConfig(dynamic=True, dynamic_shapes=axes, opset_version=opset)
    with operators_apart(), exact_optimizer():
        graph: ir.Model = OnnxExporter().export(model, dict(sample), config=config).program
    return graph


def operators_apart() -> AbstractContextManager[object]:
    """Decompose two operators while the block runs, as transformers' exporter does with others: ONNX has none for them.

    These are an index of a complex tensor (Llama 4 keeps its rotary embeddings as complex numbers) and the inverse of
    the error function (Gemma 3n works out how many activations it keeps). A patch of Tensor.__getitem__ would do it as
    well, and would leave the class changed for good: Python then takes every tensor for a sequence, and no TorchScript
    trace in this process works any more. Tested with transformers 5.23.
    """
    import torch

    index = torch.Tensor.__getitem__
    inverses = (torch.erfinv, torch.Tensor.erfinv, torch.special.erfinv)

    class Apart(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by mypy
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Index the real and the imaginary part on their own; search for the inverse."""
            if function is index and torch.is_complex(args[0]):
                tensor, position = args
                return torch.complex(index(tensor.real, position), index(tensor.imag, position))
            if function in inverses and not kwargs:
                return _inverse_error_function(*args)
            return function(*args, **(kwargs or {}))

    return Apart()


def _inverse_error_function(value: Any) -> Any:
    """Find x with erf(x) = value, which is within -1 and 1: Winitzki's formula, then two of Halley's steps.

    S. Winitzki, A handy approximation for the error function and its inverse (2008); it is right to 0.002, and each
    step triples the digits.
    """
    import torch

    constant = 0.147
    logarithm = torch.log(1 - value * value)
    middle = 2 / (math.pi * constant) + logarithm / 2
    found = torch.sign(value) * torch.sqrt(torch.sqrt(middle * middle - logarithm / constant) - middle)
    for _ in range(2):
        newton = (torch.erf(found) - value) * math.sqrt(math.pi) / 2 * torch.exp(found * found)
        found = found - newton / (1 + found * newton)
    return found


def _trace_torchscript(model: Any, sample: Mapping[str, Any], signature: Signature, opset: int | None) -> ir.Model:
    return trace_torchscript(model, sample, signature.inputs, signature.outputs, opset)


EXPORTERS: tuple[Exporter, ...] = (
    Exporter("dynamo", (None, "eager"), _trace_dynamo),
    # onnxruntime's attention fusions know the shape of eager attention under TorchScript.
    Exporter("torchscript", ("eager",), _trace_torchscript),
)


def reason_of(error: BaseException) -> str:
    """Return the type and the first line of what caused an error in the first place."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
