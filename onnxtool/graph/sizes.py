"""Sizes as polynomials in the dynamic axes of a graph, so that its size computations hold for all inputs at once.

A size is a number, or a text that stands for a polynomial: the name of an axis, or of a non-polynomial size such as the
length left by a convolution. The same computation on the same sizes has the same name, so two sizes with equal text are
equal for all inputs, and a number holds for all of them.

An axis may be empty, as a cache's is in the first step. Only where part of an axis is cut out or its sign is needed,
every axis except a cache's is assumed to have an element: no model computes anything from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

Term = tuple[str, ...]  # names to multiply, in order
Form = dict[Term, int]  # how often each product occurs in the sum
_SUM = " + "
_CACHE = "past"  # in the name of an axis that may be empty


@dataclass
class Sizes:
    """The sizes of a graph.

    Attributes:
        limits: what must be at most a number for the graph to run at all: a size, and the number.
        turns: axis sizes at which something is computed differently, by axis name.
        is_certain: whether the current part runs for all inputs, instead of being a branch that may be skipped.
    """

    limits: list[tuple[str, int]] = field(default_factory=list)
    turns: dict[str, set[int]] = field(default_factory=dict)
    is_certain: bool = True
    _forms: dict[str, Form] = field(default_factory=dict)
    _texts: dict[frozenset[tuple[Term, int]], str] = field(default_factory=dict)
    _named: dict[Hashable, str] = field(default_factory=dict)
    _signed: set[str] = field(default_factory=set)
    _bounds: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    _equal: dict[str, str] = field(default_factory=dict)

    def add_axes(self, names: Sequence[str]) -> None:
        """Add the dynamic axes; an axis named as the sum of others is treated as that sum."""
        for name in sorted(names, key=lambda name: _SUM in name):
            parts = name.split(_SUM)
            is_sum = len(parts) > 1 and all(part in self._forms for part in parts)
            form: Form = self._sum([self._forms[part] for part in parts]) if is_sum else {(name,): 1}
            self._forms[name] = form
            self._texts.setdefault(frozenset(form.items()), name)

    def name(self, key: Hashable, *, signed: bool = False, bounds: Sequence[int | str] = ()) -> str:
        """Return the name of a non-polynomial size: one per `key`, which describes how it is computed.

        Args:
            key: two such sizes are equal if their keys are.
            signed: whether it may be below 0.
            bounds: it is never larger than any of these.
        """
        if key not in self._named:
            self._named[key] = text = f"size_{len(self._named)}"
            while text in self._forms:
                self._named[key] = text = f"{text}_"
            self._forms[text] = {(text,): 1}
            self._texts[frozenset(self._forms[text].items())] = text
            self._bounds[text] = tuple(bounds)
            if signed:
                self._signed.add(text)
        return self._named[key]

    def plus(self, *sizes: int | str) -> int | str:
        """Return the sum."""
        return self._size(self._sum([self._form(size) for size in sizes]))

    def minus(self, size: int | str, other: int | str) -> int | str:
        """Return the difference."""
        return self.plus(size, self.times(other, -1))

    def times(self, *sizes: int | str) -> int | str:
        """Return the product."""
        product: Form = {(): 1}
        for size in sizes:
            product = self._sum(
                [
                    {tuple(sorted((*term, *other))): count * factor}
                    for term, count in product.items()
                    for other, factor in self._form(size).items()
                ]
            )
        return self._size(product)

    def quotient(self, dividends: Sequence[int | str], divisors: Sequence[int | str]) -> int | str | None:
        """Return the quotient of two products; None if it is not an integer polynomial, or not found to be."""
        left, right = list(dividends), []
        for size in divisors:
            if size in left:
                left.remove(size)
            else:
                right.append(size)
        dividend, divisor = self._form(self.times(*left)), self._form(self.times(*right))
        if len(divisor) != 1:
            return 1 if divisor and dividend == divisor else None
        ((term, factor),) = divisor.items()
        quotient: Form = {}
        for product, count in dividend.items():
            remaining = list(product)
            for name in term:
                if name not in remaining:
                    return None
                remaining.remove(name)
            if not factor or count % factor:
                return None
            quotient[tuple(remaining)] = count // factor
        return self._size(quotient)

    def is_at_least(self, size: int | str, other: int | str, *, least: int = 0) -> bool:
        """Return whether `size` is provably never below `other`, with at least `least` elements in each axis."""
        form = self._form(self.minus(size, other))
        shifted = self._sum([self._shifted(term, count, least) for term, count in form.items()])
        signed = any(name in self._signed for term in shifted for name in term)
        return not signed and all(count >= 0 for count in shifted.values())

    def is_larger(self, size: int | str, other: int | str) -> bool:
        """Return whether `size` is provably always above `other`."""
        return self.is_at_least(size, self.plus(other, 1))

    def note_turn(self, size: int | str, other: int | str) -> None:
        """Record that a computation depends on which of two sizes is larger."""
        form = self._form(self.minus(size, other))
        number = form.get((), 0)
        for term, factor in form.items():
            if len(term) == 1 and -number // factor > 0:  # if all other axes of the sum are empty
                self.turns.setdefault(term[0], set()).update({-number // factor, -(number // factor)})

    def broadcast(self, first: int | str | None, second: int | str | None) -> int | str | None:
        """Return the axis size of an elementwise operation on two operands, assuming that it runs; None if unknown."""
        if first == second or second == 1:
            return first
        if first == 1:
            return second
        if isinstance(first, int) or isinstance(second, int):  # the other can only be that number, or 1
            return first if isinstance(first, int) else second
        if first is None or second is None:
            return None
        for size, other in ((first, second), (second, first)):
            if other in self._bounds.get(size, ()):
                self._join(size, other)
                return other  # equal, or broadcast from 1
        return self.name(("broadcast", *sorted((first, second))))

    def _join(self, cut: str, whole: str) -> None:
        """Record that two sizes are equal wherever the graph runs: one is the other, cut to a number greater than 1."""
        limit = next((bound for bound in self._bounds[cut] if isinstance(bound, int)), 0)
        if self.is_certain and limit > 1 and cut not in self._equal:
            self._equal[cut] = whole
            self.limits.append((whole, limit))

    def settle(self, size: int | str | None) -> int | str | None:
        """Return a size with each name replaced by the size it was found to be equal to."""
        if not isinstance(size, str) or not self._equal:
            return size
        terms = self._form(size).items()
        return self.plus(*(self.times(count, *(self._settled(name) for name in term)) for term, count in terms))

    def _settled(self, name: str) -> int | str:
        return self.settle(self._equal[name]) or 0 if name in self._equal else name

    def at(self, size: int | str, of_name: Callable[[str], int]) -> int:
        """Evaluate a size as a number, given the sizes of its names."""
        total = 0
        for term, count in self._form(size).items():
            product = count
            for name in term:
                product *= of_name(name)
            total += product
        return total

    def _form(self, size: int | str) -> Form:
        if isinstance(size, int):
            return {(): size} if size else {}
        return self._forms.setdefault(size, {(size,): 1})

    def _size(self, form: Form) -> int | str:
        if not form:
            return 0
        if set(form) == {()}:
            return form[()]
        key = frozenset(form.items())
        if key not in self._texts:
            terms = sorted(form.items(), key=lambda item: (-len(item[0]), item[0]))
            text = _SUM.join("*".join([str(count)] * (count != 1 or not term) + list(term)) for term, count in terms)
            while text in self._forms:
                text = f"({text})"
            self._forms[text] = form
            self._texts[key] = text
        return self._texts[key]

    @staticmethod
    def _sum(forms: Sequence[Mapping[Term, int]]) -> Form:
        total: Form = {}
        for form in forms:
            for term, count in form.items():
                total[term] = total.get(term, 0) + count
        return {term: count for term, count in total.items() if count}

    def _shifted(self, term: Term, count: int, least: int) -> Form:
        """Return a product with each name replaced by its excess over its least value."""
        form: Form = {(): count}
        for name in term:
            more = 0 if name in self._bounds or _CACHE in name else least
            above = {tuple(sorted((*product, name))): times for product, times in form.items()}
            form = self._sum([above, {product: times * more for product, times in form.items()}])
        return form
