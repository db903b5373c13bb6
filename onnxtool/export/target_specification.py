"""Needs of a target as to a model's graph and files: determined before tracing, checked on the written files.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import TOKENIZER_NAME, ModuleFiles
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.module_forms import POOLING_MASK, PoolingModule
from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.scores import score_function
from onnxtool.checkpoint.sentence_modules import positive
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.static_embeddings import TOKENIZER_CONFIG
from onnxtool.checkpoint.tasks import LATE_INTERACTION
from onnxtool.checkpoint.tokenizer_library import read_file
from onnxtool.errors import TargetError
from onnxtool.export import targets
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.heads.choice import expanding_token, read_head, task_with_head
from onnxtool.export.heads.head import GraphHead
from onnxtool.export.modalities.modality import BATCH, SEQUENCE, Modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.options import ExportOptions
from onnxtool.export.sidecar_files import read_object, wordpiece_vocabulary, write_changed, write_json
from onnxtool.export.signature import Signature
from onnxtool.export.source import Source
from onnxtool.export.targets import DENSE, INFERENCE_FREE, KINDS, OTHER, SCORES, SPARSE, TOKENS, VERDICTS, Target, Usage
from onnxtool.graph.builder import Builder
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile, ModelPath
from onnxtool.model_file.domains import default_opset
from onnxtool.reports import Json, TensorInfo
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from onnxtool.runtime.tokens import OwnTokenizer, ReadTokens, read_by_transformers

Arrays = dict[str, NDArray[Any]]

# The modules that consumers compute themselves, by the names in `Usage.after`.
COMPUTED: Mapping[str, PoolingModule] = {
    **{mode: Pooling((mode,)) for mode in ("mean", "cls", "lasttoken")},
    "normalize": Normalize(),
    "splade": SpladePooling(),
    "splade of two logarithms": SpladePooling(activation="log1p_relu"),
}
_POSITIONS, _MAP = "max_position_embeddings", "special_tokens_map.json"
_FIRST_BACKENDS = 5  # the version of transformers whose class TokenizersBackend is
_UNLIMITED = 2**31  # transformers writes "no limit" as 1e30, which fastembed refuses


@dataclass(frozen=True)
class TargetSpecification:
    """A model as a target needs it; a target's module overrides methods where its consumer differs from others.

    Attributes:
        usage: how the consumer uses the model.
        config: the PretrainedConfig.
        tokenizer: the checkpoint's.
        head: what the graph computes; None for the model's own outputs.
        pooling: the mode by which the consumer pools; empty if it does not, or no file says how.
        scales: whether the consumer must scale vectors to length 1.
        inputs: the inputs that the graph declares, in order.
        vocabulary_size: the number of terms that the model weighs; 0 if it weighs none.
        left_out: what the checkpoint provides and the target does not use; empty if it uses everything.
        precisions: the precisions of the files that are written next to the graph.
        expansion_id: the token by which queries are expanded; None if they are not.
        pruning: the rule by which terms are left out; None for all.
    """

    target: Target
    usage: Usage
    source: Source
    config: Any
    tokenizer: Any
    head: GraphHead | None = None
    pooling: str = ""
    scales: bool = False
    inputs: tuple[str, ...] = ()
    vocabulary_size: int = 0
    left_out: str = ""
    precisions: tuple[str, ...] = ()
    expansion_id: int | None = None
    pruning: Pruning | None = None

    @property
    def note(self) -> str:
        """Settings that the target's users must make; empty if it reads everything from the folder."""
        target, longest = self.target, self.source.sentence_modules.max_sequence_length
        cuts = target.most_tokens is not None and (longest is None or longest > target.most_tokens)
        return f"{target.note}{target.notes.get(self.usage.kind, '')}".format(
            name=self.source.name,
            output=self.usage.outputs[0].name,
            pooling=self.pooling_name,
            cut=f"; it cuts texts to {target.most_tokens} tokens" if cuts else "",
            scaling=target.scaling[self.scales],
        )

    @property
    def pooling_name(self) -> str:
        """The target's name for the pooling mode that its users must configure."""
        return "none" if self.usage.head != "none" else self.pooling or "mean"

    def accepts(self) -> None:
        """Refuse a checkpoint that the target would load differently, and a tokenizer that it cannot run.

        Raises:
            OnnxtoolError: the checkpoint is refused.
        """
        title, tokenizer = self.target.title, self.tokenizer
        types = self.source.read_object("config.json").get("type_vocab_size")
        if not self.usage.tells_pairs and isinstance(types, int) and types > 1:
            raise TargetError(
                f"{title} feeds a reranker no token types, and {self.source.model_name} has {types} of them "
                "(type_vocab_size in config.json), so its scores would differ",
                "serve it with --target tei or sentence-transformers",
            )
        unpooled = self.source.sentence_modules.first_of("Pooling") is None
        if self.usage.kind == DENSE and self.usage.head != "none" and unpooled:
            raise TargetError(
                f"{self.source.model_name} does not say how it pools, and {title} gets vectors from the graph",
                "save the model with sentence-transformers, whose modules.json says it",
            )
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TargetError(
                f"{title} reads tokenizer.json, which {type(tokenizer).__name__} cannot be written as",
                "a newer transformers or tokenizers may convert it; otherwise pass --target plain",
            )
        if self.target.pads and getattr(tokenizer, "pad_token", None) is None:
            raise TargetError(
                f"{title} pads {self.target.pads}, and this tokenizer has no padding token",
                "set one with tokenizer.pad_token = tokenizer.eos_token, save the tokenizer, and export again",
            )

    def narrow(self, signature: Signature) -> Signature:
        """Return the signature without inputs the target does not feed, and the model's outputs it does not read."""
        fed = {name: shape for name, shape in signature.inputs.items() if name not in self.usage.unfed}
        signature = replace(signature, inputs=fed)
        if self.head is not None:
            return signature
        return replace(signature, outputs={info.name: signature.outputs[info.name] for info in self.usage.outputs})

    def fed(self, modality: Modality) -> Modality:
        """Return the modality without inputs that the target does not feed."""
        if not isinstance(modality, TextInputs) or not self.usage.unfed:
            return modality
        return replace(
            modality,
            names={name: token_shape for name, token_shape in modality.names.items() if name not in self.usage.unfed},
        )

    def adapt(self, graph: ir.Model, longest: int | None) -> dict[str, ir.Model]:
        """Convert a graph that has the head to the target's form, in place, and return further graphs by file name.

        Args:
            graph: the graph.
            longest: the maximum number of tokens in a text; None for no limit.

        Raises:
            TargetError: the target cannot read the opset.
        """
        further = self.convert(graph)
        self._select_outputs(graph)
        for model in (graph, *further.values()):
            self._declare_inputs(model)
            self._check_versions(model)
        if self.target.batch is not None:
            _fix_batch(graph, self.target.batch)
        return further

    def convert(self, graph: ir.Model) -> dict[str, ir.Model]:
        """Convert the head's outputs to those of `usage`, in place; return further graphs by file name."""
        return {}

    def with_pruning(self, pruning: Pruning, *, in_graph: bool) -> TargetSpecification:
        """Return the specification of a model that is pruned in its graph, or by the target's own setting.

        Raises:
            TargetError: it weighs no terms, or the target weighs them itself.
        """
        if self.usage.kind not in (SPARSE, INFERENCE_FREE) or not in_graph:
            raise TargetError(
                f"--prune {pruning} leaves out terms, and a graph for {self.target.title} gives no term weights",
                "leave --prune out, and prune where vectors are stored",
            )
        return replace(self, pruning=pruning)

    def run(self, session: Session, feeds: Arrays) -> Arrays:
        """Run a written graph as the target does, and return the outputs of the head, to compare with PyTorch's."""
        return session.run(feeds)

    def runner(self, path: ModelPath) -> Callable[[Mapping[str, NDArray[Any]]], Arrays]:
        """Return a function that runs the file as the target does, and returns the outputs of the head or the model.

        Inputs that the model ignores are zeros.
        """
        session = open_session(path, provider="cpu", frugal=True)

        def run(feeds: Mapping[str, NDArray[Any]]) -> Arrays:
            filled = {**{name: np.zeros_like(feeds["input_ids"]) for name in self.inputs}, **feeds}
            return self.run(session, {self.usage.prefix + name: array for name, array in filled.items()})

        return run

    def files(self, folder: Path, longest: int | None) -> None:
        """Write the files that the target reads to `folder`, which already holds the checkpoint's own files.

        Args:
            folder: the folder with the files.
            longest: the maximum number of tokens in a text; None for no limit.

        Raises:
            TargetError: a setting that the target requires is missing.
        """
        target, file = self.target, folder / self.target.length_in
        if not (folder / "config.json").is_file():  # a checkpoint exported into its own folder keeps its files
            raise TargetError(
                f"for {target.title}, files of {self.source.model_name} itself would change",
                "pass an --output that is not the checkpoint's own folder",
            )
        if target.fills_up and longest is not None and longest < (target.most_tokens or 0):
            raise TargetError(
                f"{target.title} feeds {target.most_tokens} tokens of every text, and this checkpoint takes {longest}",
                "raise max_seq_length in sentence_bert_config.json if the model has as many positions; else pass "
                "--target plain, and call the graph from an embedding function of your own",
            )
        self._complete_tokenizer(folder)
        named = folder / TOKENIZER_CONFIG  # by a class that transformers 4 does not have
        if target.transformers < _FIRST_BACKENDS and read_object(named).get("tokenizer_class") == "TokenizersBackend":
            write_changed(named, {"tokenizer_class": "PreTrainedTokenizerFast"})
        if file.name == TOKENIZER_CONFIG:
            self._bound_texts(file, longest)
        elif file.name == "config.json" and longest is not None:
            write_changed(file, {_POSITIONS: longest})
        # Vespa follows whatever the last training left in tokenizer.json, or else its own transformer-max-tokens.
        elif file.name == TOKENIZER_NAME and longest is not None and read_object(file).get("truncation"):
            write_changed(file, {"truncation": truncation_to(longest)})

    def pack(self, folder: Path, graph: Path) -> None:
        """Write what the target reads instead of the folder, such as an archive, once all files are there."""

    def reader(self, folder: Path) -> ReadTokens:
        """Return a function that makes ids from texts as the target does with its files in `folder`."""
        if self.target.tokenizer_of == "tokenizers":
            return partial(read_file, folder / TOKENIZER_NAME)
        return read_by_transformers(folder, lower_cases=self.target.tokenizer_of == "sentence-transformers")

    def check_tokens(self, tokenizer: OwnTokenizer, folder: Path, texts: Sequence[Text]) -> None:
        """Compare the tokens that the target makes from texts, using the files in `folder`, with transformers' tokens.

        Raises:
            CheckpointError: they differ.
        """
        tokenizer.check(
            self.target.title, self.reader(folder), texts, "pass --target plain, and read texts with onnxtool"
        )

    def check(self, root: Path, graph: ModelPath) -> None:
        """Compare the interface of the graph file, and the names of the files in `root`, with what the target expects.

        Raises:
            TargetError: something is missing or differs.
        """
        structure = ModelFile.open(graph).structure
        shape = (self.target.batch or BATCH, SEQUENCE)
        declared = [TensorInfo(self.usage.prefix + name, "int64", shape) for name in self.inputs]
        for actual, expected in ((structure.inputs, declared), (structure.outputs, self.usage.outputs)):
            if len(actual) != len(expected) or not all(map(_fits, actual, expected)):
                raise TargetError(
                    f"the graph has {_format(actual)}, and {self.target.title} needs {_format(expected)}",
                    "try another --exporter; --target plain writes the graph as it is",
                )
        if missing := [name for name in self.file_names if not (root / name).is_file()]:
            raise TargetError(
                f"the folder lacks {', '.join(missing)}, which {self.target.title} needs", "pass --target plain"
            )

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files that the folder must contain in addition to the graph."""
        return tuple(name.format(name=self.source.name) for name in self.target.files)

    def _complete_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer files that the target needs and the checkpoint lacks."""
        missing = [name for name in self.file_names if not (folder / name).is_file()]
        for name in missing:
            if name.endswith("vocab.txt"):
                vocabulary = wordpiece_vocabulary(self.tokenizer, self.vocabulary_size)
                (folder / name).write_text(vocabulary, encoding="utf-8")
        if any("token" in name for name in missing):
            with temporary_folder() as scratch:
                self.tokenizer.save_pretrained(scratch)
                for name in missing:
                    if (scratch / name).is_file():
                        shutil.copyfile(scratch / name, folder / name)
                    elif name == _MAP:  # transformers 5 keeps its content in tokenizer_config.json
                        write_json(folder / name, dict(self.tokenizer.special_tokens_map))

    def limit(self, longest: int | None) -> int | None:
        """Return the length at which texts are cut: the smaller of the model's and the tokenizer's; None for none."""
        stated = positive(self.tokenizer.model_max_length)
        return min((number for number in (stated, longest) if number is not None and number < _UNLIMITED), default=None)

    def _bound_texts(self, path: Path, longest: int | None) -> None:
        """State the maximum text length in tokenizer_config.json and, for a target that pads, the padding token."""
        content = read_object(path)
        # fastembed takes the smaller of the two; transformers leaves `max_length` there from a call of the tokenizer.
        config = {key: value for key, value in content.items() if key not in ("model_max_length", "max_length")}
        limit = self.limit(longest)
        changed = {**config, **({} if limit is None else {"model_max_length": limit})}
        if self.target.pads and not config.get("pad_token"):
            changed["pad_token"] = str(self.tokenizer.pad_token)
        if self.target.pads and limit is None:
            raise TargetError(
                f"{self.target.title} needs the length at which texts are cut, but neither tokenizer nor model states "
                "it",
                "write model_max_length into tokenizer_config.json of the checkpoint",
            )
        if changed != content:
            write_json(path, changed)

    def _select_outputs(self, model: ir.Model) -> None:
        values = {str(value.name): value for value in model.graph.outputs}
        outputs = []
        for wanted in self.usage.outputs:
            value = values[wanted.name]
            dtype = ir.DataType.from_numpy(np.dtype(wanted.dtype))
            if value.dtype != dtype:
                shape = value.shape
                value.name = f"{wanted.name}.{value.dtype}"
                value = Builder(model.graph, dtype).cast(value, dtype)
                value.name, value.dtype, value.shape = wanted.name, dtype, shape
            outputs.append(value)
        model.graph.outputs[:] = outputs
        common.RemoveUnusedNodesPass()(model)

    def _declare_inputs(self, model: ir.Model) -> None:
        """Order the inputs, and declare inputs that the model ignores, because a consumer may feed them anyway."""
        values = {str(value.name): value for value in model.graph.inputs}
        for name in self.inputs:
            if name not in values:
                values[name] = ir.val(name, dtype=ir.DataType.INT64, shape=[BATCH, SEQUENCE])
        model.graph.inputs[:] = [values[name] for name in self.inputs]
        for value in model.graph.inputs:
            value.name = f"{self.usage.prefix}{value.name}"

    def _check_versions(self, model: ir.Model) -> None:
        if self.target.versions is None:
            return
        opset, (highest_ir, highest) = default_opset(model.opset_imports), self.target.versions
        if opset > highest:
            raise TargetError(
                f"the graph is of opset {opset}, and {self.target.title} reads up to {highest}",
                f"pass --opset {highest} or lower",
            )
        # Newer format versions add types and devices, none of which opsets up to the highest use.
        model.ir_version = min(model.ir_version, highest_ir)


def usage_for(
    target: Target, task: str, modules: Sequence[PoolingModule] = (), *, pads_left: bool = False, looks_up: bool = False
) -> Usage:
    """Return how a target uses a model of `task` whose checkpoint was trained with `modules`.

    Raises:
        TargetError: it does not accept such a model, or computes something other than the checkpoint does.
    """
    kind = INFERENCE_FREE if looks_up else KINDS.get(task, OTHER)
    usages = [usage for usage in target.usages if usage.kind == kind]
    if not usages:
        ways = {
            VERDICTS: "pass --target sentence-transformers, or --target plain for `onnxtool infer`",
            **dict(target.refused),
        }
        kinds = ", ".join(dict.fromkeys(usage.kind for usage in target.usages))
        raise TargetError(
            f"{target.title} takes {kinds}; this model's task is {task}",
            ways.get(kind, "pass --target plain, or a --task that fits the checkpoint"),
        )
    for usage in usages:
        if usage.head != "none" or usage.after is None:
            return usage
        # Consumers that pool take the first position, padding or not.
        computed = [COMPUTED[name] for name in usage.after if not (pads_left and name == "cls")]
        if all(module in computed for module in modules):
            return usage
    raise TargetError(
        f"{target.title} computes {_in_words([COMPUTED[name] for name in usages[0].after or ()])} itself; this "
        f"checkpoint needs {_in_words(modules)}, and would give other answers there",
        f"pass --target plain --head {'embedding' if kind == DENSE else 'splade'}: all of it in the graph",
    )


def specify(
    target: Target, checkpoint: Checkpoint, signature: Signature, tokenizer: Any, options: ExportOptions
) -> TargetSpecification:
    """Determine the requirements for exporting a checkpoint for a target that does not accept any graph.

    Args:
        target: the consumer.
        checkpoint: the checkpoint.
        signature: its model's signature.
        tokenizer: the checkpoint's tokenizer.
        options: the head that the user asked for, which must be the one that the target needs, and the precisions.

    Raises:
        CheckpointError: the checkpoint pools in an unsupported way.
        TargetError: the target does not accept such a model, needs something it lacks, or needs another head.
    """
    source, title, task = checkpoint.source, target.title, task_with_head(options.head, checkpoint.task)
    looks_up = source.sentence_modules.query is not None
    kind = INFERENCE_FREE if looks_up else KINDS.get(task, OTHER)
    usages = [usage for usage in target.usages if usage.kind == kind]
    trained = None if usages and usages[0].after is None else _trained_head(source, kind)
    if trained is not None and trained.leaves_prompt_out:
        raise TargetError(
            f"{source.model_name} leaves the prompt out when it pools, and {title} tells a graph of no prompt "
            f"(it feeds no {POOLING_MASK})",
            "pass --target sentence-transformers, or --target plain for `onnxtool infer`",
        )
    if looks_up and not usages:
        raise TargetError(
            f"{source.model_name} encodes queries without a model, and {title} would run this one on them",
            "pass --target plain",
        )
    modules = () if trained is None else trained.modules
    pads_left = getattr(tokenizer, "padding_side", "right") == "left"
    usage = usage_for(target, task, modules, pads_left=pads_left, looks_up=looks_up)
    _check_head_name(target, usage, options.head)
    _check_inputs(target, signature, checkpoint.architecture)
    width = signature.outputs.get("logits", (0,))[-1]
    consumer_modules = () if usage.head != "none" else modules
    specification = class_of(target)(
        target,
        usage,
        source,
        checkpoint.config,
        tokenizer,
        pooling=next((module.modes[0] for module in consumer_modules if isinstance(module, Pooling)), ""),
        scales=any(isinstance(module, Normalize) for module in consumer_modules),
        inputs=usage.inputs(tuple(signature.inputs)),
        vocabulary_size=width if isinstance(width, int) else 0,
        left_out=_left_out(target, kind, source, is_single=width == 1),
        precisions=target.precisions(options.precisions),
        expansion_id=expanding_token(source, tokenizer) if kind == TOKENS else None,
    )
    specification.accepts()
    head = None if usage.head == "none" else trained or read_head(usage.head, source)
    _check_outputs(target, usage, head, signature, checkpoint.architecture)
    return replace(specification, head=head)


def class_of(target: Target) -> type[TargetSpecification]:
    """Return the class for a target: that of its module, if it has one."""
    if not target.module:
        return TargetSpecification
    module = importlib.import_module(f"{targets.__name__}.{target.module}")
    specification: type[TargetSpecification] = module.SPECIFICATION
    return specification


def _check_head_name(target: Target, usage: Usage, head_name: str) -> None:
    names = ("none", *(info.name for info in usage.outputs)) if usage.head == "none" else (usage.head,)
    if head_name in ("auto", *names):
        return
    reads = f"with the head {usage.head}"
    if usage.head == "none":
        reads = f"by their {' and '.join(names[1:])}, and computes the rest itself"
    raise TargetError(
        f"{target.title} takes {usage.kind} {reads}; --head {head_name} was passed",
        "leave --head out, or pass --target plain",
    )


def _check_inputs(target: Target, signature: Signature, architecture: str) -> None:
    for name in ("input_ids", "attention_mask"):
        if name not in signature.inputs:
            raise TargetError(
                f"{target.title} feeds {name}, which {architecture} does not take; it takes "
                f"{', '.join(signature.inputs)}",
                "pass --target plain",
            )


def _check_outputs(
    target: Target, usage: Usage, head: GraphHead | None, signature: Signature, architecture: str
) -> None:
    for name in [head.source] if head else [info.name for info in usage.outputs]:
        if name not in signature.outputs:
            raise TargetError(
                f"{target.title} takes {usage.kind} by their {name}; {architecture} gives "
                f"{', '.join(signature.outputs)}",
                "the weights must be of the model with that head; a base model's hidden states are not term weights"
                if usage.kind in (SPARSE, INFERENCE_FREE)
                else "pass a --task whose architecture has it, or --target plain",
            )


def _left_out(target: Target, kind: str, source: Source, *, is_single: bool) -> str:
    """Return a note on what a target does not use of a checkpoint."""
    if kind == SCORES:
        return other_scores(target, source, is_single=is_single)
    if kind != DENSE or not source.is_m3:
        return ""
    if not source.sentence_modules.modules:
        raise TargetError(
            f"{source.model_name} has no modules.json, by which {target.title} would know that an M3 embedder pools by "
            "the first token",
            "save it with sentence-transformers, with Pooling by cls and Normalize; or pass --target plain",
        )
    return f"{target.title} gets only the dense vector of this M3 embedder, no token weights or vectors"


def other_scores(target: Target, source: ModuleFiles, *, is_single: bool) -> str:
    """Return a note if a target turns logits into other scores than the checkpoint's library does."""
    is_multi_label = source.read_object("config.json").get("problem_type") == "multi_label_classification"
    trained = score_function(source, is_single=is_single)
    applied = target.functions[2 * is_multi_label + (not is_single)] if target.functions else trained
    note = (
        f"{target.title} scores by {applied}, and the checkpoint by {trained}: ask it for logits, and apply {trained} "
    )
    return "" if applied == trained else f"{note}to them"


def _trained_head(source: Source, kind: str) -> GraphHead | None:
    """Return what a checkpoint computes after the model; a text encoder without pooling information is not pooled."""
    if kind == DENSE and source.sentence_modules.first_of("Pooling") is None:
        return None
    heads = {SPARSE: "splade", INFERENCE_FREE: "splade", TOKENS: LATE_INTERACTION, DENSE: "embedding"}
    return read_head(heads[kind], source) if kind in heads else None


def _fix_batch(model: ir.Model, batch: int) -> None:
    """Set the batch axis to a single size, wherever it is named."""

    def fixed(shape: ir.Shape) -> ir.Shape:
        sizes = [size if isinstance(size, int) else size.value for size in shape]
        # An expression with the batch, such as its product with the sequence, is left to onnxruntime.
        return ir.Shape([batch if s == BATCH else None if isinstance(s, str) and BATCH in s else s for s in sizes])

    values = [output for graph in model.graphs() for node in graph for output in node.outputs]
    for value in [*model.graph.inputs, *values]:
        if value.shape is not None:
            value.shape = fixed(value.shape)


def truncation_to(longest: int) -> Json:
    """Return the setting in tokenizer.json that cuts texts to `longest` tokens."""
    return {"direction": "Right", "max_length": longest, "strategy": "LongestFirst", "stride": 0}


def _in_words(modules: Sequence[PoolingModule]) -> str:
    return ", ".join(module.description for module in modules) or "nothing"


def _fits(output: TensorInfo, expected: TensorInfo) -> bool:
    same = (output.name, output.dtype, len(output.shape)) == (expected.name, expected.dtype, len(expected.shape))
    return same and all(w is None or f == w for f, w in zip(output.shape, expected.shape, strict=True))


def _format(infos: Sequence[TensorInfo]) -> str:
    shapes = (", ".join("…" if size is None else str(size) for size in info.shape) for info in infos)
    return ", ".join(f"{info.name} {info.dtype} [{shape}]" for info, shape in zip(infos, shapes, strict=True))
