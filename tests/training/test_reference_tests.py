"""The script that runs the reference's own tests finds what the table of the documentation does not say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnxtool.errors import ArtifactError
from onnxtool.training import onnxblock
from onnxtool.training.api import CheckpointState
from tests.training.small_models import make, perceptron

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_reference_tests as script
from check_reference_tests import Difference

ROWS = [Difference("test_words", "the words", "no value", "nothing"), Difference("test_library", "refused", None, None)]
PLAIN = {"test_loss[MSE]": True, "test_words": False, "test_library": False}


def test_every_row_of_the_table_is_read() -> None:
    """Each has a reason, and both texts or none."""
    text = script.TABLE.read_text(encoding="utf-8")
    rows = script.read_differences(text)
    assert len(rows) == text.count("\n| `test_")
    for row in rows:
        assert row.reason
        assert (row.old is None) == (row.new is None)
    assert {row.case for row in rows if row.old is None} == {"test_grad_clipping_execution", "test_ort_custom_ops"}


def test_a_text_is_replaced_in_its_case_alone() -> None:
    """And a row that finds nothing to replace is an error."""
    source = "def test_words():\n    assert 'no value'\n\n\ndef test_other():\n    assert 'no value'\n"
    changed = script.rewrite(source, ROWS[:1])
    assert changed == source.replace("no value", "nothing", 1)
    with pytest.raises(ValueError, match="test_words has no 'no value'"):
        script.rewrite(changed, ROWS[:1])


@pytest.mark.parametrize(
    ("plain", "rewritten", "wrong"),
    [
        (PLAIN, {"test_words": True}, []),
        ({**PLAIN, "test_loss[MSE]": False}, {"test_words": True}, ["test_loss[MSE] fails"]),
        ({**PLAIN, "test_library": True}, {"test_words": True}, ["test_library passes as it stands"]),
        (PLAIN, {"test_words": False}, ["test_words fails with the text"]),
        ({"test_words": False}, {"test_words": True}, ["lists test_library, and there is no such case"]),
    ],
)
def test_a_case_is_wrong_where_it_and_the_table_differ(
    plain: dict[str, bool], rewritten: dict[str, bool], wrong: list[str]
) -> None:
    """In either direction."""
    found = script.judge(plain, rewritten, ROWS)[1]
    assert len(found) == len(wrong)
    for sentence, part in zip(found, wrong, strict=True):
        assert part in sentence


def test_gradients_in_a_sequence_are_not_clipped() -> None:
    """As the table says; the error names the way out."""
    gradients = helper.make_tensor_sequence_value_info("gradients", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([], "clip", [gradients], []), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    with onnxblock.base(model), pytest.raises(ArtifactError, match="gradients is a sequence") as caught:
        onnxblock.optim.ClipGradNorm(2.5).build("gradients")
    assert "pass the names of all of them" in caught.value.hint


def test_the_parameters_of_a_nominal_state_are_an_error_at_once(tmp_path: Path) -> None:
    """Their names are known."""
    make(tmp_path, perceptron(), nominal_checkpoint=True)
    state = CheckpointState.load_checkpoint(tmp_path / "nominal_checkpoint")
    assert "fc1.weight" in state.parameters
    with pytest.raises(ArtifactError, match="nominal and has no values"):
        state.parameters["fc1.weight"]
    with pytest.raises(ArtifactError, match="nominal and has no values"):
        state.parameters["fc1.weight"] = np.zeros((7, 5), np.float32)
