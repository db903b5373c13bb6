"""Gradients of reductions, which expand the gradient to the shape of the input."""

from __future__ import annotations

from math import prod

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.rule import Backward, Rule, rule


def _kept(n: Backward, reduced: Tensor) -> Tensor:
    """Return a reduced value with the reduced axes kept, of size 1."""
    if n.attribute("keepdims", 1) or not n.has(1):
        return reduced  # without axes it is a scalar, which broadcasts
    return n.build.op("Unsqueeze", reduced, n.x(1))


def _axes(n: Backward) -> Tensor | None:
    return n.x(1) if n.has(1) else None


def _count(n: Backward) -> Tensor:
    """Return how many elements were reduced to one."""
    x, y = n.x(0), n.y()
    if x.shape is not None and y.shape is not None and n.attribute("keepdims", 1):
        reduced = [whole for whole, part in zip(x.shape, y.shape, strict=True) if whole != part]
        if all(isinstance(size, int) for size in reduced):
            return n.build.constant(prod(size for size in reduced if isinstance(size, int)), n.dy.dtype)
    sizes = [n.build.op("Size", value).cast(n.dy.dtype) for value in (x, y)]
    return sizes[0] / sizes[1]


def _reduce_extremum(n: Backward) -> Tensor:
    """Distribute the gradient equally over all elements with the extreme value."""
    hits = n.x(0).equals(_kept(n, n.y())).cast(n.dy.dtype)
    return hits * (_kept(n, n.dy) / n.build.op("ReduceSum", hits, _axes(n), keepdims=1))


def _reduce_l2(n: Backward) -> Tensor:
    norm = _kept(n, n.y())
    direction = n.x(0) / n.build.where(norm.equals(0.0), 1.0, norm)
    return _kept(n, n.dy) * direction


def _reduce_prod(n: Backward) -> Tensor:
    """Multiply by the product of the other elements: with one zero it is zero except there, with two everywhere."""
    is_zero = n.x(0).equals(0.0)
    others = n.build.where(is_zero, 1.0, n.x(0))
    product = n.build.op("ReduceProd", others, _axes(n), keepdims=1)
    zeros = n.build.op("ReduceSum", is_zero.cast(n.dy.dtype), _axes(n), keepdims=1)
    at_zero = n.build.where(zeros.equals(1.0), product, 0.0)
    elsewhere = n.build.where(zeros.equals(0.0), product / others, 0.0)
    return _kept(n, n.dy) * n.build.op("Where", is_zero, at_zero, elsewhere)


REDUCE: dict[str, Rule] = {
    "ReduceL2": rule(_reduce_l2),
    "ReduceLogSumExp": rule(lambda n: _kept(n, n.dy) * n.build.op("Exp", n.x(0) - _kept(n, n.y()))),
    "ReduceMax": rule(_reduce_extremum),
    "ReduceMean": rule(lambda n: _kept(n, n.dy / _count(n)).expand(n.x(0).size())),
    "ReduceMin": rule(_reduce_extremum),
    "ReduceProd": rule(_reduce_prod),
    "ReduceSum": rule(lambda n: _kept(n, n.dy).expand(n.x(0).size())),
}
