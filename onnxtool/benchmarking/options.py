"""Options of a benchmark: runs, duration, warm-up, comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from onnxtool.checkpoint.text_files import TextInput, several
from onnxtool.errors import OptionError
from onnxtool.infer.options import ModelName
from onnxtool.options import NOTHING, UNSET, Many, Option, OptionalName
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs, InputShapes, SampleInputs
from onnxtool.runtime.providers import Provider, ProviderOptions, Threads, provider_effect

# Default limits per shape: enough runs for a p95, or an acceptable waiting time.
DEFAULT_RUNS, DEFAULT_DURATION_S = 100, 5.0
DEFAULT_BATCH_SIZES: Any = (1, 8)
DEFAULT_LENGTHS: Any = (16, 128)

# Beyond these bounds a number is a typing error; they protect memory.
MAX_BATCH_SIZE = 65_536
MAX_SEQUENCE_LENGTH = 1 << 20
MAX_BATCH_TOKENS = 1 << 24  # 128 MB of ids
MAX_RUNS = 10_000_000
MAX_DURATION_S = 7 * 86_400.0

if TYPE_CHECKING:
    from onnxtool.options import Converted

    Texts = Converted[tuple[TextInput, ...], TextInput | str | Iterable[TextInput | str]]
else:
    Texts = tuple[TextInput | str, ...] | TextInput | str


class BenchmarkOptions(ProviderOptions):
    """The options of a benchmark: what to time, and for how long.

    Attributes:
        sequence_lengths: sequence lengths of generated inputs; texts have their own.
        runs: stop each shape after this many runs.
        duration_s: stop each shape after this many seconds. With `runs`, whichever limit is reached first applies; if
            both are None, DEFAULT_RUNS and DEFAULT_DURATION_S apply.
        warmup: uncounted runs of each shape.
        threads: intra-op threads; 0 for one per core.
        seed: random seed of generated inputs and of the order of texts.
        texts: texts to run instead of generated inputs.
        sample_inputs: .npz files with the inputs of one run each, to time instead of generated ones.
        input_shapes: shapes of generated inputs, as `NAME:1,128`.
        model_name: the checkpoint with the tokenizer for `texts`, instead of the files next to the model.
        compare: another ONNX file, a checkpoint to run in PyTorch, or a provider, to time in turns with the model.
        fail_if: gates, e.g. `p95>20`, or `ratio<0.9` with `compare`; for a single shape, `8x128.p95>20`.
    """

    batch_sizes: Annotated[
        Many[int], Option("Batch sizes to time.", name="batch_size", minimum=1, maximum=MAX_BATCH_SIZE)
    ] = DEFAULT_BATCH_SIZES
    sequence_lengths: Annotated[
        Many[int],
        Option(
            "Sequence lengths to time; not for texts.",
            name="sequence_length",
            minimum=1,
            maximum=MAX_SEQUENCE_LENGTH,
        ),
    ] = DEFAULT_LENGTHS
    runs: Annotated[
        int | None,
        Option("Stop each shape after this many runs.", minimum=1, maximum=MAX_RUNS, default="100 or 5 s"),
    ] = None
    duration_s: Annotated[
        float | None,
        Option(
            "Stop each shape after this many seconds; with --runs, after whichever comes first.",
            name="duration",
            minimum=0,
            is_open=True,
            maximum=MAX_DURATION_S,
        ),
    ] = None
    warmup: Annotated[int, Option("Uncounted warm-up runs of each shape.", minimum=0, maximum=MAX_RUNS)] = 3
    provider: Provider = "auto"
    threads: Threads = 0
    seed: Annotated[int, Option(minimum=0)] = 0
    texts: Texts = NOTHING
    sample_inputs: SampleInputs = NOTHING
    input_shapes: InputShapes = NOTHING
    model_name: ModelName = UNSET
    compare: Annotated[
        OptionalName,
        Option(
            "Time another ONNX file, a checkpoint in PyTorch, or a provider, in turns with the model.",
            metavar="MODEL_OR_ID",
            is_checkpoint=True,
            effect=provider_effect,
        ),
    ] = UNSET
    fail_if: Annotated[
        Many[str],
        Option(
            "Exit with 1 if this holds for any shape: 'p50>20' in milliseconds, 'throughput_tokens_per_s<5000', "
            "'ratio<0.9' for the other model's latency divided by the model's with --compare, '8x128.p95>20' for one "
            "shape. May be given several times.",
            metavar="EXPR",
        ),
    ] = NOTHING

    @property
    def given(self) -> GivenInputs:
        """The options for the inputs."""
        return GivenInputs.of(self.sample_inputs, self.input_shapes)

    @property
    def stop_after(self) -> tuple[float, float]:
        """Limits of a shape in runs and seconds."""
        if self.runs is None and self.duration_s is None:
            return DEFAULT_RUNS, DEFAULT_DURATION_S
        never = float("inf")
        return never if self.runs is None else self.runs, never if self.duration_s is None else self.duration_s

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs = (text if isinstance(text, TextInput) else TextInput(text) for text in several(self.texts))
        object.__setattr__(self, "texts", tuple(inputs))
        for name in ("batch_sizes", "sequence_lengths"):
            if not getattr(self, name):
                raise OptionError(f"{name} is empty", "pass at least one")
            if repeated := [item for item, count in Counter(getattr(self, name)).items() if count > 1]:
                raise OptionError(f"{name} has {repeated[0]} more than once", "pass each number once")
        if self.given != NO_INPUTS and self.texts:
            raise OptionError(
                "texts are timed with the inputs that they become", "leave --sample_inputs and --input_shape out"
            )
        if self.sample_inputs and (self.batch_sizes, self.sequence_lengths) != (DEFAULT_BATCH_SIZES, DEFAULT_LENGTHS):
            raise OptionError(
                "samples have sizes of their own", "leave --batch_size and --sequence_length out, or --sample_inputs"
            )
        tokens = max(self.batch_sizes) * max(self.sequence_lengths)
        if not self.texts and tokens > MAX_BATCH_TOKENS:
            raise OptionError(
                f"cannot time with batches of {tokens} tokens ({max(self.batch_sizes)} x {max(self.sequence_lengths)})",
                f"at most {MAX_BATCH_TOKENS} tokens go into a batch",
            )
