"""Which parameters a list of names and patterns means."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxtool.errors import ArtifactError
from onnxtool.training.graphs.parameters import select_parameters

ALIASES = {"embeddings.weight": "decoder.weight"}


def tied() -> onnx.ModelProto:
    """A table that is known as `embeddings.weight` as well, and a bias; the graph itself does not matter."""
    tensors = [numpy_helper.from_array(np.zeros(3, np.float32), name) for name in ("decoder.weight", "decoder.bias")]
    return helper.make_model(helper.make_graph([], "tied", [], [], tensors))


@pytest.mark.parametrize("entry", ["embeddings.weight", "embeddings.*", "decoder.weight"])
def test_a_tied_parameter_goes_by_each_of_its_names(entry: str) -> None:
    """As it is, or by a pattern."""
    choice = select_parameters(tied(), ["*.bias"], [entry], aliases=ALIASES)
    assert (choice.trained, choice.frozen) == (("decoder.bias",), ("decoder.weight",))


def test_two_names_of_one_parameter_are_not_two_parameters() -> None:
    """To train it by one and freeze it by the other is to do both to one."""
    with pytest.raises(ArtifactError, match=r"decoder\.weight cannot be trained and frozen at once"):
        select_parameters(tied(), ["decoder.weight"], ["embeddings.weight"], aliases=ALIASES)


def test_a_name_that_is_nearly_an_alias_is_answered_with_it() -> None:
    """What the checkpoint calls it is what one looks for."""
    with pytest.raises(ArtifactError) as raised:
        select_parameters(tied(), ["embedings.weight"], None, aliases=ALIASES)
    assert "did you mean embeddings.weight" in str(raised.value.hint)
