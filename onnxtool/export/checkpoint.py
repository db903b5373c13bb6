"""A checkpoint: its configuration, task, architecture, tokenizer and weights.

Weights are safetensors unless a user allows a pickle, which can run code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.files import M3_FILES, MODULE_WEIGHTS
from onnxtool.checkpoint.folder import TOKENIZER_NAME
from onnxtool.checkpoint.pooling_modules import LogitScore, Pooling
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING, recognize_task
from onnxtool.checkpoint.tokenizer_library import panics_as_exceptions, require_character_maps
from onnxtool.errors import CheckpointError, ProviderError
from onnxtool.export.configuration import (
    architecture_for,
    base_architecture,
    candidates,
    find_class,
    load_config,
    task_of_architecture,
)
from onnxtool.export.source import Source, plain_name, refused_object
from onnxtool.export.vocabularies import has_vocabulary, missing_packages
from onnxtool.runtime.quiet import quiet

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_AUTO_CLASSES = {
    "image processor": ("AutoImageProcessor", "pictures"),
    "feature extractor": ("AutoFeatureExtractor", "sound"),
    "processor": ("AutoProcessor", "pictures and texts"),
}
_WEIGHTS = "model.safetensors"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer, in the name of a weight
_PICKLE = "pytorch_model.bin"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration has been read and whose architecture and task are known.

    Attributes:
        config: the PretrainedConfig.
        architecture: the class whose weights it holds.
        task: one of TASK_NAMES, or `other`.
        allow_pickle: whether weights may come from a pickle where there are no others.
        initialized: names of weights that the checkpoint does not have and that loading made up; known once loaded.
        unused: names of weights that the architecture does not have; known once loaded.
    """

    source: Source
    config: Any
    architecture: str
    task: str
    allow_pickle: bool = False
    initialized: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, source: Source, *, task: str = "auto", allow_pickle: bool = False) -> Checkpoint:
        """Read the configuration and decide on architecture and task.

        The architecture is the one that config.json names, not a base model: a SPLADE checkpoint keeps its MLM head.
        With an explicit `task`, it is the class for that task where config.json names another one.

        Raises:
            CheckpointError: the configuration is missing, cannot be read, or names no architecture that transformers
                has.
        """
        source.require_transformer()
        if source.is_local:  # known from names in a moment; of the hub, weights are fetched once all else is right
            _weight_files(source, allow_pickle=allow_pickle)
        config = load_config(source)
        named = getattr(config, "architectures", None) or []
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise CheckpointError(
                f"config.json of {source.model_name} names {named!r} as its architectures, which is no list of names",
                'write it as "architectures": ["BertForMaskedLM"], with the class that the weights are of',
            )
        if task != "auto":
            architecture = architecture_for(config, task)
            return cls(source, config, architecture, task, allow_pickle)
        if not named:
            raise CheckpointError(
                f"config.json of {source.model_name} names no architecture",
                f'add one to it ("architectures": ["…"]), or pass --task: {candidates(config)}',
            )
        if source.sentence_modules.is_late_interaction:
            return cls(source, config, base_architecture(config), LATE_INTERACTION, allow_pickle)
        kinds, architecture = source.sentence_modules.kinds, named[0]
        general = task_of_architecture(config.model_type, architecture)
        if general != "feature-extraction" and Pooling.__name__ in kinds:
            # sentence-transformers pools the states of the base model, whatever head the checkpoint was saved with.
            architecture, general = base_architecture(config), "feature-extraction"
        if LogitScore.__name__ in kinds:  # which reads the logits of a causal language model
            architecture, general = architecture_for(config, RANKING), "text-generation"
        task = recognize_task(general, kinds=kinds, tags=source.card_tags)
        if task == "feature-extraction" and not kinds and all(source.locate(name) for name in M3_FILES):
            task = "sentence-similarity"
        return cls(source, config, architecture, task, allow_pickle)

    @property
    def revision(self) -> str:
        """The commit on the hub; empty for a folder that is no snapshot of it."""
        if self.source.snapshot is not None:
            return self.source.snapshot.commit
        return getattr(self.config, "_commit_hash", None) or ""

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, in the order of their names; pickles where there are no others and they are allowed.

        Raises:
            CheckpointError: there are none.
        """
        return _weight_files(self.source, allow_pickle=self.allow_pickle)

    @property
    def is_pickle(self) -> bool:
        """Whether the weights come from a pickle."""
        return any(path.suffix == ".bin" for path in self.weight_files)

    @cached_property
    def weights_sha256(self) -> str:
        """One hash over all weight files, which tells two checkpoints of one name apart."""
        return _sha256(self.weight_files)

    @cached_property
    def module_weights_sha256(self) -> str:
        """One hash over the weights of the modules of sentence-transformers (Dense); empty where there are none.

        Raises:
            CheckpointError: modules.json is malformed, or names a path outside the checkpoint.
        """
        modules = [module for module in self.source.sentence_modules.modules if module.folder]
        found = [self.source.locate(module.file(MODULE_WEIGHTS)) for module in modules]
        files = [path for path in (*found, *map(self.source.locate, M3_FILES)) if path is not None]
        return _sha256(files) if files else ""

    def load_tokenizer(self) -> Any:
        """Load the tokenizer.

        Raises:
            CheckpointError: the checkpoint has none, or it does not load.
        """
        from transformers import AutoTokenizer

        # transformers makes up an empty vocabulary for a checkpoint without one.
        if not has_vocabulary(self.source, self.config.model_type):
            raise CheckpointError(
                f"{self.source.model_name} has no tokenizer (tokenizer.json, vocab.txt, …)",
                "save it beside the model with tokenizer.save_pretrained(...); models of text need one",
            )
        self.require_sound_tokenizer()
        try:
            with quiet(), panics_as_exceptions():
                return AutoTokenizer.from_pretrained(self.source.model_name, **self.source.arguments)
        except Exception as error:  # damaged files fail in each tokenizer's own way, in Rust as well
            missing = missing_packages(self.source, self.config.model_type)
            if missing:
                raise CheckpointError(
                    f"the tokenizer of {self.source.model_name} is a SentencePiece model, "
                    f"which cannot be read without {' and '.join(missing)}",
                    f"pip install {' '.join(missing)}; or save it as tokenizer.json where they are installed",
                ) from error
            raise self.source.unreadable(error) from error

    def require_sound_tokenizer(self) -> None:
        """Refuse a tokenizer.json that would fill the memory where it is loaded.

        Raises:
            CheckpointError: it would, or it cannot be read.
        """
        content = self.source.read_text(TOKENIZER_NAME)
        if content is not None:
            require_character_maps(content.encode(), partial(self.source.malformed, TOKENIZER_NAME))

    def load_processor(self, kind: str) -> Any:
        """Load the `image processor`, the `feature extractor`, which prepares sound, or the `processor` of pages.

        Raises:
            CheckpointError: the checkpoint has none, it does not load, or Pillow is not installed.
        """
        import transformers

        auto_class, content = _AUTO_CLASSES[kind]
        if not any(self.source.locate(name) for name in _PROCESSORS):
            raise CheckpointError(
                f"{self.source.model_name} has no {kind} ({_PROCESSORS[0]})",
                f"save it beside the model with its save_pretrained(...); models of {content} need one",
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
                "pip install 'onnxtool[images]' for pictures",
            ) from error
        except Exception as error:  # each class checks its settings in its own way, or not at all
            raise self.source.unreadable(error) from error

    def load_model(self, *, dtype: str, device: str, attention: str | None, allow_missing_weights: bool = False) -> Any:
        """Load the weights into the architecture, in evaluation mode and without caches.

        Args:
            dtype: a torch dtype by name, e.g. `float32`.
            device: where torch runs it, e.g. `cpu`.
            attention: transformers' attention implementation; None leaves the choice to it.
            allow_missing_weights: initialize what the checkpoint does not have instead of raising.

        Raises:
            CheckpointError: weights are missing or of another shape.
            ProviderError: torch cannot use the device.
        """
        import torch

        is_pickle = self.is_pickle  # raises with a better message than transformers does
        model_class = find_class(self.architecture, self.config, self.source)
        torch_dtype = getattr(torch, dtype)
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # what has to be made up is the same in every load, and in every export
                model, info = model_class.from_pretrained(
                    self.source.model_name,
                    config=self.config,
                    dtype=torch_dtype,
                    use_safetensors=not is_pickle,  # of a pickle, torch loads tensors alone (weights_only)
                    ignore_mismatched_sizes=True,  # told apart below, by name and shape
                    output_loading_info=True,
                    **({"attn_implementation": attention} if attention else {}),
                    **self.source.arguments,
                )
        except Exception as error:  # a config of wrong values fails wherever the architecture first uses one
            if is_pickle and (refused := refused_object(error)):
                raise CheckpointError(
                    f"{self.weight_files[0].name} of {self.source.model_name} holds more than tensors ({refused}), "
                    "and loading that runs code",
                    "take a checkpoint with safetensors, or save the tensors alone where you trust the file",
                ) from error
            raise self.source.unreadable(error) from error
        self.initialized[:] = sorted(info["missing_keys"])
        self.unused[:] = sorted(info["unexpected_keys"])
        self._check_loading(info, model, allow_missing_weights=allow_missing_weights)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # caches are no output of an encoder, and none that a user asked for
        try:
            return model.to(device).eval()
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
            raise ProviderError(
                f"PyTorch cannot use the device {device!r}: {(str(error).splitlines() or [''])[0]}", "pass --device cpu"
            ) from error

    def _check_loading(self, info: dict[str, Any], model: Any, *, allow_missing_weights: bool) -> None:
        # A head that another task used may be left over; a layer like those of the model may not.
        surplus = _surplus_layers(model, self.unused)
        if surplus:
            raise CheckpointError(
                f"{self.source.model_name} has weights of more layers than config.json counts: {some(surplus)}",
                "the folder mixes two models, or its config was edited; take both from one",
            )
        mismatched = sorted(
            f"{name} (weights {list(found)}, config {list(wanted)})" for name, found, wanted in info["mismatched_keys"]
        )
        if mismatched:
            raise CheckpointError(
                f"config.json and weights of {self.source.model_name} disagree on the shape of {some(mismatched)}",
                "the folder mixes two models; take both from one",
            )
        if self.initialized and not allow_missing_weights:
            raise CheckpointError(
                f"{self.source.model_name} has no weights for {some(self.initialized)} of {self.architecture}; "
                "they would be random numbers",
                "export the architecture that it was saved as (--task auto), or pass --allow_missing_weights",
            )


def _surplus_layers(model: Any, unused: Iterable[str]) -> list[str]:
    """Return the weights among `unused` that belong to layers of which the model has others, or an empty list.

    A weight is of such a layer where the model has one of the same name but for its numbers
    (`stages.0.blocks.1.weight` beside `stages.0.blocks.0.weight`), or where a list of layers that its name goes
    through has none. Both are layers that the checkpoint was trained with; what remains of another head is neither.

    Args:
        model: a transformers model, loaded.
        unused: the weights of its checkpoint that it has no place for.
    """
    import torch

    known = {_without_numbers(name) for name in model.state_dict()}
    empty = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and not len(module)
    }
    base = f"{getattr(model, 'base_model_prefix', '')}."
    return sorted(
        weight
        for weight in unused
        # A checkpoint of the base model alone has no prefix, and a model that is the base has none.
        if any(
            (_NUMBER.search(name) and _without_numbers(name) in known) or not empty.isdisjoint(_numbered_lists(name))
            for name in (weight, base + weight, weight.removeprefix(base))
        )
    )


def _without_numbers(name: str) -> str:
    return _NUMBER.sub("#", name)


def _numbered_lists(name: str) -> Iterator[str]:
    """Yield what the numbers in a name count the members of: `decoder.block` of `decoder.block.3.weight`."""
    for match in _NUMBER.finditer(name):
        yield name[: match.start() - 1]


def _weight_files(source: Source, *, allow_pickle: bool) -> tuple[Path, ...]:
    files = _files(source, _WEIGHTS)
    if files:
        return files
    pickles = _files(source, _PICKLE)
    if pickles and allow_pickle:
        return pickles
    if pickles:
        raise CheckpointError(
            f"{source.model_name} has its weights in a pickle ({pickles[0].name}) only, which can run code",
            "if you trust it, pass --allow_pickle; or convert it: save_pretrained(...) writes model.safetensors",
        )
    raise CheckpointError(
        f"{source.model_name} has no weights ({_WEIGHTS})",
        "a tokenizer or configuration alone cannot be exported; pass the model's own folder or id",
    )


def _files(source: Source, name: str) -> tuple[Path, ...]:
    """Return the file called `name`, or the shards that its index names; nothing where neither is complete."""
    single = source.locate(name)
    if single is not None:
        return (single,)
    names = source.read(f"{name}.index.json").get("weight_map")
    if not isinstance(names, dict):
        return ()
    shards = [source.locate(plain_name(str(shard))) for shard in sorted(set(map(str, names.values())))]
    return tuple(shard for shard in shards if shard is not None) if all(shards) else ()


def _sha256(files: Iterable[Path]) -> str:
    """Hash the hashes of several files, in their order."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def some(names: Sequence[str]) -> str:
    """List the first names, and how many more there are."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
