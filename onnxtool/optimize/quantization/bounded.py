"""Quantize a model within a bound on its error: the fewest layers stay in higher precision so that it holds.

One session measures any choice of layers: the model contains each layer in float32 and in fewer bits, and an input that
selects the branch to compute. Building and loading a model for each choice would take minutes.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtool.errors import PassError
from onnxtool.graph.edit import bodies, replace
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import fill_types, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.kept import patterns_of
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization.activations import Feeds, Recording, open_written, record
from onnxtool.optimize.quantization.cpu_arithmetic import EXACT, by_arithmetic
from onnxtool.optimize.quantization.error import measure_errors, output_errors, padding_mask
from onnxtool.optimize.quantization.linear_layers import LinearLayer, find_linear_layers, unfuse_linear_layers
from onnxtool.optimize.quantization.tokens import TokenPromise
from onnxtool.optimize.quantization.written import nothing_to_quantize
from onnxtool.optimize.report import FallbackLayer, GreedyTokens, Quantization
from onnxtool.progress import counted, tell
from onnxtool.runtime.difference import Spread, spreads_of
from onnxtool.runtime.running import Arrays, Session

_SWITCHES, _BRANCH = "onnxtool.switches", "onnxtool.branch_"


@dataclass(frozen=True)
class Level:
    """A precision of a layer.

    Attributes:
        precision: its name, such as `int8`.
        write: writes a layer in this precision and returns its result.
        cost: the time of a weight, compared with other levels.
        activations: see `FallbackLayer`.
    """

    precision: str
    write: Callable[[LinearLayer, Writer], ir.Value]
    cost: float = 1.0
    activations: str = ""

    def layer(self, name: str, error: float) -> FallbackLayer:
        """Describe a layer at this level."""
        return FallbackLayer(name, error, self.precision, activations=self.activations)


FLOAT32_COST = 3.9  # of a weight, compared with the lowest level


@dataclass(frozen=True)
class QuantizationSetting:
    """Conditions of a quantization other than its error, and its folder for temporary files.

    Attributes:
        tokens: the greedy tokens of a decoder; None for other models.
        folder: for temporary files as large as the model; None for the system's.
    """

    tokens: TokenPromise | None = None
    folder: Path | None = None


DEFAULT_SETTING = QuantizationSetting()


@dataclass(frozen=True)
class SwitchableModel:
    """A session on a model with switches, and its reference outputs.

    Attributes:
        num_weights: the number of weights of each layer, by name.
        levels: the levels below float32, the lowest first.
        feeds: calibration inputs, arrays by input name.
        expected: the outputs in float32, one per calibration input.
        spreads: how those with few columns vary.
    """

    num_weights: Mapping[str, int]
    levels: tuple[Level, ...]
    feeds: Sequence[Feeds]
    expected: Sequence[Arrays]
    spreads: Mapping[str, Spread]
    _session: Session

    @property
    def precisions(self) -> tuple[str, ...]:
        """The names of the levels."""
        return tuple(level.precision for level in self.levels)

    def run(self, levels: Mapping[str, int], feeds: Feeds) -> Arrays:
        """Run the model.

        Args:
            levels: for each layer that is not in float32, the index of its level in `levels`.
            feeds: inputs without switches.
        """
        switches = np.zeros((len(self.levels), len(self.num_weights)), np.float32)
        for column, name in enumerate(self.num_weights):
            if name in levels:
                switches[levels[name], column] = 1
        return self._session.run({**feeds, _SWITCHES: switches.reshape(-1)})

    def error(self, levels: Mapping[str, int], place: int) -> float:
        """Return the largest error (see `output_errors`) on the inputs at `place`, an index into `feeds`."""
        feeds = self.feeds[place]
        outputs = self.run(levels, feeds)
        return float(output_errors(outputs, self.expected[place], padding_mask(feeds), self.spreads).max(initial=0.0))


def open_switchable(
    model: ir.Model,
    levels: Sequence[Level],
    folder: Path,
    feeds: Sequence[Feeds],
    expected: Sequence[Arrays],
    arithmetic: str = EXACT,
) -> SwitchableModel:
    """Write `model` with switches to `folder` and open a session on it, which computes under an arithmetic.

    Layers that stay in float32 by name have none.
    """
    model = model.clone()
    unfuse_linear_layers(model, frozenset(), find_shapes(model))
    fill_types(model)
    layers = [layer for layer in find_linear_layers(model)[0] if not patterns_of(layer.node)]
    sizes = {layer.name: layer.num_weights for layer in layers}
    num_switches = len(levels) * len(sizes)
    switches = ir.Value(name=_SWITCHES, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([num_switches]))
    model.graph.inputs.append(switches)
    places = {name: place for place, name in enumerate(sizes)}
    for layer in layers:
        _write_switches(layer, levels, switches, range(places[layer.name], num_switches, len(sizes)))
    computed = by_arithmetic(model)
    chosen = computed.get(arithmetic, computed[EXACT])
    _name_branches(chosen)
    session = open_written(chosen, folder)
    spreads = spreads_of(expected, [padding_mask(feed) for feed in feeds])
    return SwitchableModel(sizes, tuple(levels), feeds, expected, spreads, session)


def _write_switches(layer: LinearLayer, levels: Sequence[Level], switches: ir.Value, places: Sequence[int]) -> None:
    """Replace the result of a layer by `If(switch, result in fewer bits, result)`, once per level.

    Weights stay in the main graph, where those of several levels are shared.
    """
    graph, last = layer.node.graph, layer.result.producer()
    if not isinstance(graph, ir.Graph) or last is None:
        raise ValueError(f"{layer.name} is in no graph")
    # First every consumer reads the new node, then the new node reads the layer.
    joint = ir.node("Identity", [None])
    graph.insert_after(last, joint)
    replace(layer.result, joint.outputs[0])
    layer.result.name = layer.result.name or f"{layer.name}_float32"  # a graph output has passed on its name
    graph.opset_imports.setdefault(MICROSOFT, 1)
    writer, total = Writer(joint), layer.result
    for level, place in zip(levels, places, strict=True):
        inside = Writer(initializers=graph.initializers)
        quantized = level.write(layer, inside)
        passed = ir.node("Identity", [total])
        passed.outputs[0].type = quantized.type
        chosen = writer.node("Gather", [switches, writer.constant(np.array(place), f"onnxtool.place_{place}")])
        branches = {
            "then_branch": ir.Graph([], [quantized], nodes=inside.nodes, name=f"{_BRANCH}{place}"),
            "else_branch": ir.Graph([], [passed.outputs[0]], nodes=[passed], name=f"{_BRANCH}{place}_else"),
        }
        switch = writer.op("Cast", chosen, to=int(ir.DataType.BOOL))
        total = writer.node("If", [switch], branches, like=layer.result)
    joint.replace_input_with(0, total)


def _name_branches(model: ir.Model) -> None:
    """Give values in branches names that no other has: the names that a branch assigns are those of the main graph."""
    branches = [branch for node in model.graph if node.op_type == "If" for branch in bodies(node)]
    for branch in [branch for branch in branches if str(branch.name).startswith(_BRANCH)]:
        inside = [*branch.initializers.values(), *(value for node in branch for value in node.outputs)]
        for place, value in enumerate(inside):
            value.name = f"{branch.name}.{place}"


# The fraction of the error bound allowed on calibration inputs: other texts are worse, especially in 4 bits.
MARGIN = 0.5
_LOGGER = logging.getLogger(__name__)
_MOST_FEEDS_TO_RANK_BY = 2
_HIGHEST = "float32"
_MOST_CHOICES, _MOST_KEPT = 6, 8
_SMALLEST = 1e-12


def find_fallback_layers(model: SwitchableModel, max_error: float) -> tuple[FallbackLayer, ...]:
    """Return the fewest layers of the ranking that must be at a higher level for the error to be below `max_error`.

    Layers are raised to the next level one by one; when all are there, the first is raised again. The
    next level may have the same precision at a lower cost than a higher precision.

    Raises:
        PassError: all of them would have to be in float32.
    """
    allowed = MARGIN * max_error
    precisions = (*model.precisions, _HIGHEST)
    names, last = tuple(model.num_weights), len(model.precisions) - 1
    errors = [model.error(dict.fromkeys(names, 0), place) for place in range(len(model.feeds))]
    if max(errors) <= allowed or not names:
        return ()
    # Worst first, because they reveal an insufficient choice soonest.
    worst_first = sorted(range(len(errors)), key=lambda place: -errors[place])

    def holds(levels: Mapping[str, int]) -> bool:
        quantized = {name: index for name, index in levels.items() if precisions[index] != _HIGHEST}
        return all(model.error(quantized, place) <= allowed for place in worst_first)

    level = next((index for index in range(last) if holds(dict.fromkeys(names, index + 1))), last)
    # Layers are ranked in the lowest precision, at its most exact level.
    ranking_level = max(index for index in range(level + 1) if precisions[index] == precisions[0])
    ranked = _ranked(model, ranking_level, worst_first[:_MOST_FEEDS_TO_RANK_BY])
    if level == last:
        _require_one(tuple(ranked), precisions, max_error, model)

    def is_enough(steps: int) -> bool:
        levels = _levels_after(steps, tuple(ranked), level)
        above = sum(precisions[index] != precisions[0] for index in levels.values())
        tell(f"trying {above} of {len(names)} layers in higher precision")
        is_within = holds(levels)
        _LOGGER.info(
            "%d of %d layers in higher precision: the error is %s the bound",
            above,
            len(names),
            "within" if is_within else "above",
        )
        return is_within

    levels = _levels_after(_fewest(len(names) - (level == last), is_enough), tuple(ranked), level)
    return tuple(FallbackLayer(name, ranked[name], precisions[index]) for name, index in levels.items() if index)


def _ranked(model: SwitchableModel, level: int, places: Sequence[int]) -> dict[str, float]:
    """Return all layers with the error of each alone at `level`, on the worst of the feeds at `places`.

    They are sorted by error per weight, the largest first. Errors of layers add up almost independently, and the
    time of a layer grows with its weights, so that this order reaches a bound at the lowest cost.
    """
    sizes = model.num_weights
    errors = {}
    for name in counted(list(sizes), "measuring layer"):
        errors[name] = max(model.error({name: level}, place) for place in places)
        _LOGGER.debug("layer %s alone in %s: error %.3g", name, level, errors[name])
    return dict(sorted(errors.items(), key=lambda item: -item[1] / sizes[item[0]]))


_Losses = dict[str, list[float]]  # of each layer alone, at each level


def find_levels(model: SwitchableModel, max_error: float, promise: TokenPromise) -> list[tuple[FallbackLayer, ...]]:
    """Return choices of levels for a decoder that hold the bound and its tokens, cheapest first.

    One layer after another rises to the level that saves the most loss for its time; see `_steps`. The first choice is
    the smallest number of steps found by bisection; the others are more cautious, because the written file may compute
    a little differently.

    Raises:
        PassError: not even the last choice holds, with one layer in the lowest precision.
    """
    precision, start = model.levels[0].precision, dict.fromkeys(model.num_weights, 0)
    promise.require(promise.count(partial(model.run, {})), precision)  # of tables, which are quantized already
    at_first = [model.error(start, place) for place in range(len(model.feeds))]
    worst_first = sorted(range(len(at_first)), key=lambda place: -at_first[place])
    errors, divergences = _losses(model, promise)
    # What holds already has no say in which layer rises first.
    weights = (
        float(max(at_first) > MARGIN * max_error),
        float(not promise.holds(promise.count(partial(model.run, start)))),
    )
    steps = _steps(model, weights, (errors, divergences))

    def below(count: int) -> dict[str, int]:
        levels = start | dict(steps[:count])
        return {name: level for name, level in levels.items() if level < len(model.levels)}

    def tokens(count: int) -> GreedyTokens:
        return promise.count(partial(model.run, below(count)))

    def holds(count: int) -> bool:
        shared = tokens(count)
        tell(f"trying {count} of {len(steps)} steps to higher levels: {shared.share:.1%} of the tokens are equal")
        return promise.holds(shared) and all(
            model.error(below(count), place) <= MARGIN * max_error for place in worst_first
        )

    def last() -> int:
        """Return the largest number of steps that leaves a layer in the lowest precision."""
        lowest = {place for place, level in enumerate(model.levels) if level.precision == precision}
        counts = range(len(steps))
        return max((count for count in counts if lowest & {*below(count).values()}), default=0)

    by_worth, most = steps, last()
    for kept in list(dict.fromkeys(name for name, _ in reversed(by_worth)))[:_MOST_KEPT]:
        if promise.holds(tokens(most)):
            break
        # Only layers in other precisions are left to rise, so one stays and all others rise before it.
        steps = sorted(by_worth, key=lambda step: step[0] == kept)
        most = sum(name != kept for name, _ in by_worth)
    if not holds(most):
        promise.require(tokens(most), precision)
        error = max(model.error(below(most), place) for place in worst_first)
        raise PassError(
            f"{precision} cannot hold an error of {max_error:g}: with one layer in {precision} it is {error:.2g}, and "
            f"{MARGIN:g} of the bound is allowed on the texts of the calibration",
            "pass a larger --max_error, or another --precision",
        )
    first = 0 if holds(0) else _fewest(most, holds)
    counts = range(first, most + 1, max(1, (most - first) // _MOST_CHOICES))
    return [_choice(model, dict(steps[:count]), errors) for count in counts]


def _choice(model: SwitchableModel, rising: Mapping[str, int], errors: _Losses) -> tuple[FallbackLayer, ...]:
    """Describe the layers that rise, each to a level, or to float32 if its number is past the last."""
    return tuple(
        model.levels[level].layer(name, errors[name][0])
        if level < len(model.levels)
        else FallbackLayer(name, errors[name][0])
        for name, level in rising.items()
    )


def _losses(model: SwitchableModel, promise: TokenPromise) -> tuple[_Losses, _Losses]:
    """Return the errors and the divergences of the next token, of each layer alone on the promise's sample."""
    feeds = promise.sample.feeds
    expected = model.run({}, feeds)
    errors: _Losses = {}
    divergences: _Losses = {}
    for name in counted(list(model.num_weights), "measuring layer"):
        results = [model.run({name: level}, feeds) for level in range(len(model.levels))]
        errors[name] = [_rough_error(result, expected) for result in results]
        divergences[name] = [promise.divergence(result) for result in results]
        _LOGGER.debug("layer %s alone: errors %s, divergences %s", name, errors[name], divergences[name])
    return errors, divergences


def _rough_error(actual: Arrays, expected: Arrays) -> float:
    """Return the largest 1 - cosine of a row of an output: `output_errors` takes longer than the run itself."""
    errors = [0.0]
    for name, wanted in expected.items():
        if wanted.dtype.kind == "f" and wanted.size:
            pairs = ((actual[name], wanted), (actual[name], actual[name]), (wanted, wanted))
            along, actual_square, expected_square = (np.einsum("...d,...d->...", *pair) for pair in pairs)
            cosines = along / np.maximum(np.sqrt(actual_square) * np.sqrt(expected_square), _SMALLEST)
            errors.append(
                float(np.nanmax(1.0 - cosines, initial=0.0, where=(actual_square > 0) & (expected_square > 0)))
            )
    return max(errors)


def _steps(
    model: SwitchableModel, weights: tuple[float, float], measured: tuple[_Losses, _Losses]
) -> list[tuple[str, int]]:
    """Return layers and the levels that they rise to, those that save the most loss for their time first.

    The loss of a layer is its share of the sum over all layers, of each of the two `measured` losses that has a weight.
    """
    costs = [*(level.cost for level in model.levels), FLOAT32_COST]
    factors = [
        weight / max(sum(loss[0] for loss in losses.values()), _SMALLEST)
        for weight, losses in zip(weights, measured, strict=True)
    ]
    worth: list[tuple[float, str, int]] = []
    for name, size in model.num_weights.items():
        parts = [np.array([*losses[name], 0.0]) * factor for losses, factor in zip(measured, factors, strict=True)]
        loss, at = np.add(*parts), 0
        while at < len(costs) - 1:
            saved = [(loss[at] - loss[up]) / (costs[up] - costs[at]) for up in range(at + 1, len(costs))]
            at += 1 + int(np.argmax(saved))
            worth.append((max(saved) / size, name, at))
    worth.sort(key=lambda row: -row[0])
    return [(name, level) for _, name, level in worth]


def _require_one(names: Sequence[str], precisions: Sequence[str], max_error: float, model: SwitchableModel) -> None:
    """Check that the bound holds with one quantized layer, the last of `names`."""
    levels = {names[-1]: len(precisions) - 2}
    error = max(model.error(levels, place) for place in range(len(model.feeds)))
    if error > MARGIN * max_error:
        raise PassError(
            f"{precisions[0]} cannot hold an error of {max_error:g}: with {len(names) - 1} of {len(names)} layers left "
            f"in float32 it is {error:.2g}, and {MARGIN:g} of the bound is allowed on the texts of the calibration",
            "pass a larger --max_error, or another --precision",
        )


def _fewest(most: int, is_enough: Callable[[int], bool]) -> int:
    """Return the smallest sufficient number above 0 by bisection; `most` is known to suffice."""
    too_few, enough = 0, most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _levels_after(steps: int, names: Sequence[str], level: int) -> dict[str, int]:
    """Return the level of each layer after the first `steps` of `names` rose from `level` by one."""
    return {name: level + (number < steps) for number, name in enumerate(names)}


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization of linear layers and embeddings.

    Attributes:
        precision: the lowest precision of a layer.
        levels: returns the levels of a layer below float32, cheapest first. Levels of the same precision trade time for
            a smaller error. They are asked for if the lowest one is not within the bound.
        layers: returns the pass that quantizes all layers, given the layers above the first level.
        embeddings: passes that quantize embeddings, with their precisions, lowest first; the first one within the bound
            is used.
    """

    precision: str
    levels: Callable[[], Sequence[Level]]
    layers: Callable[[Sequence[FallbackLayer]], Pass]
    embeddings: tuple[tuple[str, Pass], ...]


@dataclass(frozen=True)
class Quantized:
    """A quantized model and its error.

    Attributes:
        outcome: the model, as the outcome of a pass.
        report: its layers, and the errors on the calibration inputs, under the worst arithmetic.
        errors: the largest error under each arithmetic that was computed; see `by_arithmetic`.
    """

    outcome: Outcome
    report: Quantization
    errors: Mapping[str, float]


@dataclass(frozen=True)
class _Attempts:
    """Attempts at quantizing a model, with the attributes of `quantize_within`."""

    model: ir.Model
    feeds: Sequence[Feeds]
    layers: Sequence[LinearLayer]
    recording: Recording
    config: QuantizationConfig
    folder: Path
    named: tuple[FallbackLayer, ...]
    tokens: TokenPromise | None

    def holds(self, result: Quantized, bound: float) -> bool:
        """Whether a result is within the bound, with enough equal tokens."""
        tokens = result.report.tokens
        return result.report.error <= bound and (self.tokens is None or tokens is None or self.tokens.holds(tokens))

    def quantize(self, fallbacks: Sequence[FallbackLayer], embeddings: tuple[str, Pass] | None) -> Quantized:
        """Quantize a copy of the model, with `embeddings` as well, and measure the errors of the written file."""
        converted, fallbacks = self.model.clone(), (*self.named, *fallbacks)
        passes = [self.config.layers(fallbacks), *(() if embeddings is None else embeddings[1:])]
        outcomes = [step.apply(converted, Context()) for step in passes]
        num_embeddings = sum(outcome.num_changes for outcome in outcomes[1:])
        measured, tokens = {}, []
        for name, computed in by_arithmetic(converted).items():
            session = open_written(computed, self.folder)
            measured[name] = measure_errors(session, self.feeds, self.recording.outputs)
            tokens += [] if self.tokens is None else [self.tokens.count_steps(session)]
        errors = {name: float(of_outputs.max(initial=0.0)) for name, of_outputs in measured.items()}
        worst = max(errors, key=lambda name: errors[name])
        notes = "; ".join(outcome.note for outcome in outcomes if outcome.note)
        return Quantized(
            Outcome(converted, sum(outcome.num_changes for outcome in outcomes), notes),
            Quantization(
                precision=self.config.precision,
                num_layers=len({layer.name for layer in self.layers}),
                kept=tuple(layer for layer in fallbacks if layer.precision != self.config.precision),
                finer=tuple(
                    fallback
                    for fallback in fallbacks
                    if fallback.precision == self.config.precision and fallback.activations
                ),
                tokens=min(tokens, key=lambda counted_tokens: counted_tokens.share, default=None),
                num_embeddings=num_embeddings,
                embedding_precision=embeddings[0] if embeddings and num_embeddings else "",
                error=errors[worst],
                mean_error=float(measured[worst].mean()),
            ),
            errors,
        )

    def search(self, arithmetic: str, bound: float) -> Quantized:
        """Return the smallest result within the bound, of one for each precision of embeddings.

        A table is often larger than all layers together, so that it comes before them.
        """
        results: list[Quantized] = []
        for embeddings in (*self.config.embeddings, None):
            base = self.model.clone()
            if embeddings is None:
                if results:
                    break
            elif not embeddings[1].apply(base, Context()).num_changes:
                continue
            switchable = open_switchable(
                base, self.config.levels(), self.folder, self.feeds, self.recording.outputs, arithmetic
            )
            try:
                if embeddings and max(switchable.error({}, place) for place in range(len(self.feeds))) > MARGIN * bound:
                    continue
                if self.tokens is None:
                    choices = [find_fallback_layers(switchable, bound)]
                else:
                    choices = find_levels(switchable, bound, self.tokens)
            except PassError:
                if embeddings is None:
                    raise
                continue
            finally:
                del switchable  # it contains every weight at every level
            for fallbacks in choices:
                result = self.quantize(fallbacks, embeddings)
                if self.holds(result, bound):
                    break
            if embeddings is None or self.holds(result, bound):
                results.append(result)
            if len(result.report.kept) == len(self.named):
                break
        return min(results, key=_size_bytes)

    def within(self, max_error: float | None) -> Quantized:
        """Return the smallest result within `max_error`, or the best one."""
        result = self.quantize((), self.config.embeddings[0])
        if max_error is not None and not (result.report.error <= MARGIN * max_error and self.holds(result, max_error)):
            errors, has_tables = result.errors, bool(result.report.num_embeddings)
            del result
            # The arithmetic with the largest error over all layers decides the fallback layers; the others rarely
            # matter.
            for arithmetic in sorted(errors, key=lambda name: -errors[name]):
                result = self.search(arithmetic, max_error)
                if self.holds(result, max_error):
                    break
            if has_tables and not result.report.num_embeddings:
                lowest = self.config.embeddings[-1][0]
                note = f"embeddings stay in float32, because in {lowest} the error exceeds the bound"
                report = dataclasses.replace(result.report, note=note)
                result = dataclasses.replace(result, report=report)
        return result


def quantize_within(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None,
    configure: Callable[[Sequence[LinearLayer], Recording], QuantizationConfig],
    setting: QuantizationSetting,
) -> Quantized:
    """Quantize the linear layers of a float32 model by a configuration, within `max_error`.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, arrays by input name, on which the error is measured.
        max_error: upper bound on 1 - cosine of any row of an output, or of an output as a whole. None for no bound,
            with all layers at the lowest level.
        configure: returns the configuration for the layers of the model and their activations on `feeds`.
        setting: the tokens that have to be equal if there is a bound, and the folder.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """
    if not feeds:
        raise PassError("no calibration inputs", "pass texts to calibrate on")
    opened = model.clone()
    unfuse_linear_layers(opened, frozenset(), find_shapes(opened))
    layers, refused = find_linear_layers(opened)
    if not layers:
        raise nothing_to_quantize(opened, refused)
    with tempfile.TemporaryDirectory(prefix="onnxtool-quantize-", dir=setting.folder) as name:
        folder = Path(name)
        recording = record(model, feeds, folder)
        config = configure(layers, recording)
        named = tuple(FallbackLayer(layer.name, None, by_name=True) for layer in layers if patterns_of(layer.node))
        result = _Attempts(model, feeds, layers, recording, config, folder, named, setting.tokens).within(max_error)
    report = result.report
    if max_error is not None and report.error > max_error:
        raise PassError(
            f"the error in {report.precision} is {report.error:.2g} with {len(report.kept)} layers in higher "
            f"precision, and {max_error:g} is allowed",
            "pass a larger --max_error",
        )
    if max_error is not None and setting.tokens is not None and report.tokens is not None:
        setting.tokens.require(report.tokens, report.precision)
    return result


def _size_bytes(quantized: Quantized) -> int:
    held = (value.const_value for value in quantized.outcome.model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in held if tensor is not None)
