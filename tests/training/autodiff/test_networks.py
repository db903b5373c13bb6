"""Gradients of whole networks against PyTorch in float64, parameter by parameter."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxtool.training.autodiff import differentiate, prepare
from tests.training.autodiff.gradients import run_onnxruntime
from tests.training.autodiff.networks import NETWORKS, exported, make_network, promote

# How much further off than PyTorch's own gradient in float32 ours may be.
_TIMES = 3
# Gradients that are zero but for rounding, such as that of the bias of keys in attention, have no relative error;
# errors up to this fraction of the largest gradient of the network count as none. The unit of float32 is 1.2e-7.
_NONE = 2e-7


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradients_of_a_network_are_as_good_as_pytorchs(name: str) -> None:
    """In float32 on two threads they are no further from float64 than three times what PyTorch's are."""
    network = make_network(name)
    model = exported(network)
    prepare(model)
    expected, single = network.gradients(torch.float64), network.gradients(torch.float32)
    # As inputs, which they are in a training graph: onnxruntime folds a BatchNormalization into a convolution of
    # constant weights, though it trains.
    weights = promote(model)
    found = differentiate(model, "loss", [name for name in expected if name in weights])
    assert len(found) == len(list(network.module.parameters()))
    model.graph.outputs.extend(dict.fromkeys(found.values()))
    names = [str(value.name) for value in model.graph.outputs]
    given = [value.name for value in model.graph.inputs if value.name not in weights]
    tensors = zip(given, (*network.inputs, network.labels), strict=True)
    values = run_onnxruntime(
        ir.to_proto(model),
        weights | {str(name): one.float().numpy() if one.is_floating_point() else one.numpy() for name, one in tensors},
    )
    results = dict(zip(names, values, strict=True))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for parameter, gradient in found.items():
        ours = np.abs(results[str(gradient.name)] - expected[parameter].numpy()).max()
        theirs = float((single[parameter] - expected[parameter]).abs().max())
        assert ours <= max(_TIMES * theirs, _NONE * largest), parameter
