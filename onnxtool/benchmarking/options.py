"""What to time, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnxtool.checkpoint.text_files import TextInput
from onnxtool.errors import InputError
from onnxtool.runtime.bounds import (
    MAX_BATCH_SIZE,
    MAX_BATCH_TOKENS,
    MAX_DURATION_S,
    MAX_RUNS,
    MAX_SEQUENCE_LENGTH,
    MAX_THREADS,
)

# What stops a shape where the caller names neither: enough runs for a p95, or as long as one likes to wait.
DEFAULT_RUNS, DEFAULT_DURATION_S = 100, 5.0


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to time, and for how long.

    Attributes:
        sequence_lengths: of made-up inputs; texts have their own.
        runs: stop a shape after so many runs.
        duration_s: stop a shape after so many seconds. The first of the two that is met stops it; where both are
            None, DEFAULT_RUNS and DEFAULT_DURATION_S do.
        warmup: runs of each shape that are not counted.
        threads: intra-op threads; 0 for one a core.
        seed: of the made-up inputs, and of the order of texts.
        inter_threads: operators that may run at once; 0 for one after the other.
        io_binding: bind inputs and outputs to buffers once, and time the computation alone.
        texts: what to run in place of made-up inputs.
        model_name: where the tokenizer for `texts` is, in place of the files beside the model.
        compare: another ONNX file, a checkpoint to run in PyTorch, or a provider, to time in turns with the model.
        baseline: an earlier report in JSON, which relative gates refer to.
        fail_if: gates, e.g. `p95>+10%`; of one shape alone as `8x128.p95>+10%`.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    sequence_lengths: tuple[int, ...] = (16, 128)
    runs: int | None = None
    duration_s: float | None = None
    warmup: int = 3
    provider: str = "auto"
    threads: int = 0
    seed: int = 0
    inter_threads: int = 0
    io_binding: bool = False
    texts: tuple[TextInput, ...] = ()
    model_name: str | None = None
    compare: str | None = None
    baseline: Path | None = None
    fail_if: tuple[str, ...] = ()

    @property
    def stop_after(self) -> tuple[float, float]:
        """Runs and seconds after which a shape is done."""
        if self.runs is None and self.duration_s is None:
            return DEFAULT_RUNS, DEFAULT_DURATION_S
        never = float("inf")
        return never if self.runs is None else self.runs, never if self.duration_s is None else self.duration_s

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            InputError: a figure is out of its range, by its name and with its value.
        """
        runs, duration_s = self.stop_after
        figures = (
            ("batch_sizes", _all_within(self.batch_sizes, MAX_BATCH_SIZE), self.batch_sizes),
            ("sequence_lengths", _all_within(self.sequence_lengths, MAX_SEQUENCE_LENGTH), self.sequence_lengths),
            ("runs", 0 < (self.runs or 1) <= MAX_RUNS and runs > 0, self.runs),
            ("duration_s", 0 < (self.duration_s or 1) <= MAX_DURATION_S and duration_s > 0, self.duration_s),
            ("warmup", self.warmup >= 0, self.warmup),
            ("threads", 0 <= self.threads <= MAX_THREADS, self.threads),
            ("inter_threads", 0 <= self.inter_threads <= MAX_THREADS, self.inter_threads),
        )
        for name, is_valid, value in figures:
            if not is_valid:
                raise InputError(f"cannot time with {name} {value}", "pass positive numbers that a machine can have")
        tokens = max(self.batch_sizes) * max(self.sequence_lengths)
        if not self.texts and tokens > MAX_BATCH_TOKENS:
            raise InputError(
                f"cannot time with batches of {tokens} tokens ({max(self.batch_sizes)} x {max(self.sequence_lengths)})",
                f"at most {MAX_BATCH_TOKENS} tokens go into a batch",
            )


def _all_within(values: tuple[int, ...], highest: int) -> bool:
    return bool(values) and min(values) > 0 and max(values) <= highest
