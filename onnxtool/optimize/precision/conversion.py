"""Bring a fused model to a lower precision; what stays as it is, is measured on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtool.model_file import ModelFile
from onnxtool.optimize.passes.float16 import to_float16
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.precision.calibration import make_calibration
from onnxtool.optimize.precision.int8 import to_int8
from onnxtool.optimize.precision.ranges import Feeds, beyond, measure_ranges
from onnxtool.reports import KeptLayer, Quantization

if TYPE_CHECKING:
    import onnx_ir as ir

MAX_ERROR = 0.01
"""What int8 may cost where nobody says: rankings of texts hardly move, and nearly all layers of most models pass."""

# Half of what float16 holds: other texts give larger values than those that were tried.
_LARGEST_IN_FLOAT16 = 65504.0 / 2


@dataclass(frozen=True)
class Conversion:
    """A precision, and what is needed to reach it.

    Attributes:
        precision: one of PRECISIONS, other than fp32.
        source: the file that is optimized, with its tokenizer beside it.
        feeds: inputs of many shapes, to see how large values become.
        folder: where to put files that are run and removed again.
        max_error: the most that 1 - cosine may be in int8; None for MAX_ERROR.
        texts_path: texts to calibrate int8 on; None for onnxtool's own.
        on_progress: is told what is being done.
    """

    precision: str
    source: ModelFile
    feeds: Sequence[Feeds]
    folder: Path
    max_error: float | None
    texts_path: Path | None
    on_progress: Callable[[str], None]

    def prepare(self, model: ir.Model) -> tuple[Pass, Quantization | None]:
        """Return the pass that converts `model`, the fused one, and what is known of its error.

        Raises:
            PassError: it cannot be converted, or not within `max_error`.
            InputError: the texts cannot be read, or there is no tokenizer for them.
        """
        return self._int8(model) if self.precision == "int8" else (self._float16(model), None)

    def _float16(self, model: ir.Model) -> Pass:
        return to_float16(beyond(measure_ranges(model, self.feeds, self.folder), _LARGEST_IN_FLOAT16))

    def _int8(self, model: ir.Model) -> tuple[Pass, Quantization]:
        calibration = make_calibration(self.source.path, self.texts_path)
        max_error = MAX_ERROR if self.max_error is None else self.max_error
        result = to_int8(model, calibration.feeds, max_error, on_progress=self.on_progress)
        quantization = Quantization(
            num_layers=result.num_layers,
            kept=tuple(KeptLayer(layer.name, layer.error) for layer in result.kept),
            num_embeddings=result.num_embeddings,
            num_texts=calibration.num_texts,
            error=result.error,
            mean_error=result.mean_error,
            note=calibration.note,
        )
        done = [result.outcome]

        def apply(fused: ir.Model, _context: Context) -> Outcome:
            """Take what was converted already; somebody else's model, when passes are searched, is converted anew."""
            return done.pop() if done else to_int8(fused, calibration.feeds, max_error).outcome

        return Pass("int8", apply), quantization
