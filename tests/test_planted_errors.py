"""Planted errors are found whatever else is in the outputs, and equal files pass.

Each graph ends in something that once set the scale for all other numbers: a fill, an offset, an outlier, or another
output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnxtool import verify
from onnxtool.optimize.options import OptimizeOptions
from onnxtool.optimize.run import optimize_model
from tests import graphs

WIDTH = 48
Arrays = dict[str, NDArray[Any]]


def number(value: Any) -> NDArray[np.float32]:
    return np.array(value, np.float32)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(columns: int) -> Arrays:
    """Return the weights of a small network over token ids, with `columns` outputs."""
    return {
        "table": normal(0, 100, WIDTH),
        "w": normal(1, WIDTH, WIDTH) / np.float32(7),
        "b": normal(2, WIDTH) / np.float32(10),
        "gain": 1 + normal(3, WIDTH) / np.float32(10),
        "shift": normal(4, WIDTH) / np.float32(10),
        "v": normal(5, WIDTH, columns) / np.float32(7),
        "c": normal(6, columns) / np.float32(10),
    }


NETWORK = """
    e = Gather(table, ids)
    h = MatMul(e, w)
    hb = Add(h, b)
    t = Tanh(hb)
    d = Sub(first, second)
    n = LayerNormalization <axis = -1, epsilon: float = EPSILON> (d, gain, shift)
"""
TOKENS = "p = Identity(n)"
POOLED = "p = ReduceMean <keepdims = 0> (n, second_axis)"

# What follows the scores `s`, as ONNX's text, with its constants.
ENDS: dict[str, tuple[str, Arrays]] = {
    "nothing": ("y = Identity(s)", {}),
    **{
        f"fill {fill:g}": ("y = Where(kept, s, fill)", {"fill": number(fill)})
        for fill in (0, 1, -20, -100, -1e4, -65504, -1e9, np.finfo(np.float32).min, np.nan, np.inf)
    },
    **{f"added {fill:g}": ("y = Add(s, mask)", {"mask": number(fill)}) for fill in (-1e4, -1e9)},
    "one fill": ("y = Where(others, s, fill)", {"fill": number(-1e9)}),
    **{f"offset {offset:g}": ("y = Add(s, offset)", {"offset": number(offset)}) for offset in (100, -8, 1e4)},
    **{f"outlying channel {by:g}": ("y = Mul(s, outlier)", {"outlier": number(by)}) for by in (50, 1e4)},
    "huge rows": ("y = Mul(s, row)", {}),
    "offset and fill": (
        "so = Add(s, offset) y = Where(kept, so, fill)",
        {"offset": number(100), "fill": number(-1e9)},
    ),
}
OTHERS = {"": "", "another output": "z = Mul(e, million)", "integers": "z = ArgMax <axis = -1, keepdims = 0> (e)"}


def write(path: Path, columns: int, end: str, *, error: str = "", other: str = "") -> Path:
    """Write a network whose scores end in `end`, with a planted error."""
    arrays, is_pooled = weights(columns), columns < WIDTH
    text, constants = ENDS[end]
    place = np.arange(columns) % 4
    arrays |= {
        "kept": place != 0,
        "others": np.arange(columns) != 0,
        "million": number(1e6),
        "two": np.array(2),
        "zeros": np.zeros(1, np.int64),
        "axis": np.array([2]),
        "second_axis": np.array([1]),
        "huge": number(1e4),
        "one": number(1),
    } | constants
    if "mask" in constants:
        arrays["mask"] = np.where(place == 0, constants["mask"], 0).astype(np.float32)
    if "outlier" in constants:
        arrays["outlier"] = np.where(np.arange(columns) == 2, constants["outlier"], 1).astype(np.float32)
    if error in ("w", "v"):
        arrays[error] = arrays[error] * np.float32(1.1)
    if error in ("b", "c"):
        arrays[error] = arrays[error] + np.where(np.arange(arrays[error].size) == columns // 2 + 1, np.float32(0.05), 0)
        arrays[error] = (arrays[error] + (np.float32(0.05) if columns == 1 else 0)).astype(np.float32)
    first, second = ("t", "e") if error == "swapped" else ("e", "t")
    network = NETWORK.replace("first", first).replace("second", second)
    network = network.replace("EPSILON", "0.01" if error == "epsilon" else "0.00001")
    # Rows whose first id is even are huge.
    row = "f = Gather <axis = 1> (ids, zeros) r = Mod(f, two) even = Equal(r, zeros) size = Where(even, huge, one)"
    row += " row = Identity(size)" if is_pooled else " row = Unsqueeze(size, axis)"
    shape = f"B, {columns}" if is_pooled else f"B, S, {columns}"
    kind = {"integers": ", int64[B, S] z", "another output": f", float[B, S, {WIDTH}] z"}.get(other, "")
    body = f"{network} {POOLED if is_pooled else TOKENS} m = MatMul(p, v) s = Add(m, c)"
    body += f" {row if 'row' in text.split(', ')[-1] else ''} {text} {OTHERS[other]}"
    used = {name: array for name, array in arrays.items() if f"{name})" in body or f"{name}," in body}
    onnx.save(graphs.of_text(f"g (int64[B, S] ids) => (float[{shape}] y{kind}) {{ {body} }}", used), path)
    return path


GRAPHS = [(64, end, "") for end in ENDS]
GRAPHS += [(3, end, "") for end in ("nothing", "added -1e+09", "offset 100", "outlying channel 10000", "huge rows")]
GRAPHS += [(1, end, "") for end in ("nothing", "offset 100", "offset 10000")]
GRAPHS += [(64, "nothing", other) for other in OTHERS if other] + [(1, "offset 100", "another output")]
ERRORS = ("w", "v", "b", "c", "swapped", "epsilon")
# Two errors in each graph, every error in some graphs of each kind.
PLANTED = [(graph, ERRORS[(number + step) % 6]) for number, graph in enumerate(GRAPHS) for step in (0, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.mark.parametrize(("graph", "error"), PLANTED, ids=lambda part: part if isinstance(part, str) else str(part))
def test_a_planted_error_fails_the_verification(folder: Path, graph: tuple[int, str, str], error: str) -> None:
    columns, end, other = graph
    base = write(folder / "base.onnx", columns, end, other=other)
    planted = write(folder / "planted.onnx", columns, end, error=error, other=other)
    assert not verify(planted, base).passed


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_an_equal_file_and_an_optimized_one_pass(folder: Path, graph: tuple[int, str, str]) -> None:
    """Rounding in another order is no error, however large the numbers beside it are."""
    columns, end, other = graph
    base = write(folder / "base.onnx", columns, end, other=other)
    verification = verify(base, base)
    assert verification.passed
    assert not verification.constant_outputs
    report = optimize_model(OptimizeOptions(base, output=folder / "optimized.onnx", timing=False, force=True))
    assert report.verification is not None
    assert report.verification.passed
    assert not any(one.left_out for one in report.passes)
