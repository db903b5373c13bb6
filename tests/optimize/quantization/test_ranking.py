"""The neighbours that a quantized model finds."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from onnxtool.checkpoint.text_files import read_texts
from onnxtool.model_file import ModelFile
from onnxtool.optimize.quantization import ranking
from onnxtool.optimize.quantization.calibration import OWN_TEXTS
from onnxtool.optimize.quantization.ranking import held_out_texts, measure_ranking
from onnxtool.optimize.report import OptimizeReport
from tests.optimize.passes.builders import normal
from tests.workshop import Workshop


def test_neighbours_and_orders_are_those_of_the_definitions() -> None:
    """Counted pair by pair, on vectors of which some are close together."""
    wanted = normal(14, 4)
    found = wanted + 0.4 * normal(14, 4, seed=1)
    overlaps, taus = [], []
    for text in range(14):
        others = [one for one in range(14) if one != text]
        sides = [{one: float(vectors[text] @ vectors[one]) for one in others} for vectors in (wanted, found)]
        nearest = [set(sorted(others, key=side.__getitem__, reverse=True)[:10]) for side in sides]
        overlaps.append(len(nearest[0] & nearest[1]) / 10)
        signs = [
            np.sign(sides[0][one] - sides[0][two]) * np.sign(sides[1][one] - sides[1][two])
            for one, two in itertools.combinations(others, 2)
        ]
        taus.append(np.mean(signs))
    assert 0.8 < np.mean(overlaps) < 1
    assert ranking._overlap(wanted, found) == pytest.approx(np.mean(overlaps))
    assert ranking._kendall_tau(wanted, found) == pytest.approx(np.mean(taus))
    assert (ranking._overlap(wanted, wanted), ranking._kendall_tau(wanted, wanted)) == (1.0, 1.0)


@pytest.mark.parametrize("value", [0.0, 0.3, np.nan])
def test_vectors_that_are_all_the_same_have_no_neighbours(value: float) -> None:
    """Any order of them is right, so that none is kept."""
    vectors = np.full((12, 4), value, np.float32)
    found = ranking.compare_vectors(vectors, vectors, "y")
    assert (found.overlap, found.kendall_tau) == (None, None)
    varied = ranking.compare_vectors(normal(12, 4), normal(12, 4), "y")
    assert (varied.overlap, varied.kendall_tau) == (1.0, 1.0)


def test_texts_are_others_than_those_of_the_calibration() -> None:
    """As many as asked for, and none twice."""
    texts = held_out_texts(200)
    assert len(set(texts)) == 200
    assert not set(texts) & {text.contents for text in read_texts(OWN_TEXTS)}


@pytest.mark.slow
def test_a_quantized_model_of_vectors_reports_its_neighbours(trained_int8: tuple[Path, OptimizeReport]) -> None:
    """Those of the file that was written; a model of hidden states has none."""
    source, report = trained_int8
    found = report.ranking
    assert found is not None
    assert (found.num_texts, found.output) == (200, "sentence_embedding")
    assert 0 < found.error < 0.01
    assert found.overlap is not None
    assert 0.9 < found.overlap < 1
    assert found.kendall_tau is not None
    assert 0.9 < found.kendall_tau < 1
    assert measure_ranking(source, Path(report.output), ModelFile.open(source)) == found


def test_hidden_states_have_no_neighbours(workshop: Workshop) -> None:
    """Nor is there an error for them."""
    source = workshop.exported("tiny-encoder", exporter="torchscript")
    assert measure_ranking(source, source, ModelFile.open(source)) is None
