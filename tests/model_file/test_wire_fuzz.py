"""Thousands of damaged and made-up models: each is read as onnx reads it, or refused with ModelFileError.

`make fuzz` runs many more of them: WIRE_FUZZ multiplies the number of cases.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from onnx import ModelProto, helper

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Structure, read_nodes, read_structure
from onnxtool.reports import to_json
from onnxtool.summary import summarize_file
from tests.graphs import external_tensor, identity, make_model
from tests.model_file.protobuf import everything, field

FACTOR = int(os.environ.get("WIRE_FUZZ", "1"))
NUM_CHUNKS = 4
NUM_MUTATIONS = 4_600 * FACTOR
NUM_STRUCTURES = 3_000 * FACTOR


def dynamic() -> Any:
    """A model with external data and unpacked dims."""
    weights = [external_tensor(f"w{index}", {"location": "w.bin", "offset": str(24 * index)}) for index in range(3)]
    return make_model([helper.make_node("MatMul", ["x", "w0"], ["y"])] * 4, weights)


SEEDS = tuple(model.SerializeToString() for model in (everything(), dynamic(), make_model([identity("n")])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "w.bin").write_bytes(bytes(100))
    return folder


def mutated(data: bytes, random_: random.Random) -> bytes:
    """Damage a model in one to eight places: bytes, runs, lengths, and pieces of itself in other places."""
    damaged = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 3, 8))):
        at = random_.randrange(len(damaged) or 1)
        match random_.randrange(8):
            case 0 | 1:
                damaged[at : at + 1] = bytes([random_.randrange(256)])
            case 2:
                damaged[at : at + 1] = bytes([damaged[at] ^ 1 << random_.randrange(8)]) if damaged else b""
            case 3:
                del damaged[at : at + random_.choice((1, 2, 9, 100))]
            case 4:
                damaged[at:at] = random_.randbytes(random_.choice((1, 2, 9)))
            case 5:
                start = random_.randrange(len(damaged) or 1)
                damaged[at:at] = damaged[start : start + random_.randrange(60)]
            case 6:
                damaged[at : at + 1] = b"\xff" * random_.choice((1, 4, 9, 10, 11)) + b"\x01"
            case 7:
                del damaged[at:]
    return bytes(damaged)


def read_or_refuse(path: Path, data: bytes) -> Structure | None:
    """Read `data` by every way that stats has, and return the structure; None where it is refused."""
    path.write_bytes(data)
    structure = refusal = None
    with suppress(ModelFileError):
        assert len(list(read_nodes(path))) <= len(data)
    try:
        structure = read_structure(path)
        assert isinstance(to_json(summarize_file(ModelFile.open(path))), dict)
    except ModelFileError as error:
        refusal = error
    if refusal is not None:
        assert refusal.hint
        assert str(path) in refusal.message
        assert structure is None or "external data" in refusal.message
    return structure


def assert_as_onnx_reads_it(structure: Structure, data: bytes) -> None:
    """Compare with protobuf's own parser; what that refuses, in fields that are of no use here, is nobody's loss."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        return
    graphs = list(_graphs(model.graph))
    assert structure.ir_version == model.ir_version
    assert structure.num_nodes == sum(len(graph.node) for graph in graphs)
    assert len(structure.initializers) == sum(
        len(graph.initializer) + sum(sparse.HasField("values") for sparse in graph.sparse_initializer)
        for graph in graphs
    )
    assert structure.num_subgraphs == len(graphs) - 1
    assert len(structure.outputs) == len(model.graph.output)
    assert len(structure.functions) == len(model.functions)
    assert structure.num_trainings == len(model.training_info)
    assert structure.metadata == {entry.key: entry.value for entry in model.metadata_props}


def _graphs(graph: Any) -> list[Any]:
    inside = [
        inner
        for node in graph.node
        for attribute in node.attribute
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
    ]
    return [graph, *(deeper for inner in inside for deeper in _graphs(inner))]


@pytest.mark.parametrize("data", SEEDS, ids=["everything", "dynamic", "identity"])
def test_sound_models_are_read_as_onnx_reads_them(folder: Path, data: bytes) -> None:
    """Training and the metadata of graphs apart from the model's."""
    structure = read_or_refuse(folder / "sound.onnx", data)
    assert structure is not None
    assert_as_onnx_reads_it(structure, data)


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_damaged_models_are_read_as_onnx_reads_them_or_refused(folder: Path, chunk: int) -> None:
    """Random damage to bytes: no other error, no hang, and never another count than protobuf's parser has."""
    random_ = random.Random(f"{chunk} of {NUM_CHUNKS}")  # noqa: S311  a seed, not a secret
    path = folder / f"{chunk}.onnx"
    num_read = 0
    for case in range(NUM_MUTATIONS // NUM_CHUNKS):
        data = mutated(SEEDS[case % len(SEEDS)], random_)
        structure = read_or_refuse(path, data)
        if structure is not None:
            num_read += 1
            assert_as_onnx_reads_it(structure, data)
    assert num_read > NUM_MUTATIONS // NUM_CHUNKS // 20  # damage that nothing survives would show nothing


COUNTS = (0, 1, 1, 2, 5)  # of fields: one that is refused hides all others
LIMITS = (2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1)


def number(random_: random.Random) -> int:
    """Return a small number, or one at a limit."""
    return random_.choice((random_.randrange(31), random_.choice(LIMITS)))


def text(random_: random.Random) -> bytes:
    """Return a few letters of any alphabet, or bytes that are no text."""
    letters = "".join(
        chr(random_.choice((0, 0x80, 0xE000, 0x10000)) + random_.randrange(0x80)) for _ in range(random_.randrange(9))
    )
    return random_.choice((letters.encode(), random_.randbytes(random_.randrange(5))))


def message(random_: random.Random, depth: int = 3) -> bytes:
    """Return fields of every number that ONNX has, with contents that fit and that do not."""
    makers = (number, text, lambda inner: message(inner, depth - 1))[: 2 + (depth > 0)]
    return b"".join(field(random_.randint(1, 26), random_.choice(makers)(random_)) for _ in range(random_.randrange(6)))


def tensor(random_: random.Random) -> bytes:
    """Return a tensor with dimensions, a type, a name and more."""
    dims = b"".join(field(1, number(random_)) for _ in range(random_.randrange(5)))
    return dims + field(2, number(random_)) + field(8, text(random_)) + message(random_)


def graph(random_: random.Random) -> bytes:
    """Return a graph of up to five nodes, values, weights and annotations."""
    places = (1, 5, 11, 12, 13, 14, 15, 16)
    chosen = random_.choices(places, k=random_.choice(COUNTS))
    return b"".join(field(place, (tensor if place == 5 else message)(random_)) for place in chosen)


def test_made_up_models_are_read_as_onnx_reads_them_or_refused(folder: Path) -> None:
    """Messages of the right shape with any content: numbers at every limit, names that are no text, nesting."""
    random_ = random.Random("made up")  # noqa: S311  a seed, not a secret
    num_read = 0
    for _ in range(NUM_STRUCTURES):
        graphs = [graph(random_) for _ in range(random_.randint(1, 2))]
        data = field(1, 10) + b"".join(field(7, one) for one in graphs) + field(8, field(2, 20)) + message(random_)
        structure = read_or_refuse(folder / "made_up.onnx", data)
        if structure is not None and len(graphs) == 1:
            num_read += 1
            assert_as_onnx_reads_it(structure, data)
    assert num_read > NUM_STRUCTURES // 20
