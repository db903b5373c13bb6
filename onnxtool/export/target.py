"""The interface of a consumer of exported models: what it requires of a graph and its accompanying files.

Each consumer is a subclass of Target in its own module in `targets/`, where its name is looked up.

Shape axes: batch_size, sequence; None for a width that the model decides.
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

# What consumers do with a model, by its task. Consumers of sparse encoders treat a masked language model whose
# checkpoint does not mention pooling as SPLADE.
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

# Kinds that most consumers do not accept, with alternatives.
_ELSEWHERE = {VERDICTS: "pass --target sentence-transformers, or --target plain for `onnxtool infer`"}

PLAIN_SPLADE = (SpladePooling(),)
USUAL_POOLING = (Pooling(("mean",)), Pooling(("cls",)), Pooling(("lasttoken",)), Normalize())

_UNLIMITED = 2**31  # transformers writes "no limit" as 1e30, which fastembed refuses


@dataclass(frozen=True)
class Use:
    """The way a consumer uses models of one kind.

    Attributes:
        kind: one of SPARSE, INFERENCE_FREE (whose graph is for documents), DENSE, TOKENS, SCORES, VERDICTS, TAGS.
        outputs: the graph outputs that it reads: exactly these, in this order.
        head: the head in the graph; `none` for the model's own outputs.
        after: the modules it can compute on the outputs itself; None for all known to sentence-transformers.
        declares: the graph's inputs, in this order, including inputs that the model ignores.
        unfed: inputs it does not feed, which the model treats as zeros.
        prefix: the prefix of the graph's input names.
    """

    kind: str
    outputs: tuple[TensorInfo, ...]
    head: str = "none"
    after: tuple[PoolingModule, ...] | None = ()
    declares: tuple[str, ...] = ()
    unfed: tuple[str, ...] = ()
    prefix: str = ""

    def suits(self, modules: Sequence[PoolingModule], *, pads_left: bool) -> bool:
        """Return whether a checkpoint with these modules is computed correctly, in the graph or by the consumer."""
        if self.head != "none" or self.after is None:
            return True
        if pads_left and Pooling(("cls",)) in modules:  # pooling consumers take the first position, padding or not
            return False
        return all(module in self.after for module in modules)

    def inputs(self, available: Sequence[str]) -> tuple[str, ...]:
        """Return the inputs that the graph declares, in order, for a model that uses `available`."""
        return self.declares + tuple(name for name in available if name not in (*self.declares, *self.unfed))


# Uses shared by several consumers.
POOLED_IN_GRAPH = Use(DENSE, (VECTORS,), head="embedding")
POOLED_BY_CONSUMER = Use(DENSE, (HIDDEN_STATES,), after=USUAL_POOLING)
CLASSIFIERS = Use(SCORES, (SCORE_LOGITS,))


@dataclass(frozen=True)
class TargetModel:
    """The facts about a model that a consumer needs.

    Attributes:
        name: the model's name.
        use: how the consumer uses it.
        head: what the graph computes; None for the model's own outputs.
        modules: the modules it was trained with; the consumer computes those that the head does not.
        vocabulary_size: the number of terms the model weighs; 0 if it weighs none.
        max_tokens: sentence-transformers' maximum text length; None if no file states it.
    """

    name: str
    use: Use
    head: Head | None
    modules: tuple[PoolingModule, ...]
    vocabulary_size: int = 0
    max_tokens: int | None = None

    @property
    def pooling_mode(self) -> str:
        """The pooling mode that the consumer must use; empty if it does not pool."""
        modes = next((module.modes for module in self._computed_outside if isinstance(module, Pooling)), ("",))
        return modes[0]

    @property
    def is_normalized_outside(self) -> bool:
        """Whether the consumer must scale vectors to length 1."""
        return any(isinstance(module, Normalize) for module in self._computed_outside)

    @property
    def _computed_outside(self) -> tuple[PoolingModule, ...]:
        return () if self.head is not None else self.modules


@dataclass(frozen=True)
class Delivery:
    """The data that a consumer's files are written from.

    Attributes:
        config: the PretrainedConfig.
        tokenizer: the checkpoint's.
        folder: the folder with the files.
        max_length: the maximum number of tokens in a text; None for no limit.
    """

    model: TargetModel
    config: Any
    tokenizer: Any
    folder: Path
    max_length: int | None


class Target:
    """A consumer. Subclasses set the attributes, and override methods where the consumer differs from others.

    Attributes:
        name: its --target name.
        title: its name for users.
        uses: the uses it accepts; for several of one kind, the first that suits a checkpoint; empty for any graph.
        graph: the graph file in the folder, with `{name}` for the model's name; empty for a file next to the folder.
        files: other files that the folder must have.
        batch: the batch size it calls the graph with; None for any.
        max_ir, max_opset: the highest versions its onnxruntime reads; None for no bound.
        refused: kinds it does not accept, each with an alternative.
        tokenizer_of: its tokenization library: tokenizers, transformers or sentence-transformers.
        pads: what it pads, which requires a padding token; empty for nothing.
        functions: functions of torch.nn that it applies to logits: of one label, of several, then of both for
            `multi_label_classification`; empty if it returns logits.
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
    functions: tuple[str, ...] = ()

    @property
    def takes_any_graph(self) -> bool:
        """Whether it accepts graphs without adaptation."""
        return not self.uses

    @property
    def reads_folder(self) -> bool:
        """Whether it reads a folder that contains the graph."""
        return bool(self.graph)

    def use_for(
        self, task: str, modules: Sequence[PoolingModule], *, pads_left: bool, looks_up_queries: bool = False
    ) -> Use:
        """Return how it uses a model of `task` whose checkpoint was trained with `modules`.

        Raises:
            TargetError: it does not accept such a model, or computes something other than the checkpoint does.
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
        """Return whether it runs all modules of such checkpoints itself, so that they need not be known here."""
        uses = [use for use in self.uses if use.kind == kind]
        return bool(uses) and uses[0].after is None

    def check_checkpoint(self, use: Use, source: Source, tokenizer: Any) -> None:
        """Refuse a checkpoint that it would load differently, or not at all.

        Raises:
            OnnxtoolError: the checkpoint is refused.
        """

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer that it cannot run.

        Raises:
            TargetError: the consumer does not support its kind or one of its settings.
        """
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TargetError(
                f"{self.title} reads tokenizer.json, which {type(tokenizer).__name__} cannot be written as",
                "a newer transformers or tokenizers may convert it; otherwise pass --target plain",
            )
        if self.pads and getattr(tokenizer, "pad_token", None) is None:
            raise TargetError(
                f"{self.title} pads {self.pads}, and this tokenizer has no padding token",
                "set one with tokenizer.pad_token = tokenizer.eos_token, save the tokenizer, and export again",
            )

    def read_texts(self, folder: Path, model: TargetModel, texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        """Return the ids it makes from texts with its files in `folder`; texts longer than `limit` tokens are cut."""
        if self.tokenizer_of == "tokenizers":
            return read_file(folder / TOKENIZER_NAME, texts, limit)
        return read_by_transformers(folder, lower_cases=self.tokenizer_of == "sentence-transformers")(texts, limit)

    def reads_as_trained(self, text: Text, tokenizer: Any) -> bool:
        """Return whether it should match the tokenizer's ids for a text; some are read differently for any model."""
        return True

    def adapt_outputs(self, graph: ir.Model, head: Head | None) -> None:
        """Convert the head's outputs to those of `uses`, in place, if they differ."""

    def second_graph(self, graph: ir.Model, head: Head | None) -> ir.Model | None:
        """Return another graph to deliver next to the first, sharing its weights in memory; None for none."""
        return None

    def second_path(self, graph: Path, name: str) -> Path:
        """Return the path of the second graph of the model named `name`, next to the first."""
        raise NotImplementedError

    def restore(self, outputs: Mapping[str, NDArray[Any]], model: TargetModel, batch: int) -> dict[str, NDArray[Any]]:
        """Convert the graph's result for `batch` texts to the head's outputs, to compare with PyTorch's."""
        return dict(outputs)

    def write_files(self, to: Delivery) -> None:
        """Write the files that it reads and the checkpoint lacks to a folder that already holds the checkpoint's files.

        Raises:
            TargetError: a required setting is missing.
        """

    def pack(self, model: TargetModel, folder: Path, graph: Path) -> None:
        """Write what it reads instead of the folder, such as an archive, once all files are there."""

    def instruction(self, model: TargetModel) -> str:
        """Return what its users must configure for this model; empty if it reads everything from the folder."""
        return ""


@dataclass(frozen=True)
class Layout:
    """The output paths of an export.

    Attributes:
        root: the folder that contains all of them.
        graph: the graph file.
        files: the folder of tokenizer and configuration.
        stamp: that folder relative to the graph's, as recorded in the metadata; empty if not recorded.
    """

    root: Path
    graph: Path
    files: Path
    stamp: str


def layout(target: Target, output: Path | None, name: str) -> Layout:
    """Return the output paths for an export of the model named `name`.

    Args:
        target: the consumer.
        output: the user's choice: a folder, or NAME.onnx if the target reads no folder; None for models/NAME.
        name: the model's own.

    Raises:
        TargetError: a file was requested, but the consumer reads a folder.
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
    """Return the target named `name`, which must be one of TARGET_NAMES."""
    target: Target = importlib.import_module(f"{targets.__name__}.{targets.MODULES[name]}").TARGET
    return target


def kind_of(task: str, *, looks_up_queries: bool) -> str:
    """Return the kind of a model from its task, and whether queries are encoded without it."""
    return INFERENCE_FREE if looks_up_queries else KINDS.get(task, OTHER)


def bound_texts(folder: Path, max_length: int | None, *, pad_token: str = "") -> None:
    """State the maximum text length and padding token in tokenizer_config.json, all that some consumers read there."""
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
    """Refuse files that do not state a maximum text length, which the consumer needs.

    Raises:
        TargetError: tokenizer_config.json does not state it.
    """
    if "model_max_length" not in read_object(folder / TOKENIZER_CONFIG):
        raise TargetError(
            f"{title} needs the length at which texts are cut, but neither tokenizer nor model states it",
            "write model_max_length into tokenizer_config.json of the checkpoint",
        )


def read_object(path: Path) -> dict[str, Json]:
    """Return the JSON object in a file; empty if it contains something else.

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


def write_json(path: Path, content: Any) -> None:
    """Write a JSON object or list."""
    path.unlink(missing_ok=True)  # never write through a link into the checkpoint
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _in_words(modules: Sequence[PoolingModule]) -> str:
    return ", ".join(module.description for module in modules) or "nothing"
