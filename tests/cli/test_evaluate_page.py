"""The page of an evaluation names its systems so that they can be told apart."""

from __future__ import annotations

import re

import pytest

from onnxtool.cli.evaluate import _chart, _distinct, _Point


def test_files_of_the_same_name_are_told_apart_by_their_folders() -> None:
    """By as few parts of their paths as that takes."""
    assert _distinct(["models/a/model.onnx", "models\\b\\model.onnx"]) == ["a/model.onnx", "b/model.onnx"]
    assert _distinct(["models/splade.onnx", "bm25"]) == ["splade.onnx", "bm25"]
    assert _distinct(["org/model", "org/model"]) == ["org/model", "org/model"]


@pytest.mark.parametrize("quality", [(0.65, 0.62), (0.62, 0.65), (0.65, 0.65)])
def test_names_of_neighbouring_points_do_not_overlap(quality: tuple[float, float]) -> None:
    """The upper point has its name above, the lower one below."""
    points = [
        _Point(name, 10.0, "10 ms", mean, mean - 0.1, mean + 0.1, "red")
        for name, mean in zip(("first", "second"), quality, strict=True)
    ]
    svg = _chart(points, "nDCG@10")
    places = {
        name: float(y) for y, name in re.findall(r'y="([\d.]+)" text-anchor="(?:start|end)">(first|second)<', svg)
    }
    assert len(places) == 2
    assert abs(places["first"] - places["second"]) >= 24
