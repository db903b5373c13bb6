"""Ways to damage a model: fields of its messages, pieces that ask for too much, and bytes."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.hostile.documents import ABSURD
from tests.hostile.gadgets import GADGETS, splice

_NAMES = ("", "x", "y", "a" * 5_000, "\x1b[31mred", "../../up", "\u202eright", "a\nb", "💥", "input_ids", "%s%n{0}")
_OPERATORS = ("Add", "MatMul", "Reshape", "Loop", "If", "Attention", "SequenceAt", "Shape", "Nonsense", "ai.onnx")
_PATTERNS = (b"\xff", b"\x00\x00\x00\x80", b"\x00" * 7 + b"\x80", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00")


def damage_model(seeds: Sequence[Path], choices: random.Random) -> tuple[str, bytes]:
    """Return what was done to a seed, and the bytes of the model."""
    seed = choices.choice(seeds)
    model = onnx.load(seed)
    done = []
    for _ in range(choices.choice((1, 1, 2, 4))):
        if choices.random() < 0.25:
            name = choices.choice(list(GADGETS))
            values = [value.name for value in model.graph.input]
            values += [name for node in model.graph.node for name in node.output if name]
            splice(model, name, choices.choice(values or ["x"]), f"h{choices.randrange(10**6)}_")
            done.append(name)
        else:
            done.append(_change_field(model, choices))
    data = bytearray(model.SerializeToString())
    if choices.random() < 0.05:
        done.append("bytes")
        for _ in range(choices.choice((1, 4, 30))):
            data[choices.randrange(len(data))] = choices.randrange(256)
    return f"{seed.stem}: {', '.join(done)}", bytes(data)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type:
            for inner in value if descriptor.is_repeated else [value]:
                yield from _messages(inner)


def _change_field(model: onnx.ModelProto, choices: random.Random) -> str:
    """Change one field of one message anywhere in a model, and return where."""
    by_type = defaultdict(list)
    for message in _messages(model):
        by_type[message.DESCRIPTOR.name].append(message)
    message = choices.choice(by_type[choices.choice(list(by_type))])
    descriptor = choices.choice(message.DESCRIPTOR.fields)
    name, kind = descriptor.name, descriptor.message_type
    same = by_type.get(kind.name) if kind else None

    def another(old: Any = None) -> Any:
        if kind is None:
            return _value(descriptor, model, choices, old)
        return copy.deepcopy(choices.choice(same)) if same else None

    if descriptor.is_repeated:
        held = [copy.deepcopy(one) for one in getattr(message, name)]
        action = choices.choice(("drop", "shuffle", "double", "add", "clear"))
        if action == "shuffle":
            choices.shuffle(held)
        elif action == "clear":
            held = []
        elif action == "drop" and held:
            held.pop(choices.randrange(len(held)))
        elif action == "double" and held:
            held.append(copy.deepcopy(choices.choice(held)))
        elif (new := another()) is not None:
            held.insert(choices.randrange(len(held) + 1), new)
        message.ClearField(name)
        with contextlib.suppress(ValueError):  # a number that the field cannot hold
            getattr(message, name).extend(held)
    elif choices.random() < 0.25 or (new := another(getattr(message, name))) is None:
        message.ClearField(name)
    elif kind:
        getattr(message, name).CopyFrom(new)
    else:
        with contextlib.suppress(ValueError):
            setattr(message, name, new)
    return f"{message.DESCRIPTOR.name}.{name}"


def _value(descriptor: Any, model: onnx.ModelProto, choices: random.Random, old: Any = None) -> Any:
    """Return a value of the field's type that it should not have at most places."""
    kinds = type(descriptor)
    if descriptor.type == kinds.TYPE_STRING:
        values = [name for node in model.graph.node for name in (*node.input, *node.output)]
        return choices.choice([*_NAMES, *_OPERATORS, choices.choice(values or ["x"])])
    if descriptor.type == kinds.TYPE_BYTES:
        size = len(old or b"") or 8
        pattern = choices.choice(_PATTERNS)
        return choices.choice([(pattern * size)[:size], (old or b"")[: size // 2], b"", b"\xff\xfe", b"a" * 10_000])
    if descriptor.type in (kinds.TYPE_FLOAT, kinds.TYPE_DOUBLE):
        return choices.choice([0.0, -1.0, float("nan"), float("inf"), 1e38])
    return choices.choice([*ABSURD, *range(24), 99])


def lengthen_field(model: onnx.ModelProto, long: str, many: Sequence[str], choices: random.Random) -> str:
    """Replace one text of one message by a long one, or a list of texts by many, and return where."""
    kinds = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    places = {
        (message.DESCRIPTOR.name, field.name): (message, field)
        for message in _messages(model)
        for field in message.DESCRIPTOR.fields
        if field.type in kinds
    }
    message, field = places[choices.choice(sorted(places))]
    encode = (lambda text: text.encode()) if field.type == FieldDescriptor.TYPE_BYTES else str
    if field.is_repeated:
        message.ClearField(field.name)
        getattr(message, field.name).extend(map(encode, choices.choice(([long], many))))
    else:
        setattr(message, field.name, encode(long))
    return f"{message.DESCRIPTOR.name}.{field.name}"
