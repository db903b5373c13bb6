"""Small pieces of graphs that ask libraries for too much: absurd sizes, endless loops, operands that trap.

Each is spliced behind a float value of a seed: it reads that value or constants only, and what it makes is added to
the value. A gadget of constants is computed while a session is created, one that reads the value in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

INT64, INT32 = np.int64, np.int32
LEAST64, LEAST32 = -(2**63), -(2**31)
HUGE, LARGE = 2**60, 2**32


@dataclass
class Piece:
    """Nodes, constants and functions that compute `result` from the float value `source`, each name with a prefix."""

    source: str
    prefix: str
    result: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)

    def constant(self, array: NDArray[Any]) -> str:
        """Add a constant and return its name."""
        name = f"{self.prefix}c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op_type: str, *inputs: str, num_outputs: int = 1, **attributes: Any) -> str:
        """Add a node and return the name of its first output."""
        outputs = [f"{self.prefix}v{len(self.nodes)}_{place}" for place in range(num_outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), outputs, **attributes))
        return outputs[0]

    def zero(self, dtype: int) -> str:
        """Add nodes that make a scalar 0 of a dtype out of the source, which nothing can know to be constant."""
        sum_ = self.node("ReduceSum", self.node("Sub", self.source, self.source), keepdims=0)
        return self.node("Cast", sum_, to=dtype)


Gadget = Callable[[Piece], str]


def calling(
    op_type: str, *arrays: Any, is_constant: bool = True, domain: str = "", num_outputs: int = 1, **attributes: Any
) -> Gadget:
    """Make the gadget of one operator; without `is_constant` its first input depends on the source."""

    def add(piece: Piece) -> str:
        names = ["" if array is None else piece.constant(np.asarray(array)) for array in arrays]
        if not is_constant and names and np.asarray(arrays[0]).dtype.kind in "fiu":
            dtype = helper.np_dtype_to_tensor_dtype(np.asarray(arrays[0]).dtype)
            names[0] = piece.node("Add", names[0], piece.zero(dtype))
        return piece.node(op_type, *names, num_outputs=num_outputs, domain=domain, **attributes)

    return add


def ints(*values: int) -> NDArray[np.int64]:
    """Return a vector of int64."""
    return np.array(values, INT64)


def ones(*shape: int) -> NDArray[np.float32]:
    """Return ones of float32."""
    return np.ones(shape, np.float32)


def _doubling(count: int, *, is_constant: bool) -> Gadget:
    def add(piece: Piece) -> str:
        name = piece.constant(ones(1)) if is_constant else piece.source
        for _ in range(count):
            name = piece.node("Concat", name, name, axis=0)
        return name

    return add


def _chain(op_type: str, count: int) -> Gadget:
    def add(piece: Piece) -> str:
        name = piece.source
        for _ in range(count):
            name = piece.node(op_type, name)
        return name

    return add


def _value(name: str, dtype: int, shape: Sequence[int] | None = None) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def _loop(trips: int, *, depth: int = 1, stops: bool = False, is_constant: bool = True) -> Gadget:
    """Loops in loops, each of `trips` trips; those that stop at a condition have one that never holds."""

    def body(level: int, prefix: str) -> onnx.GraphProto:
        name = f"{prefix}l{level}_"
        nodes = [helper.make_node("Identity", [f"{name}c"], [f"{name}d"])]
        if level > 1:
            inner = body(level - 1, prefix)
            nodes.append(helper.make_node("Loop", [f"{prefix}n", f"{name}c", f"{name}x"], [f"{name}y"], body=inner))
        else:
            nodes.append(helper.make_node("Neg", [f"{name}x"], [f"{name}y"]))
        inputs = [_value(f"{name}i", TensorProto.INT64, []), _value(f"{name}c", TensorProto.BOOL, [])]
        return helper.make_graph(
            nodes,
            f"{name}body",
            [*inputs, _value(f"{name}x", TensorProto.FLOAT)],
            [_value(f"{name}d", TensorProto.BOOL, []), _value(f"{name}y", TensorProto.FLOAT)],
        )

    def add(piece: Piece) -> str:
        piece.constants.append(numpy_helper.from_array(np.array(trips, INT64), f"{piece.prefix}n"))
        number = "" if stops else f"{piece.prefix}n"
        start = piece.constant(ones(1)) if is_constant else piece.source
        return piece.node("Loop", number, piece.constant(np.array(True)), start, body=body(depth, piece.prefix))

    return add


def _branches(depth: int) -> Gadget:
    def add(piece: Piece) -> str:
        condition = piece.constant(np.array(True))

        def branch(level: int, side: str) -> onnx.GraphProto:
            output = f"{piece.prefix}b{level}{side}"
            if level == 0 or side == "e":
                node = helper.make_node("Identity", [piece.source], [output])
            else:
                inner = branch(level - 1, "t"), branch(level - 1, "e")
                node = helper.make_node("If", [condition], [output], then_branch=inner[0], else_branch=inner[1])
            return helper.make_graph([node], output, [], [_value(output, TensorProto.FLOAT)])

        return piece.node("If", condition, then_branch=branch(depth, "t"), else_branch=branch(depth, "e"))

    return add


def _functions(calls: Sequence[Sequence[int]]) -> Gadget:
    """Functions of which number n calls those in `calls[n]` one after the other, or Neg."""

    def add(piece: Piece) -> str:
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("hostile", 1)]
        for number, called in enumerate(calls):
            nodes = [
                helper.make_node(f"{piece.prefix}F{call}", [f"v{place}"], [f"v{place + 1}"], domain="hostile")
                for place, call in enumerate(called)
            ] or [helper.make_node("Neg", ["v0"], ["v1"])]
            piece.functions.append(
                helper.make_function(
                    "hostile", f"{piece.prefix}F{number}", ["v0"], [nodes[-1].output[0]], nodes, opsets
                )
            )
        return piece.node(f"{piece.prefix}F0", piece.source, domain="hostile")

    return add


def _scan(length: int) -> Gadget:
    def add(piece: Piece) -> str:
        body = helper.make_graph(
            [helper.make_node("Neg", [f"{piece.prefix}u"], [f"{piece.prefix}w"])],
            "body",
            [_value(f"{piece.prefix}u", TensorProto.FLOAT)],
            [_value(f"{piece.prefix}w", TensorProto.FLOAT)],
        )
        return piece.node("Scan", piece.constant(ones(length)), num_scan_inputs=1, body=body)

    return add


def _text(pattern: str) -> Gadget:
    def add(piece: Piece) -> str:
        text = piece.constant(np.array(["a" * 45 + "!"], object))
        matched = piece.node("RegexFullMatch", text, pattern=pattern)
        return piece.node("Cast", matched, to=TensorProto.FLOAT)

    return add


def _sequence(index: int) -> Gadget:
    def add(piece: Piece) -> str:
        made = piece.node("SequenceConstruct", piece.source, piece.source)
        return piece.node("SequenceAt", made, piece.constant(np.array(index, INT64)))

    return add


def _gadgets() -> dict[str, Gadget]:
    image, kernel = ones(1, 1, 4, 4), ones(1, 1, 3, 3)
    made: dict[str, Gadget] = {
        "doubled constants": _doubling(36, is_constant=True),
        "doubled values": _doubling(36, is_constant=False),
        "chain of 3,000 Neg": _chain("Neg", 3_000),
        "loop of 2^62 trips": _loop(2**62),
        "loop of 2^62 trips on a value": _loop(2**62, is_constant=False),
        "loop that never stops": _loop(0, stops=True),
        "loop that never stops on a value": _loop(0, stops=True, is_constant=False),
        "loops in loops": _loop(100_000, depth=3),
        "loop of negative trips": _loop(-5),
        "ifs in ifs": _branches(20),
        "functions that call twice": _functions([*([number + 1] * 2 for number in range(40)), []]),
        "function that calls itself": _functions([[0]]),
        "functions in a ring": _functions([[1], [2], [0]]),
        "functions 60 deep": _functions([*([number + 1] for number in range(60)), []]),
        "scan of 300,000": _scan(300_000),
        "catastrophic regular expression": _text("(a+)+$"),
        "regular expression of much memory": _text("((a{1000}){1000}){1000}"),
        "sequence out of bounds": _sequence(7),
        "sequence at the least integer": _sequence(LEAST64),
    }
    calls: dict[str, tuple[Any, ...]] = {
        "Div of the least int64": ("Div", ints(LEAST64), ints(-1)),
        "Div of the least int32": ("Div", np.array([LEAST32], INT32), np.array([-1], INT32)),
        "Div by zero": ("Div", ints(1), ints(0)),
        "Div of uint8 by zero": ("Div", np.array([1], np.uint8), np.array([0], np.uint8)),
        "Mod of the least int64": ("Mod", ints(LEAST64), ints(-1)),
        "Mod by zero": ("Mod", ints(1), ints(0)),
        "Pow of integers": ("Pow", ints(0, 2), ints(-1, 70)),
        "Abs of the least": ("Abs", ints(LEAST64)),
        "Range of 2^60": ("Range", np.array(0, INT64), np.array(HUGE), np.array(1, INT64)),
        "Range of 2^31": ("Range", np.array(0, INT64), np.array(2**31), np.array(1, INT64)),
        "Range without end": ("Range", np.array(0, INT64), np.array(5, INT64), np.array(0, INT64)),
        "Range of tiny steps": ("Range", np.float32(0), np.float32(1), np.float32(1e-12)),
        "Range of NaN": ("Range", np.float32(0), np.float32("nan"), np.float32(1)),
        "ConstantOfShape of 2^32": ("ConstantOfShape", ints(LARGE)),
        "ConstantOfShape of 2^70": ("ConstantOfShape", ints(2**35, 2**35)),
        "ConstantOfShape of less than nothing": ("ConstantOfShape", ints(-5)),
        "Expand to 2^32": ("Expand", ones(1), ints(LARGE)),
        "Expand to the least": ("Expand", ones(1), ints(LEAST64)),
        "Tile 2^32 times": ("Tile", ones(1), ints(LARGE)),
        "Tile negative": ("Tile", ones(2), ints(-3)),
        "Pad of 2^32": ("Pad", ones(1), ints(0, LARGE)),
        "Pad of less": ("Pad", ones(3), ints(-2, -2)),
        "OneHot of 2^31": ("OneHot", ints(0), ints(2**31), np.array([0, 1], np.float32)),
        "OneHot of a negative depth": ("OneHot", ints(0), ints(-4), np.array([0, 1], np.float32)),
        "outer MatMul": ("MatMul", ones(40_000, 1), ones(1, 40_000)),
        "outer Mul": ("Mul", ones(40_000, 1), ones(1, 40_000)),
        "TopK of 2^40": ("TopK", ones(3), ints(2**40)),
        "Slice of step 0": ("Slice", ones(3), ints(0), ints(3), ints(0), ints(0)),
        "Slice of the least": ("Slice", ones(3), ints(LEAST64), ints(2**63 - 1), ints(0), ints(LEAST64)),
        "Gather behind the end": ("Gather", ones(3), ints(2**40)),
        "Gather at the least": ("Gather", ones(3), ints(LEAST64)),
        "GatherND behind the end": ("GatherND", ones(3, 3), np.array([[2**40, 1]], INT64)),
        "GatherElements behind the end": ("GatherElements", ones(3), ints(9)),
        "ScatterND behind the end": ("ScatterND", ones(3), np.array([[2**40]], INT64), ones(1)),
        "ScatterElements behind the end": ("ScatterElements", ones(3), ints(-9), ones(1)),
        "Reshape to two unknowns": ("Reshape", ones(4), ints(-1, -1)),
        "Reshape to 2^62": ("Reshape", ones(4), ints(2**31, 2**31)),
        "Squeeze of axis 2^40": ("Squeeze", ones(1), ints(2**40)),
        "Unsqueeze of axis 2^40": ("Unsqueeze", ones(1), ints(2**40)),
        "CumSum of axis 99": ("CumSum", ones(3), np.array(99, INT64)),
        "Trilu of the least": ("Trilu", ones(3, 3), np.array(LEAST64, INT64)),
        "Compress by too many": ("Compress", ones(3), np.ones(99, bool)),
        "CenterCropPad to 2^32": ("CenterCropPad", ones(3), ints(LARGE)),
        "Col2Im of 2^40": ("Col2Im", ones(1, 9, 4), ints(2**20, 2**20), ints(3, 3)),
        "HannWindow of 2^33": ("HannWindow", np.array(2**33, INT64)),
        "DFT of 2^33": ("DFT", ones(1, 8, 1), np.array(2**33, INT64)),
        "GridSample of NaN": ("GridSample", image, np.full((1, 2, 2, 2), np.nan, np.float32)),
        "NonMaxSuppression of 2^60": ("NonMaxSuppression", ones(1, 5, 4), ones(1, 1, 5), ints(HUGE)),
    }
    attributed: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "Split into less": (("Split", ones(4), ints(-2, 6)), {"num_outputs": 2}),
        "BitShift by 200": (
            ("BitShift", np.array([1], np.uint8), np.array([200], np.uint8)),
            {"direction": "LEFT"},
        ),
        "Einsum of outer sums": (("Einsum", ones(3_000), ones(3_000), ones(300)), {"equation": "i,j,k->ijk"}),
        "Einsum of nonsense": (("Einsum", ones(3)), {"equation": "ij->" + "i" * 300}),
        "RandomNormal of 2^34": (("RandomNormal",), {"shape": [2**34]}),
        "RandomUniform of negative": (("RandomUniform",), {"shape": [-7]}),
        "EyeLike of bad dtype": (("EyeLike", ones(2, 2)), {"dtype": 99}),
        "Transpose of bad perm": (("Transpose", ones(2, 2)), {"perm": [0, 7]}),
        "Flatten of axis 2^40": (("Flatten", ones(2, 2)), {"axis": 2**40}),
        "Softmax of axis 2^40": (("Softmax", ones(2, 2)), {"axis": 2**40}),
        "ArgMax of axis -2^40": (("ArgMax", ones(2, 2)), {"axis": -(2**40)}),
        "Concat of axis 2^40": (("Concat", ones(2), ones(2)), {"axis": 2**40}),
        "Conv of no stride": (("Conv", image, kernel), {"strides": [0, 0]}),
        "Conv of no dilation": (("Conv", image, kernel), {"dilations": [0, 0]}),
        "Conv of no group": (("Conv", image, kernel), {"group": 0}),
        "Conv padded by 2^20": (("Conv", image, kernel), {"pads": [2**20] * 4}),
        "Conv padded by less": (("Conv", image, kernel), {"pads": [-9] * 4}),
        "ConvTranspose to 2^20": (("ConvTranspose", image, kernel), {"output_shape": [2**20, 2**20]}),
        "MaxPool of no kernel": (("MaxPool", image), {"kernel_shape": [0, 0]}),
        "MaxPool of 2^40": (("MaxPool", image), {"kernel_shape": [2**40, 2**40]}),
        "AveragePool of no stride": (("AveragePool", image), {"kernel_shape": [2, 2], "strides": [0, 0]}),
        "LpPool of p 0": (("LpPool", image), {"kernel_shape": [2, 2], "p": 0}),
        "DepthToSpace of no block": (("DepthToSpace", image), {"blocksize": 0}),
        "SpaceToDepth of no block": (("SpaceToDepth", image), {"blocksize": 0}),
        "LRN of no size": (("LRN", image), {"size": 0}),
        "Resize by 2^20": (("Resize", image, None, np.array([1, 1, 2**20, 2**20], np.float32)), {}),
        "Resize to nothing": (("Resize", image, None, None, ints(1, 1, 0, -4)), {}),
        "RoiAlign to 2^20": (
            ("RoiAlign", image, ones(1, 4), ints(0)),
            {"output_height": 2**20, "output_width": 2**20},
        ),
        "RoiAlign behind the end": (("RoiAlign", image, ones(1, 4), ints(2**40)), {"output_height": 2}),
        "BatchNormalization of other sizes": (
            ("BatchNormalization", image, ones(9), ones(3), ones(1), ones(0)),
            {},
        ),
        "LayerNormalization of axis 9": (("LayerNormalization", ones(2, 3), ones(3)), {"axis": 9}),
        "QuantizeLinear by zero": (("QuantizeLinear", ones(3), np.float32(0), np.int8(0)), {}),
        "QuantizeLinear of axis 9": (("QuantizeLinear", ones(2, 2), ones(2), np.zeros(2, np.int8)), {"axis": 9}),
        "DynamicQuantizeLinear of NaN": (
            ("DynamicQuantizeLinear", np.full(3, np.nan, np.float32)),
            {"num_outputs": 3},
        ),
        "LSTM of 2^30": (("LSTM", ones(2, 1, 3), ones(1, 8, 3), ones(1, 8, 2)), {"hidden_size": 2**30}),
        "GRU of negative size": (("GRU", ones(2, 1, 3), ones(1, 6, 3), ones(1, 6, 2)), {"hidden_size": -2}),
        "ReverseSequence behind the end": (("ReverseSequence", ones(2, 2), ints(99, -1)), {}),
        "Multinomial of 2^40": (("Multinomial", ones(1, 3)), {"sample_size": 2**40}),
        "TfIdfVectorizer of bad pools": (
            ("TfIdfVectorizer", ints(1, 2)),
            {
                "max_gram_length": 2,
                "max_skip_count": 2**40,
                "min_gram_length": 1,
                "mode": "TF",
                "ngram_counts": [0, 2**40],
                "ngram_indexes": [-5, 2**40],
                "pool_int64s": [1, 2],
            },
        ),
        "Constant of a billion": (("Constant",), {"value": TensorProto(dims=[2**30], data_type=1, name="t")}),
        "MatMulNBits of 99 bits": (
            ("MatMulNBits", ones(1, 32), np.zeros((32, 1, 16), np.uint8), ones(32)),
            {"domain": "com.microsoft", "bits": 99, "block_size": 0, "K": 32, "N": 32},
        ),
        "MatMulNBits of 2^40": (
            ("MatMulNBits", ones(1, 32), np.zeros((32, 1, 16), np.uint8), ones(32)),
            {"domain": "com.microsoft", "bits": 4, "block_size": 32, "K": 2**40, "N": 2**40},
        ),
        "Attention of no head": (
            ("Attention", ones(1, 2, 4), ones(4, 12), ones(12)),
            {"domain": "com.microsoft", "num_heads": 0},
        ),
        "Attention of 2^40 heads": (
            ("Attention", ones(1, 2, 4), ones(4, 12), ones(12)),
            {"domain": "com.microsoft", "num_heads": 2**40},
        ),
        "Attention of small weights": (
            ("Attention", ones(1, 2, 4), ones(4, 5), ones(2)),
            {"domain": "com.microsoft", "num_heads": 2},
        ),
        "MultiHeadAttention of no head": (
            ("MultiHeadAttention", ones(1, 2, 4), ones(1, 2, 4), ones(1, 2, 4)),
            {"domain": "com.microsoft", "num_heads": 0},
        ),
        "SkipLayerNormalization of other sizes": (
            ("SkipLayerNormalization", ones(1, 2, 4), ones(1, 2, 9), ones(7)),
            {"domain": "com.microsoft"},
        ),
        "FusedMatMul of bad sizes": (
            ("FusedMatMul", ones(2, 3), ones(2, 3)),
            {"domain": "com.microsoft", "transBatchA": 1},
        ),
        "QLinearMatMul of bad scales": (
            (
                *("QLinearMatMul", np.ones((2, 2), np.uint8), ones(0), np.uint8(0), np.ones((2, 2), np.int8)),
                *(ones(9), np.int8(0), np.float32(0), np.uint8(0)),
            ),
            {},
        ),
        "RotaryEmbedding of nothing": (
            ("RotaryEmbedding", ones(1, 2, 4), ints(2**40), ones(0, 1), ones(0, 1)),
            {"domain": "com.microsoft"},
        ),
    }
    for is_constant, suffix in ((True, ""), (False, " on a value")):
        for name, (op_type, *arrays) in calls.items():
            made[name + suffix] = calling(op_type, *arrays, is_constant=is_constant)
        for name, ((op_type, *arrays), attributes) in attributed.items():
            if arrays or is_constant:
                made[name + suffix] = calling(op_type, *arrays, is_constant=is_constant, **attributes)
    return made


GADGETS = _gadgets()


def splice(model: onnx.ModelProto, name: str, source: str, prefix: str) -> None:
    """Add the gadget called `name` to `model`: readers of the float value `source` read it with the result added."""
    piece = Piece(source, prefix)
    result = GADGETS[name](piece)
    result = piece.node("ReduceSum", piece.node("Cast", result, to=TensorProto.FLOAT), keepdims=0)
    changed = piece.node("Add", source, result)
    graph = model.graph
    nodes = list(graph.node)
    makers = [place for place, node in enumerate(nodes) if source in node.output]
    for node in nodes:
        for place, read in enumerate(node.input):
            if read == source:
                node.input[place] = changed
    for output in graph.output:
        if output.name == source:
            output.name = changed
    place = makers[0] + 1 if makers else 0
    del graph.node[:]
    graph.node.extend([*nodes[:place], *piece.nodes, *nodes[place:]])
    graph.initializer.extend(piece.constants)
    model.functions.extend(piece.functions)
    known = {opset.domain for opset in model.opset_import}
    for domain in {node.domain for node in piece.nodes} - known:
        model.opset_import.append(helper.make_opsetid(domain, 1))
