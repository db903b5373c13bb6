"""Supported page retrievers: their transformers processors, and what sentence-transformers adds."""

from __future__ import annotations

from collections.abc import Mapping

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.limits import Limit
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, MULTI_VECTOR, TOKENS, SentenceModules, positive
from onnxtool.checkpoint.token_modules import read_mask
from onnxtool.reports import Json

# Files with image processor settings; transformers reads those nested in the latter first.
PROCESSOR_NAMES = ("preprocessor_config.json", "processor_config.json")

_NAME, _TOKENIZER = "processor_config.json", "tokenizer_config.json"
# The processors, and their own settings.
_QUERY_AND_PAGE = ("query_prefix", "visual_prompt_prefix")
_PROCESSORS = {
    "ColPaliProcessor": _QUERY_AND_PAGE,
    "ColQwen2Processor": _QUERY_AND_PAGE,
    "ColModernVBertProcessor": (*_QUERY_AND_PAGE, "image_seq_len"),
}
_MODEL_PROCESSORS = {name.removesuffix("Processor").lower(): name for name in _PROCESSORS}
# Fixed-size pages, which consist only of pixels.
_WHOLE = "ColPaliProcessor"
# sentence-transformers 6.2 calls it in a way that drops the suffix of queries and the tokens of pages.
_WITHOUT_MODULES = "ColModernVBertProcessor"
# Class and file names, and parts that are read separately.
_HARMLESS = ("processor_class", "image_processor", "chat_template", "auto_map")
# sentence-transformers settings of a page retriever, which returns vectors itself, and settings without effect.
_MODULES = ("Transformer", "MultiVectorMask")
_FORWARD: Json = {"method": "forward", "method_output_name": "embeddings"}
_TRANSFORMER: Mapping[str, Json] = {
    "transformer_task": "retrieval",
    "modality_config": {"text": _FORWARD, "image": _FORWARD},
    "module_output_name": TOKENS,
}
_ENCODER: Mapping[str, tuple[Json, ...]] = {
    "model_type": (MULTI_VECTOR,),
    "prompts": ({}, {"query": "", "document": ""}),
    "similarity_fn_name": ("maxsim",),
}
_HINT = "prepare pages and queries with transformers for this checkpoint"
_NOTHING: tuple[Json, ...] = (None, False, {}, [])


def require_known_pages(files: CheckpointFiles) -> tuple[str, dict[str, Json]]:
    """Return the name of the processor for pages and queries, and its settings.

    Raises:
        OnnxtoolError: the processor, or a setting of it or of a module after the model, is not supported.
    """
    name = _processor_name(files)
    settings: dict[str, Json] = {
        key: value for key, value in files.read_object(_NAME).items() if value is not None and key not in _HARMLESS
    }
    unknown = [f"{key} {value!r}" for key, value in settings.items() if key not in _PROCESSORS[name]]
    if unknown:
        raise files.refuse(
            f"{_NAME} of {files.label} has settings that onnxtool does not support: {'; '.join(unknown)[:300]}",
            _HINT,
        )
    require_known_page_modules(files)
    return name, settings


def _processor_name(files: CheckpointFiles) -> str:
    """Return the processor class named in a checkpoint."""
    # Processors without other settings were saved without a separate file. If none is named, the model decides.
    names = {file: files.read_object(file).get("processor_class") for file in (_NAME, PROCESSOR_NAMES[0], _TOKENIZER)}
    names["config.json"] = _MODEL_PROCESSORS.get(str(files.read_object("config.json").get("model_type")))
    file, name = next(((file, name) for file, name in names.items() if name is not None), (_NAME, None))
    if not isinstance(name, str) or name not in _PROCESSORS:
        raise files.refuse(
            f"{file} of {files.label} names the processor {name!r}, and pages and queries are written as "
            f"{', '.join(_PROCESSORS)} do",
            _HINT,
        )
    return name


def page_limit(files: CheckpointFiles) -> Limit | None:
    """Return the maximum number of tokens of a page or query; None without modules: transformers does not truncate."""
    modules = SentenceModules.of(files)
    if not modules.modules:
        return None
    own, of_tokenizer = modules.max_sequence_length, positive(files.read_object(_TOKENIZER).get("model_max_length"))
    if own is not None:
        return Limit(own, f"max_seq_length of {modules.transformer_file}")
    return None if of_tokenizer is None else Limit(of_tokenizer, f"model_max_length of {_TOKENIZER}")


def require_known_page_modules(files: CheckpointFiles) -> None:
    """Refuse steps that sentence-transformers adds to the output of a page retriever's model.

    Raises:
        OnnxtoolError: it has other modules or settings.
    """
    modules, hint = SentenceModules.of(files), "export the checkpoint of transformers, without modules.json"
    if not modules.modules:
        return
    if modules.kinds != _MODULES:
        raise files.refuse(
            f"modules.json of {files.label} names {', '.join(modules.kinds)}, and of a retriever of pages "
            f"onnxtool follows {' and '.join(_MODULES)}",
            hint,
        )
    unknown = [
        f"{key} {value!r} of {modules.transformer_file}"
        for key, value in modules.transformer.items()
        if value not in (*_NOTHING, _TRANSFORMER.get(key)) and not (key == "max_seq_length" and positive(value))
    ]
    unknown += [f"no {key} in sentence_bert_config.json" for key in _TRANSFORMER if key not in modules.transformer]
    unknown += [
        f"{key} {value!r} of {ENCODER_NAME}"
        for key, value in modules.encoder.items()
        if key != "__version__" and value not in (*_NOTHING, *_ENCODER.get(key, ()))
    ]
    name = _processor_name(files)
    # If pages consist only of pixels, the accompanying tokens are not used.
    followed = ("skiplist_tasks", *(() if name == _WHOLE else ("keep_only_token_ids",)))
    unknown += [
        f"{key} {value!r} of MultiVectorMask"
        for key, value in modules.modules[1].settings.items()
        if key not in followed and value not in _NOTHING
    ]
    read_mask(modules)
    if unknown:
        raise files.refuse(
            f"{files.label} has settings that onnxtool does not support: {'; '.join(unknown)[:300]}", hint
        )
    if name == _WITHOUT_MODULES:
        raise files.refuse(
            f"sentence-transformers 6.2 calls {name} so that pages have no tokens, and queries lack those after them",
            hint,
        )
