"""What a consumer of exported models is: what it needs of a graph and of the files beside it.

Each consumer is a subclass of Target in a module of its own in `targets/`, where its name is found.

Axes of shapes: batch_size, sequence; None for a width that the model decides.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import TOKENIZER_NAME
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.pooling_module import PoolingModule
from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.checkpoint.tokenizer_library import read_file
from onnxtool.errors import TargetError
from onnxtool.export import targets
from onnxtool.export.heads.head import Head
from onnxtool.export.modalities.modality import BATCH, SEQUENCE
from onnxtool.export.source import Source
from onnxtool.model_file import follow_link
from onnxtool.reading import read_json
from onnxtool.reports import Json, TensorInfo
from onnxtool.runtime.tokens import read_by_transformers

TEXT_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", TOKENIZER_CONFIG)

LOGITS = TensorInfo("logits", "float32", (BATCH, SEQUENCE, None))
SCORE_LOGITS = TensorInfo("logits", "float32", (BATCH, None))
HIDDEN_STATES = TensorInfo("last_hidden_state", "float32", (BATCH, SEQUENCE, None))
VECTORS = TensorInfo("sentence_embedding", "float32", (BATCH, None))

# What a consumer does with a model, by the tasks for which models are exported. A masked language model whose
# checkpoint says nothing of pooling is read as SPLADE by consumers of sparse encoders.
SPARSE, INFERENCE_FREE, DENSE, TOKENS, SCORES, VERDICTS, TAGS, OTHER = (
    "sparse encoders",
    "inference-free sparse encoders",
    "text encoders",
    "late-interaction encoders",
    "text classifiers",
    "rerankers that are decoders",
    "token classifiers",
    "other",
)
KINDS = {
    "sparse-encoding": SPARSE,
    "fill-mask": SPARSE,
    "sentence-similarity": DENSE,
    "feature-extraction": DENSE,
    LATE_INTERACTION: TOKENS,
    "text-classification": SCORES,
    RANKING: VERDICTS,
    "token-classification": TAGS,
}

# What most consumers do not take, and who does.
_ELSEWHERE = {VERDICTS: "pass --target sentence-transformers, or --target plain for `onnxtool infer`"}

PLAIN_SPLADE = (SpladePooling(),)
USUAL_POOLING = (Pooling(("mean",)), Pooling(("cls",)), Pooling(("lasttoken",)), Normalize())

_UNLIMITED = 2**31  # transformers writes "no limit" as 1e30, which fastembed refuses


@dataclass(frozen=True)
class Use:
    """How a consumer uses models of one kind.

    Attributes:
        kind: of SPARSE, INFERENCE_FREE (whose graph is for documents), DENSE, TOKENS, SCORES, VERDICTS, TAGS.
        outputs: what it reads of the graph: these, in this order, and no others.
        head: the head that the graph has for it; `none` for the model's own outputs.
        after: the modules that it can compute on the outputs itself; None for all that sentence-transformers knows.
        declares: inputs that the graph has for it, in this order, even those that the model ignores.
        unfed: inputs that it does not feed, and without which the model takes zeros.
        prefix: what stands before the names of the inputs in the graph.
    """

    kind: str
    outputs: tuple[TensorInfo, ...]
    head: str = "none"
    after: tuple[PoolingModule, ...] | None = ()
    declares: tuple[str, ...] = ()
    unfed: tuple[str, ...] = ()
    prefix: str = ""

    def suits(self, modules: Sequence[PoolingModule], *, pads_left: bool) -> bool:
        """Whether a checkpoint with these modules is computed rightly: in the graph, or by the consumer."""
        if self.head != "none" or self.after is None:
            return True
        if pads_left and Pooling(("cls",)) in modules:  # consumers that pool take the first place, padding or not
            return False
        return all(module in self.after for module in modules)

    def inputs(self, available: Sequence[str]) -> tuple[str, ...]:
        """Return the inputs that the graph declares, in order, for a model that uses `available`."""
        return self.declares + tuple(name for name in available if name not in (*self.declares, *self.unfed))


# Uses that several consumers have.
POOLED_IN_GRAPH = Use(DENSE, (VECTORS,), head="embedding")
POOLED_BY_CONSUMER = Use(DENSE, (HIDDEN_STATES,), after=USUAL_POOLING)
CLASSIFIERS = Use(SCORES, (SCORE_LOGITS,))


@dataclass(frozen=True)
class TargetModel:
    """What a consumer has to know of one model.

    Attributes:
        name: the model's.
        use: how the consumer uses it.
        head: what the graph computes; None for the model's own outputs.
        modules: what the checkpoint was trained with; the consumer computes those that the head does not.
        vocabulary_size: how many terms the model weighs; 0 where it weighs none.
        max_tokens: what sentence-transformers cuts texts to; None where no file says it.
    """

    name: str
    use: Use
    head: Head | None
    modules: tuple[PoolingModule, ...]
    vocabulary_size: int = 0
    max_tokens: int | None = None

    @property
    def pooling_mode(self) -> str:
        """The mode that the consumer has to pool by; empty where it does not pool."""
        modes = next((module.modes for module in self._computed_outside if isinstance(module, Pooling)), ("",))
        return modes[0]

    @property
    def is_normalized_outside(self) -> bool:
        """Whether the consumer has to scale vectors to length 1."""
        return any(isinstance(module, Normalize) for module in self._computed_outside)

    @property
    def _computed_outside(self) -> tuple[PoolingModule, ...]:
        return () if self.head is not None else self.modules


@dataclass(frozen=True)
class Delivery:
    """What a consumer gets files for.

    Attributes:
        config: the PretrainedConfig.
        tokenizer: the checkpoint's.
        folder: where the files are.
        max_length: the most tokens that a text may have; None where nothing bounds it.
    """

    model: TargetModel
    config: Any
    tokenizer: Any
    folder: Path
    max_length: int | None


class Target:
    """One consumer. Subclasses set the attributes, and override the methods where it differs from others.

    Attributes:
        name: as --target names it.
        title: how its users call it.
        uses: what it takes; of several of one kind the first that suits a checkpoint; empty where it takes any graph.
        graph: the graph file in the folder, `{name}` standing for the model's name; empty for a file beside the folder.
        files: what else the folder must have.
        batch: the batch size that it calls the graph with; None for any.
        max_ir, max_opset: the highest that its onnxruntime reads; None for no bound.
        refused: kinds that it does not take, each with what to do instead.
        tokenizer_of: the library that makes its tokens: tokenizers, transformers or sentence-transformers.
        pads: what it pads, for which it needs a padding token; empty for nothing.
    """

    name: str
    title: str
    uses: tuple[Use, ...] = ()
    graph: str = ""
    files: tuple[str, ...] = ()
    batch: int | None = None
    max_ir: int | None = None
    max_opset: int | None = None
    refused: tuple[tuple[str, str], ...] = ()
    tokenizer_of: str = "tokenizers"
    pads: str = ""

    @property
    def takes_any_graph(self) -> bool:
        """Whether graphs need not be adapted to it."""
        return not self.uses

    @property
    def reads_folder(self) -> bool:
        """Whether it reads a folder with the graph in it."""
        return bool(self.graph)

    def use_for(
        self, task: str, modules: Sequence[PoolingModule], *, pads_left: bool, looks_up_queries: bool = False
    ) -> Use:
        """Return how it uses a model of `task` whose checkpoint was trained with `modules`.

        Raises:
            TargetError: it takes no such model, or computes something else of it than the checkpoint does.
        """
        kind = kind_of(task, looks_up_queries=looks_up_queries)
        uses = [use for use in self.uses if use.kind == kind]
        if not uses:
            takes = ", ".join(dict.fromkeys(use.kind for use in self.uses))
            found = "queries are encoded without this model" if looks_up_queries else f"this model's task is {task}"
            raise TargetError(
                f"{self.title} takes {takes}; {found}",
                (dict(self.refused) | _ELSEWHERE).get(
                    kind, "pass --target plain, or a --task that fits the checkpoint"
                ),
            )
        suited = next((use for use in uses if use.suits(modules, pads_left=pads_left)), None)
        if suited is None:
            raise TargetError(
                f"{self.title} computes {_in_words(uses[0].after or ())} itself; this checkpoint needs "
                f"{_in_words(modules)}, and would give other answers there",
                f"pass --target plain --head {'embedding' if kind == DENSE else 'splade'}: all of it in the graph",
            )
        return suited

    def computes_all(self, kind: str) -> bool:
        """Whether it runs all modules of checkpoints of this kind itself, so that they need not be known here."""
        uses = [use for use in self.uses if use.kind == kind]
        return bool(uses) and uses[0].after is None

    def check_checkpoint(self, use: Use, source: Source, tokenizer: Any) -> None:
        """Refuse a checkpoint that it would load in another way, or not at all.

        Raises:
            OnnxtoolError: it would.
        """

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer that it cannot run.

        Raises:
            TargetError: it is of a kind, or has a setting, that the consumer does not have.
        """
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TargetError(
                f"{self.title} reads tokenizer.json, which {type(tokenizer).__name__} cannot be written as",
                "a newer transformers or tokenizers may convert it; else pass --target plain",
            )
        if self.pads and getattr(tokenizer, "pad_token", None) is None:
            raise TargetError(
                f"{self.title} pads {self.pads}, and this tokenizer has no padding token",
                "set one with tokenizer.pad_token = tokenizer.eos_token, save the tokenizer, and export again",
            )

    def read_texts(self, folder: Path, model: TargetModel, texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        """Return the ids that it makes of texts by its files in `folder`; a text of more tokens than `limit` is cut."""
        if self.tokenizer_of == "tokenizers":
            return read_file(folder / TOKENIZER_NAME, texts, limit)
        return read_by_transformers(folder, lower_cases=self.tokenizer_of == "sentence-transformers")(texts, limit)

    def reads_as_trained(self, text: Text, tokenizer: Any) -> bool:
        """Whether it can be held to the tokenizer's ids of a text, or reads such texts otherwise in any model."""
        return True

    def adapt_outputs(self, graph: ir.Model, head: Head | None) -> None:
        """Turn the outputs of the head into those of `uses`, in place, where they differ."""

    def second_graph(self, graph: ir.Model, head: Head | None) -> ir.Model | None:
        """Return another graph that is delivered beside the first, on the same weights in memory; None for none."""
        return None

    def second_path(self, graph: Path, name: str) -> Path:
        """Return where the second graph of the model called `name` goes, beside the first."""
        raise NotImplementedError

    def restore(self, outputs: Mapping[str, NDArray[Any]], model: TargetModel, batch: int) -> dict[str, NDArray[Any]]:
        """Turn what the graph gave for `batch` texts into the outputs of the head, to be compared with PyTorch's."""
        return dict(outputs)

    def write_files(self, to: Delivery) -> None:
        """Write what it reads and the checkpoint's own files lack into a folder, in which those lie already.

        Raises:
            TargetError: a setting that it needs is not there.
        """

    def pack(self, model: TargetModel, folder: Path, graph: Path) -> None:
        """Write what it reads in place of the folder, such as an archive, when all files of it are there."""

    def instruction(self, model: TargetModel) -> str:
        """Say what its users must tell it about this model; empty where it reads all of it from the folder."""
        return ""


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
        target: the consumer.
        output: what the user asked for: a folder, or NAME.onnx where the target reads none; None for models/NAME.
        name: the model's own.

    Raises:
        TargetError: a file is asked for where the consumer reads a folder.
    """
    if not target.reads_folder:
        graph = follow_link(output or Path("models") / f"{name}.onnx")
        return Layout(graph.parent, graph, graph.parent / graph.stem, graph.stem)
    root = output or Path("models") / name
    graph = root / target.graph.format(name=name)
    if root.suffix == ".onnx":
        raise TargetError(
            f"{target.title} reads a folder with {graph.relative_to(root)} in it, and the output {root} is a file",
            f"pass --output {root.with_suffix('')}",
        )
    return Layout(root, graph, root, "")


def find_target(name: str) -> Target:
    """Return the target called `name`, which must be one of TARGET_NAMES."""
    target: Target = importlib.import_module(f"{targets.__name__}.{targets.MODULES[name]}").TARGET
    return target


def kind_of(task: str, *, looks_up_queries: bool) -> str:
    """Return the kind of a model by its task, and by whether queries are encoded without it."""
    return INFERENCE_FREE if looks_up_queries else KINDS.get(task, OTHER)


def bound_texts(folder: Path, max_length: int | None, *, pad_token: str = "") -> None:
    """State in tokenizer_config.json the longest text, and the padding token: all that some consumers read of them."""
    path = folder / TOKENIZER_CONFIG
    config = read_object(path)
    stated = config.pop("model_max_length", None)
    is_bound = isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated < _UNLIMITED
    limits = [limit for limit in (stated if is_bound else None, max_length) if isinstance(limit, int)]
    changed = {**config, **({"model_max_length": min(limits)} if limits else {})}
    if pad_token and not config.get("pad_token"):
        changed["pad_token"] = pad_token
    if changed != {**config, **({} if stated is None else {"model_max_length": stated})}:
        write_json(path, changed)


def require_bound(title: str, folder: Path) -> None:
    """Refuse files that do not state how long a text may be, which a consumer needs to know.

    Raises:
        TargetError: tokenizer_config.json does not.
    """
    if "model_max_length" not in read_object(folder / TOKENIZER_CONFIG):
        raise TargetError(
            f"{title} needs the length that texts are cut to, and neither tokenizer nor model says it",
            "write model_max_length into tokenizer_config.json of the checkpoint",
        )


def read_object(path: Path) -> dict[str, Json]:
    """Return the JSON object in a file; empty where it holds something else.

    Raises:
        TargetError: it is not JSON, or cannot be read.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise TargetError(f"cannot read {path.name} of the checkpoint: {error.strerror}", "fetch it again") from None
    except ValueError as error:
        raise TargetError(f"{path.name} of the checkpoint is not JSON: {error}", "fetch the checkpoint again") from None
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any] | list[Any]) -> None:
    """Write a JSON object or list."""
    path.unlink(missing_ok=True)  # never through a link into the checkpoint
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _in_words(modules: Sequence[PoolingModule]) -> str:
    return ", ".join(module.description for module in modules) or "nothing"
