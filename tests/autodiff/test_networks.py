"""Gradients of whole networks against PyTorch in float64, parameter by parameter."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tests.autodiff.networks import NETWORKS, make_network, measure, shared_export
from tests.workshop import Workshop

# How much further off than PyTorch's own gradient in float32 ours may be.
_TIMES = 3
# Gradients that are zero but for rounding, such as that of the bias of keys in attention, have no relative error;
# errors up to this fraction of the largest gradient of the network count as none. The unit of float32 is 1.2e-7.
_NONE = 2e-7
# Their operators are those of BERT; scripts/gradient_table.py has them.
LIKE_BERT = {"roberta", "distilbert"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - LIKE_BERT))
def test_the_gradients_of_a_network_are_as_good_as_pytorchs(workshop: Workshop, name: str) -> None:
    """In float32 on two threads they are no further from float64 than three times what PyTorch's are."""
    network = make_network(name)
    errors = measure(network, ir.load(shared_export(name, workshop)))
    assert len(errors) == len(list(network.module.parameters()))
    assert {parameter: one for parameter, one in errors.items() if one.ours > max(_TIMES * one.theirs, _NONE)} == {}
