"""Trace a PyTorch model into an onnx_ir model, with transformers.exporters (dynamo) or TorchScript, in a given order.

This is the only module with workarounds for these two exporters. Tested with torch 2.13 and transformers 5.23.

torch's TorchScript exporter serializes all weights for every shape inference pass, copies them when folding constants,
writes tied weights twice, and cannot hold 2 GiB. Here, weights enter the trace as inputs of which it knows only dtype
and shape: the resulting graph is small, and its weights are the model's tensors, each stored once and read when the
file is written.
"""

from __future__ import annotations

import gc
import inspect
import io
import math
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

from onnxtool.errors import ExportError
from onnxtool.export.modalities.modality import Axis
from onnxtool.export.signature import Signature, weights_of
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
        ExportError: the model cannot be traced, or not with this opset or within `timeout_s`.
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
    """Run a trace without printing or garbage collection.

    Args:
        run: the trace.
        subject: the start of the error message, e.g. `dynamo cannot trace BertModel`.
        exporter: the exporter that writes the graph.
        opset: the required opset; None for the exporter's default.
        hint: the hint for a failure.
        timeout_s: the time limit; None for no limit.

    Raises:
        ExportError: the trace failed, or has another opset.
    """
    import torch.fx

    # Every node would otherwise record the lines of code that it comes from, only for them to be stripped.
    no_lines = patched(torch.fx.config, do_not_emit_stack_traces=True)
    with quiet() as output, quiet_stdout_descriptor(), _garbage_kept(), no_lines, _deadline(timeout_s):
        try:
            graph = run()
        except Exception as error:  # exporters fail with anything that an operator, guard or pass of theirs raises
            printed = output.getvalue()[-2000:]
            raise ExportError(f"{subject}: {reason_of(error)}", f"{hint}\n{printed}" if printed else hint) from error
    written_opset = default_opset(graph.opset_imports)
    if opset is not None and written_opset != opset:
        raise ExportError(
            f"{exporter} wrote opset {written_opset}, not {opset}", "leave --opset out, or try --exporter torchscript"
        )
    return graph


@contextmanager
def _deadline(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, if the system can interrupt Python code."""
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
    """Disable garbage collection inside the block: a trace makes millions of objects that live as long as it does."""
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
    """Decompose two operators inside the block, as transformers' exporter does with others: ONNX has none for them.

    These are indexing a complex tensor (Llama 4 keeps its rotary embeddings as complex numbers) and the inverse error
    function (Gemma 3n uses it to determine how many activations to keep). Patching Tensor.__getitem__ would also work,
    but would change the class permanently: Python would then treat every tensor as a sequence, and no TorchScript trace
    in this process would work any more. Tested with transformers 5.23.
    """
    import torch

    index = torch.Tensor.__getitem__
    inverses = (torch.erfinv, torch.Tensor.erfinv, torch.special.erfinv)

    class Apart(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by mypy
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Index the real and imaginary parts separately; approximate the inverse."""
            if function is index and torch.is_complex(args[0]):
                tensor, position = args
                return torch.complex(index(tensor.real, position), index(tensor.imag, position))
            if function in inverses and not kwargs:
                return _inverse_error_function(*args)
            return function(*args, **(kwargs or {}))

    return Apart()


def _inverse_error_function(value: Any) -> Any:
    """Find x with erf(x) = value, for values within -1 and 1: Winitzki's formula, then two Halley steps.

    S. Winitzki, A handy approximation for the error function and its inverse (2008); it is accurate to 0.002, and each
    step triples the number of digits.
    """
    import torch

    constant = 0.147
    logarithm = torch.log(1 - value * value)
    middle = 2 / (math.pi * constant) + logarithm / 2
    estimate = torch.sign(value) * torch.sqrt(torch.sqrt(middle * middle - logarithm / constant) - middle)
    for _ in range(2):
        newton = (torch.erf(estimate) - value) * math.sqrt(math.pi) / 2 * torch.exp(estimate * estimate)
        estimate = estimate - newton / (1 + estimate * newton)
    return estimate


def reason_of(error: BaseException) -> str:
    """Return the type and first line of an error's root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


# torch's TorchScript exporter does not write newer opsets with all of its operators.
_OPSET = 17


def trace_torchscript(model: Any, sample: Mapping[str, Any], signature: Signature, opset: int | None) -> ir.Model:
    """Trace `model` on `sample` (input name to tensor) with TorchScript, keeping the weights out of the trace.

    The graph holds its weights under their names in the model, with matrices transposed where the graph needs it, and
    refers to the model's memory until it is saved.
    """
    import torch

    taken = {*signature.inputs, *signature.outputs}
    weights = {name: tensor for name, tensor in weights_of(model, tied=False).items() if name not in taken}
    axes = {
        name: {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in {**signature.inputs, **signature.outputs}.items()
    }
    buffer = io.BytesIO()
    with traceable_calls():
        torch.onnx.export(
            _with_weights_as_inputs(model, tuple(sample), weights, tuple(signature.outputs)),
            (*sample.values(), *(tensor.detach() for tensor in weights.values())),
            buffer,
            input_names=[*sample, *weights],
            output_names=list(signature.outputs),
            dynamic_axes=axes,
            opset_version=opset or _OPSET,
            do_constant_folding=True,
            dynamo=False,
        )
    graph: ir.Model = ir.from_proto(onnx.ModelProto.FromString(buffer.getbuffer()))
    _attach(graph.graph, weights)
    _transpose(graph.graph)
    return graph


def _with_weights_as_inputs(
    model: Any, inputs: tuple[str, ...], weights: Mapping[str, Any], outputs: tuple[str, ...]
) -> Any:
    """Give `model` positional inputs, ending with its own weights, and a tuple of outputs."""
    import torch

    class Stateless(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
        def named_modules(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, Any]]:
            """Yield the modules that nodes are named after; they are not children, which would bring weights."""
            yield "", self
            yield from model.named_modules(prefix="model")

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            traced = dict(zip(weights, tensors[len(inputs) :], strict=True))
            with _replaced(model, {id(weights[name]): tensor for name, tensor in traced.items()}):
                result = model(**dict(zip(inputs, tensors, strict=False)))
            return (result,) if isinstance(result, torch.Tensor) else tuple(result[name] for name in outputs)

    return Stateless().eval()


@contextmanager
def _replaced(model: Any, tensors: Mapping[int, Any]) -> Iterator[None]:
    """Replace the weights with these ids with `tensors` inside the block.

    torch.func.functional_call is meant for this, but refuses to run in a trace.
    """
    places = [
        (own, name, weight)
        for module in model.modules()
        for own in (module._parameters, module._buffers)  # noqa: SLF001  attributes would not accept a plain tensor
        for name, weight in own.items()
        if id(weight) in tensors
    ]
    try:
        for own, name, weight in places:
            own[name] = tensors[id(weight)]
        yield
    finally:
        for own, name, weight in places:
            own[name] = weight


def _attach(graph: ir.Graph, weights: Mapping[str, Any]) -> None:
    """Turn inputs that are weights into initializers; drop unused ones."""
    inputs = {str(value.name): value for value in graph.inputs}
    graph.inputs[:] = [value for name, value in inputs.items() if name not in weights]
    for name, tensor in weights.items():
        value = inputs.get(name)
        if value is not None and value.uses():
            value.const_value = TorchTensor(tensor.detach(), name=name)
            graph.register_initializer(value)


def _transpose(graph: ir.Graph) -> None:
    """Replace `Transpose(weight)` with a transposed weight if nothing uses the original.

    onnxruntime's fusions recognize a MatMul by the weight at its input. A weight used both ways, such as an embedding
    tied to the output layer, keeps its Transpose: onnxruntime resolves that when loading the file.
    """
    for value in list(graph.initializers.values()):
        nodes = [node for node, _ in value.uses()]
        orders = {tuple(node.attributes["perm"].as_ints()) for node in nodes if _transposes(node)}
        if len(orders) != 1 or not all(map(_transposes, nodes)) or value.is_graph_output():
            continue
        tensor: Any = value.const_value
        turned = TorchTensor(tensor.raw.permute(*orders.pop()), name=tensor.name)  # a view: no memory
        value.const_value, value.shape = turned, ir.Shape(turned.shape)
        for node in nodes:
            node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
            graph.remove(node, safe=True)


def _transposes(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.domain == "" and "perm" in node.attributes


# Functions that make a tensor from a shape; torch's exporter writes them as nodes that draw at every run.
_DRAWS = ("rand", "randn", "randint", "randperm")
_UNSEEDED = 0x6F6E6E78746F6F6C


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class, a module or an object inside the block."""
    before = {name: inspect.getattr_static(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def traceable_calls() -> Iterator[None]:
    """Make models traceable that use strides or their own autograd functions, or draw with a seed."""
    with _strides_of_contiguous_tensors(), _autograd_functions_called(), _seeded_draws_as_constants():
        yield


@contextmanager
def _strides_of_contiguous_tensors() -> Iterator[None]:
    """Make `as_strided` see contiguous tensors, as ONNX lays them out; Longformer's windows use it.

    For a view, the requested strides refer to the view's own memory; each is scaled to its contiguous equivalent.
    """
    import torch

    original = torch.Tensor.as_strided

    def as_strided(tensor: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if tensor.is_contiguous() or storage_offset or len(stride) != tensor.dim():
            return original(tensor, size, stride, storage_offset)
        contiguous = tensor.contiguous()
        pairs = zip(stride, tensor.stride(), contiguous.stride(), strict=True)
        return original(contiguous, size, [int(wanted * after // before) for wanted, before, after in pairs])

    with patched(torch.Tensor, as_strided=as_strided):
        yield


@contextmanager
def _autograd_functions_called() -> Iterator[None]:
    """Call the `forward` of autograd functions like any function: inference has no use for their `backward`.

    In a trace, an autograd function is a single node, and torch's exporter fails to insert its body if that contains
    modules, such as Reformer's, which contains all layers. Functions with an ONNX `symbolic` are left unchanged.
    """
    import torch

    function = torch.autograd.Function
    original = vars(function)["apply"]  # the classmethod itself, because the attribute is bound
    without_context = torch.autograd.function._SingleLevelFunction.setup_context  # noqa: SLF001  torch's own check

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cls, "symbolic"):
            return original.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not without_context:  # forward then takes no context
            return cls.forward(*args, **kwargs)
        context = torch.autograd.function.FunctionCtx()
        context.needs_input_grad = (False,) * len(args)
        return cls.forward(context, *args, **kwargs)

    with patched(function, apply=classmethod(apply)):
        yield


@contextmanager
def _seeded_draws_as_constants() -> Iterator[None]:
    """Turn numbers drawn after a model seeds torch's generator into constants, which they are: Reformer's hashes.

    Numbers drawn without the model's own seed, or from its own generator, are still drawn. Afterward, the state of
    torch's generator is restored.
    """
    import torch

    def constant(original: Any) -> Any:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if torch.initial_seed() == _UNSEEDED or kwargs.get("generator") is not None:
                return original(*args, **kwargs)
            with _untraced():
                return original(*_numbers(args), **{name: _numbers(value) for name, value in kwargs.items()})

        return draw

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_UNSEEDED)
        with patched(torch, **{name: constant(getattr(torch, name)) for name in _DRAWS}):
            yield


@contextmanager
def _untraced() -> Iterator[None]:
    """Record nothing inside the block; tensors made in it are constants of the trace."""
    import torch

    state = torch._C._get_tracing_state()  # noqa: SLF001  torch.jit has no public way to pause a trace
    torch._C._set_tracing_state(None)  # noqa: SLF001
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # noqa: SLF001


def _numbers(value: Any) -> Any:
    """Return sizes as numbers; in a trace, they are tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_numbers, value)) if isinstance(value, (tuple, list)) else value


EXPORTERS: tuple[Exporter, ...] = (
    Exporter("dynamo", (None, "eager"), _trace_dynamo),
    # onnxruntime's attention fusions recognize eager attention as traced by TorchScript.
    Exporter("torchscript", ("eager",), trace_torchscript),
)

# dynamo reasons about every dynamic size, and never finishes for Swin's rolling windows.
_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class ExportStrategy:
    """A strategy for tracing a model: an exporter with settings.

    Attributes:
        attention: transformers' attention implementation; None for its default.
        fixed: the axes that are not dynamic in the file, with their sizes.
        prompts: how a file with a cache runs its prompts; empty for others.
        timeout_s: how long the trace may take if other strategies remain; None for no limit.
    """

    exporter: Exporter
    attention: str | None
    fixed: Mapping[str, int] = field(default_factory=dict)
    prompts: str = ""
    timeout_s: float | None = None

    @property
    def fixed_axes(self) -> str:
        """The fixed axes as stamped, e.g. `sequence 512`."""
        return ", ".join(f"{axis} {size}" for axis, size in self.fixed.items())

    @property
    def name(self) -> str:
        """Its name in notes, e.g. `dynamo with eager attention, sequence fixed to 512`."""
        attention = f" with {self.attention} attention" if self.attention else ""
        fixed = "".join(f", {axis} fixed to {size}" for axis, size in self.fixed.items())
        prompts = f", prompts {self.prompts}" if self.prompts else ""
        return f"{self.exporter.name}{attention}{fixed}{prompts}"


def strategies_for(
    exporter: str, axes: Iterable[Axis], default_attention: str | None, *, verified: bool = True
) -> Iterator[ExportStrategy]:
    """List the strategies for a model, the most useful file first.

    The first ones have all axes dynamic; then the lengths are fixed, which users can pad to; then also the batch.
    TorchScript comes first if verification reaches the largest size that the model accepts: it traces in a tenth of the
    time, and onnxruntime fuses its attention. It keeps the branches that the sample took, which verification would
    detect. If sizes are unbounded, dynamo comes first, because it guards what it assumes.

    Args:
        exporter: a name of EXPORTER_NAMES; `auto` for all of them.
        axes: the dynamic axes of the model's inputs.
        default_attention: transformers' choice, which need not be tried twice.
        verified: whether the file will be verified; otherwise dynamo, which guards what it assumes, comes first.
    """
    axes = tuple(axes)
    chosen = [row for row in EXPORTERS if exporter in ("auto", row.name)]
    if verified and all(axis.is_covered for axis in axes if axis.may_fail):
        chosen.sort(key=lambda row: row.name != "torchscript")
    contents = {axis.name: axis.fixed_size for axis in axes if axis.may_fail}
    batches = {axis.name: axis.fixed_size for axis in axes if not axis.may_fail}
    for row in chosen:
        for attention in row.attentions:
            if attention is None or attention != default_attention or None not in row.attentions:
                yield ExportStrategy(row, attention, timeout_s=_TIMEOUT_S if len(chosen) > 1 else None)
    if contents:
        yield from (ExportStrategy(row, row.attentions[0], contents) for row in chosen)
    yield from (ExportStrategy(row, row.attentions[0], contents | batches) for row in chosen)


def attention_of(model: Any) -> str | None:
    """Return the attention implementation of a loaded model."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)
