"""Tracing leaves nothing behind: no weights in memory, no words on standard output, no change in torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtool.errors import ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.modalities.modality import Axis
from onnxtool.export.signature import Signature, detect_signature, to_tensors
from onnxtool.export.source import Source
from onnxtool.export.tracing import (
    EXPORTERS,
    guarded,
    operators_apart,
    strategies_for,
    trace,
    trace_torchscript,
    traceable_calls,
)
from onnxtool.graph.exact_rules import exact_optimizer
from onnxtool.model_file.weights import write_inline
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.session import open_session
from tests.workshop import Workshop


@pytest.mark.parametrize("exporter", EXPORTERS, ids=lambda row: row.name)
def test_weights_go_with_the_graph(workshop: Workshop, exporter: object) -> None:
    """They would stand beside those of the model that the file is compared with."""
    row = next(row for row in EXPORTERS if row is exporter)
    checkpoint = Checkpoint.open(Source.find(str(workshop.checkpoint("tiny-tagger"))))
    model = checkpoint.load_model(dtype="float32", device="cpu", attention=row.attentions[0])
    modality = find_modality(model, checkpoint)
    signature = detect_signature(model, modality)
    weight = weakref.ref(model.bert.encoder.layer[0].output.dense.weight)
    graph = trace(row, model, to_tensors(model, modality.sample({})), signature, None)
    del graph, model
    gc.collect()
    assert weight() is None
    # A list of numbers of torch is one of TorchScript's own steps, which a patched Tensor class once broke.
    assert torch.tensor([torch.tensor(3)]).tolist() == [3]


def test_what_a_failing_exporter_prints_goes_into_the_hint(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing reaches standard output, from Python or from below it, where a report in JSON stands alone."""

    def fail() -> None:
        sys.stdout.write("half a graph\n")
        os.write(1, b"Torch IR graph")
        raise RuntimeError("\x1b[96mfirst\x1b[0m\nsecond")

    with pytest.raises(ExportError, match=r"cannot trace it: RuntimeError: first\n") as error:
        guarded(fail, subject="cannot trace it", exporter="dynamo", opset=None, hint="way out")  # type: ignore[arg-type]
    assert error.value.hint == "way out\nhalf a graph\n"
    assert capfd.readouterr().out == ""


def test_an_opset_that_was_not_written_is_an_error() -> None:
    """Dynamo answers opset 14 with opset 18."""
    graph = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 18]> g (float[1] x) => (float[1] x) {}')
    with pytest.raises(ExportError, match="dynamo wrote opset 18, not 14"):
        guarded(lambda: graph, subject="", exporter="dynamo", opset=14, hint="")


def test_nodes_of_a_trace_record_no_lines_of_code() -> None:
    """They would be stripped, and cost an eighth of its time; a user's own traces record them."""
    graph = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 18]> g (float[1] x) => (float[1] x) {}')
    recorded: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def run() -> ir.Model:
        traced = make_fx(forward, tracing_mode="fake", record_stack_traces=True)(torch.ones(1))
        recorded.append(any(node.stack_trace for node in traced.graph.nodes))
        return graph

    guarded(run, subject="", exporter="dynamo", opset=None, hint="")
    run()
    assert recorded == [False, True]


def test_a_trace_that_takes_too_long_is_given_up() -> None:
    """So that another way gets its turn; dynamo would think about Swin's windows for an hour."""
    with pytest.raises(ExportError, match="TimeoutError: not done after 0 s"):
        guarded(
            lambda: time.sleep(30),  # type: ignore[arg-type,return-value]
            subject="cannot trace it",
            exporter="dynamo",
            opset=None,
            hint="way out",
            timeout_s=0.05,
        )
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_inverse_of_the_error_function_is_made_of_operators_that_onnx_has() -> None:
    """Gemma 3n asks for it, and no ONNX operator is its like; outside of the block it is torch's own again."""

    class Quantiles(torch.nn.Module):
        def forward(self, share: torch.Tensor) -> torch.Tensor:
            return torch.distributions.Normal(0, 1, validate_args=False).icdf(share)

    shares = torch.linspace(1e-4, 1 - 1e-4, 999, dtype=torch.float64)
    wanted = Quantiles()(shares)
    with operators_apart():
        program = torch.export.export(Quantiles(), (shares,))
        # In double precision, two steps of Halley's method leave no more than rounding.
        torch.testing.assert_close(Quantiles()(shares), wanted, rtol=1e-10, atol=1e-10)
    assert not [node for node in program.graph.nodes if "erfinv" in str(node.target)]
    torch.testing.assert_close(program.module()(shares), wanted, rtol=1e-10, atol=1e-10)
    assert torch.equal(Quantiles()(shares), wanted)


def test_only_what_is_0_or_1_is_dropped_from_a_graph() -> None:
    """The optimizer at the end of torch's exporter takes numbers up to 1e-8 for 0, and the logarithm is infinite."""

    class Logarithms(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x + 1e-9) * 1.000001 / 1.000002 - 1e-10).log() + (x * 1 + 0) / 1 - 0

    with exact_optimizer(), quiet():
        program = torch.onnx.export(Logarithms().eval(), (torch.zeros(3),), dynamo=True, verbose=False)
    assert sorted(node.op_type for node in program.model.graph) == sorted(["Add", "Mul", "Div", "Sub", "Log", "Add"])


def test_the_optimizer_keeps_its_own_rules_and_no_graph_after_a_trace() -> None:
    from onnxscript import rewriter

    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 0) * self.weight

    before = rewriter._DEFAULT_REWRITE_RULES
    with exact_optimizer(), quiet():
        program = torch.onnx.export(Weighted().eval(), (torch.zeros(3),), dynamo=True, verbose=False)
    assert rewriter._DEFAULT_REWRITE_RULES is before
    graph = weakref.ref(program.model.graph)
    del program
    gc.collect()
    assert graph() is None


INPUTS = {"input_ids": ("batch_size", "sequence")}
OUTPUTS = {"output": ("batch_size", "sequence", 11)}


class Tied(torch.nn.Module):
    """An embedding int64 [B, S] -> float32 [B, S, 6], a layer, and an output layer of the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(11, 6)
        self.layer = torch.nn.Linear(6, 6)
        self.unused = torch.nn.Linear(6, 6)
        self.out = torch.nn.Linear(6, 11)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(torch.relu(self.layer(self.table(input_ids))) * self.scale)
        return output


@pytest.fixture
def model() -> Tied:
    tied = Tied()
    tied.eval()
    return tied


def trace_weights_apart(model: torch.nn.Module, opset: int | None = None) -> ir.Model:
    sample = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    with quiet():  # torch warns of its own exporter, as every caller of this knows
        return trace_torchscript(model, sample, Signature(INPUTS, OUTPUTS), opset)


def weight(graph: ir.Model, name: str) -> np.ndarray[Any, Any]:
    tensor = graph.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def test_the_file_answers_as_the_model_on_other_shapes(model: Tied, tmp_path: Path) -> None:
    """The weights that were put on the graph are in their places, whatever the batch and the length."""
    write_inline(trace_weights_apart(model), tmp_path / "m.onnx")
    session = open_session(tmp_path / "m.onnx", provider="cpu", frugal=True)
    for shape in ((1, 1), (2, 3), (5, 9)):
        ids = np.random.default_rng(0).integers(0, 11, shape)
        with torch.inference_mode():
            wanted = model(torch.from_numpy(ids)).numpy()
        # float32, three layers: rounding is below 1e-6 of values of about 10
        np.testing.assert_allclose(session.run({"input_ids": ids})["output"], wanted, rtol=1e-5, atol=1e-5)


def test_a_tied_weight_is_there_once(model: Tied) -> None:
    """An output layer that shares the embedding's weight brings no second one, nor does its transposition."""
    sizes = [
        value.const_value.size for value in trace_weights_apart(model).graph.initializers.values() if value.const_value
    ]
    assert sizes.count(66) == 1


def test_a_matrix_is_transposed_in_place_of_a_node(model: Tied) -> None:
    """MatMul finds a weight at its input, which the fusions of onnxruntime look for."""
    graph = trace_weights_apart(model)
    (layer,) = (node for node, _ in graph.graph.initializers["layer.weight"].uses())
    assert layer.op_type == "MatMul"
    np.testing.assert_array_equal(weight(graph, "layer.weight"), model.layer.weight.detach().numpy().T)


def test_weights_are_called_as_in_the_model_and_unused_ones_left_out(model: Tied) -> None:
    """Names are those of the state dict."""
    names = set(trace_weights_apart(model).graph.initializers)
    assert {"table.weight", "layer.weight", "layer.bias", "out.bias", "scale"} <= names
    assert not {name for name in names if name.startswith("unused")}


def test_only_the_given_inputs_are_left(model: Tied) -> None:
    """Weights stand in for inputs during the trace alone."""
    assert [value.name for value in trace_weights_apart(model).graph.inputs] == ["input_ids"]


def test_the_model_has_its_own_weights_afterwards(model: Tied) -> None:
    """Tracing changes nothing about the model, not even where it fails."""
    before = [(name, id(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]]
    trace_weights_apart(model)
    with pytest.raises(Exception, match="opset"):
        trace_weights_apart(model, opset=999)
    assert [(name, id(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]] == before


def test_weights_take_no_memory_of_their_own(model: Tied) -> None:
    """The graph refers to the memory of the model, transposed weights as well."""
    tensor: Any = trace_weights_apart(model).graph.initializers["layer.weight"].const_value
    assert tensor.raw.data_ptr() == model.layer.weight.data_ptr()


BATCH = Axis("batch_size", 2, 3, may_fail=False, when_fixed=1)
SHORT = Axis("sequence", 8, 11, is_covered=True, when_fixed=512)
ENDLESS = Axis("sequence", 8, 11, is_covered=False, when_fixed=512)


def names(exporter: str, *axes: Axis, attention: str | None = "sdpa") -> list[str]:
    return [strategy.name for strategy in strategies_for(exporter, axes, attention)]


def test_torchscript_comes_first_where_the_longest_input_is_verified() -> None:
    """What it baked in would show there."""
    assert names("auto", BATCH, SHORT)[0] == "torchscript with eager attention"


def test_dynamo_comes_first_where_sizes_have_no_bound() -> None:
    """Its guards hold beyond what was tried."""
    assert names("auto", BATCH, ENDLESS)[:3] == [
        "dynamo",
        "dynamo with eager attention",
        "torchscript with eager attention",
    ]


def test_without_verification_dynamo_comes_first() -> None:
    """Nothing would show what TorchScript baked in."""
    assert next(strategies_for("auto", (BATCH, SHORT), "sdpa", verified=False)).name == "dynamo"


def test_the_time_limit_ends_only_where_another_strategy_is_left() -> None:
    """Who asks for one exporter waits for it, and the last strategies are not given up."""
    strategies = list(strategies_for("auto", (BATCH, ENDLESS), "sdpa"))
    assert [strategy.timeout_s is None for strategy in strategies] == [bool(strategy.fixed) for strategy in strategies]
    assert all(strategy.timeout_s is None for strategy in strategies_for("dynamo", (BATCH, ENDLESS), "sdpa"))


def test_fixed_axes_come_last_and_the_batch_after_all() -> None:
    """A fixed length costs padding, a fixed batch more."""
    assert names("dynamo", BATCH, SHORT) == [
        "dynamo",
        "dynamo with eager attention",
        "dynamo, sequence fixed to 512",
        "dynamo, sequence fixed to 512, batch_size fixed to 1",
    ]


def test_eager_attention_is_not_tried_twice() -> None:
    """Some models have no other."""
    assert "dynamo with eager attention" not in names("auto", BATCH, SHORT, attention="eager")


def test_an_exporter_that_is_asked_for_is_the_only_one() -> None:
    """Who names one wants that one."""
    assert all(name.startswith("torchscript") for name in names("torchscript", BATCH, ENDLESS))


X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


class Doubled(torch.autograd.Function):
    """Twice a value, through a module that is handed over as no tensor, as Reformer hands over its layers."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        """Keep what `backward` would want."""
        ctx.save_for_backward(value)
        ctx.layer = layer
        output: torch.Tensor = 2 * layer(value)
        return output


class Shifted(torch.autograd.Function):
    """A value and three, in the style that takes no context."""

    @staticmethod
    def forward(value: torch.Tensor) -> torch.Tensor:
        """Add three."""
        return value + 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""


class WithFunctions(torch.nn.Module):
    """Both of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 2 * layer(x + 3)."""
        output: torch.Tensor = Doubled.apply(Shifted.apply(x), self.layer)
        return output


class Drawing(torch.nn.Module):
    """A product with a random matrix."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ R, where R [width of x, 4] is drawn in this very run."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return x @ torch.randn(x.shape[-1], 4)


def trace_patched(model: torch.nn.Module) -> ir.Model:
    with quiet():
        return trace_torchscript(
            model.eval(), {"x": X}, Signature({"x": ("batch_size", 3)}, {"output": ("batch_size", 4)}), None
        )


def run(graph: ir.Model, x: torch.Tensor) -> Any:
    return ReferenceEvaluator(ir.to_proto(graph)).run(None, {"x": x.numpy()})[0]


def test_an_autograd_function_is_traced_through() -> None:
    """It may hold a whole model, of which torch's own exporter finds nothing."""
    model = WithFunctions()
    graph, longer = trace_patched(model), torch.cat([X, X + 1])
    # float32, one layer of three
    np.testing.assert_allclose(run(graph, longer), model(longer).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_what_is_drawn_under_a_seed_is_a_constant() -> None:
    """The model draws the same in every run, and so must the file."""
    model = Drawing(seed=7)
    graph = trace_patched(model)
    assert not [node for node in graph.graph if node.op_type.startswith("Random")]
    np.testing.assert_allclose(run(graph, X), model(X).numpy(), rtol=1e-5, atol=1e-5)


def test_what_is_drawn_without_a_seed_stays_a_draw() -> None:
    """A constant would answer the same each time, as the model does not."""
    assert [node.op_type for node in trace_patched(Drawing(seed=None)).graph if node.op_type.startswith("Random")]


def test_torch_is_itself_afterwards() -> None:
    """Its functions, and the state of its generator."""
    torch.manual_seed(3)
    wanted = torch.randn(2)
    torch.manual_seed(3)
    before = vars(torch.autograd.Function)["apply"], torch.randn, torch.Tensor.as_strided
    with traceable_calls():
        torch.manual_seed(11)
        torch.randn(5)
    assert (vars(torch.autograd.Function)["apply"], torch.randn, torch.Tensor.as_strided) == before
    assert torch.equal(torch.randn(2), wanted)
    value = torch.ones(2, 3, requires_grad=True)
    assert Shifted.apply(value).grad_fn is not None
