"""Ways to damage a model, each of which leaves most of it as it was: libraries get far into it before they fail."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper

from fuzzing.gadgets import GADGETS, splice

ABSURD = (0, -1, -5, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, -(2**63))
_NAMES = ("", "x", "y", "a" * 5_000, "\x1b[31mred", "../../up", "\u202eright", "a\nb", "💥", "input_ids", "%s%n{0}")
_DEEP = "[" * 10_000 + "]" * 10_000
_TEXTS = ("", "null", "[]", "{}", "NaN", "-1", "1e999", '"', "\x00", _DEEP, "9" * 5_000, '{"a": 1}', "[1, 2", "true")
_OPERATORS = (
    *("Add", "Div", "MatMul", "Reshape", "Gather", "Concat", "Cast", "Loop", "If", "Constant", "Attention", "Softmax"),
    *("LayerNormalization", "Conv", "Range", "Split", "Identity", "Nonsense", "SequenceAt", "Optional", "Shape", ""),
)
_DTYPES = (0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 14, 16, 17, 21, 22, 23, 99, -1)
_TERABYTE = 1 << 40


class Damage:
    """One model that is being damaged, with the choices of one seed."""

    def __init__(self, model: onnx.ModelProto, choices: random.Random, folder: Path, others: list[Path]) -> None:
        self.model = model
        self.choose = choices.choice
        self.random = choices
        self.folder = folder
        self.others = others

    @property
    def graph(self) -> onnx.GraphProto:
        """The main graph."""
        return self.model.graph

    def a_graph(self) -> onnx.GraphProto:
        """Choose the main graph or, now and then, one inside a node."""
        inner = [attribute.g for node in self.graph.node for attribute in node.attribute if attribute.HasField("g")]
        return self.choose(inner) if inner and self.random.random() < 0.5 else self.graph

    def a_node(self) -> onnx.NodeProto:
        """Choose a node."""
        nodes = self.a_graph().node or self.graph.node
        return self.choose(nodes) if nodes else self.graph.node.add(op_type="Identity", input=["x"], output=["y"])

    def an_initializer(self) -> onnx.TensorProto:
        """Choose an initializer, or make one."""
        tensors = self.graph.initializer
        return self.choose(tensors) if tensors else tensors.add(name="made", data_type=1, dims=[1], float_data=[1.0])

    def an_input(self) -> onnx.ValueInfoProto:
        """Choose an input, or make one."""
        values = self.graph.input
        if not values:
            values.append(helper.make_tensor_value_info("made", TensorProto.FLOAT, [1]))
        return self.choose(values)

    def a_value(self) -> str:
        """Choose the name of a value."""
        names = [name for node in self.graph.node for name in node.output if name]
        return self.choose(names) if names else "x"


def _gadget(damage: Damage) -> None:
    floats = [value.name for value in damage.graph.input if value.type.tensor_type.elem_type == TensorProto.FLOAT]
    floats += [
        node.output[0]
        for node in damage.graph.node
        if node.op_type in ("MatMul", "Add", "LayerNormalization", "Relu", "Mul", "Tanh", "Gelu") and node.output
    ]
    source = damage.choose(floats) if floats else damage.a_value()
    splice(damage.model, damage.choose(list(GADGETS)), source, f"h{damage.random.randrange(10**6)}_")


def _duplicate_node(damage: Damage) -> None:
    damage.graph.node.add().CopyFrom(damage.a_node())


def _drop_node(damage: Damage) -> None:
    if damage.graph.node:
        del damage.graph.node[damage.random.randrange(len(damage.graph.node))]


def _shuffle_nodes(damage: Damage) -> None:
    nodes = list(damage.graph.node)
    damage.random.shuffle(nodes)
    del damage.graph.node[:]
    damage.graph.node.extend(nodes)


def _rewire(damage: Damage) -> None:
    node = damage.a_node()
    if node.input:
        node.input[damage.random.randrange(len(node.input))] = damage.choose([damage.a_value(), "", "nowhere"])


def _rename_output(damage: Damage) -> None:
    node = damage.a_node()
    if node.output:
        node.output[damage.random.randrange(len(node.output))] = damage.choose([damage.a_value(), *_NAMES])


def _rename_node(damage: Damage) -> None:
    damage.a_node().name = damage.choose(_NAMES)


def _operator(damage: Damage) -> None:
    damage.a_node().op_type = damage.choose(_OPERATORS)


def _domain(damage: Damage) -> None:
    damage.a_node().domain = damage.choose(
        ["", "ai.onnx", "com.microsoft", "ai.onnx.ml", "local", "nowhere", "a" * 999]
    )


def _inputs(damage: Damage) -> None:
    node = damage.a_node()
    names = [*node.input, *[damage.a_value() for _ in range(damage.choose([1, 2, 500]))]]
    del node.input[:]
    node.input.extend(damage.choose([[], names]))


def _outputs(damage: Damage) -> None:
    node = damage.a_node()
    node.output.extend(f"more{place}" for place in range(damage.choose([1, 50])))


def _attribute(damage: Damage) -> None:
    nodes = [node for node in damage.graph.node if node.attribute]
    if not nodes:
        return
    node = damage.choose(nodes)
    attribute = damage.choose(node.attribute)
    match damage.random.randrange(7):
        case 0:
            node.attribute.remove(attribute)
        case 1:
            node.attribute.add().CopyFrom(attribute)
        case 2:
            attribute.type = damage.choose([0, 1, 2, 3, 4, 5, 7, 8, 10, 11])
        case 3:
            attribute.name = damage.choose(["axis", "to", "value", "body", "epsilon", *_NAMES])
        case _:
            _change_value(damage, attribute)


def _change_value(damage: Damage, attribute: AttributeProto) -> None:
    if attribute.type == AttributeProto.INTS:
        values = [damage.choose([value, *ABSURD]) for value in [*attribute.ints, 0]]
        del attribute.ints[:]
        attribute.ints.extend(damage.choose([values, values[:-1], []]))
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = damage.choose([0.0, -1.0, float("nan"), float("inf"), 1e38])
    elif attribute.type == AttributeProto.STRING:
        attribute.s = damage.choose([b"", b"\xff\xfe", b"a" * 10_000, b"NONSENSE"])
    elif attribute.type == AttributeProto.TENSOR:
        _damage_tensor(damage, attribute.t)
    else:
        attribute.i = damage.choose(ABSURD)


def _initializer(damage: Damage) -> None:
    tensor = damage.an_initializer()
    match damage.random.randrange(4):
        case 0:
            damage.graph.initializer.remove(tensor)
        case 1:
            damage.graph.initializer.add().CopyFrom(tensor)
        case 2:
            tensor.name = damage.choose([damage.a_value(), *_NAMES])
        case _:
            _damage_tensor(damage, tensor)


def _damage_tensor(damage: Damage, tensor: TensorProto) -> None:
    match damage.random.randrange(5):
        case 0:
            tensor.data_type = damage.choose(_DTYPES)
        case 1 if tensor.dims:
            tensor.dims[damage.random.randrange(len(tensor.dims))] = damage.choose(ABSURD)
        case 2:
            tensor.dims.append(damage.choose(ABSURD))
        case 3 if tensor.raw_data:
            tensor.raw_data = tensor.raw_data[: damage.random.randrange(len(tensor.raw_data))]
        case _ if tensor.raw_data:
            # Bytes of NaN, of the least integer, of -1, of large numbers.
            pattern = damage.choose([b"\xff", b"\x00\x00\x00\x80", b"\x00" * 7 + b"\x80", b"\x7f", b"\x00"])
            size = len(tensor.raw_data)
            tensor.raw_data = (pattern * size)[:size]
        case _:
            del tensor.int64_data[:]
            tensor.int64_data.append(damage.choose(ABSURD))


def _input_dims(damage: Damage) -> None:
    shape = damage.an_input().type.tensor_type.shape
    if shape.dim and damage.random.random() < 0.7:
        dim = damage.choose(shape.dim)
        if damage.random.random() < 0.7:
            dim.dim_value = damage.choose(ABSURD)
        else:
            dim.dim_param = damage.choose(_NAMES)
    else:
        shape.dim.add(dim_value=damage.choose(ABSURD))


def _input_dtype(damage: Damage) -> None:
    value = damage.an_input()
    kind = damage.random.randrange(6)
    if kind == 0:
        inner = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
        value.type.CopyFrom(damage.choose([helper.make_sequence_type_proto, helper.make_optional_type_proto])(inner))
    elif kind == 1:
        value.ClearField("type")
    else:
        value.type.tensor_type.elem_type = damage.choose(_DTYPES)


def _inputs_of_graph(damage: Damage) -> None:
    match damage.random.randrange(4):
        case 0:
            del damage.graph.input[:]
        case 1:
            damage.graph.input.add().CopyFrom(damage.an_input())
        case 2:
            damage.an_input().name = damage.choose([damage.a_value(), *_NAMES])
        case _:
            damage.graph.input.append(helper.make_tensor_value_info("more", damage.choose(_DTYPES[:-2]), ["batch", 3]))


def _outputs_of_graph(damage: Damage) -> None:
    graph = damage.graph
    match damage.random.randrange(5):
        case 0:
            del graph.output[:]
        case 1 if graph.output:
            graph.output.add().CopyFrom(graph.output[0])
        case 2 if graph.output:
            names = [damage.a_value(), damage.an_initializer().name, damage.an_input().name, *_NAMES]
            graph.output[0].name = damage.choose(names)
        case 3 if graph.output:
            graph.output[0].type.tensor_type.elem_type = damage.choose(_DTYPES)
        case _:
            graph.output.append(helper.make_tensor_value_info(damage.a_value(), TensorProto.FLOAT, None))


def _value_info(damage: Damage) -> None:
    shape = [damage.choose(ABSURD) for _ in range(damage.random.randrange(4))]
    damage.graph.value_info.append(helper.make_tensor_value_info(damage.a_value(), damage.choose(_DTYPES), shape))


def _opsets(damage: Damage) -> None:
    opsets = damage.model.opset_import
    match damage.random.randrange(4):
        case 0:
            del opsets[:]
        case 1:
            opsets.add(domain=damage.choose(["", "com.microsoft", "nowhere"]), version=damage.choose([1, 7, 99]))
        case _ if opsets:
            opsets[0].version = damage.choose([*ABSURD, 6, 9, 11, 13, 17, 22, 23, 24, 25, 99])


def _ir_version(damage: Damage) -> None:
    damage.model.ir_version = damage.choose([*ABSURD, 3, 4, 10, 13, 99])


def _metadata(damage: Damage) -> None:
    entries = damage.model.metadata_props
    keys = [entry.key for entry in entries] + ["onnxtool.steps", "onnxtool.input_kinds", "onnxtool.task", "author"]
    entries.add(key=damage.choose(keys), value=damage.choose(_TEXTS))
    if len(entries) > 1:
        text = entries[0].value
        entries[0].value = damage.choose([*_TEXTS, text[: len(text) // 2], json.dumps({"onnxtool": text})])


def _external(damage: Damage) -> None:
    tensor = damage.an_initializer()
    (damage.folder / "short.bin").write_bytes(bytes(16))
    with (damage.folder / "sparse.bin").open("wb") as file:
        file.truncate(_TERABYTE)
    for name in ("raw_data", "float_data", "int64_data", "int32_data"):
        tensor.ClearField(name)
    tensor.data_location = TensorProto.EXTERNAL
    places = ("/etc/passwd", "../up.bin", "nowhere.bin", "short.bin", "sparse.bin", ".", "", "a\x00b", "model.onnx")
    tensor.external_data.add(key="location", value=damage.choose(places))
    numbers = ("0", "-1", "99999999999999999999", "x", str(_TERABYTE - 4))
    tensor.external_data.add(key="offset", value=damage.choose(numbers))
    tensor.external_data.add(key="length", value=damage.choose(numbers))
    if damage.random.random() < 0.3:
        del tensor.dims[:]
        tensor.dims.append(damage.choose([_TERABYTE // 4, _TERABYTE // 8, 2**31]))


def _function(damage: Damage) -> None:
    functions = damage.model.functions
    if functions and damage.random.random() < 0.7:
        function = damage.choose(functions)
        match damage.random.randrange(4):
            case 0:
                function.node.add().CopyFrom(helper.make_node(function.name, ["v"], ["w"], domain=function.domain))
            case 1:
                functions.add().CopyFrom(function)
            case 2:
                del function.output[:]
            case _:
                function.name = damage.a_node().op_type
                function.domain = ""
        return
    node = damage.a_node()
    opsets = [helper.make_opsetid("", 18)]
    inputs = [f"i{place}" for place in range(len(node.input))]
    outputs = [f"o{place}" for place in range(len(node.output))]
    inner = helper.make_node(node.op_type, inputs, outputs)
    # A function in the name of a standard operator, which calls that operator: itself.
    functions.append(helper.make_function(node.domain, node.op_type, inputs, outputs, [inner], opsets))


def _sparse(damage: Damage) -> None:
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [2], [1.0, 2.0])
    indices = helper.make_tensor("", TensorProto.INT64, [2], [damage.choose(ABSURD), damage.choose(ABSURD)])
    values.name = damage.an_initializer().name if damage.random.random() < 0.5 else damage.a_value()
    damage.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [damage.choose(ABSURD)]))


def _annotations(damage: Damage) -> None:
    damage.graph.quantization_annotation.add(tensor_name=damage.a_value()).quant_parameter_tensor_names.add(
        key="SCALE_TENSOR", value="nowhere"
    )
    damage.model.training_info.add().algorithm.CopyFrom(damage.graph)


def _into_a_branch(damage: Damage) -> None:
    """Move a node into both branches of an If of a constant condition."""
    node = damage.a_node()
    if len(node.output) != 1:
        return
    output = node.output[0]
    branch = helper.make_graph([node], "branch", [], [onnx.ValueInfoProto(name=output)])
    damage.graph.initializer.append(helper.make_tensor(f"condition_{output}"[:200], TensorProto.BOOL, [], [True]))
    condition = damage.graph.initializer[-1].name
    moved = helper.make_node("If", [condition], [output], then_branch=branch, else_branch=branch)
    node.CopyFrom(moved)


def _splice_graphs(damage: Damage) -> None:
    """Append the graph of another seed, fed by values of this one."""
    other = onnx.load(damage.choose(damage.others))
    names = {name for node in other.graph.node for name in node.output} | {t.name for t in other.graph.initializer}
    taken = {value.name: damage.a_value() for value in other.graph.input}

    def renamed(name: str) -> str:
        return taken.get(name, f"other_{name}" if name in names else name)

    for tensor in other.graph.initializer:
        tensor.name = renamed(tensor.name)
    for node in other.graph.node:
        read, made = [renamed(name) for name in node.input], [renamed(name) for name in node.output]
        del node.input[:], node.output[:]
        node.input.extend(read)
        node.output.extend(made)
    for value in other.graph.output:
        value.name = renamed(value.name)
    damage.graph.node.extend(other.graph.node)
    damage.graph.initializer.extend(other.graph.initializer)
    damage.graph.output.extend(other.graph.output)
    damage.model.functions.extend(other.functions)


def _exchange_operator(damage: Damage) -> None:
    """Let a node compute something else of the same inputs: patterns almost match."""
    groups = (("Add", "Sub", "Mul", "Max"), ("Tanh", "Relu", "Sigmoid", "Neg", "Exp"), ("ReduceMean", "ReduceMax"))
    nodes = [(node, group) for node in damage.graph.node for group in groups if node.op_type in group]
    if nodes:
        node, group = damage.choose(nodes)
        node.op_type = damage.choose(group)


def _rename_everywhere(damage: Damage) -> None:
    """Give a value a hostile name wherever it is made and read."""
    old, new = damage.a_value(), damage.choose([name for name in _NAMES if name])
    for node in damage.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
    for output in damage.graph.output:
        if output.name == old:
            output.name = new


def _insert(damage: Damage) -> None:
    """Put nodes that change nothing, or next to nothing, behind a value."""
    value = damage.a_value()
    kind = damage.choose(["Identity", "Neg", "Dropout", "Clip"])
    readers = [node for node in damage.graph.node if value in node.input]
    place = next((n for n, node in enumerate(damage.graph.node) if value in node.output), 0) + 1
    new = f"{value}_{damage.random.randrange(10**6)}"
    for node in readers:
        for at, name in enumerate(node.input):
            if name == value:
                node.input[at] = new
    nodes = list(damage.graph.node)
    inserted = [helper.make_node(kind, [value], [f"{new}_half"]), helper.make_node(kind, [f"{new}_half"], [new])]
    del damage.graph.node[:]
    damage.graph.node.extend([*nodes[:place], *inserted, *nodes[place:]])


def _fix_dims(damage: Damage) -> None:
    """Fix a dimension of an input to a size that it may have."""
    for dim in damage.an_input().type.tensor_type.shape.dim:
        if damage.random.random() < 0.5:
            dim.dim_value = damage.choose([1, 2, 3, 8, 16])


def _weights(damage: Damage) -> None:
    """Let all weights be NaN, infinite, zero or huge: the graph is sound, and nothing that it computes is."""
    pattern = damage.choose([b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x00\x00", b"\xff\xff\x7f\x7f"])
    for tensor in damage.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.raw_data:
            tensor.raw_data = pattern * (len(tensor.raw_data) // 4)


def _documents(damage: Damage) -> None:
    damage.model.doc_string = "d" * damage.choose([0, 10_000, 9_000_000])
    damage.model.producer_name = damage.choose(_NAMES)
    damage.graph.name = damage.choose(_NAMES)


MUTATIONS: dict[str, Callable[[Damage], None]] = {
    "a hostile piece": _gadget,
    "another graph": _splice_graphs,
    "attribute": _attribute,
    "annotations": _annotations,
    "domain": _domain,
    "doubled node": _duplicate_node,
    "dropped node": _drop_node,
    "exchanged operator": _exchange_operator,
    "external data": _external,
    "fixed dims": _fix_dims,
    "function": _function,
    "graph's inputs": _inputs_of_graph,
    "graph's outputs": _outputs_of_graph,
    "initializer": _initializer,
    "input dims": _input_dims,
    "input dtype": _input_dtype,
    "IR version": _ir_version,
    "inserted nodes": _insert,
    "into a branch": _into_a_branch,
    "metadata": _metadata,
    "names of nodes": _rename_node,
    "names of values": _rename_output,
    "node's inputs": _inputs,
    "node's outputs": _outputs,
    "operator": _operator,
    "opsets": _opsets,
    "order of nodes": _shuffle_nodes,
    "renamed everywhere": _rename_everywhere,
    "rewired": _rewire,
    "sparse initializer": _sparse,
    "texts": _documents,
    "value info": _value_info,
    "weights": _weights,
}


def damaged(seeds: list[Path], choices: random.Random, folder: Path) -> tuple[str, bytes]:
    """Return what was done to a seed, and the bytes of the model; files beside it are written into `folder`."""
    seed = choices.choice(seeds)
    model = onnx.load(seed)
    damage = Damage(model, choices, folder, seeds)
    names = ["a hostile piece"] if choices.random() < 0.25 else [choices.choice(list(MUTATIONS))]
    names += [choices.choice(list(MUTATIONS)) for _ in range(choices.choice((0, 0, 1, 3)))]
    for name in names:
        MUTATIONS[name](damage)
    data = bytearray(model.SerializeToString())
    if choices.random() < 0.05:
        names.append("bytes")
        for _ in range(choices.choice((1, 4, 30))):
            data[choices.randrange(len(data))] = choices.randrange(256)
    return f"{seed.stem}: {', '.join(names)}", bytes(data)


def any_json(choices: random.Random) -> Any:
    """Return a value that no configuration should have at most places."""
    nothing: list[Any] = [None, True, [], {}, "", "x", "a" * 10_000, "\x00", [[]], {"a": {}}, float("nan"), 1e308]
    return choices.choice([*nothing, *ABSURD])
