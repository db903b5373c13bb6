"""sentence-transformers: its own modules after a transformer that onnxtool.sentence_transformers runs.

From the sources of sentence-transformers 6.2.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.pruning import COUNTS, Pruning
from onnxtool.checkpoint.sentence_modules import (
    ENCODER_NAME,
    MODULES_NAME,
    ROUTER_NAME,
    TRANSFORMER_NAMES,
    TRANSFORMERS,
    as_list,
    as_object,
)
from onnxtool.checkpoint.static_embeddings import SparseStaticEmbedding, require_same_tokens
from onnxtool.errors import TargetError
from onnxtool.export.sidecar_files import write_json
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.targets import DENSE, INFERENCE_FREE, SCORES, SPARSE, TOKENS, VERDICTS
from onnxtool.reports import Json
from onnxtool.version import DISTRIBUTION, __version__

CLASS = "onnxtool.sentence_transformers.Transformer"
# Modules whose only files are config.json and, for some, model.safetensors.
_WITH_WEIGHTS = frozenset(("Dense", "LayerNorm", "SparseAutoEncoder"))
_SCORE = "LogitScore"
_LOADED = _WITH_WEIGHTS | {"Pooling", "Normalize", "Dropout", "SpladePooling", "MultiVectorMask", _SCORE}
_ENCODERS = {
    DENSE: "SentenceTransformer",
    SPARSE: "SparseEncoder",
    INFERENCE_FREE: "SparseEncoder",
    TOKENS: "MultiVectorEncoder",
    SCORES: "CrossEncoder",
    VERDICTS: "CrossEncoder",
}
_TASKS = {
    DENSE: "feature-extraction",
    SPARSE: "fill-mask",
    INFERENCE_FREE: "fill-mask",
    TOKENS: "feature-extraction",
    SCORES: "sequence-classification",
    VERDICTS: "text-generation",
}
_PACKAGE = "sentence_transformers"
_REASON = "It runs the ONNX file of this model instead of PyTorch."


class SentenceTransformersSpecification(TargetSpecification):
    """The checkpoint's own files, and a graph in the folder `onnx` through a class from onnxtool."""

    def accepts(self) -> None:
        """Refuse modules with unknown files, and a transformer whose output differs from the graph's."""
        source, usage, modules = self.source, self.usage, self.source.sentence_modules
        if modules.modules and source.read_json(MODULES_NAME) is None:
            raise _refusal(
                f"{source.model_name} has the layout of Stanford's ColBERT, which sentence-transformers rewrites as it "
                "loads it",
                "save it with save_pretrained of MultiVectorEncoder, and export what that wrote",
            )
        routed = [str(as_object(entry).get("type")) for entry in as_list(source.read_json(MODULES_NAME))]
        if modules.query is None and any(name.endswith((".Router", ".Asym")) for name in routed):
            raise _refusal(f"{source.model_name} is a Router of several models, and a folder holds one of them")
        if usage.kind == VERDICTS and not modules.modules:
            raise _refusal(
                f"{source.model_name} has no modules, by which {self.target.title} would know which tokens are scored",
                f"save it with {_ENCODERS[VERDICTS]} first, and export what that wrote; or pass --target plain",
            )
        first, *following = modules.kinds or ("Transformer",)
        if first not in TRANSFORMERS:
            raise _refusal(
                f"{source.model_name} begins with {first}, which is not a transformer that onnxruntime can run"
            )
        if unknown := [kind for kind in following if kind not in _LOADED]:
            raise _refusal(f"{source.model_name} has the modules {', '.join(unknown)}, whose files are not known here")
        for stored in modules.modules:
            if stored.kind in _WITH_WEIGHTS:
                source.read_tensors(stored.folder)
        settings, name = modules.transformer, modules.transformer_file
        if (task := settings.get("transformer_task", TRANSFORMERS[first])) != _TASKS[usage.kind] and modules.modules:
            raise _refusal(f"{source.model_name} has the transformer_task {task!r} ({name}), not {_TASKS[usage.kind]}")
        output = usage.outputs[0].name
        for modality, settings_of_modality in as_object(settings.get("modality_config")).items():
            output_name = as_object(settings_of_modality).get("method_output_name")
            if as_object(settings_of_modality).get("method") != "forward" or output_name not in (output, [output]):
                raise _refusal(f"{source.model_name} reads {output_name!r} for {modality} ({name}), not {output}")
        if modules.query is not None:
            require_same_tokens(modules.query, source)
            SparseStaticEmbedding.read(modules.query)
        super().accepts()

    def files(self, folder: Path, longest: int | None) -> None:
        """Name onnxtool's class instead of the transformer's, and write what sentence-transformers assumes by default.

        A transformers-only checkpoint gets the modules that sentence-transformers would add.
        """
        super().files(folder, longest)
        kind, files = self.usage.kind, CheckpointFolder(folder)
        stored = files.sentence_modules
        if not stored.modules:
            _write_modules(folder, kind, _default_pooling(kind, self.config))
        elif stored.query is None:
            first, *following = as_list(files.read_json(MODULES_NAME))
            write_json(folder / MODULES_NAME, [{**as_object(first), "type": CLASS}, *following])
        else:
            routes = files.read_object(ROUTER_NAME)
            types = {**as_object(routes.get("types")), stored.modules[0].folder: CLASS}
            write_json(folder / ROUTER_NAME, {**routes, "types": types})
            copy = folder / stored.query.file("tokenizer.json")  # identical, as ensured by `accepts`
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / "tokenizer.json", copy)
        if (score := stored.first_of(_SCORE)) is not None:  # the graph has computed it: the one logit that it returns
            write_json(
                folder / score.file("config.json"), {**score.settings, "true_token_id": 0, "false_token_id": None}
            )
        # As in the files: a late-interaction encoder's description includes settings that PyLate keeps elsewhere.
        name = stored.transformer_file or TRANSFORMER_NAMES[0]
        settings = files.read_object(name)
        if settings.get("transformer_task") is None:  # it was implied by the class
            write_json(folder / name, {**settings, "transformer_task": _TASKS[kind]})
        requirement = {DISTRIBUTION: {"specifier": f">={__version__}", "reason": _REASON}}
        encoder = {"prompts": {}, "default_prompt_name": None, **files.read_object(ENCODER_NAME)}
        if kind != TOKENS:  # a PyLate model without a name gets converted; a name would prevent that
            encoder.setdefault("model_type", _ENCODERS[kind])
        if self.pruning is not None:
            own, number = encoder.get("max_active_dims"), int(self.pruning.number)
            encoder["max_active_dims"] = min(own, number) if isinstance(own, int) else number
        required = as_object(encoder.get("requirements"))
        write_json(folder / ENCODER_NAME, {**encoder, "requirements": {**required, **requirement}})

    def with_pruning(self, pruning: Pruning, *, in_graph: bool) -> TargetSpecification:
        """Return the specification of a model whose sentence-transformers keeps as many terms.

        Raises:
            TargetError: it weighs no terms, or the rule is another one.
        """
        if self.usage.kind != SPARSE or pruning.rule not in COUNTS:
            raise TargetError(
                f"sentence-transformers keeps a number of terms of sparse encoders, and --prune {pruning} was passed",
                f"pass {' or '.join(COUNTS)}, or leave --prune out",
            )
        return replace(self, pruning=pruning)

    @property
    def note(self) -> str:
        """Instructions to load it."""
        return (
            f'import onnxtool.sentence_transformers, then load it with {_ENCODERS[self.usage.kind]}("FOLDER") of '
            "sentence-transformers 6; without that import, trust_remote_code=True"
        )


def _refusal(message: str, hint: str = "") -> TargetError:
    return TargetError(
        message, hint or "load the checkpoint with PyTorch in sentence-transformers; or pass --target plain"
    )


def _default_pooling(kind: str, config: Any) -> tuple[str, Mapping[str, Json]] | None:
    """Return the module that sentence-transformers adds to a transformer, as class and settings; None for none."""
    if kind == SPARSE:
        settings = {"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": config.vocab_size}
        return f"{_PACKAGE}.sparse_encoder.modules.splade_pooling.SpladePooling", settings
    if kind == SCORES:
        return None
    named = (getattr(config, "architectures", None) or [""])[0]
    is_causal = named.endswith("ForCausalLM") and getattr(config, "is_causal", True)
    settings = {"embedding_dimension": config.hidden_size, "pooling_mode": "lasttoken" if is_causal else "mean"}
    return f"{_PACKAGE}.sentence_transformer.modules.pooling.Pooling", settings


def _write_modules(folder: Path, kind: str, pooling: tuple[str, Mapping[str, Json]] | None) -> None:
    listed: list[Json] = [{"idx": 0, "name": "0", "path": "", "type": CLASS}]
    if pooling is not None:
        class_name, settings = pooling
        path = f"1_{class_name.rpartition('.')[2]}"
        (folder / path).mkdir(exist_ok=True)
        write_json(folder / path / "config.json", dict(settings))
        listed.append({"idx": 1, "name": "1", "path": path, "type": class_name})
    write_json(folder / MODULES_NAME, listed)


SPECIFICATION = SentenceTransformersSpecification
