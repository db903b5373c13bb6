"""Graphs in the shapes that exporters write for attentions, activations and normalizations, each in its own wording.

The public fusion tests of onnxruntime, transformers and onnxscript name the families; the graphs here are our own.
B rows of S tokens, N heads of D numbers, H = N * D; P tokens of a cache; random weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from backend_suite.cases import Case

N, D = 4, 8
H = N * D
_POSITIONS = 512
_VOCABULARY = 50
_SIZES = ({"B": 2, "S": 6, "P": 3, "T": 7, "U": 9}, {"B": 1, "S": 9, "P": 1, "T": 4, "U": 10})  # U = P + S
_AXES = {"B": "batch_size", "S": "sequence_length", "P": "past_sequence_length", "T": "encoder_sequence_length"}
_AXES["U"] = f"{_AXES['P']} + {_AXES['S']}"
_MASKED, _LOWEST = -10_000.0, float(np.finfo(np.float32).min)


class Graph:
    """Builds a graph; `graph.MatMul(x, w)` adds a node, and returns the name of its output."""

    def __init__(self, opset: int = 17) -> None:
        self.opset = opset
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.inputs: list[tuple[str, int, list[str | int]]] = []
        self.random = np.random.default_rng(7)
        self.residual = ""
        self.made = 0

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return partial(self.add, kind)

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or those of several."""
        self.made += 1
        names = [f"{kind}_{self.made}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"/{kind}_{self.made}", **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """Add an initializer of these numbers."""
        name = f"constant_{len(self.weights)}"
        self.weights[name] = numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def ints(self, *values: int) -> str:
        """Add an initializer of sizes or axes."""
        return self.constant(values, np.int64)

    def weight(self, *shape: int, scale: float = 0.3) -> str:
        """Add an initializer of random numbers."""
        return self.constant(self.random.normal(0, scale, shape))

    def input(self, name: str, *shape: str | int, dtype: int = TensorProto.FLOAT) -> str:
        """Add an input."""
        self.inputs.append((name, dtype, list(shape)))
        return name

    def begin(self) -> str:
        """Add the input of a layer, [B, S, H], normalized; `case` adds it to the layer's output and normalizes that."""
        self.residual = self.norm(self.Add(self.input("hidden", "B", "S", H), self.weight(H)))
        return self.residual

    def norm(self, x: str) -> str:
        """Normalize by one node, from opset 17 on."""
        if self.opset < 17:
            return self.normalize(x)
        return str(self.LayerNormalization(x, self.weight(H), self.weight(H), epsilon=1e-5))

    def linear(self, x: str, width: int = H, *, given: int = H, bias: str = "last") -> str:
        """Multiply by a weight and add a bias, as `last` or `first` operand, or without one."""
        product = self.MatMul(x, self.weight(given, width))
        if not bias:
            return str(product)
        operands = [product, self.weight(width)]
        return str(self.Add(*(operands if bias == "last" else operands[::-1])))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Unsqueeze one axis after another, by an attribute before opset 13."""
        for axis in axes:
            x = self.Unsqueeze(x, self.ints(axis)) if self.opset >= 13 else self.Unsqueeze(x, axes=[axis])
        return x

    def sizes(self, x: str, *wanted: int | str) -> str:
        """Concatenate sizes: a text is the axis of `x` that is meant, as TorchScript writes it."""
        shape, parts = self.Shape(x), []
        for one in wanted:
            axis = self.constant(int(one), np.int64)
            parts.append(self.unsqueeze(self.Gather(shape, axis), 0) if isinstance(one, str) else self.ints(one))
        return str(self.Concat(*parts, axis=0))

    def split(self, x: str, *, heads: int = N, width: int = D, traced: bool = False) -> str:
        """Make [B, N, S, D] of [B, S, N * D]."""
        shape = self.sizes(x, "0", "1", heads, width) if traced else self.ints(0, 0, heads, width)
        return str(self.Transpose(self.Reshape(x, shape), perm=[0, 2, 1, 3]))

    def merge(self, x: str, *, width: int = H, traced: bool = False) -> str:
        """Make [B, S, N * D] of [B, N, S, D]."""
        x = self.Transpose(x, perm=[0, 2, 1, 3])
        return str(self.Reshape(x, self.sizes(x, "0", "1", width) if traced else self.ints(0, 0, width)))

    def attend(
        self,
        query: str,
        key: str,
        value: str,
        *,
        mask: str = "",
        scale: str = "div",
        where: str = "",
        low: float = _LOWEST,
    ) -> str:
        """Attend, with `mask` added to the scores, and with `low` where `where` is false."""
        root = math.sqrt(D)
        if scale == "query":
            query = self.Mul(query, self.constant(1 / root))
        elif scale == "both":
            query, key = (self.Mul(one, self.constant(root**-0.5)) for one in (query, key))
        scores = self.MatMul(query, self.turned(key))
        if scale == "div":
            scores = self.Div(scores, self.constant(root))
        elif scale == "mul":
            scores = self.Mul(scores, self.constant(1 / root))
        if where:
            scores = self.Where(where, scores, self.constant(low))
        if mask:
            scores = self.Add(scores, mask)
        return str(self.MatMul(self.Softmax(scores, axis=-1), value))

    def turned(self, key: str) -> str:
        """Make [B, N, D, S] of keys, by one Transpose where they come from another, as exporters simplify it."""
        maker = next((node for node in self.nodes if key in node.output and node.op_type == "Transpose"), None)
        if maker is None:
            return str(self.Transpose(key, perm=[0, 1, 3, 2]))
        if not any(key in node.input for node in self.nodes):
            self.nodes.remove(maker)
        return str(self.Transpose(maker.input[0], perm=[0, 2, 3, 1]))

    def padding(self, mask: str, *axes: int, low: float = _MASKED) -> str:
        """Make of ones and zeros what is added to scores."""
        mask = self.Cast(self.unsqueeze(mask, *axes) if axes else mask, to=TensorProto.FLOAT)
        return str(self.Mul(self.Sub(self.constant(1.0), mask), self.constant(low)))

    def causal(self, query: str, key: str) -> str:
        """Slice a table of booleans by the lengths of both, [1, 1, S, T]."""
        table = self.constant(np.tril(np.ones((1, 1, _POSITIONS, _POSITIONS))), bool)
        total, new = (self.unsqueeze(self.Gather(self.Shape(x), self.constant(2, np.int64)), 0) for x in (key, query))
        rows = self.Slice(table, self.Sub(total, new), total, self.ints(2))
        return str(self.Slice(rows, self.ints(0), total, self.ints(3)))

    def rotate(self, x: str, cos: str, sin: str, width: int = D) -> str:
        """Rotate halves by positions; where `width` is less than D, only so many numbers of a head."""
        rest = ""
        if width < D:
            rest = self.Slice(x, self.ints(width), self.ints(D), self.ints(3))
            x = self.Slice(x, self.ints(0), self.ints(width), self.ints(3))
        half = width // 2
        first = self.Slice(x, self.ints(0), self.ints(half), self.ints(3))
        second = self.Slice(x, self.ints(half), self.ints(1 << 62), self.ints(3))
        turned = self.Concat(self.Neg(second), first, axis=-1)
        x = self.Add(self.Mul(x, cos), self.Mul(turned, sin))
        return str(self.Concat(x, rest, axis=-1) if rest else x)

    def angles(self, width: int = D) -> tuple[str, str]:
        """Gather cosines and sines of the input `position_ids` from tables, [B, 1, S, width]."""
        positions = self.input("position_ids", "B", "S", dtype=TensorProto.INT64)
        turns = np.outer(np.arange(_POSITIONS), 10_000.0 ** (-np.arange(0, width, 2) / width))
        tables = (self.constant(function(np.concatenate([turns, turns], -1))) for function in (np.cos, np.sin))
        cos, sin = (self.unsqueeze(self.Gather(table, positions), 1) for table in tables)
        return cos, sin

    def normalize(self, x: str, *, square: str = "pow", width: int = H) -> str:
        """Normalize the last axis by its mean and variance, one node a step."""
        centered = self.Sub(x, self.ReduceMean(x, axes=[-1]))
        squared = self.Pow(centered, self.constant(2.0)) if square == "pow" else self.Mul(centered, centered)
        root = self.Sqrt(self.Add(self.ReduceMean(squared, axes=[-1]), self.constant(1e-5)))
        return str(self.Add(self.Mul(self.Div(centered, root), self.weight(width)), self.weight(width)))

    def scale_by_root(self, x: str, width: int = H) -> str:
        """Normalize the last axis by its root mean square."""
        mean = self.ReduceMean(self.Pow(x, self.constant(2.0)), axes=[-1])
        factor = self.Div(self.constant(1.0), self.Sqrt(self.Add(mean, self.constant(1e-6))))
        return str(self.Mul(self.weight(width), self.Mul(x, factor)))

    def case(self, name: str, outputs: str | list[str], *, attentions: int = 1, model_type: str = "bert") -> Case:
        """Return the case: inputs of two sizes, with rows of padding behind and, in masks of pairs, before the text."""
        names = [outputs] if isinstance(outputs, str) else outputs
        if self.residual:
            names = [self.norm(self.Add(names[0], self.residual)), *names[1:]]
        values = [
            helper.make_tensor_value_info(kind, dtype, [_AXES.get(str(axis), axis) for axis in shape])
            for kind, dtype, shape in self.inputs
        ]
        results = [helper.make_tensor_value_info(one, TensorProto.FLOAT, None) for one in names]
        graph = helper.make_graph(self.nodes, name, values, results, list(self.weights.values()))
        opsets = [helper.make_opsetid("", self.opset)]
        if any(node.domain for node in self.nodes):
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10 if self.opset > 20 else 8)
        model = onnx.shape_inference.infer_shapes(model)
        feeds = [{one[0]: self._feed(*one, sizes) for one in self.inputs} for sizes in _SIZES]
        return Case(name, "fusions", model, feeds, attentions=attentions, model_type=model_type)

    def _feed(self, name: str, dtype: int, shape: list[str | int], sizes: dict[str, int]) -> Any:
        given = tuple(sizes[one] if isinstance(one, str) else one for one in shape)
        if "mask" in name:
            mask = np.ones(given, np.int64)
            for row in range(given[0]):
                mask[row, ..., given[-1] - 1 - row :] = 0
            lowest = np.float32(_MASKED)
            return mask if dtype == TensorProto.INT64 else ((1 - mask) * lowest).astype(np.float32)
        if name == "position_ids":
            return np.broadcast_to(np.arange(given[1]), given).astype(np.int64)
        if dtype == TensorProto.INT64:
            return self.random.integers(0, 2 if "type" in name else _VOCABULARY, given)
        return self.random.normal(0, 1, given).astype(np.float32)


def _projected(
    graph: Graph,
    x: str,
    context: str = "",
    *,
    bias: tuple[str, str, str] = ("last",) * 3,
    given: int = H,
    traced: bool = False,
) -> list[str]:
    """Return queries of `x` and keys and values of `context`, [B, N, S, D] each."""
    sources = (x, context or x, context or x)
    widths = (H, given, given)
    return [
        graph.split(graph.linear(source, given=width, bias=one), traced=traced)
        for source, width, one in zip(sources, widths, bias, strict=True)
    ]


def _bert(
    name: str,
    mask: str = "",
    *,
    opset: int = 17,
    traced: bool = False,
    bias: str = "last",
    scale: str = "div",
    low: float = _MASKED,
    where: bool = False,
) -> Case:
    """A layer's attention with its residual and normalization; `mask` is 2d, 3d or 4d."""
    graph = Graph(opset)
    x = graph.begin()
    added = kept = ""
    if mask == "4d":
        added = graph.input("mask", "B", 1, "S", "S")
    elif mask:
        shape, axes = {"2d": (("B", "S"), (1, 2)), "3d": (("B", "S", "S"), (1,))}[mask]
        given = graph.input("mask", *shape, dtype=TensorProto.INT64)
        if where:
            kept = graph.Cast(graph.unsqueeze(given, *axes), to=TensorProto.BOOL)
        else:
            added = graph.padding(given, *axes, low=low)
    query, key, value = _projected(graph, x, bias=(bias,) * 3, traced=traced)
    merged = graph.merge(graph.attend(query, key, value, mask=added, where=kept, low=low, scale=scale), traced=traced)
    return graph.case(name, graph.linear(merged, bias=bias))


def _bert_packed(name: str, *, bias_table: bool = False) -> Case:
    """Queries, keys and values of one MatMul, cut by Split; with a table that is added to the scores of each head."""
    graph = Graph()
    packed = graph.linear(graph.begin(), 3 * H)
    parts = graph.Split(packed, graph.ints(H, H, H), axis=2, outputs=3)
    added = graph.padding(graph.input("mask", "B", "S", dtype=TensorProto.INT64), 1, 2)
    if bias_table:
        added = graph.Add(added, graph.input("positions", 1, N, "S", "S"))
    merged = graph.merge(graph.attend(*map(graph.split, parts), mask=added))
    return graph.case(name, graph.linear(merged))


def _bert_pruned(name: str) -> Case:
    """Three of four heads are left."""
    graph = Graph()
    x = graph.begin()
    parts = [graph.split(graph.linear(x, 3 * D), heads=3) for _ in range(3)]
    added = graph.padding(graph.input("mask", "B", "S", dtype=TensorProto.INT64), 1, 2)
    return graph.case(name, graph.linear(graph.merge(graph.attend(*parts, mask=added), width=3 * D), given=3 * D))


def _with_past(name: str, *, scale: str, mask: str = "", model_type: str = "bert", biases: Any = ("last",) * 3) -> Case:
    """Keys and values behind those of a cache, both of which are outputs as well."""
    graph = Graph()
    query, key, value = _projected(graph, graph.begin(), bias=biases)
    key, value = (
        graph.Concat(graph.input(f"past_{kind}", "B", N, "P", D), new, axis=2)
        for kind, new in (("key", key), ("value", value))
    )
    added = graph.padding(graph.input("mask", "B", "U", dtype=TensorProto.INT64), 1, 2) if mask == "2d" else ""
    kept = graph.causal(query, key) if mask == "causal" else ""
    merged = graph.merge(graph.attend(query, key, value, mask=added, where=kept, scale=scale))
    return graph.case(name, [graph.linear(merged), key, value], model_type=model_type)


def _keras(name: str, *, mask: bool) -> Case:
    """Products are Einsum, with weights of [H, N, D]."""
    graph = Graph()
    x = graph.begin()
    query, key, value = (
        graph.Add(graph.Einsum(x, graph.weight(H, N, D), equation="abc,cde->abde"), graph.weight(N, D))
        for _ in range(3)
    )
    query = graph.Mul(query, graph.constant(1 / math.sqrt(D)))
    scores = graph.Einsum(key, query, equation="aecd,abcd->acbe")
    if mask:
        scores = graph.Add(scores, graph.padding(graph.input("mask", "B", "S", dtype=TensorProto.INT64), 1, 2))
    context = graph.Einsum(graph.Softmax(scores, axis=-1), value, equation="acbe,aecd->abcd")
    output = graph.Einsum(context, graph.weight(N, D, H), equation="abcd,cde->abe")
    return graph.case(name, graph.Add(output, graph.weight(H)), model_type="bert_keras")


def _tensorflow(name: str) -> Case:
    """Tokens of all rows in one matrix, whose rows are put apart again for the heads."""
    graph = Graph(13)
    x = graph.begin()
    flat = graph.Reshape(x, graph.ints(-1, H))
    sizes = graph.sizes(x, "0", "1", N, D)
    parts = [graph.Transpose(graph.Reshape(graph.linear(flat), sizes), perm=[0, 2, 1, 3]) for _ in range(3)]
    added = graph.padding(graph.input("mask", "B", "S", dtype=TensorProto.INT64), 1, 2)
    context = graph.Transpose(graph.attend(*parts, mask=added, scale="mul"), perm=[0, 2, 1, 3])
    output = graph.linear(graph.Reshape(context, graph.ints(-1, H)))
    return graph.case(name, graph.Reshape(output, graph.sizes(x, "0", "1", H)), model_type="bert_tf")


def _gpt2(name: str, *, past: bool, mask: bool = False, style: str = "where") -> Case:
    """One Gemm over all tokens, Split, and a table that hides what comes later; the cache is one tensor of both."""
    graph = Graph()
    x = graph.begin()
    flat = graph.Gemm(graph.Reshape(x, graph.ints(-1, H)), graph.weight(H, 3 * H), graph.weight(3 * H))
    packed = graph.Reshape(flat, graph.sizes(x, "0", "1", 3 * H))
    parts = graph.Split(packed, graph.ints(H, H, H), axis=2, outputs=3)
    query, key, value = (graph.split(one, traced=True) for one in parts)
    outputs = []
    if past:
        cache = graph.input("past", 2, "B", N, "P", D)
        held = [graph.Gather(cache, graph.constant(one, np.int64), axis=0) for one in (0, 1)]
        key, value = (graph.Concat(old, new, axis=2) for old, new in zip(held, (key, value), strict=True))
        outputs = [graph.Concat(graph.unsqueeze(key, 0), graph.unsqueeze(value, 0), axis=0)]
    table = graph.causal(query, key)
    added = graph.padding(graph.input("mask", "B", "U" if past else "S", dtype=TensorProto.INT64), 1, 2) if mask else ""
    if style == "where":
        context = graph.attend(query, key, value, where=table, mask=added, low=_MASKED)
    else:  # scores * table - 10000 * (1 - table)
        scores = graph.MatMul(query, graph.turned(key))
        scores = graph.Div(scores, graph.constant(math.sqrt(D)))
        numbers = graph.Cast(table, to=TensorProto.FLOAT)
        hidden = graph.Mul(graph.Sub(graph.constant(1.0), numbers), graph.constant(-_MASKED))
        scores = graph.Sub(graph.Mul(scores, numbers), hidden)
        scores = graph.Add(scores, added) if added else scores
        context = graph.MatMul(graph.Softmax(scores, axis=-1), value)
    return graph.case(name, [graph.linear(graph.merge(context, traced=True)), *outputs], model_type="gpt2")


def _megatron(name: str) -> Case:
    """Queries, keys and values of each head lie together, and the mask is one of pairs."""
    graph = Graph()
    packed = graph.Reshape(graph.linear(graph.begin(), 3 * H), graph.ints(0, 0, N, 3 * D))
    parts = graph.Split(packed, graph.ints(D, D, D), axis=3, outputs=3)
    query, key, value = (graph.Transpose(one, perm=[0, 2, 1, 3]) for one in parts)
    added = graph.padding(graph.input("mask", "B", 1, "S", "S", dtype=TensorProto.INT64))
    return graph.case(
        name, graph.linear(graph.merge(graph.attend(query, key, value, mask=added, scale="both"))), model_type="gpt2"
    )


def _encoder_decoder(
    name: str,
    *,
    cross: int = 0,
    causal: bool = False,
    scale: str = "query",
    bias: Any = ("last",) * 3,
    mask: bool = False,
    model_type: str = "bart",
    positions: bool = False,
    traced: bool = True,
) -> Case:
    """Attention to the text itself, or to `cross` numbers for each token of another one."""
    graph = Graph()
    x = graph.begin()
    context = graph.input("context", "B", "T", cross) if cross else ""
    query, key, value = _projected(graph, x, context, bias=bias, given=cross or H, traced=traced)
    length = "T" if cross else "S"
    added = ""
    if mask:
        added = graph.padding(graph.input("mask", "B", length, dtype=TensorProto.INT64), 1, 2, low=_LOWEST)
    if positions:
        table = graph.input("positions", 1, N, "S", length)
        added = graph.Add(table, added) if added else table
    kept = graph.causal(query, key) if causal else ""
    merged = graph.merge(graph.attend(query, key, value, mask=added, where=kept, scale=scale), traced=traced)
    return graph.case(name, graph.linear(merged, bias=bias[0]), model_type=model_type)


def _cross_with_cache(name: str) -> Case:
    """Keys and values of the other text come from the cache as they are."""
    graph = Graph()
    query = graph.split(graph.linear(graph.begin()), traced=True)
    key, value = (graph.input(f"past_{kind}", "B", N, "T", D) for kind in ("key", "value"))
    context = graph.attend(query, key, value, scale="query")
    return graph.case(name, graph.linear(graph.merge(context, traced=True)), model_type="bart")


def _sam(name: str) -> Case:
    """The heads have half the width of the tokens."""
    graph = Graph()
    x, context = graph.input("hidden", "B", "S", 2 * H), graph.input("context", "B", "T", 2 * H)
    parts = [graph.split(graph.linear(one, given=2 * H)) for one in (x, context, context)]
    return graph.case(name, graph.linear(graph.merge(graph.attend(*parts)), 2 * H), model_type="sam2")


def _rotary(
    name: str, *, groups: int = N, past: bool = False, width: int = D, bias: str = "", normalized: bool = False
) -> Case:
    """Queries and keys are rotated by their positions; keys and values of `groups` heads are repeated."""
    graph = Graph()
    x = graph.begin()
    cos, sin = graph.angles(width)
    query = graph.split(graph.linear(x, bias=bias))
    key, value = (graph.split(graph.linear(x, groups * D, bias=bias), heads=groups) for _ in range(2))
    if normalized:
        query, key = (graph.scale_by_root(one, D) for one in (query, key))
    query, key = (graph.rotate(one, cos, sin, width) for one in (query, key))
    outputs = []
    if past:
        outputs = [
            graph.Concat(graph.input(f"past_{kind}", "B", groups, "P", D), new, axis=2)
            for kind, new in (("key", key), ("value", value))
        ]
        key, value = outputs
    kept = graph.causal(query, key)
    if groups < N:
        key, value = (_repeated(graph, one, groups) for one in (key, value))
    merged = graph.merge(graph.attend(query, key, value, where=kept, scale="mul"))
    return graph.case(name, [graph.linear(merged, bias=bias), *outputs], model_type="phi" if width < D else "gpt2")


def _repeated(graph: Graph, x: str, groups: int) -> str:
    """Expand [B, groups, 1, S, D] to all heads."""
    shape = graph.Concat(graph.sizes(x, "0", groups, N // groups), graph.sizes(x, "2", D), axis=0)
    expanded = graph.Expand(graph.unsqueeze(x, 2), shape)
    return str(graph.Reshape(expanded, graph.sizes(x, "0", N, "2", D)))


def _conformer(name: str) -> Case:
    """Scores of contents and of positions are added before they are scaled."""
    graph = Graph()
    x = graph.begin()
    query, key, value = _projected(graph, x, traced=True)
    about_content, about_places = (graph.Add(query, graph.weight(N, 1, D)) for _ in range(2))
    places = graph.split(graph.linear(graph.input("positions", 1, "S", H), bias=""))
    scores = graph.MatMul(about_content, graph.turned(key))
    scores = graph.Add(scores, graph.MatMul(about_places, graph.turned(places)))
    weights = graph.Softmax(graph.Div(scores, graph.constant(math.sqrt(D))), axis=-1)
    return graph.case(
        name, graph.linear(graph.merge(graph.MatMul(weights, value), traced=True)), model_type="conformer"
    )


def _operator(name: str, *, heads_apart: bool, causal: int = 0) -> Case:
    """ONNX's own Attention, of opset 23."""
    graph = Graph(23)
    x = graph.begin()
    parts = [graph.linear(x) for _ in range(3)]
    if heads_apart:
        added = graph.padding(graph.input("mask", "B", "S", "S", dtype=TensorProto.INT64), 1)
        context = graph.merge(graph.Attention(*map(graph.split, parts), added))
    else:
        context = graph.Attention(*parts, q_num_heads=N, kv_num_heads=N, is_causal=causal)
    return graph.case(name, graph.linear(context))


def _gelu(name: str, write: Callable[[Graph, str], str], *, bias: bool = False) -> Case:
    """An activation between two layers."""
    graph = Graph()
    x = graph.linear(graph.input("hidden", "B", "S", H), 2 * H, bias="last" if bias else "")
    return graph.case(name, graph.linear(write(graph, x), given=2 * H), attentions=0)


def _erf(graph: Graph, x: str, *, order: int = 0) -> str:
    part = graph.Add(graph.Erf(graph.Div(x, graph.constant(math.sqrt(2)))), graph.constant(1.0))
    half = graph.constant(0.5)
    if order == 0:
        return str(graph.Mul(graph.Mul(x, part), half))
    return str(graph.Mul(graph.Mul(x, half), part) if order == 1 else graph.Mul(x, graph.Mul(part, half)))


def _tanh(graph: Graph, x: str, *, power: bool = True) -> str:
    cube = graph.Pow(x, graph.constant(3.0)) if power else graph.Mul(graph.Mul(x, x), x)
    inner = graph.Mul(graph.Add(x, graph.Mul(cube, graph.constant(0.044715))), graph.constant(math.sqrt(2 / math.pi)))
    part = graph.Add(graph.Tanh(inner), graph.constant(1.0))
    if power:
        return str(graph.Mul(graph.Mul(x, graph.constant(0.5)), part))
    return str(graph.Mul(x, graph.Mul(graph.constant(0.5), part)))


def _quick(graph: Graph, x: str) -> str:
    return str(graph.Mul(x, graph.Sigmoid(graph.Mul(x, graph.constant(1.702)))))


def _normalization(name: str, write: Callable[[Graph, str], str], *, skip: bool = False) -> Case:
    """A normalization, of a sum with what is behind it where `skip` is set."""
    graph = Graph()
    x = graph.input("hidden", "B", "S", H)
    return graph.case(name, graph.linear(write(graph, graph.Add(graph.linear(x), x) if skip else x)), attentions=0)


def _embeddings(name: str) -> Case:
    """Words, positions and types of a token are added and normalized."""
    graph = Graph()
    ids, kinds = (graph.input(one, "B", "S", dtype=TensorProto.INT64) for one in ("input_ids", "token_type_ids"))
    length = graph.unsqueeze(graph.Gather(graph.Shape(ids), graph.constant(1, np.int64)), 0)
    places = graph.Slice(graph.constant([range(_POSITIONS)], np.int64), graph.ints(0), length, graph.ints(1))
    words = graph.Add(graph.Gather(graph.weight(_VOCABULARY, H), ids), graph.Gather(graph.weight(2, H), kinds))
    return graph.case(
        name, graph.normalize(graph.Add(words, graph.Gather(graph.weight(_POSITIONS, H), places))), attentions=0
    )


def _einsum(name: str) -> Case:
    """Products and a transpose written as Einsum, with no attention between them."""
    graph = Graph()
    x = graph.Einsum(graph.input("hidden", "B", "S", H), graph.weight(H, N, D), equation="bsh,hnd->bnsd")
    return graph.case(name, graph.Einsum(graph.Relu(x), graph.weight(N, D, H), equation="bnsd,ndh->bsh"), attentions=0)


def fusion_cases() -> Iterator[Case]:
    """Yield the graphs; the first 40 have an attention."""
    half_biased = ("last", "", "last")
    yield _bert("bert, no mask")
    yield _bert("bert, mask of tokens", "2d")
    yield _bert("bert, mask of pairs", "3d")
    yield _bert("bert, float mask", "4d")
    yield _bert("bert, traced sizes", "2d", traced=True)
    yield _bert("bert, bias first", "2d", bias="first")
    yield _bert("bert, opset 11", "2d", opset=11, traced=True)
    yield _bert("roberta", "2d", low=_LOWEST, traced=True)
    yield _bert("distilbert", "2d", where=True, low=_LOWEST, scale="query")
    yield _bert_packed("bert, one product")
    yield _bert_packed("tnlr", bias_table=True)
    yield _bert_pruned("bert, pruned heads")
    yield _with_past("bert, with past", scale="div", mask="2d")
    yield _keras("keras, no mask", mask=False)
    yield _keras("keras, mask", mask=True)
    yield _tensorflow("tensorflow")
    yield _gpt2("gpt2", past=False)
    yield _gpt2("gpt2, mask of tokens", past=False, mask=True)
    yield _gpt2("gpt2, subtraction", past=False, style="sub")
    yield _gpt2("gpt2, with past", past=True)
    yield _gpt2("gpt2, with past, mask of tokens", past=True, mask=True)
    yield _megatron("megatron")
    yield _encoder_decoder("bart, encoder", mask=True)
    yield _encoder_decoder("bart, decoder", causal=True)
    yield _with_past("bart, decoder with past", scale="query", mask="causal", model_type="bart")
    yield _encoder_decoder("bart, cross", cross=H, mask=True)
    yield _cross_with_cache("bart, cross from cache")
    yield _encoder_decoder("t5, encoder", scale="", bias=("",) * 3, mask=True, positions=True, model_type="t5")
    yield _encoder_decoder("t5, cross", scale="", bias=("",) * 3, cross=H, mask=True, model_type="t5")
    yield _encoder_decoder("whisper, cross", bias=half_biased, cross=H)
    yield _encoder_decoder("vit", scale="div", traced=False, model_type="vit")
    yield _encoder_decoder("clip, text", causal=True, scale="mul", model_type="clip")
    yield _sam("sam")
    yield _encoder_decoder("unet, cross", scale="mul", bias=("",) * 3, cross=3 * D, model_type="unet")
    yield _rotary("llama, groups, with past", groups=2, past=True)
    yield _rotary("phi", width=D // 2, bias="last")
    yield _conformer("conformer")
    yield _operator("attention of opset 23", heads_apart=False)
    yield _rotary("qwen", bias="last", normalized=True)
    yield _operator("attention of opset 23, mask", heads_apart=True)
    yield _gelu("gelu, x * part * half", _erf)
    yield _gelu("gelu, x * half * part", partial(_erf, order=1), bias=True)
    yield _gelu("gelu, x * (part * half)", partial(_erf, order=2), bias=True)
    yield _gelu("gelu, tanh and power", _tanh, bias=True)
    yield _gelu("gelu, tanh and products", partial(_tanh, power=False))
    yield _gelu("gelu, quick", _quick)
    yield _normalization("normalization, power", Graph.normalize)
    yield _normalization("normalization, product", partial(Graph.normalize, square="product"))
    yield _normalization("normalization, root mean square", Graph.scale_by_root)
    yield _normalization("normalization, skip", Graph.normalize, skip=True)
    yield _embeddings("embeddings")
    yield _einsum("einsum")
