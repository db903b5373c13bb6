"""What to time, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from onnxtool.checkpoint.text_files import TextInput
from onnxtool.errors import InputError
from onnxtool.infer.options import ModelName, Provider, Threads
from onnxtool.options import Option
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
DEFAULT_LENGTHS = (16, 128)


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to time, and for how long.

    Attributes:
        sequence_lengths: of generated inputs; texts have their own.
        runs: stop a shape after so many runs.
        duration_s: stop a shape after so many seconds. The first of the two that is met stops it; where both are
            None, DEFAULT_RUNS and DEFAULT_DURATION_S do.
        warmup: runs of each shape that are not counted.
        threads: intra-op threads; 0 for one a core.
        seed: of the generated inputs, and of the order of texts.
        inter_threads: operators that may run at once; 0 for one after the other.
        io_binding: bind inputs and outputs to buffers once, and time the computation alone.
        texts: what to run in place of generated inputs.
        model_name: where the tokenizer for `texts` is, in place of the files beside the model.
        compare: another ONNX file, a checkpoint to run in PyTorch, or a provider, to time in turns with the model.
        baseline: an earlier report in JSON, which relative gates refer to.
        fail_if: gates, e.g. `p95>+10%`; of one shape alone as `8x128.p95>+10%`.
    """

    batch_sizes: Annotated[
        tuple[int, ...], Option("Batch sizes to time.", name="batch_size", maximum=MAX_BATCH_SIZE)
    ] = (1, 8)
    sequence_lengths: Annotated[
        tuple[int, ...],
        Option("Sequence lengths to time; texts have their own.", name="sequence_length", maximum=MAX_SEQUENCE_LENGTH),
    ] = DEFAULT_LENGTHS
    runs: Annotated[
        int | None,
        Option("Stop a shape after so many runs.", minimum=1, maximum=MAX_RUNS, default="100 or 5 s"),
    ] = None
    duration_s: Annotated[
        float | None,
        Option(
            "Stop a shape after so many seconds; with --runs, after whichever comes first.",
            name="duration",
            minimum=0,
            is_open=True,
            maximum=MAX_DURATION_S,
        ),
    ] = None
    warmup: Annotated[int, Option("Runs of each shape that do not count.", minimum=0, maximum=MAX_RUNS)] = 3
    provider: Provider = "auto"
    threads: Threads = 0
    seed: int = 0
    inter_threads: Annotated[
        int,
        Option("Operators that may run at once; 0: one after the other.", minimum=0, maximum=MAX_THREADS),
    ] = 0
    io_binding: Annotated[bool, Option("Bind inputs and outputs to buffers once, and time the computation alone.")] = (
        False
    )
    texts: tuple[TextInput, ...] = ()
    model_name: ModelName = None
    compare: Annotated[
        str | None,
        Option(
            "Time another ONNX file, a checkpoint in PyTorch, or the provider cpu or cuda, in turns with the model.",
            metavar="MODEL_OR_ID",
        ),
    ] = None
    baseline: Annotated[Path | None, Option("An earlier report (--format json) for --fail_if.", metavar="FILE")] = None
    fail_if: Annotated[
        tuple[str, ...],
        Option(
            "Exit with 1 where this holds for a shape: 'p50>20' in milliseconds, 'throughput_tokens_per_s<5000', "
            "'p95>+10%' against --baseline or --compare, '8x128.p95>+10%' for one shape. May be given several times.",
            metavar="EXPR",
        ),
    ] = ()

    @property
    def stop_after(self) -> tuple[float, float]:
        """Runs and seconds after which a shape is done."""
        if self.runs is None and self.duration_s is None:
            return DEFAULT_RUNS, DEFAULT_DURATION_S
        never = float("inf")
        return never if self.runs is None else self.runs, never if self.duration_s is None else self.duration_s

    def check(self) -> None:
        """Refuse values out of range.

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
