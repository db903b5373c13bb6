"""A bound run computes the same without copies, and a run on a device is timed in its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool.errors import SessionError
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from tests.infer.tiny_models import TinyModel, table


@pytest.fixture
def session(tmp_path: Path) -> Session:
    path = TinyModel(table(15, 4), "logits", inputs=("input_ids",)).write(tmp_path / "model.onnx")
    return open_session(path, provider="cpu", threads=1)


def _feeds(*ids: int) -> dict[str, NDArray[Any]]:
    return {"input_ids": np.array([ids], np.int64)}


def test_a_bound_run_gives_the_outputs_of_a_run(session: Session) -> None:
    """By a plain run of the session on the same inputs."""
    bound = session.bind(_feeds(1, 2, 3))
    bound()
    (output,) = bound.outputs()
    np.testing.assert_array_equal(output, session.run(_feeds(1, 2, 3))["logits"])


def test_outputs_lie_in_one_buffer_for_all_runs(session: Session) -> None:
    """Nothing is allocated in a run that is timed."""
    bound = session.bind(_feeds(1, 2, 3))
    places = set()
    for _ in range(3):
        bound()
        places.add(bound._binding.get_outputs()[0].data_ptr())
    assert len(places) == 1


def test_inputs_that_do_not_run_are_an_error_of_ours(session: Session) -> None:
    """With the shapes that were given."""
    with pytest.raises(SessionError, match=r"cannot run .*model\.onnx on input_ids \[1, 1, 1\]"):
        session.bind({"input_ids": np.zeros((1, 1, 1), np.int64)})
