"""What one form of a report says, all say: text, Markdown, JSON and HTML have the same facts."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli.entry_point import run_onnxtool
from tests.graphs import of_text

TEXT = """g (float[n,4] x) => (float[n,4] y, float[n,4] z) {
    a = MatMul(x, w) b = MatMul(a, v) c = Sub(a, b) l = LeakyRelu <alpha = 0.125> (c) y = Relu(l) z = Abs(b)
}"""
WEIGHTS = {"w": np.arange(16, dtype=np.float32).reshape(4, 4), "v": np.ones((4, 4), np.float32)}


def base() -> Any:
    return of_text(TEXT, WEIGHTS)


def other_weights() -> Any:
    model = base()
    for one in model.graph.initializer:
        one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one) * 3, one.name))
    return model


def other_edges() -> Any:
    return of_text(TEXT.replace("Sub(a, b)", "Sub(b, a)").replace("0.125", "0.375"), WEIGHTS)


def other_operators() -> Any:
    text = TEXT.replace("y = Relu(l)", "t = Tanh(l) y = Relu(t)").replace("float[n,4] z)", "float[n,4] q)")
    return of_text(text.replace("z = Abs", "q = Abs"), {**WEIGHTS, "v": np.ones((4, 4), np.float32) * 7})


def other_stamps() -> Any:
    model = base()
    for key, value in (("team.run", "run-431"), ("team.step", "9731")):
        model.metadata_props.add(key=key, value=value)
    model.producer_name, model.producer_version = "other", "7.25"
    model.opset_import[0].version += 1
    return model


def facts(text: str) -> set[str]:
    """Return the words of a report that state something: names of this graph, and all that has a digit."""
    words = re.split(r"[\s|`*,;:()<>\[\]\"'{}·#\\]+", text)
    return {word.strip(".=") for word in words if re.search(r"\d", word)}


def of_html(page: str) -> str:
    page = re.sub(r"<(style|script)\b.*?</\1>|<wbr>|</?span[^>]*>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def values(data: Any) -> Iterator[str]:
    """Yield all names and values of a JSON document."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from values(value)
    elif isinstance(data, list):
        for value in data:
            yield from values(value)
    else:
        yield str(data)


@pytest.mark.parametrize("change", [None, other_weights, other_edges, other_operators, other_stamps])
def test_text_markdown_json_and_html_have_the_same_facts(tmp_path: Path, change: Any) -> None:
    onnx.save(base(), tmp_path / "base.onnx")
    onnx.save((change or base)(), tmp_path / "model.onnx")
    files = ("model.onnx", "base.onnx") if change is not None else ("model.onnx",)
    said = {
        form: run_onnxtool(tmp_path, "stats", *files, "--format", form, COLUMNS="200").stdout
        for form in ("text", "markdown", "json", "html")
    }
    told = facts(said["text"])
    assert len(told) > 10
    assert told <= facts(html.unescape(said["markdown"]))
    assert told <= facts(of_html(said["html"]))
    # JSON has the numbers in full, and changes without their sign and percentage.
    known = set(values(json.loads(said["json"])))
    stated = {word for word in told if re.fullmatch(r"[a-z._]*\d+", word)}
    assert stated - known <= {"0"}
