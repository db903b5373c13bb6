"""A gate is met exactly where its condition on a figure holds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxtool.errors import GateError
from onnxtool.reports import Json
from onnxtool.summary.gates import Gate, GateResult, TextGate, check_any_gates, check_gates, parse_any_gate, parse_gate

REPORT: Json = {
    "path": "model.onnx",
    "size_bytes": 1051,
    "num_nodes": 100,
    "ops": {"MatMul": 98, "com.microsoft::Attention": 12},
    "opsets": {"ai.onnx": 20},
    "initializer_bytes": {"float32": 4000},
    "inputs": [{"name": "x", "shape": ["batch", 3]}],
    "latency_ms": {"p95": 1.5},
    "passed": True,
}
BASE: Json = {
    "size_bytes": 1000,
    "num_nodes": 90,
    "ops": {"MatMul": 98, "Gelu": 4},
    "opsets": {"ai.onnx": 17},
    "initializer_bytes": {"float16": 2000},
    "latency_ms": {"p95": 1.25},
}


def check(expression: str, base: Json = BASE) -> GateResult:
    (result,) = check_gates([parse_gate(expression)], REPORT, base)
    return result


@pytest.mark.parametrize(
    ("expression", "met"),
    [
        ("num_nodes>99", True),
        ("num_nodes>100", False),
        ("num_nodes>=100", True),
        ("num_nodes>=101", False),
        ("num_nodes<101", True),
        ("num_nodes<100", False),
        ("num_nodes<=100", True),
        ("num_nodes<=99", False),
        ("num_nodes==100", True),
        ("num_nodes==100.5", False),
        ("num_nodes!=100", False),
        ("num_nodes!=99", True),
        ("  num_nodes  >  99.5  ", True),
        ("ops.MatMul!=98", False),
        ("ops.com.microsoft::Attention<12", False),
        ("ops.com.microsoft::Attention<13", True),
        ("opsets.ai.onnx!=20", False),
        ("initializer_bytes.float32>3999", True),
        ("inputs.0.shape.1==3", True),
        ("latency_ms.p95>1.5", False),
        ("latency_ms.p95>=1.5", True),
        ("size_bytes>1.051kB", False),
        ("size_bytes>=1.051 kB", True),
        ("size_bytes<1.03KiB", True),
        ("size_bytes<0.001MB", False),
        ("size_bytes>0.001MiB", True),
        ("size_bytes<0.00000001GB", False),
        ("size_bytes<1GiB", True),
        ("count(ops)==2", True),
        ("count( inputs.0.shape )>1", True),
        ('ops."com.microsoft::Attention"<12', False),
        ('"latency_ms"."p95"==1.5', True),
    ],
)
def test_an_absolute_gate_compares_with_its_number(expression: str, met: bool) -> None:
    """Each operator holds on its side of the threshold, for figures at any depth, with and without a base."""
    assert check(expression).met is met
    assert check(expression, base=None).met is met


@pytest.mark.parametrize(
    ("expression", "met", "threshold"),
    [
        ("num_nodes>+9", True, Fraction(99)),
        ("num_nodes>+10", False, Fraction(100)),
        ("num_nodes==+10", True, Fraction(100)),
        ("num_nodes!=+0", True, Fraction(90)),
        ("num_nodes<-5", False, Fraction(85)),
        ("size_bytes>+5%", True, Fraction(1050)),
        ("size_bytes>+5.1%", False, Fraction(1051)),
        ("size_bytes>= + 5.1 %", True, Fraction(1051)),
        ("size_bytes<-0.5%", False, Fraction(995)),
        ("latency_ms.p95>+10%", True, Fraction("1.375")),
        ("latency_ms.p95>+20%", False, Fraction("1.5")),
        ("ops.com.microsoft::Attention>+0", True, Fraction(0)),
        ("ops.com.microsoft::Attention>+50%", True, Fraction(0)),
        ("ops.Gelu<-3", True, Fraction(1)),
    ],
)
def test_a_relative_gate_compares_with_the_base(expression: str, met: bool, threshold: Fraction) -> None:
    """A sign counts from the base's figure and a percentage is a part of it, without errors of rounding."""
    result = check(expression)
    assert result.met is met
    assert result.threshold == threshold
    assert result.base_value is not None


@pytest.mark.parametrize("expression", ["ops.Softmax==0", "ops.org.other::Thing==0", "initializer_bytes.int8==0"])
def test_what_is_not_counted_is_zero(expression: str) -> None:
    """An operator that is not in the graph, and a dtype of which there are no weights, count 0."""
    assert check(expression).met


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "num_nodes",
        "num_nodes 500",
        ">500",
        "num_nodes>",
        "num_nodes>+",
        "num_nodes>%",
        "num_nodes>five",
        "num_nodes>1e3",
        "num_nodes>1.",
        "num_nodes>.5",
        "num_nodes>1.2.3",
        "num_nodes>++5",
        "num_nodes>5%%",
        "num_nodes>+5%0",
        "num_nodes>٣",
        "num_nodes>" + "9" * 31,
        "num_nodes=500",
        "num_nodes=>500",
        "num_nodes>>500",
        "num_nodes<>500",
        "num_nodes>500>600",
        "num_nodes>5%",
        "__import__('os').getpid()>0",
        "count(ops>1",
        "count(ops)1",
        'ops."MatMul>1',
        "num_nodes>5TB",
        "num_nodes>5 6",
    ],
)
def test_what_does_not_follow_the_grammar_is_refused(expression: str) -> None:
    """Every other text is an error that quotes it and says how to write a gate; nothing of it is ever run."""
    with pytest.raises(GateError) as caught:
        check(expression)
    assert repr(expression) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("expression", "hint"),
    [
        ("num_node>5", "did you mean 'num_nodes'? there are size_bytes, num_nodes, ops.*, opsets.*"),
        ("opsets.com.microsoft>1", "opsets.*"),
        ("initializer_bytes.flaot32>5", "did you mean 'initializer_bytes.float32'?"),
        ("ops.Matmul>98", "did you mean 'ops.MatMul'?"),
        ("ops.MATMUL==0", "did you mean 'ops.MatMul'?"),
        ("ops.com.Microsoft::attention>0", "did you mean 'ops.com.microsoft::Attention'?"),
        ("Num_Nodes>5", "did you mean 'num_nodes'?"),
        ("ops>5", "ops.*"),
        ("ops.>5", "ops.*"),
        ("path==5", "size_bytes"),
        ("passed==1", "size_bytes"),
    ],
)
def test_an_unknown_figure_is_named_with_those_that_exist(expression: str, hint: str) -> None:
    """A figure that the report does not have, or that is no number, is an error with the names that are there."""
    with pytest.raises(GateError, match="the report has no figure") as caught:
        check(expression)
    assert hint in caught.value.hint


def test_a_base_that_counts_it_in_other_case_is_an_error() -> None:
    """The report has none left, so that only the base tells that the name is misspelt."""
    with pytest.raises(GateError, match="the base has no figure 'ops.GELU'") as caught:
        check("ops.GELU<-3")
    assert "did you mean 'ops.Gelu'?" in caught.value.hint


def test_counts_are_zero_only_in_a_report_that_counts() -> None:
    """A report without operators has no figure for one."""
    with pytest.raises(GateError, match="no figure 'ops.MatMul'"):
        check_gates([parse_gate("ops.MatMul>1")], {"p95": 1.0})


def test_a_relative_gate_needs_a_base_that_has_the_figure() -> None:
    """Without a base, or with one that lacks the figure, there is nothing to be relative to."""
    with pytest.raises(GateError, match="there is no base"):
        check("num_nodes>+1", base=None)
    with pytest.raises(GateError, match="the base has no figure 'num_nodes'"):
        check("num_nodes>+1", base={"size_bytes": 1})


def test_results_come_in_the_order_of_the_gates_and_say_the_figures() -> None:
    """A result tells expression, figure, base and threshold in one line."""
    gates = [parse_gate(text) for text in ("size_bytes>+0.05%", "num_nodes>500", "latency_ms.p95>1")]
    assert [str(result) for result in check_gates(gates, REPORT, BASE)] == [
        "size_bytes is 1051, 1000 in the base, fails if size_bytes>+0.05%: a threshold of 1000.5",
        "num_nodes is 100, fails if num_nodes>500",
        "latency_ms.p95 is 1.5, fails if latency_ms.p95>1",
    ]


@given(st.text(alphabet="ab.:_ 0159+-%<>=!٣²", max_size=14))
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_any_text_is_a_gate_or_a_gate_error(text: str) -> None:
    """No text makes the parser fail in another way."""
    try:
        gate = parse_gate(text)
    except GateError:
        return
    assert gate.expression == text
    assert gate.amount >= 0


@pytest.mark.parametrize(
    ("expression", "position"),
    [
        ("num_nodes", 10),
        ("num_nodes>>5", 10),
        ("num_nodes>five", 11),
        ("num_nodes>+5x", 13),
        (">5", 1),
        ("count(ops>5", 10),
        ('a."b>5', 3),
    ],
)
def test_an_error_points_at_the_place(expression: str, position: int) -> None:
    """The message says the character, and shows it below the expression."""
    with pytest.raises(GateError) as caught:
        parse_gate(expression)
    first, shown, pointer = caught.value.message.split("\n")
    assert f"at character {position} of" in first
    assert shown == f"  {expression}"
    assert pointer == "  " + " " * (position - 1) + "^"


def test_a_threshold_beyond_all_floats_is_shown() -> None:
    """Metadata of a model is untrusted: a figure in it may have hundreds of digits."""
    (result,) = check_gates([parse_gate("big>+3.3333%")], {"big": 10**400}, {"big": 10**400 + 1})
    assert not result.met
    assert "a threshold of 1.033333000e+400" in str(result)
    (result,) = check_gates([parse_gate("small<0.5")], {"small": 0.25})
    assert str(result) == "small is 0.25, fails if small<0.5"


@pytest.mark.parametrize(
    ("expression", "met"),
    [
        ("license!=apache-2.0", True),
        ("license!=MIT", False),
        ("license == Mit ", True),
        ('license!="mit"', False),
        ('license_name!=""', False),
        ("license==0bsd", False),
        ("inputs.0.name!=x", False),
        ('metadata.version=="2"', True),
        ("metadata.version!=2 beta", True),
    ],
)
def test_a_text_is_compared_without_regard_to_case(expression: str, met: bool) -> None:
    """At any depth, in quotes or not; what is a number is a text in quotes."""
    report: Json = {"license": "mit", "license_name": "", "inputs": [{"name": "x"}], "metadata": {"version": "2"}}
    gate = parse_any_gate(expression)
    assert isinstance(gate, TextGate)
    (result,) = check_any_gates([gate], report)
    assert result.met is met
    assert str(result).endswith(f", fails if {expression}")


@pytest.mark.parametrize(
    "expression",
    [
        "license!=",
        "license>mit",
        "license!==mit",
        'license!="mit',
        "license=mit",
        "license!=a\x1bb",
        "!=mit",
        "license",
    ],
)
def test_a_gate_on_a_text_follows_the_grammar(expression: str) -> None:
    """The message is that of the number that would stand there, or of what is missing."""
    with pytest.raises(GateError):
        parse_any_gate(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("licence!=mit", "no text 'licence'"),
        ("num_nodes==many", "'many' is not a threshold"),
        ("num_nodes==5%", "a percentage needs a sign"),
        ("passed!=true", "no text 'passed'"),
    ],
)
def test_a_gate_on_no_text_is_refused(expression: str, message: str) -> None:
    """A number cannot be a word, and a figure that is not there is named with those that are alike."""
    gate = parse_any_gate(expression)
    assert isinstance(gate, TextGate)
    report: Json = {"license": "mit", "num_nodes": 3, "passed": True}
    with pytest.raises(GateError, match=message):
        check_any_gates([gate], report)


def test_a_number_is_no_gate_on_a_text() -> None:
    """The way out is to put it into quotes."""
    gate = parse_any_gate("path==3")
    assert isinstance(gate, Gate)
    with pytest.raises(GateError, match="path is a text"):
        check_any_gates([gate], REPORT)
