"""Options of an optimization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from onnxtool.checkpoint.vector_types import PruneInGraph
from onnxtool.errors import OptionError
from onnxtool.options import NOTHING, UNSET, Force, ManyTexts, Option, OptionalPath, PathField
from onnxtool.reading import STDIN
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs, InputShapes, SampleInputs
from onnxtool.runtime.providers import (
    AUTO,
    BF16,
    CPU,
    FP32,
    ROWS,
    ExecutionProvider,
    ProviderOptions,
    parse_provider,
    provider_effect,
    provider_problem,
    resolve_provider,
)
from onnxtool.runtime.sizes import FixedTo, check_sizes

INT4_FP16 = "int4_fp16"
# Defined here rather than with the passes, because --help lists them without importing the passes.
PRECISIONS: dict[str, tuple[str, ...]] = {
    "cpu": ("fp32", "fp16", "int8", "uint8", "int4", INT4_FP16, "auto"),
    "cuda": ("fp32", "fp16", "int4", "auto"),
    "openvino": ("fp32", "bf16", "int8", "auto"),
}
PROVIDER_NAMES = tuple(PRECISIONS)
PRECISION_NAMES = ("fp32", "fp16", "bf16", "int8", "uint8", "int4", INT4_FP16, "auto")
EIGHT_BITS = ("int8", "uint8")
BLOCKS = ("int4", INT4_FP16)
QUANTIZED = (*EIGHT_BITS, *BLOCKS)
MIXED, PER_ROW, DYNAMIC, STATIC = ACTIVATIONS = ("mixed", "per_row", "dynamic", "static")
"""Quantization modes of int8 activations; the first is the default.

The range is per token, per run, or fixed by calibration; mixed is `static` after a normalization, whose tokens are
similar, and `per_row` elsewhere.
"""

ANY_CPU, NATIVE = "any", "native"
EXACT_CPUS = ("vnni", "arm")
"""CPUs on which int8 products never saturate."""
CPUS = (ANY_CPU, "avx2", *EXACT_CPUS, NATIVE)


def computing_in(precision: str, provider: ExecutionProvider) -> ExecutionProvider:
    """Return the provider with the arithmetic that a file of this precision leaves to it: bfloat16, or float32."""
    return replace(provider, precision=BF16 if precision == BF16 else FP32)


class OptimizeOptions(ProviderOptions):
    """Options of `optimize`.

    Attributes:
        output: None for NAME-optimized.onnx next to NAME.onnx, or NAME-int8.onnx, depending on the precision.
        model_type: overrides the metadata, like `num_heads` and `hidden_size`.
        require_fusion: fail unless every attention is fused.
        provider: the provider that the file is for, one of PROVIDER_NAMES, with a device and options of its own; or
            `auto`, with the precision auto, for the fastest one on this machine.
        precision: one of PRECISION_NAMES: `uint8` is int8 with unsigned weights, and `auto` the fastest one on this
            machine.
        activations: range of int8 activations: `per_row` for one per token, `dynamic` for one per run, `static`
            for ranges fixed by `calibration`, or `mixed` for `static` after normalizations and `per_row` elsewhere;
            None for mixed, or for other precisions.
        cpu: target CPU of int8. `any` and `avx2`: products are exact on every CPU. `vnni` and `arm`: weights have finer
            steps, and products are exact on CPUs whose sums do not saturate. `native`: suited to this machine.
            None for any, or for other precisions.
        keep_float32: patterns of names of nodes, layers or operators that stay in float32.
        embeddings: the lowest precision of embeddings in int4, `int4` or `int8`; None for int4.
        max_error: upper bound on 1 - cosine of any output; None for the precision's tolerance. In int8 and int4, layers
            stay in higher precision until it holds on the texts of `calibration`; None for 0.01.
        equal_tokens: the least share of greedy tokens that a decoder in int8 or int4 has in common with its input,
            from 0, for which they are not compared, to 1; None for all of them.
        calibration: texts for int8, int4 and auto, one per line or JSON Lines with `contents`; None for onnxtool's own.
        prune: a rule of `parse_pruning` by which the graph leaves out terms; None for none.
        vocabulary: texts, or a JSON list of tokens, to cut the vocabulary to; None for the whole vocabulary.
        sizes: sizes of batch and sequence such as `8x128`, with commas between them, or `NAME=VALUE,...`: one for an
            output of that size, several for a file of each next to it.
        compiled: let the provider compile the output, or each file of `sizes`.
        sample_inputs: .npz files with the inputs of one run each, for verification and calibration; empty for generated
            inputs.
        input_shapes: shapes of generated inputs, as `NAME:1,128`.
        timing: time the result against the input in plain sessions, and warn if it is slower.
    """

    model_path: Annotated[PathField, Option("The ONNX file.")]
    output: Annotated[
        OptionalPath,
        Option(
            "The optimized file.",
            default="NAME-optimized.onnx or NAME-PRECISION.onnx, next to the input",
            writes="file",
        ),
    ] = UNSET
    provider: Annotated[
        str,
        Option(
            "Target execution provider: cpu, cuda, openvino, or auto with --precision auto. Optimizations for one can "
            "slow down another.",
            metavar="NAME[:DEVICE]",
            effect=provider_effect,
            parse=parse_provider,
        ),
    ] = CPU
    precision: Annotated[
        str,
        Option(
            "Precision of weights and arithmetic; inputs and outputs keep their types. bf16: float32 weights that the "
            "provider multiplies in bfloat16. uint8: int8 with unsigned weights. int4: weights in 4-bit blocks; "
            "int4_fp16: the rest in fp16. auto: the fastest on this machine within --max_error.",
            choices=PRECISION_NAMES,
        ),
    ] = "fp32"
    activations: Annotated[
        str | None,
        Option(
            "Quantization range of int8 activations: one per token (per_row), one per run (dynamic), fixed "
            "by the calibration texts (static), or fixed after normalizations, whose tokens are similar, and one per "
            "token elsewhere (mixed). With dynamic, the output for a text depends on what else is in the "
            "batch.",
            choices=ACTIVATIONS,
            default=ACTIVATIONS[0],
        ),
    ] = None
    cpu: Annotated[
        str | None,
        Option(
            "Target CPU of int8. any, avx2: exact on every CPU. vnni, arm: finer weights for CPUs whose 16-bit sums "
            "do not saturate; on others, infer uses exact products, which are slower. native: suited to this machine.",
            choices=CPUS,
            default="any",
        ),
    ] = None
    keep_float32: Annotated[
        ManyTexts,
        Option(
            "Keep what this pattern matches in float32, weights and arithmetic: names of nodes, of layers such as "
            "encoder.layer.3.attention, or operators; * and ? stand for any text. May be given several times.",
            metavar="PATTERN",
        ),
    ] = NOTHING
    embeddings: Annotated[
        str | None,
        Option(
            "The lowest precision of embeddings in int4. int8: standard operators only, for runtimes without "
            "GatherBlockQuantized, such as onnxruntime-web.",
            choices=("int4", "int8"),
            default="int4",
        ),
    ] = None
    model_type: Annotated[
        str | None, Option("Architecture, by its name in transformers.", default="from the metadata")
    ] = None
    num_heads: Annotated[int | None, Option("Attention heads.", minimum=1, default="from the metadata")] = None
    hidden_size: Annotated[int | None, Option("Hidden width.", minimum=1, default="from the metadata")] = None
    require_fusion: Annotated[bool, Option("Fail unless every attention is fused.")] = False
    max_error: Annotated[
        float | None,
        Option(
            "Upper bound on 1 - cosine of any output. In int8 and int4, layers stay in higher precision until it "
            "holds on the calibration texts.",
            metavar="X",
            minimum=0,
            maximum=1,
            effect="check",
            default="0.01 for int8, int4 and auto, otherwise the precision's tolerance",
        ),
    ] = None
    equal_tokens: Annotated[
        float | None,
        Option(
            "The least share of greedy tokens that a decoder in int8 or int4 has in common with its input; 0 leaves "
            "the comparison out.",
            metavar="SHARE",
            minimum=0,
            maximum=1,
            effect="check",
            default="1",
        ),
    ] = None
    calibration: Annotated[
        OptionalPath,
        Option(
            "Texts for int8, int4 and auto, one per line or JSON Lines with contents.",
            metavar="FILE",
            default="onnxtool's own",
        ),
    ] = UNSET
    prune: PruneInGraph = None
    vocabulary: Annotated[
        OptionalPath,
        Option(
            "Cut the vocabulary to the tokens of these texts: a file as for infer --input, a test collection's folder, "
            "or a JSON list of tokens. The cut tokenizer goes to a folder beside the output.",
            metavar="TEXTS",
            default="the whole vocabulary",
        ),
    ] = UNSET
    sizes: FixedTo = NOTHING
    compiled: Annotated[
        bool,
        Option(
            "Write what the provider compiles from the graph: it loads faster, on this version and hardware alone.",
            name="compile",
        ),
    ] = False
    sample_inputs: SampleInputs = NOTHING
    input_shapes: InputShapes = NOTHING
    verify: Annotated[bool, Option("Compare the result with the input.", effect="check")] = True
    timing: Annotated[bool, Option("Time the result against the input, for about a second.")] = True
    force: Force = False

    @property
    def target(self) -> ExecutionProvider:
        """The provider that the file is for, with its precision; for `auto`, the reference among its candidates."""
        text = resolve_provider(AUTO) if self.provider == AUTO else self.provider
        return computing_in(self.precision, ExecutionProvider.parse(text))

    def each_provider(self) -> Iterator[OptimizeOptions]:
        """Yield these options for each provider to try: for `auto`, those that run here and have a preset."""
        names = [self.provider] if self.provider != AUTO else [self.target.name]
        if names == [CPU] and self.provider == AUTO:  # with an NVIDIA GPU, nothing else is worth a try
            names += [name for name in PROVIDER_NAMES if not ROWS[name].is_reference and not provider_problem(name)]
        yield from (self if name == self.provider else replace(self, provider=name) for name in names)

    @property
    def given(self) -> GivenInputs:
        """The options for the inputs."""
        if not self.sample_inputs and not self.input_shapes:
            return NO_INPUTS
        return GivenInputs.of(self.sample_inputs, self.input_shapes)

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs, precision, target = self.given, self.precision, self.target.name
        if self.sizes:
            check_sizes(self.sizes)
        if self.compiled and (self.target.row.is_reference or not self.verify):
            raise OptionError(
                f"{self.provider} compiles nothing" if self.verify else "--compile compares what it writes",
                "leave --compile out, or pass --provider openvino" if self.verify else "leave --no_verify out",
            )
        if self.provider == AUTO and precision != AUTO:
            raise OptionError(
                f"the provider auto is chosen together with a precision, and that is {precision}",
                f"pass --precision auto, or one of {', '.join(PROVIDER_NAMES)}",
            )
        if target not in PRECISIONS:
            raise OptionError(f"there is no preset for {target}", f"use one of {', '.join(PROVIDER_NAMES)}")
        if precision not in PRECISIONS[target]:
            raise OptionError(f"{precision} is not for {target}", f"use one of {', '.join(PRECISIONS[target])}")
        if self.max_error is not None and not self.verify and precision not in (*QUANTIZED, "auto"):
            raise OptionError(
                f"--max_error of {precision} is checked by the comparison with the input, which --no_verify leaves out",
                "leave one of them out",
            )
        if self.vocabulary == STDIN:
            raise OptionError("--vocabulary is read twice, and standard input is read once", "pass a file")
        if self.calibration is not None and precision not in (*QUANTIZED, "auto"):
            raise OptionError(
                f"--calibration is for int8, int4 and auto, and the precision is {precision}", "pass --precision int8"
            )
        if self.equal_tokens is not None and precision not in (*QUANTIZED, "auto"):
            raise OptionError(
                f"--equal_tokens is for int8, int4 and auto, and the precision is {precision}", "pass --precision int4"
            )
        if inputs != NO_INPUTS and precision == FP32 and not self.verify and not self.timing:
            raise OptionError(
                "inputs are for the comparison and the timing, which --no_verify and --no_timing leave out",
                "leave out --sample_inputs and --input_shape",
            )
        if self.calibration is not None and inputs.samples:
            raise OptionError("a model is calibrated on texts or on samples", "leave --calibration out")
        if self.activations is not None and precision not in EIGHT_BITS:
            hint = "leave it out: auto tries all" if precision == "auto" else "pass --precision int8"
            raise OptionError(f"--activations is for int8, and the precision is {precision}", hint)
        if self.embeddings is not None and precision not in BLOCKS:
            raise OptionError(f"--embeddings is for int4, and the precision is {precision}", "pass --precision int4")
        if self.keep_float32 and precision in (FP32, BF16):
            why = {
                FP32: "everything is float32",
                BF16: "a provider multiplies all of a session in bfloat16, or nothing",
            }
            raise OptionError(
                f"--keep_float32 is for a lower precision: in {precision}, {why[precision]}",
                "leave it out" if precision == FP32 else "pass --precision int8, or leave it out",
            )
        if self.cpu is not None and precision not in ("int8", "auto"):
            raise OptionError(f"--cpu is for int8 and auto, and the precision is {precision}", "pass --precision int8")
