"""A checkpoint: configuration, task, architecture, tokenizer and weights.

Weights are safetensors unless the user allows pickles, which can run code.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.files import M3_FILES, MODULE_PICKLE, MODULE_WEIGHTS
from onnxtool.checkpoint.folder import TOKENIZER_NAME
from onnxtool.checkpoint.page_modules import PROCESSOR_NAMES
from onnxtool.checkpoint.pooling_modules import LogitScore, Pooling
from onnxtool.checkpoint.tasks import (
    LATE_INTERACTION,
    RANKING,
    TASKS,
    TEXT_TO_TEXT_WITH_CACHE,
    Task,
    find_task,
    recognize_task,
)
from onnxtool.checkpoint.tokenizer_guard import panics_as_exceptions, require_harmless
from onnxtool.checkpoint.tokenizer_library import lower_case, prefix_tokens
from onnxtool.errors import CheckpointError, ProviderError, first_line, some
from onnxtool.export.adapters import TASKS as ADAPTER_TASKS
from onnxtool.export.adapters import PeftAdapter
from onnxtool.export.source import Source, has_vocabulary, missing_packages, reason
from onnxtool.export.weights import (
    FLOAT_CHECKPOINT,
    Accounts,
    StoredTensor,
    account,
    foreign_prefix,
    is_quantized,
    key_mapping,
    read_headers,
    require_known_quantizer,
    require_scaled,
    surplus_layers,
    weight_files,
)
from onnxtool.guarded import memory_limit
from onnxtool.reports import Json
from onnxtool.runtime.quiet import quiet

_AUTO_CLASSES = {
    "image processor": ("AutoImageProcessor", "images"),
    "feature extractor": ("AutoFeatureExtractor", "sound"),
    "processor": ("AutoProcessor", "images and texts"),
}
_WITH_LABELS = ("text-classification", "token-classification", RANKING)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
# The most memory that loading takes: copies of all weights, such as float32 for 4-bit weights, plus a fixed amount.
_COPIES, _EXTRA_BYTES = 10, 4 << 30
_NO_MEMORY = "allocate memory"  # PyTorch's wording


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration has been read and whose architecture and task are known.

    Attributes:
        config: the PretrainedConfig.
        architecture: the class whose weights it contains.
        task: one of TASK_NAMES, or `other`.
        adapter: the PEFT adapter merged into the weights; None if there is none.
        initialized: names of missing weights that loading initialized; known once loaded.
        notes: remarks for the user about the stored tensors; known once loaded.
    """

    source: Source
    config: Any
    architecture: str
    task: str
    adapter: PeftAdapter | None = None
    initialized: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, source: Source, *, task: str = "auto") -> Checkpoint:
        """Read the configuration and choose the architecture and task.

        The architecture is the one named in config.json, not a base model: a SPLADE checkpoint keeps its MLM head. With
        an explicit `task`, it is the class for that task if config.json names another one.

        Raises:
            CheckpointError: the configuration is missing, cannot be read, or names no architecture known to
                transformers.
        """
        source.require_transformer()
        if source.weights.is_local:  # quick, by names only; weights on the hub are fetched once everything is checked
            weight_files(source.weights)
        config, adapter = load_config(source.weights), PeftAdapter.find(source) if source.adapter else None
        require_known_quantizer(config, source)
        named = getattr(config, "architectures", None) or []
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise CheckpointError(
                f"config.json of {source.model_name} names {named!r} as architectures, which is not a list of names",
                'write it as "architectures": ["BertForMaskedLM"], with the class of the weights',
            )
        if task != "auto":
            architecture = architecture_for(config, task)
            return cls(source, config, architecture, task, adapter)
        if not named:
            raise CheckpointError(
                f"config.json of {source.model_name} names no architecture",
                f'add one to it ("architectures": ["…"]), or pass --task: {candidates(config)}',
            )
        if source.sentence_modules.is_late_interaction:
            return cls(source, config, base_architecture(config), LATE_INTERACTION, adapter)
        kinds, architecture = source.sentence_modules.kinds, named[0]
        if source.base is not None and (trained := ADAPTER_TASKS.get(source.adapter.get("task_type"))) and not kinds:
            architecture = architecture_for(config, trained)  # the base was not saved as this class
        general = task_of_architecture(config.model_type, architecture)
        if general != "feature-extraction" and Pooling.__name__ in kinds:
            # sentence-transformers pools the base model's states, regardless of the head the checkpoint was saved with.
            architecture, general = base_architecture(config), "feature-extraction"
        if LogitScore.__name__ in kinds:  # it reads the logits of a causal language model
            architecture, general = architecture_for(config, RANKING), "text-generation"
        task = recognize_task(general, kinds=kinds, tags=source.card_tags)
        if task == "feature-extraction" and not kinds and source.is_m3:
            task = "sentence-similarity"
        return cls(source, config, architecture, task, adapter)

    @property
    def is_of_pages(self) -> bool:
        """Whether it is a retriever of pages as images."""
        return self.architecture.endswith("ForRetrieval")

    @property
    def writes_from_encoder(self) -> bool:
        """Whether it is an encoder-decoder exported with its cache, as two files."""
        return self.task == TEXT_TO_TEXT_WITH_CACHE and bool(getattr(self.config, "is_encoder_decoder", False))

    @property
    def revision(self) -> str:
        """The commit on the hub; empty for a folder that is not a hub snapshot."""
        if self.source.snapshot is not None:
            return self.source.snapshot.commit
        return getattr(self.config, "_commit_hash", None) or ""

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, sorted by name; pickles if there are no others and they are allowed.

        Raises:
            CheckpointError: there are none, or some are missing.
        """
        return weight_files(self.source.weights)

    @property
    def is_pickle(self) -> bool:
        """Whether the weights come from a pickle."""
        return any(path.suffix == ".bin" for path in self.weight_files)

    @cached_property
    def weights_sha256(self) -> str:
        """A single hash over all weight files that were read: the transformer's, the adapter's and the modules'.

        It distinguishes two checkpoints with the same name.

        Raises:
            CheckpointError: modules.json is malformed, or names a path outside the checkpoint.
        """
        modules = self.source.sentence_modules
        stored = [module for module in (*modules.modules, modules.query) if module is not None and module.folder]
        names = [module.file(name) for module in stored for name in (MODULE_WEIGHTS, MODULE_PICKLE)]
        module_files = dict.fromkeys(path for path in map(self.source.locate, (*names, *M3_FILES)) if path is not None)
        adapter = () if self.adapter is None else (self.adapter.file,)
        digest = hashlib.sha256()
        for path in dict.fromkeys((*self.weight_files, *adapter, *module_files)):
            digest.update(_digest(path).digest())
        return digest.hexdigest()

    @property
    def checkpoint_sha256(self) -> str:
        """A single hash over the names and contents of all files read: configuration, tokenizer and weights."""
        digest = hashlib.sha256(self.weights_sha256.encode())
        for name, path in sorted(self.source.files_read.items()):
            if path.suffix not in WEIGHT_SUFFIXES:
                digest.update(f"\n{name} {_digest(path).hexdigest()}".encode())
        return digest.hexdigest()

    @property
    def adapted_config(self) -> dict[str, Json]:
        """The base's config.json as modified by its adapter: the architecture, and the labels of its head."""
        labels = {str(label): name for label, name in self.config.id2label.items()}
        head = {"id2label": labels, "label2id": dict(self.config.label2id)} if self.task in _WITH_LABELS else {}
        return {**self.source.read_object("config.json"), "architectures": [self.architecture], **head}

    @property
    def quantizer(self) -> str:
        """The quantization method of its weights, which transformers computes with; empty for floats."""
        stated = getattr(self.config, "quantization_config", None)
        return "" if stated is None else str(stated.get("quant_method", "bitsandbytes"))

    def load_tokenizer(self) -> Any:
        """Load the tokenizer, set up as in sentence-transformers if it is one of its checkpoints.

        Raises:
            CheckpointError: the checkpoint has none, or it cannot be loaded.
        """
        from transformers import AutoTokenizer

        # transformers invents an empty vocabulary for a checkpoint without one.
        if not has_vocabulary(self.source, self.config.model_type):
            raise CheckpointError(
                f"{self.source.model_name} has no tokenizer (tokenizer.json, vocab.txt, …)",
                "save it next to the model with tokenizer.save_pretrained(...); text models need one",
            )
        self.require_sound_tokenizer()
        try:
            with quiet(), panics_as_exceptions():
                tokenizer = AutoTokenizer.from_pretrained(
                    self.source.tokenizer.model_name, **self.source.tokenizer.arguments
                )
        except Exception as error:  # each tokenizer fails differently on damaged files, including in Rust
            missing = missing_packages(self.source, self.config.model_type)
            if missing:
                raise CheckpointError(
                    f"the tokenizer of {self.source.model_name} is a SentencePiece model, "
                    f"which cannot be read without {' and '.join(missing)}",
                    f"pip install {' '.join(missing)}; or save it as tokenizer.json where they are installed",
                ) from error
            raise self.source.unreadable(error) from error
        if self.source.sentence_modules.lower_cases and hasattr(tokenizer, "backend_tokenizer"):
            lower_case(tokenizer.backend_tokenizer)
        prefixes = self.source.sentence_modules.prefixes
        if prefixes and (tokens := prefix_tokens(prefixes, tokenizer.get_vocab(), tokenizer.tokenize)):
            tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
        return tokenizer

    def require_sound_tokenizer(self) -> None:
        """Refuse a tokenizer.json that would exhaust this process's time or memory.

        Raises:
            CheckpointError: it is refused, or cannot be read.
        """
        content = self.source.read_text(TOKENIZER_NAME)
        if content is not None:
            require_harmless(content, partial(self.source.malformed, TOKENIZER_NAME))

    def load_processor(self, kind: str) -> Any:
        """Load the `image processor`, the `feature extractor` for audio, or the `processor` for pages.

        Raises:
            CheckpointError: the checkpoint has none, it cannot be loaded, or Pillow is not installed.
        """
        import transformers

        auto_class, content = _AUTO_CLASSES[kind]
        if not any(self.source.locate(name) for name in PROCESSOR_NAMES):
            raise CheckpointError(
                f"{self.source.model_name} has no {kind} ({PROCESSOR_NAMES[0]})",
                f"save it next to the model with its save_pretrained(...); models of {content} need one",
            )
        self.require_sound_tokenizer()
        try:
            with quiet(), panics_as_exceptions():
                return getattr(transformers, auto_class).from_pretrained(
                    self.source.model_name, **self.source.arguments
                )
        except ImportError as error:
            raise CheckpointError(
                f"the {kind} of {self.source.model_name} needs a package that is not installed: "
                f"{' '.join(str(error).split())[:200]}",
                "pip install 'onnxtool-cli[images]' for images",
            ) from error
        except Exception as error:  # each class validates its settings differently, or not at all
            raise self.source.unreadable(error) from error

    def load_model(
        self,
        *,
        dtype: str,
        device: str,
        attention: str | None,
        allow_missing_weights: bool = False,
        allow_unused_weights: bool = False,
    ) -> Any:
        """Load the weights into the architecture, in evaluation mode and without caches.

        Args:
            dtype: a torch dtype name, e.g. `float32`.
            device: the torch device, e.g. `cpu`.
            attention: transformers' attention implementation; None for its default.
            allow_missing_weights: initialize missing weights instead of raising.
            allow_unused_weights: ignore weights that fit nowhere in the architecture instead of raising.

        Raises:
            CheckpointError: weights are missing, fit nowhere, or have another shape or kind than the architecture's.
            ProviderError: torch cannot use the device.
        """
        stored = read_headers(self.weight_files, self.source.model_name)
        self.notes.clear()
        model, info = self._load(dtype, attention, {})
        prefix = foreign_prefix(model, stored) if info["missing_keys"] and not self.quantizer else ""
        renaming: dict[str, Any] = {"key_mapping": key_mapping(prefix)} if prefix else {}
        if prefix:
            self.notes.append(f"the names of all weights begin with {prefix!r}, which was stripped")
            model, info = self._load(dtype, attention, renaming)
        labels = None if self.adapter is None else self.adapter.num_labels(model)
        if labels is not None:  # the adapter's own head, which the base's configuration does not count
            self.config.num_labels = labels
            model, info = self._load(dtype, attention, renaming)
        can_do_without = "add_pooling_layer" in inspect.signature(type(model)).parameters and not allow_missing_weights
        if can_do_without and info["missing_keys"] and all(name.startswith("pooler.") for name in info["missing_keys"]):
            self.notes.append("without its pooler, which the checkpoint does not have")
            model, info = self._load(dtype, attention, {**renaming, "add_pooling_layer": False})
        self._require_shapes(info, model)
        unknown = self._account(info, model, stored, prefix)
        self._require_all(unknown, missing=allow_missing_weights, unused=allow_unused_weights)
        if self.adapter is not None:
            model = self.adapter.merge(model)
            self.notes.append(self.adapter.note)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # caches are not outputs of an encoder, and were not requested
        if is_quantized(model) and device == "cpu":  # it is already there, and some quantizers refuse to be moved
            return model.eval()
        try:
            return model.to(device).eval()
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
            raise ProviderError(
                f"PyTorch cannot use the device {device!r}: {first_line(error)}", "pass --device cpu"
            ) from error

    def _require_all(self, unknown: list[str], *, missing: bool, unused: bool) -> None:
        """Refuse missing weights, and `unknown` ones that fit nowhere, unless they are allowed."""
        label = self.source.weights.model_name
        if self.initialized and not missing:
            unmatched = f", and weights that fit nowhere: {some(unknown)}" if unknown else ""
            raise CheckpointError(
                f"{label} has no weights for {some(self.initialized)} of {self.architecture}; they would be random "
                f"numbers{unmatched}",
                "export the architecture that it was saved as (--task auto), or pass --allow_missing_weights",
            )
        if unknown and not unused:
            raise CheckpointError(
                f"{len(unknown)} tensors of {label} fit nowhere in {self.architecture}, and would be ignored: "
                f"{some(unknown)}",
                "pass --allow_unused_weights if the model is right without them",
            )
        if unknown:
            self.notes.append(f"left out, because {self.architecture} has no place for them: {some(unknown)}")

    def _load(self, dtype: str, attention: str | None, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the model as loaded by transformers with further `arguments`, and its report about the weights."""
        import torch

        source = self.source.weights
        model_class = find_class(self.architecture, self.config, source)
        is_lowest = False
        try:
            with quiet(), torch.random.fork_rng(devices=[]), memory_limit(self._max_bytes) as is_lowest:
                torch.manual_seed(0)  # invented weights are the same in every load, and in every export
                model, info = model_class.from_pretrained(
                    source.model_name,
                    config=self.config,
                    dtype=getattr(torch, dtype),
                    use_safetensors=not self.is_pickle,  # torch loads only tensors from a pickle (weights_only)
                    ignore_mismatched_sizes=True,  # distinguished by name and shape
                    output_loading_info=True,
                    **arguments,
                    # transformers would insert the adapter, and report its weights instead of the model's.
                    **({"adapter_kwargs": {"subfolder": "none"}} if self.adapter else {}),
                    **({"attn_implementation": attention} if attention else {}),
                    **source.arguments,
                )
        except Exception as error:  # invalid configurations fail wherever the architecture first uses a value
            if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
                if not is_lowest:
                    raise MemoryError from error
                raise source.malformed(
                    "config.json", f"its model takes more than {self._max_bytes / 1e9:.0f} GB, and its weights less"
                ) from error
            if self.quantizer and isinstance(error, ImportError | NotImplementedError | RuntimeError):
                raise CheckpointError(
                    f"{source.model_name} is quantized by {self.quantizer}, which transformers cannot compute with "
                    f"here: {reason(error)}",
                    FLOAT_CHECKPOINT,
                ) from error
            raise source.unreadable(error) from error
        return model, info

    @property
    def _max_bytes(self) -> int:
        """Return the most memory that a model with these weights takes; a configuration could request any amount."""
        return _EXTRA_BYTES + sum(_COPIES * path.stat().st_size for path in self.weight_files)

    def _require_shapes(self, info: Mapping[str, Any], model: Any) -> None:
        """Refuse weights with more layers than the configuration, or with other shapes."""
        label = self.source.weights.model_name
        # A leftover head from another task is fine; a leftover layer of the model's kind is not.
        surplus = surplus_layers(model, info["unexpected_keys"])
        if surplus:
            raise CheckpointError(
                f"{label} has weights for more layers than config.json states: {some(surplus)}",
                "the folder mixes two models, or its config was edited; take both from one",
            )
        mismatched = sorted(
            f"{name} (weights {list(stored)}, config {list(wanted)})"
            for name, stored, wanted in info["mismatched_keys"]
        )
        if mismatched:
            raise CheckpointError(
                f"config.json and weights of {label} disagree on the shape of {some(mismatched)}",
                "the folder mixes two models; take both from one",
            )

    def _account(
        self, info: Mapping[str, Any], model: Any, stored: Mapping[str, StoredTensor], prefix: str
    ) -> list[str]:
        """Record the fate of the stored tensors, and which weights were initialized; return those that fit nowhere."""
        label = self.source.weights.model_name
        if self.quantizer:
            require_scaled(model, stored, label)
            coded = sum(not tensor.is_float for tensor in stored.values())
            self.notes.append(
                f"{coded} tensors, quantized by {self.quantizer}, are exported as the floats they stand for"
            )
            accounts = Accounts(unknown=tuple(sorted(info["unexpected_keys"])))
        else:
            accounts = account(model, stored, label, prefix)
        elsewhere = set[str]() if self.adapter is None else set(self.adapter.stored)
        self.initialized[:] = sorted(set(info["missing_keys"]) - elsewhere)
        if accounts.left_out:
            self.notes.append(f"left out, because {self.architecture} does not use them: {some(accounts.left_out)}")
        if accounts.defaults:
            self.notes.append(
                f"as transformers initializes them, because the checkpoint lacks them: {some(accounts.defaults)}"
            )
        if self.source.sentence_modules.is_late_interaction:  # Stanford's projection, which is read by a module
            elsewhere.add("linear.weight")
        return [name for name in accounts.unknown if name not in elsewhere]


def _digest(path: Path) -> Any:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


_MAX_PARTS = 4096  # the deepest models have some hundred layers, and at most two thousand experts
_MAX_LABELS = 1_000_000
# Settings for parts that a transformers class creates one by one.
_PARTS = re.compile(r"(^|_)(n|num|nb)_?(\w+_)?(layers?|blocks?|stages?|experts)$|_layers$|(^|_)depths?$|^layers$")


def load_config(source: Source) -> Any:
    """Read config.json into its transformers class.

    Raises:
        CheckpointError: it cannot be read, or transformers does not know its model type.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    _require_counts(source, source.read_object("config.json"))
    try:
        with quiet():
            return AutoConfig.from_pretrained(source.model_name, **source.arguments)
    except ValueError as error:
        model_type = source.read_object("config.json").get("model_type")
        if isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES:
            raise source.unreadable(error) from error
        if source.read_object("config.json").get("auto_map") and not source.trust_remote_code:
            raise CheckpointError(
                f"{source.model_name} is a model with its own code (auto_map in config.json), which was not run",
                "read that code, and pass --trust_remote_code if you trust it",
            ) from error
        similar = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, n=3)
        raise CheckpointError(
            f"transformers knows no model_type {model_type!r} (config.json of {source.model_name})",
            (f"did you mean {', '.join(similar)}? " if similar else "") + "a newer transformers may know it",
        ) from error
    except Exception as error:  # each configuration validates its values differently, or not at all
        raise source.unreadable(error) from error


def _require_counts(source: Source, settings: Mapping[str, Json]) -> None:
    """Refuse implausible numbers of layers, experts or labels: creating them would take hours and all memory."""
    for name, value in settings.items():
        if isinstance(value, dict):
            if len(value) > _MAX_LABELS:
                raise _too_many(source, name, len(value), _MAX_LABELS)
            _require_counts(source, value)
        limit = _MAX_LABELS if name == "num_labels" else _MAX_PARTS
        numbers = value if isinstance(value, list) else [value]
        if name == "num_labels" or _PARTS.search(name):
            for number in numbers:
                if isinstance(number, int | float) and number > limit:
                    raise _too_many(source, name, number, limit)


def _too_many(source: Source, name: str, number: float, limit: int) -> CheckpointError:
    return CheckpointError(
        f"config.json of {source.model_name} has {number} as {name}, and no model has more than {limit}",
        "the file is damaged or malicious; fetch it again",
    )


def find_class(architecture: str, config: Any, source: Source) -> Any:
    """Return the class named `architecture`, or transformers' automatic class for a checkpoint with its own code.

    Raises:
        CheckpointError: transformers has no such class, it is not a model, or it belongs to another configuration.
    """
    import torch
    import transformers

    if source.trust_remote_code:
        for auto_class, reference in (getattr(config, "auto_map", None) or {}).items():
            if str(reference).rsplit(".", 1)[-1] == architecture:
                return getattr(transformers, auto_class)
    model_class = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not hasattr(model_class, "from_pretrained"):
        raise CheckpointError(
            f"transformers {transformers.__version__} has no architecture {architecture!r} "
            f"(config.json of {source.model_name})",
            f"pass --task: {candidates(config)}; a model with its own code needs --trust_remote_code",
        )
    # The base classes of models have weights but no forward.
    is_base = getattr(model_class, "forward", None) is torch.nn.Module.forward
    if not issubclass(model_class, transformers.PreTrainedModel) or is_base:
        raise CheckpointError(
            f"{architecture}, which config.json of {source.model_name} names as its architecture, is not a model",
            f"name the class of the weights, or pass --task: {candidates(config)}",
        )
    wanted = getattr(model_class, "config_class", None)
    if isinstance(wanted, type) and not isinstance(config, wanted):
        raise CheckpointError(
            f"config.json of {source.model_name} is one of {config.model_type}, and names {architecture}, "
            f"which is a model of {getattr(wanted, 'model_type', wanted.__name__)}",
            f"the folder mixes two models; take both from one, or pass --task: {candidates(config)}",
        )
    return model_class


def architecture_for(config: Any, task: str) -> str:
    """Return the class for `task`: the one in config.json if it is suitable, else transformers' own.

    Raises:
        CheckpointError: transformers has none for it.
    """
    row = find_task(task)
    names = architectures(row, config.model_type)
    named = getattr(config, "architectures", None) or ()
    own = [name for name in named if name in names or serves(name, row) or name.endswith(row.own_suffixes)]
    if own:
        return str(own[0])
    if not names:
        raise CheckpointError(
            f"{config.model_type} has no architecture for the task {task}", f"pass one of: {candidates(config)}"
        )
    return names[0]


def base_architecture(config: Any) -> str:
    """Return the class of the model without a head; for an encoder-decoder, its encoder's class if there is one.

    Raises:
        CheckpointError: transformers has none.
    """
    named = architecture_for(config, "feature-extraction")
    if not getattr(config, "is_encoder_decoder", False):
        return named
    names = architectures(find_task("feature-extraction"), config.model_type)
    return next((name for name in names if name.endswith("EncoderModel")), named)


def candidates(config: Any) -> str:
    """List the tasks that a configuration can be used for, with their classes."""
    classes = [(task.name, architectures(task, config.model_type)) for task in TASKS]
    return ", ".join(f"{task} ({names[0]})" for task, names in classes if names) or "none that onnxtool knows"


def task_of_architecture(model_type: str, architecture: str) -> str:
    """Return the task of an architecture: one of TASK_NAMES, or `other`."""
    known = next((task.name for task in TASKS if architecture in architectures(task, model_type)), None)
    return known or next((task.name for task in TASKS if architecture.endswith(task.suffixes)), "other")


def architectures(task: Task, model_type: str) -> tuple[str, ...]:
    """Return the names of transformers' classes for a task and model type."""
    import transformers

    names: list[str] = []
    for auto_class in task.auto_classes:
        # Private, but the only list of what exists; it has names only, so nothing is imported. transformers 5.23.
        mapped = getattr(transformers, auto_class)._model_mapping._model_mapping.get(model_type, ())  # noqa: SLF001
        names += [mapped] if isinstance(mapped, str) else mapped
    return tuple(names)


def serves(architecture: str, task: Task) -> bool:
    """Return whether an architecture is for a task, for any model type: parts of larger models have their own."""
    import transformers

    for auto_class in task.auto_classes:
        for names in getattr(transformers, auto_class)._model_mapping._model_mapping.values():  # noqa: SLF001  as above
            if architecture in ((names,) if isinstance(names, str) else names):
                return True
    return False
