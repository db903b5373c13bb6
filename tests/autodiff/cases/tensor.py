"""Cases of operators that move elements."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from tests.autodiff.cases.case import Case, integers, normal

_LARGEST = 2**63 - 1
_ROWS = integers(0, 2, 2, -1)
_TABLE = integers([0, 2, 2], [2, 0, -5])
_CELLS = integers([0, 1, 1], [2, 2, -3])
_POINTS = integers([0, 1], [2, 3], [0, 1], [-1, 0])


def _positive_index(indices: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(indices < 0, indices + size, indices)


def _take_along(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.gather(x, 1, _positive_index(indices, x.shape[1]))


def _put(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return x.scatter(1, _positive_index(indices, x.shape[1]), updates)


def _put_points(x: torch.Tensor, points: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return x.index_put((points[:, 0], points[:, 1]), updates)


def _add_points(x: torch.Tensor, points: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return x.index_put((points[:, 0], points[:, 1]), updates, accumulate=True)


def _batched_points(x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return torch.stack([part[index[:, 0]] for part, index in zip(x, points, strict=True)])


def _reversed_sum(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x.flip(1).cumsum(1).flip(1) - x


def _crd(x: torch.Tensor) -> torch.Tensor:
    return pixel_shuffle(x, 2)


def _dcr(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(n, c // 4, 2 * h, 2 * w)


def _to_depth(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return pixel_unshuffle(x, 2).reshape(n, c, 4, h // 2, w // 2).transpose(1, 2).reshape(n, c * 4, h // 2, w // 2)


TENSOR = (
    Case("Reshape", (normal(2, 3, 4), integers(6, -1)), lambda x, _: x.reshape(6, 4)),
    Case("Flatten", (normal(2, 3, 4),), lambda x: x.reshape(6, 4), {"axis": 2}),
    Case("Squeeze", (normal(2, 1, 4), integers(1)), lambda x, _: x.squeeze(1)),
    Case("Unsqueeze", (normal(2, 4), integers(0, -1)), lambda x, _: x[None, :, :, None]),
    Case("Transpose", (normal(2, 3, 4),), lambda x: x.permute(2, 0, 1), {"perm": [2, 0, 1]}),
    Case("Transpose", (normal(2, 3, 4),), lambda x: x.permute(2, 1, 0), note="reversed"),
    Case("Expand", (normal(3, 1), integers(2, 3, 4)), lambda x, _: x.expand(2, 3, 4)),
    Case("Expand", (normal(2, 3, 4), integers(3, 1)), lambda x, _: x * 1, note="to less"),
    Case("Compress", (normal(2, 4), np.array([True, False, True])), lambda x, c: x[:, :3][:, c], {"axis": -1}),
    Case("Compress", (normal(2, 2), np.array([True, False, True])), lambda x, c: x.flatten()[:3][c], note="of all"),
    Case(
        "ReverseSequence",
        (normal(3, 2, 2), integers(2, 3)),
        lambda x, _: torch.stack([torch.cat([x[:2, 0].flip(0), x[2:, 0]]), x[:, 1].flip(0)], 1),
    ),
    Case("Concat", (normal(2, 1), normal(2, 3)), lambda *x: torch.cat(x, 1), {"axis": -1}),
    Case(
        "Concat",
        (normal(2, 1), normal(2, 3), normal(2, 2)),
        lambda *x: torch.cat(x, 1),
        {"axis": 1},
        by=(1,),
        note="of one",
    ),
    Case(
        "OneHot",
        (integers([0, 2], [-1, 5]), np.array(3), np.array([-0.5, 2.0])),
        lambda i, _, v: torch.where((i[..., None] % 3 == torch.arange(3)) & (i[..., None] < 3), v[1], v[0]),
    ),
    Case(
        "OneHot",
        (integers([0, 2], [1, 5]), np.array(3), np.array([-0.5, 2.0])),
        lambda i, _, v: torch.where(i[:, None] == torch.arange(3)[:, None], v[1], v[0]),
        {"axis": 1},
        note="in the middle",
    ),
    Case(
        "Range",
        (np.array(0.5), np.array(3.0), np.array(0.75)),
        lambda start, _, step: start + torch.arange(4) * step,
        by=(0, 2),
    ),
    Case("Split", (normal(5, 2), integers(1, 4)), lambda x, _: (x[:1], x[1:]), {"axis": 0}, outputs=2),
    Case(
        "Split",
        (normal(2, 5),),
        lambda x: tuple(x.split(3, 1)),
        {"axis": -1, "num_outputs": 2},
        outputs=2,
        note="in equal parts",
    ),
    Case("Slice", (normal(5, 6), integers(1), integers(4)), lambda x, *_: x[1:4]),
    Case(
        "Slice",
        (normal(5, 6), integers(-4, 2), integers(_LARGEST, -1), integers(-1, 0)),
        lambda x, *_: x[2:-1, -4:],
        note="counted from the end",
    ),
    Case("Slice", (normal(5, 6), integers(4), integers(2), integers(0)), lambda x, *_: x[4:2], note="of nothing"),
    Case(
        "Slice",
        (normal(5, 6), integers(0, 5), integers(5, -_LARGEST), integers(0, 1), integers(2, -2)),
        lambda x, *_: x[::2].flip(1)[:, ::2],
        note="with steps",
    ),
    Case("Gather", (normal(4, 3), _ROWS), lambda x, i: x[i], note="of a vector"),
    Case("Gather", (normal(5, 3), _TABLE), lambda x, i: x[i], note="of a table"),
    Case("Gather", (normal(5, 3), _TABLE.astype(np.int32)), lambda x, i: x[i], note="int32"),
    Case("Gather", (normal(2, 5, 3), _TABLE), lambda x, i: x[:, i], {"axis": 1}, note="of an inner axis"),
    Case("Gather", (normal(2, 3, 5), _TABLE), lambda x, i: x[..., i], {"axis": -1}, note="of the last axis"),
    Case("Gather", (normal(4, 3), np.array(-2)), lambda x, i: x[i], note="of a number"),
    Case("Gather", (normal(6), _TABLE), lambda x, i: x[i], note="from a vector"),
    Case("GatherElements", (normal(2, 4), _CELLS), _take_along, {"axis": 1}),
    Case("GatherND", (normal(3, 4, 2), _POINTS), lambda x, i: x[i[:, 0], i[:, 1]]),
    Case("GatherND", (normal(3, 4), _POINTS), lambda x, i: x[i[:, 0], i[:, 1]], note="of numbers"),
    Case(
        "GatherND",
        (normal(2, 4, 3), integers([[0], [3], [3]], [[1], [1], [-2]])),
        _batched_points,
        {"batch_dims": 1},
        note="in a batch",
    ),
    Case("ScatterElements", (normal(2, 4), integers([0, 1], [2, -1]), normal(2, 2)), _put, {"axis": 1}),
    Case(
        "ScatterElements",
        (normal(2, 4), integers([0, 0], [2, 2]), normal(2, 2)),
        lambda x, i, u: x.scatter_add(1, i, u),
        {"axis": 1, "reduction": "add"},
        note="added",
    ),
    Case("ScatterND", (normal(3, 4, 2), integers([0, 1], [2, 3]), normal(2, 2)), _put_points),
    Case(
        "ScatterND",
        (normal(3, 4, 2), integers([0, 1], [2, 3]), normal(2, 2)),
        _add_points,
        {"reduction": "add"},
        note="added",
    ),
    Case("TopK", (normal(3, 5), integers(2)), lambda x, _: x.topk(2, 1)[0], {"axis": 1}, outputs=2),
    Case(
        "TopK",
        (normal(5, 3), integers(2)),
        lambda x, _: x.topk(2, 0, largest=False)[0],
        {"axis": 0, "largest": 0},
        outputs=2,
        note="smallest",
    ),
    Case("Pad", (normal(2, 3), integers(1, 0, 2, 3)), lambda x, _: pad(x, (0, 3, 1, 2))),
    Case("Pad", (normal(4, 3), integers(-1, 0, 2, -1)), lambda x, _: pad(x, (0, -1, -1, 2)), note="and crop"),
    Case("Pad", (normal(4, 3), integers(1, 2), None, integers(-1)), lambda x, *_: pad(x, (1, 2)), note="one axis"),
    Case(
        "Pad",
        (normal(4, 3), integers(0, 1, 0, 2), np.array(0.5)),
        lambda x, _, v: torch.cat([v.expand(4, 1), x, v.expand(4, 2)], 1),
        note="with a trained number",
    ),
    Case(
        "Pad",
        (normal(1, 4, 5), integers(0, 2, 1, 0, 1, 3)),
        lambda x, _: pad(x[None], (1, 3, 2, 1), "reflect")[0],
        {"mode": "reflect"},
        note="reflect",
    ),
    Case(
        "Pad",
        (normal(1, 4, 5), integers(0, 2, 1, 0, 1, 3)),
        lambda x, _: pad(x[None], (1, 3, 2, 1), "replicate")[0],
        {"mode": "edge"},
        note="edge",
    ),
    Case("Tile", (normal(2, 3), integers(2, 3)), lambda x, _: x.repeat(2, 3)),
    Case("Trilu", (normal(2, 4, 4),), torch.triu),
    Case("Trilu", (normal(4, 5), np.array(-1)), lambda x, k: torch.tril(x, -1), {"upper": 0}, note="lower"),
    Case("CumSum", (normal(2, 4), np.array(1)), lambda x, _: x.cumsum(1)),
    Case("CumSum", (normal(2, 4), np.array(1)), _reversed_sum, {"exclusive": 1, "reverse": 1}, note="reversed"),
    Case("DepthToSpace", (normal(1, 8, 2, 3),), _dcr, {"blocksize": 2}),
    Case(
        "DepthToSpace", (normal(1, 8, 2, 3),), _crd, {"blocksize": 2, "mode": "CRD"}, note="columns first", fixed=True
    ),
    Case("SpaceToDepth", (normal(1, 2, 4, 6),), _to_depth, {"blocksize": 2}),
)
