"""The report of `optimize`: passes, fusions, precision, and verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxtool.reports import Json, short_repr
from onnxtool.runtime.sizes import SizeResult
from onnxtool.summary.figures import Stats
from onnxtool.verification import Verification


@dataclass(frozen=True)
class PassResult:
    """The result of one pass.

    Attributes:
        num_changes: nodes and initializers added, removed or rewritten.
        note: a remark by the pass, or an empty string.
        left_out: whether it was skipped, because it would change the outputs; `note` explains how.
    """

    name: str
    num_changes: int
    duration_ms: float
    note: str = ""
    left_out: bool = False


@dataclass(frozen=True)
class FusionCount:
    """The number of fused subgraphs of one kind; `expected` is None if unknown."""

    kind: str
    expected: int | None
    found: int


@dataclass(frozen=True)
class FallbackLayer:
    """A layer that stays in higher precision.

    Attributes:
        name: the name of its weight.
        error: the largest 1 - cosine of an output, or of a row of it, with this layer alone quantized, on the worst
            calibration inputs; None for a layer that was not tried, e.g. in a branch or loop body.
        precision: precision of its weight in the file: `float32`, or `int8` for an 8-bit weight in an int4 file.
        by_name: whether `keep_float32` names it; otherwise the measured error decided.
        activations: precision of what a layer in blocks is multiplied with, `int8` or `float32`; empty for others.
    """

    name: str
    error: float | None
    precision: str = "float32"
    by_name: bool = False
    activations: str = ""


@short_repr
@dataclass(frozen=True)
class GreedyTokens:
    """The greedy tokens of a quantized decoder, compared with those of the input file in float32.

    After each prompt, both files read the input's own greedy tokens, step by step: all tokens of a prompt are equal
    exactly if the two generate the same text.

    Attributes:
        num_prompts: number of prompts, held out from the rounding of weights.
        num_steps: tokens after each.
        num_equal: tokens that are equal.
        num_undecided: tokens that are not counted: the input's two best logits are closer than its own rounding, as
            measured between steps and a single pass.
        first_difference: prompt and step of the first different token, from 1; None if there is none.
    """

    num_prompts: int
    num_steps: int
    num_equal: int
    num_undecided: int
    first_difference: tuple[int, int] | None = None

    @property
    def num_counted(self) -> int:
        """The number of tokens that can be equal."""
        return self.num_prompts * self.num_steps - self.num_undecided

    @property
    def share(self) -> float:
        """The share of equal tokens."""
        return self.num_equal / self.num_counted

    def __str__(self) -> str:
        """State the figures in a sentence."""
        counts = f"{self.num_equal} of {self.num_counted} equal to float32's"
        undecided = f", {self.num_undecided} more undecided in float32" if self.num_undecided else ""
        return f"{counts} ({self.num_prompts} prompts of {self.num_steps} steps{undecided})"


@short_repr
@dataclass(frozen=True)
class KeptNode:
    """A node of the result that `keep_float32` names, and that computes in float32 on float32 weights.

    Attributes:
        name: its name in the file; that of its first output if it has none.
        patterns: those that match it, or a node of the input whose place it took.
    """

    name: str
    operator: str
    patterns: tuple[str, ...]


@short_repr
@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The error of a quantized model, measured on calibration texts.

    Attributes:
        precision: `int8` or `int4`.
        activations: how the activations of int8 get their ranges, `per_row`, `dynamic` or `static`; empty for int4,
            which does not quantize them.
        cpu: target CPU of int8: `any` if products are exact on every CPU; empty for int4.
        num_layers: number of linear layers in the file; the layers in `kept` have higher precision.
        num_embeddings: number of lookups in a quantized table.
        embedding_precision: precision of these tables, separated by commas if they differ; empty if there are none.
        num_texts: the number of calibration texts; 0 for random ids.
        error: the largest 1 - cosine of an output, or of a row of one, over all texts, ignoring padding.
        mean_error: the average instead of the largest.
        tokens: the greedy tokens of a decoder; None for other models, and if they are not compared.
        finer: layers of the lowest precision with activations in float32, where others round them to int8.
        arithmetic: `error` under each int8 arithmetic that CPUs use, on any machine: `exact`; `saturating`, with sums
            of two products clipped to 16 bits, null for a file not meant for such CPUs; and `per_row`, with activations
            that the kernel rounds row by row. `error` is the largest of them. Empty for int4.
        note: a remark on the calibration; may be empty.
    """

    precision: str
    activations: str = ""
    cpu: str = ""
    num_layers: int
    kept: tuple[FallbackLayer, ...]
    num_embeddings: int
    embedding_precision: str
    num_texts: int = 0
    error: float
    mean_error: float
    note: str = ""
    arithmetic: Mapping[str, float | None] = field(default_factory=dict)
    tokens: GreedyTokens | None = None
    finer: tuple[FallbackLayer, ...] = ()

    @property
    def has_small_pairs(self) -> bool:
        """Whether the products in the file never saturate, on any CPU."""
        return self.arithmetic.get("saturating") is not None

    @property
    def recorded(self) -> dict[str, Json]:
        """Its error and tokens, as the file's record of the step has them."""
        figures: dict[str, Json] = {"error": self.error, "arithmetic": dict(self.arithmetic)}
        if self.tokens is not None:
            names = ("num_prompts", "num_steps", "num_equal", "num_undecided")
            figures["tokens"] = {name: getattr(self.tokens, name) for name in names}
        return figures


@dataclass(frozen=True)
class Ranking:
    """Agreement of a quantized model's nearest neighbours, or scores, on texts that it was not calibrated on.

    Attributes:
        num_texts: number of texts, which are paragraphs of Python's documentation.
        output: the vectors or scores.
        error: the largest 1 - cosine of any text; for scores, that of all together, relative to their spread.
        overlap: average fraction of the ten nearest texts, or fraction of the ten best, that both models share, from 0
            to 1; None if all texts have the same vector or score, so that none is nearer than another.
        kendall_tau: average Kendall's tau between the rankings of all other texts; 1 for the same order; None as for
            `overlap`.
        is_scores: whether the output is one score for each text, such as a reranker's.
    """

    num_texts: int
    output: str
    error: float
    overlap: float | None
    kendall_tau: float | None
    is_scores: bool = False


@short_repr
@dataclass(frozen=True)
class Candidate:
    """A precision that `--precision auto` tried on this machine.

    Attributes:
        provider: where it runs.
        precision: as for `--precision`; `activations` as for `--activations`.
        latency_ms: median latency by shape name; empty if not timed.
        size_bytes: file size; None if there is no file.
        error: the largest 1 - cosine of an output, or of a row of one, on the calibration texts; None if unknown.
        chosen: whether it is the output.
        reason: why it was ruled out; otherwise empty.
        quality: mean of each retrieval measure by name; empty if none was measured.
        not_judged: why the judge did not evaluate it, although nothing rules it out; otherwise empty.
    """

    provider: str
    precision: str
    activations: str
    latency_ms: dict[str, float]
    size_bytes: int | None
    error: float | None
    chosen: bool
    reason: str
    quality: Mapping[str, float] = field(default_factory=dict)
    not_judged: str = ""


@dataclass(frozen=True)
class Speed:
    """The speed of the result on this machine, compared with its input in plain single-threaded sessions.

    Attributes:
        shape: shape of the first input.
        turns: number of counted runs of each file.
        before_ms: median of the input; `after_ms`, of the result.
        ratio: median ratio of input to result, turn by turn: below 1, the result is slower.
        interval: 95 % interval of the ratio; the extremes for fewer than six turns.
        slower: whether the result is slower beyond noise.
    """

    shape: str
    turns: int
    before_ms: float
    after_ms: float
    ratio: float
    interval: tuple[float, float]
    slower: bool


@short_repr
@dataclass(frozen=True)
class VocabularyCut:
    """The result of `vocabulary`: what is left of a model and its tokenizer, compared with the input.

    Attributes:
        rows: rows of the vocabulary, formerly `rows_before`.
        weight_bytes: bytes of the weights that were cut, which fall by exactly those of the rows.
        size_bytes: bytes of the file before passes and conversions.
        num_texts: texts read with both tokenizers; the ids of those whose tokens are kept map one to one.
        num_run: texts run with both files, of which the outputs of `num_equal` are equal bit by bit.
        largest_difference: of any output element of these.
        num_held_out: texts read with the tokens of the other texts alone; `num_changed` of them are split otherwise.
        cosine_mean: of the vectors of changed texts, before and after, for at most 64; None without vectors or changes.
        weight_lost: fraction of a sparse encoder's weight that was on dropped terms; None for other models.
        terms: its nonzero terms per text, before and after; None for other models.
        notes: ids in the checkpoint's settings that no token has.
    """

    rows_before: int
    rows: int
    weight_bytes_before: int
    weight_bytes: int
    size_bytes_before: int
    size_bytes: int
    num_texts: int = 0
    num_run: int = 0
    num_equal: int = 0
    largest_difference: float | None = None
    num_held_out: int = 0
    num_changed: int = 0
    cosine_mean: float | None = None
    cosine_min: float | None = None
    weight_lost: float | None = None
    terms: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class OptimizeReport:
    """The result of `optimize`.

    Attributes:
        precision: precision of the output; for `--precision auto`, the chosen one.
        quantization: None if nothing was quantized.
        ranking: None if nothing was quantized or verified, and for models without text vectors.
        candidates: the candidates of `--precision auto`; empty for a given precision.
        kept_float32: the nodes that `keep_float32` names.
        speed: None if not measured; `not_timed` says why, and is empty if not requested.
        notes: notes for the user on the provider.
        sizes: the files of fixed sizes.
        vocabulary: None if the vocabulary is whole.
    """

    output: str
    provider: str
    precision: str
    before: Stats
    after: Stats
    passes: tuple[PassResult, ...]
    fusions: tuple[FusionCount, ...]
    quantization: Quantization | None
    ranking: Ranking | None
    candidates: tuple[Candidate, ...]
    verification: Verification | None
    duration_ms: dict[str, float]
    speed: Speed | None = None
    not_timed: str = ""
    notes: tuple[str, ...] = ()
    kept_float32: tuple[KeptNode, ...] = ()
    sizes: tuple[SizeResult, ...] = ()
    vocabulary: VocabularyCut | None = None

    @property
    def num_kept(self) -> Mapping[str, int]:
        """The number of nodes that each pattern of `keep_float32` keeps."""
        return Counter(pattern for node in self.kept_float32 for pattern in node.patterns)

    @property
    def warning(self) -> str:
        """A warning if the result is slower than its input; otherwise empty."""
        if self.speed is None or not self.speed.slower:
            return ""
        low, high = self.speed.interval
        hint = "float16 is slower on most CPUs" if self.precision == "fp16" and self.provider == "cpu" else ""
        return (
            f"the result is slower than its input here: {self.speed.ratio:.2f} times as fast ({low:.2f} to {high:.2f}) "
            f"on {self.speed.shape}, in plain sessions of onnxruntime{hint and f'; {hint}'}; compare your own shapes "
            "with onnxtool infer --benchmark --compare before you use it"
        )
