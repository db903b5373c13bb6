"""Find the layers that have to stay in float32 for the error to hold, with as little work in float32 as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxtool.errors import PassError
from onnxtool.optimize.precision.activations import Feeds
from onnxtool.optimize.precision.switches import SwitchableModel
from onnxtool.runtime.session import Arrays

# What calibration inputs may show of the error that is allowed: among other texts there are worse ones.
MARGIN = 0.6
_MOST_FEEDS_TO_RANK_BY = 2


@dataclass(frozen=True)
class KeptLayer:
    """A layer that stays in float32.

    Attributes:
        name: of its weight.
        error: the largest 1 - cosine of an output, or of a row of it, where this layer alone is in int8; on the
            calibration inputs that are worst where all layers are.
    """

    name: str
    error: float


@dataclass(frozen=True)
class Trials:
    """A model whose layers can be switched to int8, and what it is to be compared with.

    Attributes:
        expected: the outputs in float32, one a calibration input.
    """

    model: SwitchableModel
    feeds: Sequence[Feeds]
    expected: Sequence[Arrays]

    def error(self, kept: Sequence[KeptLayer], place: int) -> float:
        """Return the largest error on one of the feeds with all layers but `kept` in int8."""
        names = {layer.name for layer in kept}
        return self._error([name for name in self.model.num_weights if name not in names], place)

    def ranked(self, places: Sequence[int], on_progress: Callable[[str], None]) -> tuple[KeptLayer, ...]:
        """Return all layers, those first whose int8 costs most error on the feeds at `places` for their weights.

        Errors of layers add up almost as if they were independent, and the time of a layer goes with its weights: to
        keep those first that give most error back for their time is then the cheapest way below a bound.
        """
        sizes = self.model.num_weights
        layers = []
        for number, name in enumerate(sizes, start=1):
            on_progress(f"measuring layer {number} of {len(sizes)}")
            layers.append(KeptLayer(name, max(self._error([name], place) for place in places)))
        return tuple(sorted(layers, key=lambda layer: -layer.error / sizes[layer.name]))

    def _error(self, int8: Sequence[str], place: int) -> float:
        return float(self.model.errors(int8, self.feeds[place], self.expected[place]).max(initial=0.0))


def find_kept_layers(trials: Trials, max_error: float, on_progress: Callable[[str], None]) -> tuple[KeptLayer, ...]:
    """Return the fewest layers of the ranking that must stay in float32 for the error to be below `max_error`.

    Raises:
        PassError: they are all of them.
    """
    allowed = MARGIN * max_error
    errors = [trials.error((), place) for place in range(len(trials.feeds))]
    if max(errors) <= allowed:
        return ()
    # The worst are what has to come down, and they tell soonest that a choice is not enough.
    worst_first = sorted(range(len(errors)), key=lambda place: -errors[place])
    ranked = trials.ranked(worst_first[:_MOST_FEEDS_TO_RANK_BY], on_progress)
    too_few, enough = 0, len(ranked) - 1
    best = max(trials.error(ranked[:enough], place) for place in worst_first)
    if best > allowed:
        raise PassError(
            f"int8 cannot hold an error of {max_error:g}: with {enough} of {len(ranked)} layers left in float32 "
            f"it is {best:.2g}, and {MARGIN:g} of the bound is allowed on the texts of the calibration",
            "pass a larger --max_error, or another --precision",
        )
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        on_progress(f"trying {middle} of {len(ranked)} layers in float32")
        if all(trials.error(ranked[:middle], place) <= allowed for place in worst_first):
            enough = middle
        else:
            too_few = middle
    return ranked[:enough]
