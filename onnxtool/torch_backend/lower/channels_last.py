"""Keep the images of a training step in the memory layout of PyTorch's convolutions, from the first to the last.

PyTorch's kernels for convolutions copy contiguous images [N, C, H, W] to another layout, and their results back, in the
forward and in the backward pass. Images whose channels lie next to each other (`channels_last`) need no copies, and
batch normalization, activations and pooling are faster with them, too. The joint graph gets one copy where a run of
such operators begins and one where it ends, so that all other operators, and results, keep the layout that eager
PyTorch gives them. The operators in between stay in PyTorch, and round as they do with `channels_last`: the sums of
batch normalization have up to ten times the rounding there, some 1e-5 of the largest gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from onnxtool.torch_backend.lower import attempted
from onnxtool.torch_backend.nodes import MANY_ELEMENTS, Node, call, is_call, seen_elements, tensor_of

aten = torch.ops.aten
LAYOUT = "PyTorch's kernels for images in the layout of its convolutions"
STAYS = "stays in PyTorch"
"""The key of a node's metadata with the reason."""
_WEIGHTS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
_LAYERS = (
    *(aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default),
    *(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    *(aten.relu.default, aten.threshold_backward.default, aten.add.Tensor),
)
_SAME = (operator.getitem, aten.detach.default)
_FOLLOW = (aten._native_batch_norm_legit_functional.default, aten.max_pool2d_with_indices.default, aten.relu.default)


def keep_channels_last(graph: torch.fx.Graph) -> None:
    """Insert the copies into a joint graph whose nodes have fake values, and mark what stays in PyTorch."""
    run: dict[Node, None] = {}
    for node in graph.nodes:
        if (node.target in _SAME and node.args[0] in run) or (
            is_call(node, *_WEIGHTS, *_LAYERS) and (_begins(node) or any(image in run for image in _images(node)))
        ):
            run[node] = None
    values = attempted(_values, next(iter(run)), run) if run else None
    if values is None:
        return
    copies: dict[Node, Node] = {}
    for node in run:
        for image in _images(node):
            if image not in run:
                if image not in copies:
                    copies[image] = call(node, aten.clone.default, image, memory_format=torch.channels_last)
                node.replace_input_with(image, copies[image])
    for node in run:
        node.meta[STAYS] = LAYOUT
        eager, node.meta["val"] = node.meta["val"], values[node]
        outside = [user for user in node.users if user not in run]
        if outside and _is_image(node):
            first = next(reader for reader in graph.nodes if reader in outside)
            copied = call(first, aten.clone.default, node, memory_format=suggest_memory_format(eager))
            for user in outside:
                user.replace_input_with(node, copied)
    for node in graph.nodes:
        if is_call(node, aten.clone.default) and (node in copies.values() or node.args[0] in run):
            node.meta[STAYS] = LAYOUT


def _values(_first: Node, run: Iterable[Node]) -> dict[Node, Any]:
    """Return the fake values that the nodes of a run will have, before anything is changed."""
    values: dict[Node, Any] = {}
    for node in run:
        images = {
            image: image.meta["val"].clone(memory_format=torch.channels_last)
            for image in _images(node)
            if image not in values
        }
        known = images | values
        arguments, options = torch.fx.node.map_arg(
            (node.args, node.kwargs),
            lambda source, known=known: known[source] if source in known else source.meta["val"],
        )
        values[node] = node.target(*arguments, **options)
    return values


def _begins(node: Node) -> bool:
    """Return whether a run begins at the node: a convolution before operators of PyTorch, and large ones only."""
    image = tensor_of(node)
    return (
        is_call(node, aten.convolution.default)
        and image is not None
        and image.dtype is torch.float32
        and image.device.type == "cpu"
        and seen_elements(image) >= MANY_ELEMENTS
        and any(is_call(user, *_FOLLOW) for user in node.users)
    )


def _images(node: Node) -> Iterator[Node]:
    for place, argument in enumerate(node.args):
        if place != _WEIGHTS.get(node.target) and _is_image(argument):
            yield argument


def _is_image(node: object) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dim() == 4
