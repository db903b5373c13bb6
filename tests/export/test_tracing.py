"""Tracing leaves nothing behind: no weights in memory, no words on standard output, no change in torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref

import pytest
import torch

from onnxtool.errors import ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.signature import detect_signature, to_tensors
from onnxtool.export.source import Source
from onnxtool.export.tracing import EXPORTERS, guarded, operators_apart, trace
from onnxtool.graph.exact_rules import exact_optimizer
from onnxtool.runtime.quiet import quiet
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
