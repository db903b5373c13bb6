"""Find the part of a model in which its values part from a reference's.

Parts end at values through which all information from an input to an output passes: the states between layers, and
those between attention and the rest of a layer. They are the same however operators are fused and values are named, so
that those of two graphs are matched by their numbers. Each part is then computed from the reference's own values
before it: its own error is that of this part alone.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxtool.graph.chains import Chain, Model, feed, find_chain, kind_of, precision_of, scopes_of, show
from onnxtool.graph.edit import reads
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile, scratch_file
from onnxtool.model_file.weights import load_model
from onnxtool.runtime.comparison import Case, Runner, row_cases
from onnxtool.runtime.providers import CPU
from onnxtool.runtime.session import open_alike
from onnxtool.verification import LayerError

Array = NDArray[Any]
Pair = tuple[Array, Array]

_LEVEL = "DISABLE_ALL"  # optimizations would fuse values away
_SAMPLE = 16  # tokens by which values are matched
_CLOSE = 1e-3  # relative error of values that are surely the same
_ALIKE = 0.5  # relative error of values that may be the same although their names differ
_NAMED = 0.5  # the worth of a common name, next to 1 for equal numbers
_WORSE = 4.0  # times the error that the file itself has after a value
_APART = 8  # values between two suspects, so that a residual connection does not carry one into the other
_UNREAD = 3.0  # times as far from the reference as the next value
_FEWEST_ALIKE, _USUAL = 3, 4.0  # parts of a kind, and times the median of their errors: no rounding any more
# Own errors that rounding explains: 20 times (fp32) and 5 times (fp16) those measured in transformers.
_ROUNDING = {"fp32": 1e-5, "fp16": 3e-3, "int8": 0.3}


class Values(NamedTuple):
    """Values of a reference, in the order in which they are computed.

    Attributes:
        names: the name of each.
        scopes: for each, the modules that compute it from the value before it.
        arrays: for each case, one array per value.
        outputs: for each case, the outputs by name.
        stays: for each case, whether a text alone has the same outputs as in it: convolutions read padding.
        end: the output that they lead to.
        source: the input that they come from; empty if it is no graph.
    """

    names: Sequence[str]
    scopes: Sequence[Sequence[str]]
    arrays: Sequence[Sequence[Array]]
    outputs: Sequence[Mapping[str, Array]]
    stays: Sequence[bool]
    end: str
    source: str = ""

    def only(self, cases: Sequence[int]) -> Values:
        """Return the values on some of the cases."""
        return self._replace(
            arrays=[self.arrays[number] for number in cases],
            outputs=[self.outputs[number] for number in cases],
            stays=[self.stays[number] for number in cases],
        )


def record(file: ModelFile, cases: Sequence[Case], end: str) -> Values:
    """Run a file, and return the values between its parts on the way to an output.

    Raises:
        InputError: it has no parts.
        SessionError: onnxruntime cannot run it.
    """
    return _values_of(load_model(file.path), cases, end)


def run_outputs(file: ModelFile, cases: Sequence[Case]) -> list[Mapping[str, Array]]:
    """Run a file as it is, and return its outputs on each case.

    Raises:
        SessionError: onnxruntime cannot run it.
    """
    run = open_alike(file, provider=CPU, disabled=(), level=_LEVEL).run
    return [run(case.feeds) for case in cases]


def output_errors(
    actual: Sequence[Mapping[str, Array]], expected: Sequence[Mapping[str, Array]], cases: Sequence[Case]
) -> dict[str, float]:
    """Return how far each output of floats is from the reference's, relative to it."""
    names = [name for name, array in expected[0].items() if array.dtype.kind == "f" and name in actual[0]]
    runs = list(zip(actual, expected, cases, strict=True))
    names = [name for name in names if all(ours[name].shape == theirs[name].shape for ours, theirs, _ in runs)]
    pairs = {
        name: [(_real(ours[name], case), _real(theirs[name], case)) for ours, theirs, case in runs] for name in names
    }
    return {name: _relative(arrays) for name, arrays in pairs.items()}


def _values_of(model: Model, cases: Sequence[Case], end: str, source: str = "") -> Values:
    chain = find_chain(model, end, source)
    outputs = [str(value.name) for value in model.graph.outputs]
    shown = [show(model.graph, value) for value in chain.values]
    with _opened(model) as run:
        runs = [run(case.feeds) for case in cases]
        stays = [is_same_alone(run, case, {end: arrays[end]}) for case, arrays in zip(cases, runs, strict=True)]
    return Values(
        [str(value.name) for value in chain.values],
        [scopes_of(nodes) for nodes in chain.nodes],
        [[arrays[name] for name in shown] for arrays in runs],
        [{name: arrays[name] for name in outputs} for arrays in runs],
        stays,
        str(chain.end.name),
        str(chain.source.name),
    )


@contextmanager
def _opened(model: Model) -> Iterator[Any]:
    """Load a graph as it is."""
    with temporary_folder() as folder, scratch_file(model, folder) as path:
        yield open_alike(ModelFile.open(path), provider=CPU, disabled=(), level=_LEVEL).run


def measure_layers(file: ModelFile, reference: Values, cases: Sequence[Case]) -> tuple[LayerError, ...]:
    """Compare the parts of a file with a reference's values.

    Args:
        file: the model.
        reference: what the reference computes on each case.
        cases: inputs; rows of padding alone have no meaning.

    Raises:
        InputError: the graph has no parts.
        SessionError: onnxruntime cannot run it.
    """
    model = load_model(file.path)
    chain = find_chain(model, reference.end, reference.source)
    own = _values_of(model.clone(), cases, reference.end, str(chain.source.name))
    comparison = _LayerComparison(model, chain, own, reference, cases)
    pairs = _align(reference, own, cases)
    parts = comparison.parts(pairs)
    pairs = [pair for pair, both in zip(pairs, itertools.pairwise(parts), strict=True) if not _is_correction(*both)]
    parts, decided = comparison.parts(pairs), set[tuple[int, int]]()
    while tried := _suspects(pairs, parts, decided):
        decided |= tried
        without = {part.model_value: part for part in comparison.parts([kept for kept in pairs if kept not in tried])}
        wrong = set()
        for number, pair in enumerate(pairs):
            if pair in tried:
                part, after = parts[number : number + 2]
                joined, reads_more = without[after.model_value], comparison.reads_before(pairs, number)
                # From the file's own value the next one is right, and wrong from the reference's: another value. Or it
                # differs where nothing reads it: in logits that are never positive, for SPLADE.
                is_unread = _worst(joined) < _worst(part) / _UNREAD and not reads_more
                is_other = after.own_error > _WORSE * after.error and part.error > _WORSE * after.error
                is_other |= joined.own_error < after.own_error / 2
                if is_other or is_unread or _is_correction(part, after):
                    wrong.add(pair)
        if wrong:
            # Parts before a removed value are judged again, because the value after them has changed.
            decided -= {before for before, pair in itertools.pairwise(pairs) if pair in wrong}
            pairs = [pair for pair in pairs if pair not in wrong]
            parts = comparison.parts(pairs)
    return tuple(parts)


def _worst(part: LayerError) -> float:
    return max(part.own_error, part.batch_error)


def _is_correction(part: LayerError, after: LayerError) -> bool:
    """Whether a part differs by less than the product of integers before it, whose rounding a bias may correct."""
    return after.differs and part.precision == "int8" != after.precision and after.own_error < part.own_error


def _suspects(
    pairs: Sequence[tuple[int, int]], parts: Sequence[LayerError], decided: Collection[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return matched values before or after which a part differs, and which were not doubted yet; none near another."""
    suspects: set[tuple[int, int]] = set()
    for number in reversed(range(len(pairs))):
        is_doubtful = parts[number].differs or parts[number + 1].differs
        if is_doubtful and pairs[number] not in decided and suspects.isdisjoint(pairs[number : number + _APART]):
            suspects.add(pairs[number])
    return suspects


def _align(reference: Values, own: Values, cases: Sequence[Case]) -> list[tuple[int, int]]:
    """Match values of both by their numbers, in order; a common name counts as well."""
    worth = np.zeros((len(reference.names), len(own.names)))
    samples = [_samples(values.arrays, cases) for values in (reference, own)]
    for i, (size, wanted) in enumerate(samples[0]):
        for j, (other, sample) in enumerate(samples[1]):
            if size != other or sample.shape != wanted.shape:
                continue
            error = _relative([(sample, wanted)])
            is_named = reference.names[i] == own.names[j] and all(
                theirs[i].shape == ours[j].shape for theirs, ours in zip(reference.arrays, own.arrays, strict=True)
            )
            if is_named or error < _ALIKE:
                worth[i, j] = max(0.0, 1 - error / _ALIKE) ** 2 + (error < _CLOSE) + _NAMED * is_named
    best = np.zeros((len(worth) + 1, worth.shape[1] + 1))
    for i, j in np.ndindex(*worth.shape):
        joined = best[i, j] + worth[i, j] if worth[i, j] else -1.0
        best[i + 1, j + 1] = max(best[i, j + 1], best[i + 1, j], joined)
    pairs, (i, j) = [], worth.shape
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def _samples(arrays: Sequence[Sequence[Array]], cases: Sequence[Case]) -> list[tuple[tuple[int, ...], Array]]:
    """Return the sizes of each value without padding, and its numbers at some tokens of each case."""
    samples = []
    for values in zip(*arrays, strict=True):
        real = [np.atleast_1d(_real(value, case)) for value, case in zip(values, cases, strict=True)]
        rows = [array[np.linspace(0, len(array) - 1, min(len(array), _SAMPLE)).astype(int)].ravel() for array in real]
        samples.append((tuple(array.size for array in real), np.concatenate(rows).astype(np.float64)))
    return samples


def _real(array: Array, case: Case) -> Array:
    """Return the real tokens of a value; all of it if it has none."""
    axis = _token_axis(array, case)
    return array if axis is None else np.moveaxis(array, axis, 1)[case.valid]


def _token_axis(array: Array, case: Case) -> int | None:
    """Return the axis of tokens: of [B, S, ...], or of [B, heads, S, ...]; None if there is none."""
    shape = None if case.valid is None else case.valid.shape
    axes = [axis for axis in (1, 2) if axis < array.ndim and (array.shape[0], array.shape[axis]) == shape]
    return next(iter(axes), None)


def _fed(expected: Array, own: Array, case: Case) -> Array:
    """Return the reference's value in the model's shape, with the model's own padding, which may hold anything."""
    axis, other = _token_axis(own, case), _token_axis(expected, case)
    if axis is None or other is None or case.valid is None:
        return expected.reshape(own.shape).astype(np.float32)
    fed = own.astype(np.float32)
    tokens = np.moveaxis(fed, axis, 1)  # heads may stand before or after the tokens
    tokens[case.valid] = _real(expected, case).reshape(tokens[case.valid].shape)
    return fed


def _relative(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Return the norm of the differences of arrays, relative to that of the second ones.

    The same infinity or NaN in both, as of a mask, is no difference; one of them alone is an infinite one.
    """
    square_error = size = 0.0
    for actual, expected in pairs:
        numbers = np.isfinite(expected)
        if not np.array_equal(actual[~numbers], expected[~numbers], equal_nan=True):
            return float("inf")
        expected = expected[numbers].astype(np.float64)
        square_error += float(np.square(actual[numbers] - expected).sum())
        size += float(np.square(expected).sum())
    return float(np.nan_to_num(np.sqrt(square_error / size if size else square_error and np.inf), nan=np.inf))


class _Errors(NamedTuple):
    """The errors of a part: of all before it as well, alone, and between a text alone and in a batch."""

    accumulated: float
    alone: float
    moved: float


class _LayerComparison(NamedTuple):
    """A model, the values of its chain and of the reference's, and the cases on which they were computed."""

    model: Model
    chain: Chain
    own: Values
    reference: Values
    cases: Sequence[Case]

    def parts(self, pairs: Sequence[tuple[int, int]]) -> list[LayerError]:
        """Compare the part before each pair of values, and the one before the output."""
        live = {*itertools.chain(*self.chain.nodes)}
        last = len(self.reference.names), len(self.chain.values)
        spans = list(zip([(-1, -1), *pairs], [*pairs, last], strict=True))
        nodes = [[*itertools.chain(*self.chain.nodes[i + 1 : j + 1])] for (_, i), (_, j) in spans]
        precisions, errors = [precision_of(part, live) for part in nodes], self.errors(pairs)
        kinds = [tuple(sorted(map(kind_of, part))) for part in nodes]
        bounds = _bounds(precisions, kinds, [error.alone for error in errors])
        moves = _bounds(precisions, kinds, [error.moved for error in errors])
        end = str(self.chain.end.name)
        names, own_names = [*self.reference.names, end], [*self.own.names, end]
        results = []
        for number, (((before, _), (i, j)), error) in enumerate(zip(spans, errors, strict=True)):
            scopes = [*itertools.chain(*self.reference.scopes[before + 1 : i + 1])]
            scope = _common(scopes) or f"{names[before] if before >= 0 else 'inputs'} to {names[i]}"
            differs = not (error.alone <= bounds[number] and error.moved <= moves[number])
            values = names[i], own_names[j]
            results.append(LayerError(scope, *values, precisions[number], *error, bounds[number], differs))
        return results

    def reads_before(self, pairs: Sequence[tuple[int, int]], number: int) -> bool:
        """Whether the part after a matched value reads earlier ones as well, as the end of a residual connection."""
        values, end = self.chain.values, [*pairs, (0, len(self.chain.values))][number + 1][1]
        earlier = {values[j] for _, j in pairs[:number]}
        nodes = itertools.chain(*self.chain.nodes[pairs[number][1] + 1 : end + 1])
        return any(value in earlier for node in nodes for value in reads(node))

    def errors(self, pairs: Sequence[tuple[int, int]]) -> list[_Errors]:
        """Measure the same parts."""
        model, cases = self.model.clone(), self.cases
        chain = find_chain(model, self.own.end, self.own.source)
        values = [chain.values[j] for _, j in pairs]
        names = [*(show(model.graph, value) for value in values), str(chain.end.name)]
        fed_names = [feed(model.graph, value) for value in values]
        had = _with_end(self.own, [j for _, j in pairs], names[-1])
        wanted = _with_end(self.reference, [i for i, _ in pairs], names[-1])
        differences: list[tuple[list[Pair], ...]] = [([], [], []) for _ in names]
        with _opened(model) as run:
            for case, before, right, stays in zip(cases, had, wanted, self.reference.stays, strict=True):
                fed = [_fed(one, other, case) for one, other in zip(right, before, strict=True)]
                computed = run({**case.feeds, **dict(zip(fed_names, fed, strict=False))})
                for place, name in enumerate(names):
                    real = _real(fed[place], case)
                    differences[place][0].append((_real(before[place], case), real))
                    differences[place][1].append((_real(computed[name], case), real))
                # A part computes the same for a text alone as in a batch: rounding cannot hide a wrong mask there.
                for alone in _alone(case) if stays else ():
                    row = [_row(one, case, alone.rows[0]) for one in fed]
                    moved = run({**alone.feeds, **dict(zip(fed_names, row, strict=False))})
                    for place, name in enumerate(names):
                        differences[place][2].append((moved[name], _row(computed[name], case, alone.rows[0])))
        return [_Errors(*map(_relative, difference)) for difference in differences]


def _bounds(precisions: Sequence[str], kinds: Sequence[Hashable], errors: Sequence[float]) -> list[float]:
    """Return what each part's error may be.

    How far rounding to integers moves a part shows in the other layers: in the parts with the same operators, or in
    those with the largest errors if there are too few of its kind.
    """
    narrow: dict[Hashable, list[float]] = {}
    for precision, kind, error in zip(precisions, kinds, errors, strict=True):
        if precision == "int8":
            narrow.setdefault(kind, []).append(error)
    usual = {kind: float(np.median(of_kind)) for kind, of_kind in narrow.items()}
    common = [usual[kind] for kind, of_kind in narrow.items() if len(of_kind) >= _FEWEST_ALIKE] or [*usual.values()]
    bounds = []
    for precision, kind in zip(precisions, kinds, strict=True):
        error = _USUAL * (usual[kind] if len(narrow.get(kind, ())) >= _FEWEST_ALIKE else max(common, default=0.0))
        is_narrow = precision == "int8"
        bounds.append(min(max(_ROUNDING["fp32"], error), _ROUNDING["int8"]) if is_narrow else _ROUNDING[precision])
    return bounds


def _alone(case: Case) -> list[Case]:
    """Return a text of a case alone."""
    return [row for row in row_cases(case) if len(row.rows) == 1]


def is_same_alone(run: Runner, case: Case, outputs: Mapping[str, Array]) -> bool:
    """Whether a text of a case alone gives a reference the outputs that it gives in the case."""
    return all(
        _relative([(outputs_alone[name], _row(array, case, alone.rows[0]))]) < _CLOSE
        for alone in _alone(case)
        for outputs_alone in [run(alone.feeds)]
        for name, array in outputs.items()
        if array.dtype.kind == "f"
    )


def _row(array: Array, case: Case, row: int) -> Array:
    """Return a row of a value without its padding."""
    axis, rows = _token_axis(array, case), array[row : row + 1]
    return rows if axis is None or case.valid is None else rows.compress(case.valid[row], axis)


def _with_end(values: Values, indices: Sequence[int], end: str) -> list[list[Array]]:
    """Return, for each case, some of the values and the output at the end."""
    return [
        [*(arrays[place] for place in indices), outputs[end]]
        for arrays, outputs in zip(values.arrays, values.outputs, strict=True)
    ]


def _common(scopes: Sequence[str]) -> str:
    """Return the innermost module that holds all of these."""
    if not scopes:
        return ""
    parts = [scope.split(".") for scope in scopes]
    common = []
    for names in zip(*parts, strict=False):
        if len({*names}) > 1:
            break
        common.append(names[0])
    return ".".join(common)
