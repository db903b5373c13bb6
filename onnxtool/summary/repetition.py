"""Find consecutive blocks of a graph that are equal in operators, attributes, shapes and inner wiring."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from operator import eq
from typing import NamedTuple

from onnxtool.model_file.wire.structure import scope_of_node
from onnxtool.model_file.wire.topology import INPUT, Wire, WiredNode

_MAX_PERIODS = 128  # block lengths to try; real graphs have a few dozen
_MAX_RUNS = 500
_MAX_COMPARED = 100_000  # nodes to inspect for the best place to cut
_LEAST_NODES = 3  # the smallest repetition worth folding


class RepeatedBlock(NamedTuple):
    """Nodes that are drawn once.

    Attributes:
        start: the first node of the first of the blocks.
        length: the number of nodes in each.
        times: the number of blocks; 1 for a single node, which has no items.
        is_chain: whether each block after the first reads values of the one before.
        items: the first block, which may contain repetitions itself.
    """

    start: int
    length: int = 1
    times: int = 1
    is_chain: bool = False
    items: tuple[RepeatedBlock, ...] = ()

    @property
    def end(self) -> int:
        """The node after the last block."""
        return self.start + self.length * self.times


class _Run(NamedTuple):
    """Nodes that, except for wiring, each equal the node `period` places later, if that one is before `end`."""

    start: int
    end: int
    period: int


def find_blocks(calls: Sequence[WiredNode]) -> list[RepeatedBlock]:
    """Return the nodes in order, with repeated blocks folded; each node is in exactly one block of the list.

    Nodes are equal if they have the same operator, attributes, and dtypes and shapes of weights and graph inputs.
    Blocks are equal if their nodes are equal and wired alike; all blocks after the first also read outside values in
    the same way. Names and the values of weights do not count.
    """
    numbers: dict[object, int] = {}
    tokens = []
    for call in calls:
        # The first block may read a graph input where each of the others reads the block before it.
        kinds = tuple("" if kind.startswith(INPUT) else kind for kind in call.kinds)
        token = call.op, call.attributes, kinds, tuple(wire is None for wire in call.wires)
        tokens.append(numbers.setdefault(token, len(numbers)))
    return _fold(calls, 0, len(calls), _find_runs(tokens))


def _find_runs(tokens: Sequence[int]) -> list[_Run]:
    """Return the places where a sequence repeats itself, for its most common periods."""
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
        _Run(match.start(), match.end() + period, period)
        for period, _ in periods.most_common(_MAX_PERIODS)
        for match in re.finditer(rb"\x01{%d,}" % period, bytes(map(eq, tokens, tokens[period:])))
    ]
    # Of two that cover the same nodes, the one with more blocks.
    return sorted(runs, key=lambda run: (run.start - run.end, run.period))[:_MAX_RUNS]


def _fold(calls: Sequence[WiredNode], first: int, last: int, runs: list[_Run]) -> list[RepeatedBlock]:
    blocks: list[RepeatedBlock] = []
    pending = [(first, last, runs)]
    while pending:
        start, end, runs = pending.pop()
        clipped = (_Run(max(run.start, start), min(run.end, end), run.period) for run in runs)
        runs = [run for run in clipped if run.end - run.start >= max(2 * run.period, _LEAST_NODES)]
        if not runs:
            blocks += map(RepeatedBlock, range(start, end))
            continue
        best = max(runs, key=lambda run: ((run.end - run.start) // run.period * run.period, -run.period))
        runs.remove(best)
        for block in _equal_blocks(calls, best):
            inner = [run for run in runs if run.period < block.length]
            items = _fold(calls, block.start, block.start + block.length, inner)
            blocks.append(block._replace(items=tuple(items)))
            pending.append((start, block.start, runs))
            start = block.end
        pending.append((start, end, runs))
    return sorted(blocks)


def _equal_blocks(calls: Sequence[WiredNode], run: _Run) -> list[RepeatedBlock]:
    """Cut a run into blocks, and join consecutive ones that are wired alike."""
    period = run.period
    spare = min((run.end - run.start) % period, _MAX_COMPARED // period)
    start = min(range(run.start, run.start + spare + 1), key=lambda cut: (*_cost(calls, cut, period), cut))
    blocks: list[RepeatedBlock] = []
    inner, outer = _wiring(calls, start, period)
    way: list[object] = []
    for place in range(start, run.end - period + 1, period):
        wiring, outer_before = inner, outer
        inner, outer = _wiring(calls, place, period)
        alike = all(
            kind == other or "" in (kind, other) for (_, kind), (_, other) in zip(outer, outer_before, strict=False)
        )
        if blocks and inner == wiring and alike:
            group, last = blocks[-1], way
            way = [_relation(*pair, place, group.start) for pair in zip(outer, outer_before, strict=True)]
            if group.times == 1 or way == last:
                is_chain = any(group.end - period <= wire[0] < place for wire, _ in outer)
                blocks[-1] = group._replace(times=group.times + 1, is_chain=is_chain)
                continue
        blocks.append(RepeatedBlock(place, period))
    return [block for block in blocks if block.times > 1 and block.times * period >= _LEAST_NODES]


def _cost(calls: Sequence[WiredNode], cut: int, period: int) -> tuple[int, bool]:
    """Return the number of values that cross the end of the first block, and whether that end splits a named part."""
    crossing = {wire for wire, _ in _wiring(calls, cut + period, period)[1] if wire[0] >= cut}
    before, after = (scope_of_node(calls[place].name, "", ()) for place in (cut + period - 1, cut + period))
    return len(crossing), before == after


def _wiring(
    calls: Sequence[WiredNode], start: int, length: int
) -> tuple[list[Wire | int | None], list[tuple[Wire, str]]]:
    """Return the inputs of the nodes of a block; outside values have their kind, and are numbered by first use."""
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
    """Return where a block at `start` reads a value: in another block, where the block before does, or elsewhere."""
    wire, kind = value
    if value == before:
        return "shared"
    return (start - wire[0], wire[1]) if wire[0] >= first else kind
