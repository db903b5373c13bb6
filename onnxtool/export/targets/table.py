"""The consumers of exported models and what each needs of a file: a table, a row per consumer.

The facts are from the consumers' sources: Anserini (SpladePlusPlusEncoder.java), sentence-transformers 5.7 with
optimum-onnx 0.1, fastembed 0.9, Vespa 8 (SpladeEmbedder.java, HuggingFaceEmbedder.java), text-embeddings-inference
(backends/ort/src/lib.rs), Transformers.js 4.3.

Axes of shapes: batch_size, sequence, and `terms`, as many as a text has; None for a width that the model decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxtool.errors import TargetError
from onnxtool.export.heads.steps import Normalize, Pool, Splade, Step
from onnxtool.export.signature import BATCH, SEQUENCE
from onnxtool.reports import TensorInfo

PLAIN = "plain"
TERMS = "terms"
TEXT_INPUTS = ("input_ids", "token_type_ids", "attention_mask")

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_LOGITS = TensorInfo("logits", "float32", (BATCH, SEQUENCE, None))
_SCORES = TensorInfo("logits", "float32", (BATCH, None))
_STATES = TensorInfo("last_hidden_state", "float32", (BATCH, SEQUENCE, None))
_VECTORS = TensorInfo("sentence_embedding", "float32", (BATCH, None))

# What a consumer does with a model, by the tasks for which models are exported. A masked language model whose
# checkpoint says nothing of pooling is read as SPLADE by whoever takes sparse encoders.
SPARSE, DENSE, SCORES, TAGS, OTHER = (
    "sparse encoders",
    "text encoders",
    "text classifiers",
    "token classifiers",
    "other",
)
KINDS = {
    "sparse-encoding": SPARSE,
    "fill-mask": SPARSE,
    "sentence-similarity": DENSE,
    "feature-extraction": DENSE,
    "text-classification": SCORES,
    "token-classification": TAGS,
}


@dataclass(frozen=True)
class Use:
    """How a consumer uses models of one kind.

    Attributes:
        kind: of SPARSE, DENSE, SCORES, TAGS.
        outputs: what it reads of the graph: these, in this order, and no others.
        head: what the graph computes for it, as in heads/
        after: the steps that it can compute on the outputs itself; None for all that sentence-transformers knows.
    """

    kind: str
    outputs: tuple[TensorInfo, ...]
    head: str = "none"
    after: tuple[Step, ...] | None = ()

    def suits(self, steps: Sequence[Step], *, pads_left: bool) -> bool:
        """Whether a checkpoint with these steps is computed rightly: in the graph, or by the consumer."""
        if self.head != "none" or self.after is None:
            return True
        if pads_left and Pool(("cls",)) in steps:  # those that pool outside take the first place, padding or not
            return False
        return all(step in self.after for step in steps)


@dataclass(frozen=True)
class Target:
    """One consumer.

    Attributes:
        title: how its users call it.
        uses: what it takes; of several of one kind the first that suits a checkpoint.
        graph: the graph file in the folder, `{name}` standing for the model's name; empty for a file beside the folder.
        files: what else the folder must have.
        declares: inputs that the graph has for it, even those that the model ignores.
        batch: the batch size that it calls the graph with; None for any.
        max_ir, max_opset: the highest that its onnxruntime reads; None for no bound.
        refused: what to do with kinds that it does not take, by kind.
    """

    name: str
    title: str
    uses: tuple[Use, ...]
    graph: str
    files: tuple[str, ...] = ()
    declares: dict[str, tuple[str, ...]] | None = None
    batch: int | None = None
    max_ir: int | None = None
    max_opset: int | None = None
    refused: dict[str, str] | None = None

    def use_for(self, task: str, steps: Sequence[Step], *, pads_left: bool) -> Use:
        """Return how it uses a model of `task` whose checkpoint was trained with `steps`.

        Raises:
            TargetError: it takes no such model, or computes something else of it than the checkpoint does.
        """
        kind = KINDS.get(task, OTHER)
        uses = [use for use in self.uses if use.kind == kind]
        if not uses:
            takes = ", ".join(dict.fromkeys(use.kind for use in self.uses))
            raise TargetError(
                f"{self.title} takes {takes}; this model's task is {task}",
                (self.refused or {}).get(kind, "pass --target plain, or a --task that fits the checkpoint"),
            )
        suited = next((use for use in uses if use.suits(steps, pads_left=pads_left)), None)
        if suited is None:
            raise TargetError(
                f"{self.title} computes {_in_words(uses[0].after or ())} itself; this checkpoint needs "
                f"{_in_words(steps)}, and would give other answers there",
                f"pass --target plain --head {'splade' if kind == SPARSE else 'embedding'}: all of it in the graph",
            )
        return suited

    def computes_all(self, kind: str) -> bool:
        """Whether it runs whatever modules a checkpoint of this kind has, so that they need not be known here."""
        uses = [use for use in self.uses if use.kind == kind]
        return bool(uses) and uses[0].after is None

    def inputs(self, kind: str, available: Sequence[str]) -> tuple[str, ...]:
        """Return the inputs that the graph declares, in order, for a model that uses `available`."""
        declared = (self.declares or {}).get(kind, ())
        return tuple(declared) + tuple(name for name in available if name not in declared)


_PLAIN_SPLADE = (Splade(),)
_USUAL_POOLING = (Pool(("mean",)), Pool(("cls",)), Pool(("lasttoken",)), Normalize())

TARGETS: tuple[Target, ...] = (
    Target(PLAIN, "onnxtool", (), graph=""),
    Target(
        "anserini",
        "Anserini",
        (
            Use(
                SPARSE,
                (TensorInfo("output_idx", "int64", (TERMS,)), TensorInfo("output_weights", "float32", (TERMS,))),
                head="splade",
            ),
        ),
        graph="{name}-optimized.onnx",
        files=("{name}-vocab.txt",),
        declares={SPARSE: TEXT_INPUTS},
        batch=1,
        max_ir=9,  # onnxruntime 1.17.0
        max_opset=20,
    ),
    Target(
        "sentence-transformers",
        "sentence-transformers",
        (Use(DENSE, (_STATES,), after=None), Use(SPARSE, (_LOGITS,), after=None), Use(SCORES, (_SCORES,), after=None)),
        graph="onnx/model.onnx",
        files=("config.json", *_TOKENIZER),
        max_ir=10,
        max_opset=21,
    ),
    Target(
        "fastembed",
        "fastembed",
        (
            Use(SPARSE, (_LOGITS,), after=_PLAIN_SPLADE),
            Use(DENSE, (_STATES,), after=_USUAL_POOLING),
            Use(DENSE, (_VECTORS,), head="embedding"),
            Use(SCORES, (_SCORES,)),
        ),
        graph="model.onnx",
        files=("config.json", *_TOKENIZER, "special_tokens_map.json"),
        max_ir=9,  # it admits onnxruntime 1.17
        max_opset=20,
    ),
    Target(
        "vespa",
        "Vespa",
        (
            Use(SPARSE, (_LOGITS,), after=_PLAIN_SPLADE),
            Use(DENSE, (_STATES,), after=(Pool(("mean",)), Pool(("cls",)), Normalize())),
            Use(DENSE, (_VECTORS,), head="embedding"),
        ),
        graph="model.onnx",
        files=("tokenizer.json",),
        # SpladeEmbedder feeds all three, and fails on one that the graph does not have; HuggingFaceEmbedder asks first.
        declares={SPARSE: TEXT_INPUTS},
        max_ir=10,
        max_opset=21,
        refused={SCORES: "a ranking model of Vespa names its inputs itself (onnx-model): pass --target plain"},
    ),
    Target(
        "tei",
        "text-embeddings-inference",
        (
            Use(DENSE, (_STATES,), after=_USUAL_POOLING),
            Use(DENSE, (_VECTORS,), head="embedding"),
            Use(SCORES, (_SCORES,)),
        ),
        graph="model.onnx",
        files=("config.json", *_TOKENIZER),
        max_ir=10,
        max_opset=21,
        refused={SPARSE: "its onnxruntime backend has no SPLADE pooling; serve the safetensors with --pooling splade"},
    ),
    Target(
        "transformers.js",
        "Transformers.js",
        (
            Use(DENSE, (_STATES,), after=_USUAL_POOLING),
            Use(DENSE, (_VECTORS,), head="embedding"),
            Use(SPARSE, (_LOGITS,), after=None),
            Use(SCORES, (_SCORES,)),
            Use(TAGS, (_LOGITS,)),
        ),
        graph="onnx/model.onnx",
        files=("config.json", *_TOKENIZER),
        max_ir=10,
        max_opset=21,
        refused={OTHER: "decoders need their cache as inputs there; pass --target plain for a graph without one"},
    ),
)
TARGET_NAMES = tuple(target.name for target in TARGETS)


def find_target(name: str) -> Target:
    """Return the row of the target called `name`, which must be one of TARGET_NAMES."""
    return next(target for target in TARGETS if target.name == name)


@dataclass(frozen=True)
class Layout:
    """Where the files of an export go.

    Attributes:
        root: the folder below which all of them are.
        graph: the graph file.
        files: the folder of tokenizer and configuration.
        stamp: what the graph's metadata says of that folder, relative to the graph's; empty where it needs not be said.
    """

    root: Path
    graph: Path
    files: Path
    stamp: str


def layout(target: Target, output: Path | None, name: str) -> Layout:
    """Return where an export of the model called `name` goes.

    Args:
        target: whom it is for.
        output: what the user asked for: a folder, or NAME.onnx for `plain`; None for models/NAME.
        name: the model's own.

    Raises:
        TargetError: a file is asked for where the consumer reads a folder.
    """
    if not target.graph:
        graph = output or Path("models") / f"{name}.onnx"
        return Layout(graph.parent, graph, graph.parent / graph.stem, graph.stem)
    root = output or Path("models") / name
    graph = root / target.graph.format(name=name)
    if root.suffix == ".onnx":
        raise TargetError(
            f"{target.title} reads a folder with {graph.relative_to(root)} in it, and the output {root} is a file",
            f"pass --output {root.with_suffix('')}",
        )
    return Layout(root, graph, root, "")


def _in_words(steps: Sequence[Step]) -> str:
    return ", ".join(map(describe_step, steps)) or "nothing"


def describe_step(step: Step) -> str:
    """Say what a step does in a few words."""
    match step:
        case Pool(modes):
            return f"pooling by {' and '.join(modes)}"
        case Splade(strategy, activation):
            return f"the {strategy} of {'log(1 + log(1 + relu))' if activation == 'log1p_relu' else 'log(1 + relu)'}"
        case _:
            return type(step).__name__
