"""What a mask means is found by running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.graph.shapes import find_shapes
from onnxtool.optimize.attention.masks import BIAS, NO_MASK, MaskKind, _feeds, find_mask_kind
from onnxtool.optimize.attention.scores import Masking, find_attention, match_roots
from onnxtool.optimize.attention.slices import slice_above
from onnxtool.optimize.passes.attention import attention
from tests.optimize.attention.graphs import INPUTS, MASKINGS, PADDING, PLACES, attention_graph, ragged_feeds
from tests.optimize.passes.builders import apply, run

PADDED = "masked = Where(allowed, scaled, lowest)"
NAMES = {
    "nothing": "nothing",
    "padding": "padding",
    "padding, added": "padding",
    "causal": "causal",
    "both": "padding, causal",
    "both, one by one": "padding, causal",
    "both, multiplied": "padding, causal",
    "window": "bias",
    "slopes": "bias",
    "padding, inverted": "bias",
}


def kind_of(masking: str, inputs: str = INPUTS, constants: Mapping[str, Any] | None = None) -> MaskKind:
    """Return the kind of the masks in an attention."""
    return kind_in(attention_graph(masking, inputs=inputs, constants=constants))


def kind_in(model: ir.Model) -> MaskKind:
    shapes = find_shapes(model)
    (root,) = match_roots(model.graph)
    return find_mask_kind(model, find_attention(root, shapes).masking, shapes)


def name_of(mask_kind: MaskKind) -> str:
    """Name a mask kind by its parts."""
    parts = [
        *(["padding"] if mask_kind.padding is not None else []),
        *(["causal"] if mask_kind.is_causal else []),
        *(["bias"] if mask_kind.is_bias else []),
    ]
    return ", ".join(parts) or "nothing"


@pytest.mark.parametrize("masking", MASKINGS)
def test_a_mask_is_known_by_what_it_does(masking: str) -> None:
    """However it is computed."""
    assert name_of(kind_of(MASKINGS[masking])) == NAMES[masking]


def test_the_padding_is_the_input_of_the_graph() -> None:
    """Not what was computed from it."""
    padding = kind_of(MASKINGS["both"]).padding
    assert padding is not None
    assert padding.is_graph_input()
    assert padding.name == "attention_mask"


@pytest.mark.parametrize("width", [3, 8, 64, 512, 2000])
def test_a_window_is_found_however_wide_it_is(width: int) -> None:
    """A short sequence would not show it."""
    assert kind_of(MASKINGS["window"], constants={"window": np.array(width)}) == BIAS


def test_a_window_that_is_too_wide_to_try_stays_a_bias() -> None:
    """A mask grows with the square of it, and a bias is always right."""
    assert kind_of(MASKINGS["window"], constants={"window": np.array(4096)}) == BIAS


@pytest.mark.parametrize("positions", [64, 120, 600])
def test_a_window_is_found_in_a_model_of_few_positions(positions: int) -> None:
    """Though no probe of shapes is as long as the window is wide."""
    embedded = "table_rows = Slice(table, first, end) x = Add(x0, table_rows)"
    ends = f"shape0 = Shape(x0) end = Slice(shape0, last, two_index) {embedded}"
    model = attention_graph(
        MASKINGS["window"],
        before=ends,
        inputs=INPUTS.replace(" x,", " x0,"),
        constants={
            "table": np.zeros((positions, 8), np.float32),
            "window": np.array(positions - 10),
            "two_index": np.array([2]),
        },
    )
    assert kind_in(model) == BIAS


@pytest.mark.parametrize(
    ("width", "expected"),
    [(20, MaskKind(is_bias=True, hides_later=True)), (64, MaskKind(is_causal=True, hides_later=True))],
)
def test_a_window_in_a_table_is_found(width: int, expected: MaskKind) -> None:
    """GPT-Neo writes one into a table of all places; a table as wide as it is long has none."""
    places = np.arange(64)
    apart = places[:, None] - places[None, :]
    table = ((apart >= 0) & (apart < width))[None, None]
    body = (
        "shape = Shape(x) long = Slice(shape, last, two_index) longs = Concat <axis=0> (long, long) "
        "before = Slice(table, zeros, longs, axes) masked = Where(before, scaled, lowest)"
    )
    constants = {
        "table": table,
        "zeros": np.array([0, 0]),
        "two_index": np.array([2]),
        "axes": np.array([2, 3]),
    }
    assert kind_of(body, constants=constants) == expected


@pytest.mark.parametrize(
    ("dtype", "condition"), [("int64", "real = Cast <to=9> (mask)"), ("bool", "real = Identity(mask)")]
)
def test_a_mask_may_be_of_any_dtype(dtype: str, condition: str) -> None:
    """Its name has to say that it is one."""
    body = f"{condition} allowed = Unsqueeze(real, outer) {PADDED}"
    assert name_of(kind_of(body, INPUTS.replace("int64[B, S] attention_mask", f"{dtype}[B, S] mask"))) == "padding"


def test_a_mask_of_another_name_is_known_by_what_it_does() -> None:
    """Whatever is not zero counts as a token to see."""
    inputs = INPUTS.replace("attention_mask", "padding")
    model = attention_graph(f"{PADDING} {PADDED}".replace("attention_mask", "padding"), inputs=inputs)
    assert name_of(kind_in(model)) == "padding"
    feeds = ragged_feeds()
    real = feeds["attention_mask"].astype(bool)
    feeds["padding"] = feeds.pop("attention_mask")
    (expected,) = run(model, feeds)
    assert apply(attention, model).num_changes == 1
    # float32 sums of eight numbers around 1, in another order
    np.testing.assert_allclose(run(model, feeds)[0][real], expected[real], atol=1e-5, rtol=0)


def test_a_mask_of_the_first_tokens_alone_is_no_padding() -> None:
    """Rows that differ from the mask in one place are enough."""
    body = f"{PLACES} early = Less(column, window) {PADDING} both = And(allowed, early)"
    body += " masked = Where(both, scaled, lowest)"
    assert kind_of(body) == BIAS


def test_a_mask_of_every_head_for_itself_stays_a_bias() -> None:
    """The fused operators know one for all of them."""
    body = "masked = Where(by_head, scaled, lowest)"
    assert kind_of(body, constants={"by_head": np.array([True, False]).reshape(1, 2, 1, 1)}) == BIAS


def test_what_is_added_is_a_bias_unless_it_keeps_out() -> None:
    """-10 lowers a score and keeps no token out."""
    body = MASKINGS["padding, added"].replace("lowest", "low")
    assert kind_of(body, constants={"low": np.array(-10.0, np.float32)}) == BIAS


def test_what_keeps_nothing_out_is_nothing() -> None:
    """Such as an attention_mask of image models, which is there for its form."""
    body = f"{PLACES} all = Greater(column, below) masked = Where(all, scaled, lowest)"
    assert kind_of(body, constants={"below": np.array(-1)}) == NO_MASK


def test_a_mask_that_comes_from_hidden_states_stays_a_bias() -> None:
    """What it keeps out depends on numbers, not on the lengths of rows."""
    length = "b = Abs(x) a = ReduceMax <axes=[-1], keepdims=0> (b) real = Greater(a, one)"
    body = f"{length} allowed = Unsqueeze(real, outer) {PADDED}"
    assert kind_of(body) == BIAS


def test_no_masks_mean_nothing() -> None:
    """And nothing is run."""
    model = attention_graph()
    assert find_mask_kind(model, Masking(), find_shapes(model)) == NO_MASK


AFTER = f"{PLACES} before = LessOrEqual(column, row)"
CAUSAL_BUT = "masked = Where(all, scaled, lowest)"
# Masks that are causal, or padding, at nearly all sizes, and on nearly all rows.
NEARLY = {
    "at a length": f"{AFTER} is = Equal(long, hundred) all = Or(before, is) {CAUSAL_BUT}",
    "below a length": f"{AFTER} is = Less(long, hundred) all = Or(before, is) {CAUSAL_BUT}",
    "at a place": f"{AFTER} is = Equal(column, hundred) all = Or(before, is) {CAUSAL_BUT}",
    "at a distance": f"{AFTER} far = Sub(column, row) is = Equal(far, hundred) all = Or(before, is) {CAUSAL_BUT}",
    "at a sum of constants": (
        f"{AFTER} moved = Add(column, hundred) far = Sub(moved, hundred) again = Add(far, hundred) "
        f"more = Add(again, hundred) is = Equal(row, more) other = Not(is) all = And(before, other) {CAUSAL_BUT}"
    ),
    "at every hundredth": f"{AFTER} m = Mod(column, hundred) is = Equal(m, window) all = Or(before, is) {CAUSAL_BUT}",
    "at a last place": (
        f"{AFTER} end = Sub(long, hundred) is = Equal(column, end) other = Not(is) all = And(before, other) "
        f"{CAUSAL_BUT}"
    ),
    "by a third token": (
        f"{PADDING} a0 = Gather <axis=3> (allowed, zero_index) a1 = Unsqueeze(a0, three) b0 = Gather <axis=3> "
        f"(allowed, one_index) b1 = Unsqueeze(b0, three) other = Not(b1) some = And(a1, other) "
        f"all = Or(allowed, some) {CAUSAL_BUT}"
    ),
    "by the number of tokens": (
        f"{PADDING} n = ReduceSum <keepdims=1> (attention_mask, last) is = Equal(n, hundred) "
        f"u = Unsqueeze(is, outer) all = Or(allowed, u) {CAUSAL_BUT}"
    ),
}


@pytest.mark.parametrize("masking", NEARLY)
def test_a_mask_that_is_only_nearly_known_stays_a_bias(masking: str) -> None:
    """It would agree with the known one at the sizes and rows that one would try."""
    assert kind_of(NEARLY[masking], constants={"hundred": np.array(100), "three": np.array([3])}).is_bias


@pytest.mark.parametrize("batch", ["1", "B"])
def test_a_window_is_found_in_a_model_of_one_row(batch: str) -> None:
    """The only dynamic axis is the length then."""
    inputs = INPUTS.replace("[B,", f"[{batch},")
    assert kind_of(MASKINGS["window"], inputs, {"window": np.array(20)}) == BIAS
    assert name_of(kind_of(MASKINGS["both"], inputs)) == "padding, causal"


def test_all_pairs_of_two_tokens_are_tried() -> None:
    """So that what reads two of them is known on every row."""
    model = attention_graph(MASKINGS["padding"])
    part = slice_above(
        find_attention(next(match_roots(model.graph)), find_shapes(model)).masking.values, find_shapes(model)
    )
    assert part is not None
    feeds = _feeds(part, {"B": 3, "S": 13})
    assert feeds is not None
    rows = np.concatenate([one["attention_mask"] for one, _ in feeds])
    pairs = {(i, j): {*zip(rows[:, i].tolist(), rows[:, j].tolist(), strict=True)} for i in range(13) for j in range(i)}
    assert all(len(seen) == 4 for seen in pairs.values())


def test_what_padding_adds_is_known() -> None:
    """A query that may attend to nothing gets the mean behind the lowest number, and NaN behind infinities."""
    numbers = {"minus": np.array(-1e4, np.float32), "infinity": np.array(-np.inf, np.float32)}
    filled = {name: kind_of(MASKINGS["padding"].replace("lowest", name), constants=numbers).fill for name in numbers}
    assert filled == {"minus": np.finfo(np.float32).min, "infinity": -np.inf}
    assert kind_of(MASKINGS["padding, added"].replace("lowest", "minus"), constants=numbers).fill == -1e4


@pytest.mark.parametrize("masking", ["padding", "both"])
def test_a_model_of_fixed_sizes_has_masks_as_well(masking: str) -> None:
    """There is one size to try."""
    inputs = "float[3, 7, 8] x, int64[3, 7] attention_mask"
    assert name_of(kind_of(MASKINGS[masking], inputs)) == NAMES[masking]
