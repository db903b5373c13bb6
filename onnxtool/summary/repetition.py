"""Find blocks of a graph that follow each other and are equal: operators, attributes, shapes and inner wiring."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from operator import eq
from typing import NamedTuple

from onnxtool.model_file.wire.structure import scope_of_node
from onnxtool.model_file.wire.topology import INPUT, Call, Wire

_MAX_PERIODS = 128  # lengths of blocks that are tried; real graphs have a few dozen
_MAX_RUNS = 500
_MAX_COMPARED = 100_000  # nodes to look at for the best place to cut
_LEAST_NODES = 3  # that a repetition replaces by fewer


class Block(NamedTuple):
    """Nodes that are drawn once.

    Attributes:
        start: the first node of the first of the blocks.
        length: nodes of each.
        times: how many follow each other; 1 for a node by itself, which has no items.
        is_chain: whether each block after the first reads values of the one before.
        items: the first block, in which blocks may repeat as well.
    """

    start: int
    length: int = 1
    times: int = 1
    is_chain: bool = False
    items: tuple[Block, ...] = ()

    @property
    def end(self) -> int:
        """The node behind the last of the blocks."""
        return self.start + self.length * self.times


class _Run(NamedTuple):
    """Nodes each of which equals the one `period` nodes later, but for wiring, as far as the second is before `end`."""

    start: int
    end: int
    period: int


def find_blocks(calls: Sequence[Call]) -> list[Block]:
    """Return the nodes in their order, with blocks that repeat folded: each node is in exactly one block of the list.

    Nodes are equal that have the same operator, attributes, and dtypes and shapes of weights and graph inputs. Blocks
    are equal whose nodes are, and are wired alike inside; and all after the first read what is outside of them in the
    same way. Names and the values of weights do not count.
    """
    numbers: dict[object, int] = {}
    tokens = []
    for call in calls:
        # The first of the blocks may read a graph input where the others read each other.
        kinds = tuple("" if kind.startswith(INPUT) else kind for kind in call.kinds)
        token = call.op, call.attributes, kinds, tuple(wire is None for wire in call.wires)
        tokens.append(numbers.setdefault(token, len(numbers)))
    return _fold(calls, 0, len(calls), _find_runs(tokens))


def _find_runs(tokens: Sequence[int]) -> list[_Run]:
    """Return where a sequence repeats itself, for the periods that most of it has."""
    periods: Counter[int] = Counter()
    ranks, width = list(tokens), 1
    # In a sequence that repeats three times, a window of a length between half a period and a period, or longer, is
    # next seen one period on.
    while width <= len(tokens):
        last: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            if rank in last:
                periods[place - last[rank]] += 1
            last[rank] = place
        pairs: dict[tuple[int, int], int] = {}
        ranks = [pairs.setdefault(pair, len(pairs)) for pair in zip(ranks, ranks[width:], strict=False)]
        width *= 2
    runs = [
        _Run(found.start(), found.end() + period, period)
        for period, _ in periods.most_common(_MAX_PERIODS)
        for found in re.finditer(rb"\x01{%d,}" % period, bytes(map(eq, tokens, tokens[period:])))
    ]
    # Of two that cover the same nodes, the one of more blocks.
    return sorted(runs, key=lambda run: (run.start - run.end, run.period))[:_MAX_RUNS]


def _fold(calls: Sequence[Call], first: int, last: int, runs: list[_Run]) -> list[Block]:
    blocks: list[Block] = []
    pending = [(first, last, runs)]
    while pending:
        start, end, runs = pending.pop()
        clipped = (_Run(max(run.start, start), min(run.end, end), run.period) for run in runs)
        runs = [run for run in clipped if run.end - run.start >= max(2 * run.period, _LEAST_NODES)]
        if not runs:
            blocks += map(Block, range(start, end))
            continue
        best = max(runs, key=lambda run: ((run.end - run.start) // run.period * run.period, -run.period))
        runs.remove(best)
        for found in _equal_blocks(calls, best):
            inner = [run for run in runs if run.period < found.length]
            items = _fold(calls, found.start, found.start + found.length, inner)
            blocks.append(found._replace(items=tuple(items)))
            pending.append((start, found.start, runs))
            start = found.end
        pending.append((start, end, runs))
    return sorted(blocks)


def _equal_blocks(calls: Sequence[Call], run: _Run) -> list[Block]:
    """Cut a run into blocks, and join those in a row that are wired alike."""
    period = run.period
    spare = min((run.end - run.start) % period, _MAX_COMPARED // period)
    start = min(range(run.start, run.start + spare + 1), key=lambda cut: (*_cost(calls, cut, period), cut))
    found: list[Block] = []
    inner, outer = _wiring(calls, start, period)
    way: list[object] = []
    for place in range(start, run.end - period + 1, period):
        wiring, others = inner, outer
        inner, outer = _wiring(calls, place, period)
        alike = all(kind == other or "" in (kind, other) for (_, kind), (_, other) in zip(outer, others, strict=False))
        if found and inner == wiring and alike:
            group, last = found[-1], way
            way = [_relation(*pair, place, group.start) for pair in zip(outer, others, strict=True)]
            if group.times == 1 or way == last:
                is_chain = any(group.end - period <= wire[0] < place for wire, _ in outer)
                found[-1] = group._replace(times=group.times + 1, is_chain=is_chain)
                continue
        found.append(Block(place, period))
    return [block for block in found if block.times > 1 and block.times * period >= _LEAST_NODES]


def _cost(calls: Sequence[Call], cut: int, period: int) -> tuple[int, bool]:
    """Return how many values cross the end of the first block, and whether that lies inside a part by its names."""
    crossing = {wire for wire, _ in _wiring(calls, cut + period, period)[1] if wire[0] >= cut}
    before, after = (scope_of_node(calls[place].name, "", ()) for place in (cut + period - 1, cut + period))
    return len(crossing), before == after


def _wiring(calls: Sequence[Call], start: int, length: int) -> tuple[list[Wire | int | None], list[tuple[Wire, str]]]:
    """Return what the nodes of a block read, and the values from outside with their kind, numbered by first use."""
    outer: dict[tuple[Wire, str], int] = {}
    inner: list[Wire | int | None] = []
    for call in calls[start : start + length]:
        for wire, kind in zip(call.wires, call.kinds, strict=True):
            if wire is None:
                inner.append(None)
            elif wire[0] >= start:
                inner.append((wire[0] - start, wire[1]))
            else:
                inner.append(outer.setdefault((wire, kind), len(outer)))
    return inner, list(outer)


def _relation(value: tuple[Wire, str], before: tuple[Wire, str], start: int, first: int) -> object:
    """Return where a block at `start` has a value from: another block, where the one before has it from, or its own."""
    wire, kind = value
    if value == before:
        return "shared"
    return (start - wire[0], wire[1]) if wire[0] >= first else kind
