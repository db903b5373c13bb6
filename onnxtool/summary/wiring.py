"""Compare how the nodes of two graphs are connected: by structure, and neither by names nor by order.

A value is known by what computes it: the operator, its attributes, and the values that it reads. Nodes whose values
exist in both graphs are equal. Of the others, those that read known values are paired by operator and inputs, their
differences are listed, and from then on their values count as the same.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from onnxtool.model_file.wire.structure import scope_of_node
from onnxtool.model_file.wire.topology import INPUT, Topology, Wire, WiredNode
from onnxtool.summary.figures import EdgeChange, Edges, Weight

_COMMUTATIVE = frozenset(("Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Max", "Mean", "Min", "Mul"))
_COMMUTATIVE |= {"Or", "Sum", "Xor"}
_MOST_ROUNDS = 100  # pairs that depend on each other
_MOST_READY = 1000  # nodes to be paired at once
_VALUE_DTYPES = ("int32", "int64")  # small tensors of these have their values in the kind of an input
_MOST_VALUES = 64
_NONE = "none"
_SHORT = 60  # characters of an attribute
_Key = tuple[object, ...]


class _ValueKeys(NamedTuple):
    """Keys of a graph's values: one for each node, and those that it reads."""

    keys: list[int]
    reads: list[list[int]]


class _ComparedGraph:
    """One of the graphs, with the pairs that were made so far."""

    def __init__(self, topology: Topology, leaves: Mapping[str, _Key], numbers: dict[_Key, int]) -> None:
        self.calls, self.outputs = topology
        self.leaves, self.numbers = leaves, numbers
        self.forced: dict[int, int] = {}
        self.settled: set[int] = set()

    def key(self, wire: Wire | None, kind: str, keys: Sequence[int]) -> int:
        """Return what a value is known by."""
        if wire is None:
            return self.numbers.setdefault((), len(self.numbers))
        place, slot = wire
        known: _Key = (keys[place] if 0 <= place < len(keys) else -1, slot)
        if place < 0 and not kind.startswith(INPUT):
            known = self.leaves.get(str(slot), (kind,))
        return self.numbers.setdefault(known, len(self.numbers))

    def round(self) -> _ValueKeys:
        """Number all values anew, after pairs were made."""
        keys: list[int] = []
        reads: list[list[int]] = []
        for place, call in enumerate(self.calls):
            operands = [self.key(wire, _kind(call, number), keys) for number, wire in enumerate(call.wires)]
            reads.append(operands)
            ordered = sorted(operands) if call.op in _COMMUTATIVE else operands
            known = call.op, call.attributes, *ordered
            keys.append(self.forced.get(place) or self.numbers.setdefault(known, len(self.numbers)))
        return _ValueKeys(keys, reads)

    def name(self, wire: Wire | None) -> str:
        """Name a value as a user knows it."""
        if wire is None:
            return _NONE
        place, slot = wire
        if place < 0:
            return str(slot)
        outputs = self.calls[place].outputs
        return outputs[int(slot)] if int(slot) < len(outputs) else self.calls[place].op

    def layer(self, place: int) -> str:
        """Return the part of the model that a node belongs to; empty if no name says it."""
        call = self.calls[place]
        sources = [str(wire[1]) for wire in call.wires if wire is not None and wire[0] < 0]
        return scope_of_node(call.name, "", sources) or scope_of_node(next(iter(call.outputs), ""), "", ())

    def change(self, place: int, aspect: str, before: str, after: str) -> EdgeChange:
        """Describe a change of a node."""
        call = self.calls[place]
        return EdgeChange(call.name or next(iter(call.outputs), ""), call.op, self.layer(place), aspect, before, after)


def compare_wiring(
    model: Topology | None,
    base: Topology | None,
    weights: Mapping[str, Weight],
    base_weights: Mapping[str, Weight],
) -> Edges:
    """Return the changed edges, attributes and constants of a graph.

    Weights with the same data are the same, and so are those of one name, whose data may differ: the list of
    initializers has these. Others agree in dtype and shape. What If, Loop and Scan contain is compared as a whole.

    Args:
        model: the reviewed graph; None if it is too large to be read.
        base: likewise, the one to compare it with.
        weights: the model's initializers by name.
        base_weights: the base's.
    """
    if model is None or base is None:
        return Edges(compared=False)
    numbers: dict[_Key, int] = {(_NONE,): 0, (): 1}  # 0 is no key
    new = _ComparedGraph(model, _leaves(model, base, weights, base_weights), numbers)
    old = _ComparedGraph(base, _leaves(base, model, base_weights, weights), numbers)
    changes: list[EdgeChange] = []
    for _ in range(_MOST_ROUNDS):
        now, before = new.round(), old.round()
        num_left = len(_ready(new, now, before)) + len(_ready(old, before, now))
        if num_left > _MOST_READY:
            break
        if not num_left:
            return _edges([*changes, *_changed_outputs(new, old, now, before)])
        changes += _pair(new, old, now, before)
    return _edges(changes)._replace(compared=False)


def _edges(changes: Sequence[EdgeChange]) -> Edges:
    return Edges(len(changes), tuple(changes))


def _pair(new: _ComparedGraph, old: _ComparedGraph, now: _ValueKeys, before: _ValueKeys) -> list[EdgeChange]:
    """Pair nodes that differ, and whose inputs are known; where there is no pair, take them as added or removed.

    A node may also be the changed one of several that computed the same, or have become like others.
    """
    ready, left = _ready(new, now, before), _ready(old, before, now)
    sides = _Sides(new, old, now, before)
    pairs = sides.pairs(ready, left)
    for place, other in pairs:
        new.forced[place] = old.forced[other] = new.numbers.setdefault(("pair", place, other), len(new.numbers))
    if not pairs:
        pairs = sides.pairs(ready, _spare(before, now))
        new.forced.update((place, before.keys[other]) for place, other in pairs)
        old_pairs = sides.pairs(_spare(now, before), left)
        old.forced.update((other, now.keys[place]) for place, other in old_pairs)
        pairs += old_pairs
    if pairs:
        return [change for place, other in pairs for change in sides.differences(place, other)]
    # A node waits while the other graph has one of its kind whose inputs are not known yet.
    waiting = [{graph.calls[place].op for place in _unknown(graph, own, other)} for graph, own, other in sides.each]
    lone = (
        [p for p in ready if new.calls[p].op not in waiting[1]],
        [p for p in left if old.calls[p].op not in waiting[0]],
    )
    changes = []
    for graph, places in zip((new, old), lone if any(lone) else (ready, left), strict=True):
        graph.settled.update(places)
        for place in places:
            values = ", ".join(graph.name(wire) for wire in graph.calls[place].wires)
            ends = ("added", "", values) if graph is new else ("removed", values, "")
            changes.append(graph.change(place, *ends))
    return changes


def _spare(own: _ValueKeys, other: _ValueKeys) -> list[int]:
    """Return the nodes that compute what nodes of the other graph do as well, but fewer of them."""
    counts, other_counts = Counter(own.keys), Counter(other.keys)
    return [place for place, key in enumerate(own.keys) if counts[key] > other_counts[key] > 0]


def _unknown(graph: _ComparedGraph, now: _ValueKeys, other: _ValueKeys) -> list[int]:
    """Return the nodes that the other graph lacks, and which are not settled."""
    other_keys = {*other.keys}
    return [place for place, key in enumerate(now.keys) if key not in other_keys and place not in graph.settled]


def _ready(graph: _ComparedGraph, now: _ValueKeys, other: _ValueKeys) -> list[int]:
    """Return those of them whose inputs the other graph has, or which were settled."""
    unknown = _unknown(graph, now, other)
    among = {*unknown}
    return [
        place for place in unknown if all(wire is None or wire[0] not in among for wire in graph.calls[place].wires)
    ]


class _Sides(NamedTuple):
    """Both graphs in a round."""

    new: _ComparedGraph
    old: _ComparedGraph
    now: _ValueKeys
    before: _ValueKeys

    @property
    def each(self) -> tuple[tuple[_ComparedGraph, _ValueKeys, _ValueKeys], ...]:
        """Each graph with its values, and those of the other."""
        return (self.new, self.now, self.before), (self.old, self.before, self.now)

    def pairs(self, places: Sequence[int], candidates: Sequence[int]) -> list[tuple[int, int]]:
        """Pair each node of the model with the one of the base that is most like it, and not paired yet."""
        left = list(candidates)
        paired = []
        for place in places:
            alike = [(self.likeness(place, other), -rank) for rank, other in enumerate(left)]
            likeness, rank = max(alike, default=(0, 0))
            if likeness:
                paired.append((place, left.pop(-rank)))
        return paired

    def likeness(self, place: int, other: int) -> int:
        """Return how alike two nodes are; 0 if they are no pair."""
        node, counterpart = self.new.calls[place], self.old.calls[other]
        if node.op != counterpart.op:
            return 0
        mine, theirs = self.now.reads[place], self.before.reads[other]
        same = 0 if node.op in _COMMUTATIVE else sum(a == b for a, b in zip(mine, theirs, strict=False))
        shared = len({*mine} & {*theirs})
        is_named = (bool(node.name) and node.name == counterpart.name) or node.outputs == counterpart.outputs
        if not shared and not is_named:
            return 0
        return 2 * (same + shared + 2 * is_named) + (node.attributes == counterpart.attributes)

    def differences(self, place: int, other: int) -> Iterator[EdgeChange]:
        """Yield how a node differs from its counterpart."""
        node, counterpart = self.new.calls[place], self.old.calls[other]
        mine, theirs = self.now.reads[place], self.before.reads[other]
        if node.op in _COMMUTATIVE:  # the inputs that the other lacks, wherever they stand
            mine, theirs = _unshared(mine, theirs), _unshared(theirs, mine)
        places = range(max(len(mine), len(theirs)))
        parted = [number for number in places if mine[number : number + 1] != theirs[number : number + 1]]
        if parted:
            names = (
                ", ".join(_named(graph, call, n) for n in parted)
                for graph, call in ((self.old, counterpart), (self.new, node))
            )
            yield self.new.change(place, f"input {', '.join(map(str, parted))}", *names)
        mine_of, theirs_of = dict(node.attributes), dict(counterpart.attributes)
        for name in sorted({*mine_of, *theirs_of}):
            values = theirs_of.get(name, _NONE), mine_of.get(name, _NONE)
            if values[0] != values[1]:
                yield self.new.change(place, name, *(value[:_SHORT] for value in values))


def _unshared(reads: Sequence[int], other_reads: Sequence[int]) -> list[int]:
    """Return inputs with 0 for those that the other node reads as well."""
    left = list(other_reads)
    unshared = []
    for key in reads:
        is_shared = key in left
        if is_shared:
            left.remove(key)
        unshared.append(0 if is_shared else key)
    return unshared


def _named(graph: _ComparedGraph, call: WiredNode, number: int) -> str:
    return graph.name(call.wires[number]) if number < len(call.wires) else _NONE


def _changed_outputs(
    new: _ComparedGraph, old: _ComparedGraph, now: _ValueKeys, before: _ValueKeys
) -> Iterator[EdgeChange]:
    """Yield the outputs of both graphs that are other values."""
    for name, (kind, wire) in new.outputs.items():
        if name not in old.outputs:
            continue
        other_kind, other = old.outputs[name]
        if new.key(wire, kind, now.keys) != old.key(other, other_kind, before.keys):
            yield EdgeChange(name, "output", "", "value", old.name(other), new.name(wire))


def _kind(call: WiredNode, number: int) -> str:
    return call.kinds[number] if number < len(call.kinds) else ""


def _leaves(
    topology: Topology, other: Topology, weights: Mapping[str, Weight], other_weights: Mapping[str, Weight]
) -> dict[str, _Key]:
    """Return what weights and graph inputs are known by; constants are known by their data."""
    data, other_data = (
        {weight.sha256 for weight in each.values() if weight.sha256} for each in (weights, other_weights)
    )
    leaves: dict[str, _Key] = {}
    for name, weight in weights.items():
        counterpart = other_weights.get(name)
        is_common = counterpart is not None and (counterpart.dtype, counterpart.shape) == (weight.dtype, weight.shape)
        if not weight.shape or (weight.dtype in _VALUE_DTYPES and prod(weight.shape) <= _MOST_VALUES):
            continue
        is_moved = weight.sha256 in other_data and (
            not is_common or (counterpart is not None and counterpart.sha256 in data)
        )
        if is_moved:
            leaves[name] = ("data", weight.sha256)
        elif is_common:
            leaves[name] = ("name", name)
        else:
            leaves[name] = ("shape", weight.dtype, weight.shape)
    return leaves
