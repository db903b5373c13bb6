"""Passes run in order, say truly what they changed, and are named when they fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtool.errors import PassError
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory, run_passes
from onnxtool.optimize.presets import PRESETS


def small_model() -> ir.Model:
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=["n", 2])
    weight = ir.val("w", const_value=ir.tensor(np.ones((2, 2), np.float32), name="w"))
    product = ir.node("MatMul", [x, weight], name="product")
    result = ir.node("Relu", product.outputs, name="result")
    for index, node in enumerate((product, result)):
        node.outputs[0].name = f"v{index}"
    graph = ir.Graph([x], result.outputs, nodes=[product, result], initializers=[weight], opset_imports={"": 20})
    return ir.Model(graph, ir_version=9)


def noting(name: str, seen: list[str], num_rounds: int = 0) -> Pass:
    """Return a pass that notes its name in `seen`, and changes something as many times as `num_rounds`."""

    def apply(model: ir.Model, _context: Context) -> Outcome:
        seen.append(name)
        return Outcome(model, 2 if seen.count(name) <= num_rounds else 0, note=f"note {seen.count(name)} of {name}")

    return Pass(name, apply)


def test_passes_run_in_the_order_of_the_list() -> None:
    """Each sees what the one before it left."""
    seen: list[str] = []
    passes = [noting("first", seen), noting("second", seen)]
    _, results = run_passes(small_model(), passes, Context())
    assert seen == ["first", "second"]
    assert [(result.name, result.num_changes, result.note) for result in results] == [
        ("first", 0, "note 1 of first"),
        ("second", 0, "note 1 of second"),
    ]


def test_passes_run_again_until_none_of_them_changes_anything() -> None:
    """What one leaves another may find; the changes of all rounds are counted, and the last note stays."""
    seen: list[str] = []
    passes = [noting("first", seen, 1), noting("second", seen, 2)]
    _, results = run_passes(small_model(), passes, Context())
    assert seen == ["first", "second"] * 3
    assert [(result.num_changes, result.note) for result in results] == [
        (2, "note 3 of first"),
        (4, "note 3 of second"),
    ]


def test_passes_that_never_come_to_rest_are_stopped() -> None:
    """Two that undo each other's work would run for ever."""
    seen: list[str] = []
    run_passes(small_model(), [noting("restless", seen, 1000)], Context())
    assert len(seen) < 10


def test_a_pass_that_fails_is_named() -> None:
    """Whatever a foreign tool raises becomes an error with the name of the pass."""

    def fail(_model: ir.Model, _context: Context) -> Outcome:
        raise ZeroDivisionError("of all things")

    with pytest.raises(PassError, match="the pass clumsy failed: ZeroDivisionError: of all things"):
        run_passes(small_model(), [Pass("clumsy", fail)], Context())


def test_a_change_counts_once() -> None:
    """A node that is rewritten leaves one inventory and enters the other; attributes and weights count as well."""
    model = small_model()
    changes: tuple[Callable[[], object], ...] = (
        lambda: setattr(model.graph[1], "op_type", "Sigmoid"),
        lambda: model.graph[0].attributes.update(alpha=ir.AttrFloat32("alpha", 1.0)),
        lambda: model.graph.initializers.pop("w"),
    )
    for change in changes:
        before = inventory(model)
        assert count_changes(before, inventory(model)) == 0
        change()
        assert count_changes(before, inventory(model)) == 1


@pytest.mark.parametrize("provider", PRESETS)
def test_no_pass_stands_twice_in_a_preset(provider: str) -> None:
    """Names are what the report tells passes apart by."""
    names = [step.name for step in PRESETS[provider]]
    assert len(set(names)) == len(names)


def test_renamed_values_take_no_name_of_the_main_graph() -> None:
    """Neither an output's, which comes later, nor an initializer's; an output that nobody wants stays without one."""
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[1, 1, 4] x, bool c) => (float[1, 1, 2] val_0_2)
        <float[1] val_0_1 = {1.0}> {
        z = If <then_branch = t () => (float[1, 1, 4] p) { val_0 = Neg(x) p, "" = Dropout(val_0) },
                else_branch = e () => (float[1, 1, 4] q) { q = Identity(x) }> (c)
        sum = Add(z, val_0_1)
        val_0_2, "" = MaxPool <kernel_shape = [2], strides = [2]> (sum)
    }"""
    model: ir.Model = ir.from_proto(onnx.parser.parse_model(text))

    def add(model: ir.Model, _context: Context) -> Outcome:
        branch, result = model.graph[0], model.graph[1]
        negated = ir.node("Neg", [result.inputs[1]])
        negated.outputs[0].name = "val_0"
        model.graph.insert_before(branch, negated)
        result.replace_input_with(1, negated.outputs[0])
        return Outcome(model, 1)

    model, _ = run_passes(model, [Pass("add", add)], Context(), most_rounds=1)
    assert [output.name for output in model.graph[-1].outputs] == ["val_0_2", ""]
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.array([[[1.0, -2.0, 0.0, 4.0]]], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "c": np.array(False)})[0], [[[0.0, 3.0]]])


def test_new_values_do_not_take_the_names_of_those_in_branches() -> None:
    """A name may be made once in a model, its branches included, or no runtime loads it."""
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[N] x, bool c) => (float[N] y) {
        z = If <then_branch = t () => (float[N] p) { val_0 = Neg(x) p = Abs(val_0) },
                else_branch = e () => (float[N] q) { q = Identity(x) }> (c)
        y = Add(z, x)
    }"""
    model: ir.Model = ir.from_proto(onnx.parser.parse_model(text))

    def add(model: ir.Model, _context: Context) -> Outcome:
        branch, result = model.graph
        for _ in range(2):
            negated = ir.node("Neg", [result.inputs[1]])
            model.graph.insert_before(branch, negated)
            result.replace_input_with(1, negated.outputs[0])
        return Outcome(model, 2)

    model, _ = run_passes(model, [Pass("add", add)], Context(), most_rounds=1)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.array([1.0, -2.0], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "c": np.array(True)})[0], [2.0, 0.0])


def test_new_constants_do_not_take_the_names_of_computed_values() -> None:
    """A model of anyone's may call a value as a pass calls its constants."""

    def apply(model: ir.Model, _context: Context) -> Outcome:
        one = Writer(model.graph).constant(np.ones(2, np.float32), "v0")
        list(model.graph)[1].replace_input_with(0, one)
        return Outcome(model, 1)

    model, _ = run_passes(small_model(), [Pass("adds", apply)], Context(), most_rounds=1)
    assert [node.outputs[0].name for node in model.graph] == ["v0", "v1"]
    assert set(model.graph.initializers) == {"w", "v0_1"}
    found = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": np.ones((1, 2), np.float32)})
    np.testing.assert_array_equal(found[0], [1, 1])


def test_replacing_an_input_of_a_node_with_many_does_not_copy_the_others() -> None:
    """Otherwise thousands of constants of one node take minutes."""
    constants = [ir.node("Constant", [], {"value_float": float(number)}) for number in range(300)]
    wide = ir.node("Sum", [node.outputs[0] for node in constants])
    wide.outputs[0].name, wide.outputs[0].dtype, wide.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape([])
    graph = ir.Graph([], wide.outputs, nodes=[*constants, wide], opset_imports={"": 20})
    seen: list[object] = []

    def replace_some(model: ir.Model, _context: Context) -> Outcome:
        held = wide.inputs
        wide.replace_input_with(7, wide.inputs[9])
        seen.append(wide.inputs is held)
        wide.resize_inputs(200)
        wide.resize_inputs(201)
        wide.replace_input_with(200, wide.inputs[0])
        return Outcome(model, 0)

    model, _ = run_passes(ir.Model(graph, ir_version=9), [Pass("some", replace_some)], Context())
    assert seen == [True]
    assert len(constants[9].outputs[0].uses()) == 2
    assert not constants[7].outputs[0].uses()
    proto = run_passes(model, PRESETS["cpu"], Context())[0]
    session = ort.InferenceSession(ir.to_proto(proto).SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {})[0] == sum(range(200)) - 7 + 9
