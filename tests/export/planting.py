"""Errors that are planted in exported graphs, which verification has to find."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def name_of(plant: Callable[..., None]) -> str:
    """Return the name of an error."""
    return str(getattr(plant.func if isinstance(plant, partial) else plant, "__name__", plant))


def constant(model: onnx.ModelProto, array: Any) -> str:
    """Add an initializer, and return its name."""
    name = f"planted_{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return name


def replace_value(model: onnx.ModelProto, name: str, *nodes: onnx.NodeProto) -> None:
    """Let everything that reads `name` read the output of the last of `nodes` instead."""
    for node in model.graph.node:
        node.input[:] = [nodes[-1].output[0] if value == name else value for value in node.input]
    for position, node in enumerate(nodes):
        model.graph.node.insert(position, node)


def swap_outputs(model: onnx.ModelProto, first: str, second: str) -> None:
    """Let two values change their names."""
    swapped = {first: second, second: first}
    for node in model.graph.node:
        node.input[:] = [swapped.get(name, name) for name in node.input]
        node.output[:] = [swapped.get(name, name) for name in node.output]


def ignore_the_mask(model: onnx.ModelProto) -> None:
    """Attend to padding as well."""
    one = constant(model, np.array(1, np.int64))
    replace_value(model, "attention_mask", helper.make_node("Max", ["attention_mask", one], ["planted"]))


def invert_the_mask(model: onnx.ModelProto) -> None:
    """Attend to padding alone."""
    one = constant(model, np.array(1, np.int64))
    replace_value(model, "attention_mask", helper.make_node("Sub", [one, "attention_mask"], ["planted"]))


def fix_the_batch(model: onnx.ModelProto, size: int) -> None:
    """Take so many texts at once, and no other number."""
    shape = constant(model, np.array([size, -1], np.int64))
    replace_value(model, "input_ids", helper.make_node("Reshape", ["input_ids", shape], ["planted"]))


def round_to_half(model: onnx.ModelProto) -> None:
    """Round the first output to float16."""
    value = model.graph.output[0].name
    producer = next(node for node in model.graph.node if value in node.output)
    producer.output[list(producer.output).index(value)] = "planted_full"
    half = helper.make_node("Cast", ["planted_full"], ["planted_half"], to=TensorProto.FLOAT16)
    model.graph.node.extend([half, helper.make_node("Cast", ["planted_half"], [value], to=TensorProto.FLOAT)])
