"""Which axis of a value is which is computed by the operators of a graph, for all sizes of its inputs at once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtool.graph.shapes import dynamic_axes, find_shapes, infer_shapes, infer_types, with_sums
from tests.optimize.passes.builders import Arrays, build, normal

WEIGHTS = {
    "w": normal(8, 12),
    "two": np.array([2]),
    "limit": np.array([512]),
    "one": np.array([1]),
    "block": np.array([16]),
    "less": np.array([15]),
    "minus": np.array([-1]),
    "zero": np.array([0]),
}
# The size of the sequence, and what models make of it.
LENGTH = "s = Shape <start=1, end=2> (x)"
NUMBERS = {
    "itself": ("n = Identity(s)", ["S"]),
    "there and back": ("a = Add(s, two) n = Sub(a, two)", ["S"]),
    "times and by": ("a = Mul(s, two) n = Div(a, two)", ["S"]),
    "twice": ("n = Mul(s, two)", ["2*S"]),
    "nothing of it": ("n = Sub(s, s)", [0]),
    "no rest": ("a = Mul(s, block) n = Mod(a, block)", [0]),
    "never below 0": ("c = Less(s, zero) n = Where(c, two, s)", ["S"]),
    "never -1": ("t = Concat <axis=0> (s, two) c = Equal(t, minus) n = Where(c, minus, t)", ["S", 2]),
}
# What no few sizes show: each of these is 0, or the size itself, at nearly all of them.
TURNING = {
    "at most 512": ("n = Min(s, limit)", {"S": {512}}),
    "at least 512": ("n = Max(s, limit)", {"S": {512}}),
    "a multiple of 16": ("a = Add(s, less) d = Div(a, block) n = Mul(d, block)", {"S": {1}}),
    "what is over 16": ("n = Mod(s, block)", {"S": {16}}),
    "at 512 alone": ("c = Equal(s, limit) n = Where(c, two, s)", {"S": {512}}),
    "beyond 512": ("c = Greater(s, limit) n = Where(c, two, s)", {"S": {512}}),
    "the first 512": ("h = Shape(cut) n = Slice(h, one, two)", {"S": {512}}),
    "empty or not": ("c = Equal(s, zero) n = Where(c, two, s)", {}),
}


def output(model: ir.Model) -> ir.Value:
    return model.graph.outputs[0]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_what_its_operators_make_of_the_sizes(number: str) -> None:
    """For all sizes at once."""
    body, expected = NUMBERS[number]
    shapes = find_shapes(build(f"g (float[B, S, 8] x) => (int64[N] n) {{ {LENGTH} {body} }}", WEIGHTS))
    assert shapes.elements["n"].tolist() == expected


@pytest.mark.parametrize("number", TURNING)
def test_a_number_that_turns_somewhere_is_none_of_the_sizes(number: str) -> None:
    """However many sizes it agrees with; where it turns is told, for a verification to look at both sides."""
    body, turns = TURNING[number]
    cut = "cut = Slice(x, zero, limit, one)"
    shapes = find_shapes(build(f"g (float[B, S, 8] x) => (int64[1] n) {{ {LENGTH} {cut} {body} }}", WEIGHTS))
    found = shapes.elements.get("n")
    assert found is None or (found.dtype == object and found.tolist() != ["S"])
    assert {axis: numbers - {512} or numbers for axis, numbers in shapes.sizes.turns.items()} == turns or (
        shapes.sizes.turns == {"S": {512}} and not turns
    )


def test_a_product_with_a_weight_has_its_width() -> None:
    """Fixed for all inputs, while the others move."""
    model = build("g (float[B, S, 8] x) => (float y) { y = MatMul(x, w) }", WEIGHTS)
    shapes = find_shapes(model)
    value = output(model)
    assert shapes.rank(value) == 3
    assert (shapes.fixed(value, -1), shapes.fixed(value, 1), shapes.fixed(value, 3)) == (12, None, None)
    assert shapes.shape(value) == ("B", "S", 12)


@pytest.mark.parametrize(("second", "expected"), [("B, S, 8", True), ("B, T, 8", False), ("1, S, 8", False)])
def test_two_shapes_are_the_same_only_where_they_are_for_all_inputs(second: str, expected: bool) -> None:
    """Two axes of different names may be of one size, or of two."""
    model = build(f"g (float[B, S, 8] x, float[{second}] r) => (float y) {{ y = Add(x, r) }}")
    first, other = model.graph.inputs
    assert find_shapes(model).same(first, other) == expected


def test_what_is_not_known_is_none() -> None:
    """How many numbers are not zero, nobody knows before they are there."""
    model = build("g (float[B, S] x) => (float y) { z = NonZero(x) y = Cast <to=1> (z) }")
    shapes = find_shapes(model)
    value = output(model)
    assert (shapes.rank(value), shapes.prime_shape(value), shapes.fixed(value, 0), shapes.fixed(value, 1)) == (
        2,
        None,
        2,
        None,
    )
    assert not shapes.same(value, value)
    assert (shapes.prime_shape(None), shapes.rank(None), shapes.fixed(None, 0), shapes.dtype(None)) == (
        None,
        None,
        None,
        None,
    )


def test_every_axis_has_sizes_of_its_own() -> None:
    """However many there are; two of the same sizes would be taken for each other."""
    inputs = ", ".join(f"float[N{number}] x{number}" for number in range(20))
    shapes = find_shapes(build(f"g ({inputs}) => (float y) {{ y = Neg(x19) }}"))
    assert shapes.known["y"] == ("N19",)
    assert len(set(shapes.probes[0].values())) == 20


def test_axes_without_a_name_are_called_by_their_place() -> None:
    """Each one has sizes of its own."""
    model = build("g (float[B, S, 8] x, int64[B, S] ids) => (float y) { y = Neg(x) }")
    assert dynamic_axes(model) == ("B", "S")
    model.graph.inputs[0].shape = ir.Shape([None, "S", 8])
    assert dynamic_axes(model) == ("x[0]", "S", "B")


def test_an_axis_that_is_named_as_a_sum_is_as_long_as_its_parts() -> None:
    """The mask of a decoder with a cache; what is no name of an axis is no part of a sum."""
    model = build("g (float[B, N] mask, float[B, P] past, float[B, S] own) => (float y) { y = Neg(mask) }")
    model.graph.inputs[0].shape = ir.Shape(["B", "P + S"])
    for probe in find_shapes(model).probes:
        assert probe["P + S"] == probe["P"] + probe["S"]
    sizes = {"P": 3, "S": 4, "P + S": 100, "P + other": 5, "P +  S": 6}
    assert with_sums(sizes) == {**sizes, "P + S": 7}


def test_a_model_of_fixed_sizes_has_numbers_alone() -> None:
    """There is no axis to name."""
    model = build("g (float[2, 3, 8] x) => (int64 n) { n = Shape(x) }")
    shapes = find_shapes(model)
    assert shapes.elements["n"].tolist() == [2, 3, 8]


def test_the_steps_of_sound_are_not_zero() -> None:
    """A convolution leaves nothing of a few samples, so there are thousands."""
    kernels = {"w": normal(4, 1, 400)}
    text = "g (float[B, T] x) => (float y) { u = Unsqueeze(x, one) y = Conv <strides=[320]> (u, w) }"
    model = build(text, {**kernels, "one": np.array([1])})
    for sizes in find_shapes(model).probes:
        assert 0 not in infer_shapes(model, sizes)["y"]


def test_shapes_are_found_once_for_as_long_as_the_graph_is_the_same() -> None:
    """Nothing of them is left when it changes."""
    model = build("g (float[B, S, 8] x) => (float y) { z = Neg(x) y = Abs(z) }")
    first = find_shapes(model)
    assert find_shapes(model) is first
    model.graph[1].replace_input_with(0, model.graph.inputs[0])
    assert find_shapes(model) is not first


def test_shapes_are_inferred_for_any_sizes() -> None:
    """Those of a probe, and others."""
    model = build("g (float[B, S, 8] x) => (float y) { y = MatMul(x, w) }", WEIGHTS)
    assert infer_shapes(model, find_shapes(model).probes[0])["y"] == find_shapes(model).prime_shape(output(model))
    assert infer_shapes(model, {"B": 4, "S": 6})["y"] == (4, 6, 12)


def test_dtypes_are_those_of_numpy() -> None:
    """Where numpy has them."""
    model = build("g (float[B] x) => (bool b, int64 n) { b = IsNaN(x) n = Shape(x) }")
    shapes = find_shapes(model)
    assert [shapes.dtype(value) for value in model.graph.outputs] == [np.dtype(bool), np.dtype(np.int64)]


# Before opset 13 axes are an attribute, which later versions of the operator do not look at.
OLD_AXES = {
    "Unsqueeze": ("i = Gather(s, first) n = Unsqueeze <axes=[0]> (i)", (1,)),
    "Squeeze": ("r = Reshape(s, matrix) n = Squeeze <axes=[0]> (r)", (1,)),
    "ReduceProd": ("n = ReduceProd <axes=[0], keepdims=1> (s)", (1,)),
}


@pytest.mark.parametrize("operator", OLD_AXES)
def test_numbers_are_computed_by_the_opset_of_the_model(operator: str) -> None:
    """By the latest one, the sizes of models of an old opset were lost, or of another rank."""
    body, shape = OLD_AXES[operator]
    weights = {"zero": np.array([0]), "one": np.array([1]), "first": np.array(0), "matrix": np.array([1, 1])}
    text = f"g (float[S, 8] x) => (int64[N] n) {{ a = Shape(x) s = Slice(a, zero, one) {body} }}"
    shapes = find_shapes(build(text, weights, opset=11))
    assert (shapes.elements["n"].shape, shapes.elements["n"].item()) == (shape, "S")


def test_a_branch_tells_what_both_have_in_common() -> None:
    """Which one is taken nobody knows; a loop may end before its state has changed."""
    text = (
        "g (float[B, 8] x, bool c, int64 k) => (float y, float z) { "
        "y = If (c) <then_branch = t () => (float[B, 8] a) { a = Neg(x) }, "
        "else_branch = e () => (float[B, 16] b) { b = Concat <axis=1> (x, x) }> "
        "z = Loop (k, c, x) <body = l (int64 i, bool d, float[N, M] s) => (bool d, float[N, M] u) "
        "{ u = Concat <axis=1> (s, x) }> }"
    )
    model = build(text)
    shapes = find_shapes(model)
    _, z = model.graph.outputs
    assert shapes.known["y"] == ("B", None)
    assert shapes.prime_shape(z) is None
    assert shapes.dtype(z) == np.float32


def types(text: str, weights: Arrays | None = None) -> dict[str, tuple[int | str | None, ...]]:
    model = build(text, weights)
    infer_types(model)
    values = {str(value.name): value.shape for node in model.graph for value in node.outputs}
    return {
        name: tuple(size if isinstance(size, int) else size.value for size in shape)
        for name, shape in values.items()
        if shape is not None
    }


def test_axes_keep_their_names() -> None:
    """Through operators of onnxruntime, and through what sizes are computed with."""
    found = types(
        "g (float[B, S, 8] x) => (float y) <int64[2] heads = {2, 4}, int64[1] zero = {0}, int64[1] two = {2}> { "
        "g = com.microsoft.Gelu(x) s = Shape(g) front = Slice(s, zero, two) target = Concat <axis=0> (front, heads) "
        "r = Reshape(g, target) y = Transpose <perm=[0, 2, 1, 3]> (r) }"
    )
    assert (found["g"], found["r"], found["y"]) == (("B", "S", 8), ("B", "S", 2, 4), ("B", 2, "S", 4))


def test_an_axis_that_nobody_named_has_a_new_name() -> None:
    """The same where it is the same, and none that is there already."""
    found = types(
        "g (float[unk__0, 8] x, float[B, 8] w) => (float y) "
        "{ a = NonZero(x) b = Transpose <perm=[1, 0]> (a) c = NonZero(w) d = Add(x, w) y = Neg(b) }"
    )
    names = {found["a"][1], found["c"][1], found["d"][0]}
    assert len(names | {"unk__0", "B", None}) == 6
    assert found["b"] == found["y"] == (found["a"][1], 2)


def test_pieces_of_computed_sizes_have_the_other_axes_of_the_whole() -> None:
    """Onnx says nothing of them."""
    found = types("g (float[B, S, 8] x, int64[2] sizes) => (float y) { a, b = Split <axis=1> (x, sizes) y = Neg(b) }")
    assert (found["a"][0], found["a"][2], found["y"]) == ("B", 8, found["b"])
    assert len({found["a"][1], found["b"][1], "S"}) == 3


def test_what_is_declared_holds_behind_operators_that_nobody_knows() -> None:
    """An exporter may know more."""
    model = build("g (float[B, 8] x) => (float y) { a = other.Mystery(x) y = Neg(a) }")
    inner = model.graph[0].outputs[0]
    inner.dtype, inner.shape = ir.DataType.FLOAT16, ir.Shape(["B", 3])
    infer_types(model)
    assert model.graph.outputs[0].shape == ir.Shape(["B", 3])
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT  # as the graph says


def test_sizes_of_another_dtype_stay_of_it() -> None:
    """The lengths that operators of onnxruntime take are int32."""
    text = "s = Shape <start=1, end=2> (x) n = Cast <to=6> (s) m = Sub(n, one) y = Neg(m)"
    model = build(f"g (float[B, S, 8] x) => (int32[1] y) <int32[1] one = {{1}}> {{ {text} }}")
    infer_types(model)
    assert model.graph[-2].outputs[0].dtype == ir.DataType.INT32


def test_functions_are_followed_by_their_own_opset() -> None:
    """A function of another opset than the model: its axes are an attribute."""
    function = onnx.parser.parse_function(
        '<domain: "local", opset_import: ["": 11]> f (x) => (y) { s = Shape(x) u = Unsqueeze <axes=[0]> (s) '
        "y = Squeeze <axes=[0]> (u) }"
    )
    model = build("g (float[B, 8] x) => (int64[2] y) { y = local.f(x) }", opset=17)
    proto = ir.to_proto(model)
    proto.functions.append(function)
    proto.opset_import.add(domain="local", version=1)
    assert find_shapes(ir.from_proto(proto)).elements["y"].tolist() == ["B", 8]
