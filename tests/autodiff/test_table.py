"""The table of gradients in the documentation is that of the rules."""

from __future__ import annotations

import re

from tests.autodiff.cases import CASES
from tests.autodiff.networks import NETWORKS
from tests.workshop import load_script

gradient_table = load_script("gradient_table")

# What onnxruntime-training 1.19.2 has a gradient for.
_REFERENCE = """
    Cast Sin Cos Log Tanh Sqrt Erf MatMul Split Relu Pow ReduceMean ReduceSum ReduceMax ReduceLogSumExp ReduceL2
    Add Sub Mul Div Neg Concat Reshape Transpose Gemm MaxPool Gather Conv ConvTranspose Squeeze Unsqueeze
    Sigmoid Softmax LogSoftmax SoftmaxCrossEntropyLoss GlobalAveragePool GlobalMaxPool AveragePool Dropout
    GatherND GatherElements Gelu QuickGelu BiasGelu FastGelu LayerNormalization SimplifiedLayerNormalization
    BatchNormalization Slice Where Expand Exp Flatten Abs Identity Reciprocal Clip Min Max Tile Pad TopK
    ScatterND ScatterElements Trilu LeakyRelu Resize Atan FakeQuant ScaledSum LSTM GRU
"""
_NETWORKS = "\n## Networks\n"
_ERROR = re.compile(r" (0|\d+e-\d+) \|$", re.MULTILINE)


def test_the_page_is_up_to_date() -> None:
    """Except for the errors, which are measured."""
    text = gradient_table.PAGE.read_text(encoding="utf-8")
    operators, found, networks = text.partition(_NETWORKS)
    is_same = _ERROR.sub("  |", operators) + found + networks == gradient_table.page({})
    assert is_same, "run python scripts/gradient_table.py, which writes docs/gradients.md"


def test_every_network_is_there() -> None:
    """The second table is that of the networks that are tested."""
    table = gradient_table.PAGE.read_text(encoding="utf-8").partition(_NETWORKS)[2]
    assert re.findall(r"^\| (\w+) \| \d+ \|", table, re.MULTILINE) == list(NETWORKS)


def test_every_error_is_there_and_within_what_the_tests_allow() -> None:
    """A row without its error was never run."""
    text = gradient_table.PAGE.read_text(encoding="utf-8").partition(_NETWORKS)[0]
    found = [float(error) for error in _ERROR.findall(text)]
    assert len(found) == len({(case.domain, case.op_type) for case in CASES})
    assert max(found) <= max(case.tolerance for case in CASES)


def test_what_onnxruntime_training_differentiates_is_there() -> None:
    """Whatever the domain is that an operator of this name is of."""
    assert set(_REFERENCE.split()) <= {case.op_type for case in CASES}
