"""Gradient of Einsum: the same kind of sum, with the letters of one input in place of those of the output."""

from __future__ import annotations

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule


def _terms(n: Backward) -> tuple[list[str], str]:
    """Return the letters of each input, and those of the output."""
    equation = n.attribute("equation", "").replace(" ", "")
    if "." in equation:
        raise Refusal("with an ellipsis")
    left, arrow, output = equation.partition("->")
    inputs = left.split(",")
    if not arrow:  # then all letters that come once, in order
        output = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    if any(len(set(term)) < len(term) for term in inputs):
        raise Refusal("with a letter twice in one input")
    return inputs, output


def _einsum(n: Backward) -> Tensor:
    inputs, output = _terms(n)
    wanted = inputs[n.index]
    others = [place for place in range(len(inputs)) if place != n.index]
    known = {*output, *(letter for place in others for letter in inputs[place])}
    kept = "".join(letter for letter in wanted if letter in known)
    equation = ",".join([output, *(inputs[place] for place in others)]) + f"->{kept}"
    gradient = n.build.op("Einsum", n.dy, *(n.x(place) for place in others), equation=equation)
    if kept == wanted:
        return gradient
    # Summed over in this input alone, so that all elements along it have the same gradient.
    summed = [axis for axis, letter in enumerate(wanted) if letter not in known]
    spread = n.build.op("Unsqueeze", gradient, n.build.axes(summed))
    return spread.expand(n.x(n.index).size())


EINSUM: dict[str, Rule] = {"Einsum": Rule((_einsum,), variadic=True)}
