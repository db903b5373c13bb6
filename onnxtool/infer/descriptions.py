"""User descriptions of files without a stamp, made by other exporters: checked against the file, then used as a stamp.

Shape letters: B batch, S sequence, H hidden size, V vocabulary, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.pooling_modules import Normalize
from onnxtool.checkpoint.scores import stated_activation
from onnxtool.checkpoint.sentence_modules import MODULES_NAME, StoredModule
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.errors import OptionError
from onnxtool.infer.heads import AnyHead, gives_states
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.heads.labels import Labels, Scores, unchanged
from onnxtool.infer.heads.terms import Terms
from onnxtool.infer.options import FILE_TASKS, FileDescription
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import HEAD_KEY, TASK_KEY
from onnxtool.model_file.wire import read_nodes
from onnxtool.reports import TensorInfo

_SPARSE, _DENSE = "sparse-encoding", "sentence-similarity"
# Axes of the outputs that identify tasks: [B, L] or [B, S, L], or pooled outputs, [B, H] or [B, V].
_RANKS = {
    **dict.fromkeys((_DENSE, _SPARSE), (2, 3)),
    **dict.fromkeys(("text-classification", RANKING, "question-answering"), (2,)),
    **dict.fromkeys((LATE_INTERACTION, "token-classification", "fill-mask", "text-generation"), (3,)),
}
_ASSUMED = "assumed, as no file says it"


@dataclass(frozen=True)
class Interpretation:
    """The interpretation of a file, from its stamp, the user's description, or its outputs and checkpoint.

    Attributes:
        stored: the checkpoint's folder without the user's description.
        description: the user's description of the file.
    """

    model: ModelFile
    stored: CheckpointFolder
    description: FileDescription

    @cached_property
    def folder(self) -> CheckpointFolder:
        """The folder, with pooling and normalization from the user's description instead of modules.json."""
        stored, description = self.stored.sentence_modules, self.description
        if description.pooling is None and description.normalize is None:
            return self.stored
        modules = list(stored.modules)
        is_sparse = _SPARSE in (description.purpose, self.model.stated_task) or "SpladePooling" in stored.kinds
        kind, key = ("SpladePooling", "pooling_strategy") if is_sparse else ("Pooling", "pooling_mode")
        if description.pooling is not None:
            modules = modules or [StoredModule("MLMTransformer" if is_sparse else "Transformer", "", {}, self.stored)]
            place = stored.kinds.index(kind) if kind in stored.kinds else None
            settings = {} if place is None else modules.pop(place).settings
            modules.insert(place or 1, StoredModule(kind, "", {**settings, key: description.pooling}, self.stored))
        if description.normalize is not None:
            modules = [module for module in modules if module.kind != "Normalize"]
            modules += [StoredModule("Normalize", "", {}, self.stored)] * description.normalize
        return replace(self.stored, described=replace(stored, modules=tuple(modules)))

    def task(self, vocabulary_size: int) -> str:
        """Return the file's task, deduced from its outputs and vocabulary size if it is not stated.

        Raises:
            OptionError: the description contradicts the stamp or the outputs.
        """
        description, stamps = self.description, {key: self.model.metadata.get(key) for key in (TASK_KEY, HEAD_KEY)}
        for value, key, name in ((description.task, TASK_KEY, "--task"), (description.head, HEAD_KEY, "--head")):
            if value is not None and any(stamps.values()) and value != stamps[key]:
                raise OptionError(
                    f"{name} {value} was passed, but {self.model.path} is stamped {key} {stamps[key]}",
                    "leave it out: the file says itself what it is; --pooling pools one that gives states of tokens",
                )
        if task := self.model.stated_task:
            return task
        if description.purpose is None:
            task = deduce_task(self.model, self.folder, vocabulary_size)
            return _DENSE if task == UNKNOWN_TASK and description.pooling is not None else task
        ranks = {len(info.shape) for info in self.model.structure.outputs}
        if 0 not in ranks and ranks.isdisjoint(_RANKS.get(description.purpose, ranks)):  # 0: not stated
            raise self._refused("--task" if description.task else "--head", f"gives nothing for {description.purpose}")
        return description.purpose

    def described(self, head: AnyHead) -> AnyHead:
        """Return `head` adapted to vectors pooled by the graph and normalized by the user, or to probabilities.

        Raises:
            OptionError: the description contradicts the file, or does not apply to its outputs.
        """
        description, is_stamped, is_dense = self.description, self.model.stated_task != "", isinstance(head, Embeddings)
        pools = gives_states(self.model) and isinstance(head, Embeddings | Terms)
        in_graph = isinstance(head, Embeddings) and head.in_graph
        if description.pooling is not None and (in_graph or not pools):
            raise self._refused("--pooling", f"leaves nothing to pool, read for {head.kind}")
        if description.normalize is not None and not is_dense:
            raise self._refused("--normalize", f"is read for {head.kind}, and not for embeddings")
        if in_graph and description.normalize is not None and is_stamped:
            if description.normalize != ("Normalize" in self.stored.sentence_modules.kinds):
                raise self._refused("--normalize", "was exported from a checkpoint that says otherwise")
        elif isinstance(head, Embeddings) and in_graph and description.normalize:
            return replace(head, after=(Normalize(),))
        if isinstance(head, Labels) and self._gives_probabilities:
            return replace(head, function=unchanged)
        return replace(head, activation=unchanged) if isinstance(head, Scores) and self._gives_probabilities else head

    def notes(self, head: AnyHead, task: str) -> tuple[str, ...]:
        """Explain how `head` reads the file for `task`, and why, if it has no stamp or has a description."""
        given_options, is_stamped = self.description.given, self.model.stated_task != ""
        notes = []
        if task == UNKNOWN_TASK:
            notes.append(f"the model does not say what it is for; pass --task with one of {', '.join(FILE_TASKS)}")
        elif not is_stamped:
            reason = given_options.get("--task") or given_options.get("--head") or "its outputs"
            notes.append(f"the model does not say what it is for; read as {task} from {reason}")
        if is_stamped and not given_options:
            return ()
        if isinstance(head, Embeddings) and head.in_graph:
            scaled = f"scaled to length 1 ({given_options['--normalize']})" if head.after else "taken as they are"
            notes.append(f"vectors are pooled by the graph, and {scaled}")
        elif isinstance(head, Embeddings):
            if head.pooling is not None and head.is_stated:  # otherwise its own note covers this
                notes.append(f"{head.pooling.description} ({self._source('--pooling', 'Pooling')})")
            scaled = "" if head.normalizes else "not "
            notes.append(f"vectors are {scaled}scaled to length 1 ({self._source('--normalize', 'Normalize')})")
        elif isinstance(head, Terms) and gives_states(self.model):
            notes.append(f"weights are {head.pooling.description} ({self._source('--pooling', 'SpladePooling')})")
        elif isinstance(head, Labels | Scores) and self._gives_probabilities:
            notes.append("the graph ends in a Softmax or Sigmoid, and scores are what it gives")
        elif isinstance(head, Labels | Scores) and stated_activation(self.stored) is None:
            notes.append("scores are a sigmoid of one logit, or a softmax of several, but for what problem_type says")
        return tuple(notes)

    def _source(self, option: str, kind: str) -> str:
        """Name the source of a vector setting: an option, or a module of this kind."""
        is_stored = kind in self.stored.sentence_modules.kinds
        return self.description.given.get(option) or (
            f"{MODULES_NAME} of {self.stored.path}" if is_stored else _ASSUMED
        )

    @cached_property
    def _gives_probabilities(self) -> bool:
        """Whether a file without a stamp returns probabilities itself: in "logits", or the first [B, L]."""
        names = [info.name for info in self.model.structure.outputs if len(info.shape) == 2]
        output = "logits" if "logits" in names else names[0] if names else ""
        ends = (node.op_type for node in read_nodes(self.model.path) if output in node.outputs)
        return not self.model.stated_task and next(ends, "") in ("Sigmoid", "Softmax")

    def _refused(self, option: str, reason: str) -> OptionError:
        outputs = ", ".join(f"{info.name} {list(info.shape)}" for info in self.model.structure.outputs)
        return OptionError(
            f"{self.description.given[option]} was passed, but {self.model.path} {reason}: it gives {outputs}",
            "leave it out, or say with --task what the file is for",
        )


UNKNOWN_TASK = "unknown"

_EMBEDDINGS = frozenset({"sentence_embedding", "text_embeds"})  # second output of a dual encoder
_HIDDEN_STATES = frozenset({"last_hidden_state", "token_embeddings"})


def deduce_task(model: ModelFile, folder: CheckpointFolder, vocabulary_size: int) -> str:
    """Deduce the task from output names and shapes and the checkpoint's files.

    Conservative: ambiguous cases are UNKNOWN_TASK, for which answers are shapes.
    """
    outputs = {info.name: info for info in model.structure.outputs}
    if "sparse" in outputs or {"output_idx", "output_weights"} <= set(outputs):
        return "sparse-encoding"
    if _EMBEDDINGS & set(outputs):
        return "sentence-similarity"
    if _HIDDEN_STATES & set(outputs):
        return (
            "sentence-similarity" if folder.sentence_modules.first_of("Pooling") is not None else "feature-extraction"
        )
    if {"start_logits", "end_logits"} <= set(outputs):
        return "question-answering"
    if "logits" in outputs:
        return _task_of_logits(outputs["logits"], folder, vocabulary_size)
    return UNKNOWN_TASK


def _task_of_logits(logits: TensorInfo, folder: CheckpointFolder, vocabulary_size: int) -> str:
    names = folder.read_object("config.json").get("id2label")
    num_labels = len(names) if isinstance(names, dict) else None
    match logits.shape:
        case (_, int(width)) if width == num_labels:
            return "text-classification"
        case (_, _, int(width)) if width == num_labels:
            return "token-classification"
        case (_, _, int(width)) if width >= vocabulary_size:
            if folder.sentence_modules.first_of("SpladePooling") is not None:
                return "sparse-encoding"
            # A decoder returns logits of the same shape; only masked language models have a mask token.
            return "fill-mask" if _has_mask_token(folder) else "text-generation"
    return UNKNOWN_TASK


def _has_mask_token(folder: CheckpointFolder) -> bool:
    return any(
        folder.read_object(name).get("mask_token") for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
