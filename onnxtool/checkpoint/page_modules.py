"""Which retrievers of pages are followed: their processors of transformers, and what sentence-transformers adds."""

from __future__ import annotations

from collections.abc import Mapping

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.limits import Limit
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, MULTI_VECTOR, TOKENS, SentenceModules, positive
from onnxtool.checkpoint.token_modules import read_mask
from onnxtool.reports import Json

# Where the settings of an image processor stand; transformers reads those nested in the latter first.
PROCESSOR_NAMES = ("preprocessor_config.json", "processor_config.json")

_NAME, _TOKENIZER = "processor_config.json", "tokenizer_config.json"
# The processors, and their own settings.
_QUERY_AND_PAGE = ("query_prefix", "visual_prompt_prefix")
_PROCESSORS = {
    "ColPaliProcessor": _QUERY_AND_PAGE,
    "ColQwen2Processor": _QUERY_AND_PAGE,
    "ColModernVBertProcessor": (*_QUERY_AND_PAGE, "image_seq_len"),
}
_OF_MODELS = {name.removesuffix("Processor").lower(): name for name in _PROCESSORS}
# Pages of one size, which are pixels alone.
_WHOLE = "ColPaliProcessor"
# sentence-transformers 6.2 calls it so that queries go without what stands behind them, and pages without tokens.
_NOT_OF_MODULES = "ColModernVBertProcessor"
# Names of classes and files, and parts that are read for themselves.
_HARMLESS = ("processor_class", "image_processor", "chat_template", "auto_map")
# What sentence-transformers says of a retriever of pages, which gives vectors itself, and what beside that changes
# nothing.
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
    """Return the name of the processor that prepares pages and writes queries, and its own settings.

    Raises:
        OnnxtoolError: it is another one, or it or a module behind the model has settings that are not followed.
    """
    name = _processor_name(files)
    settings: dict[str, Json] = {
        key: value for key, value in files.read(_NAME).items() if value is not None and key not in _HARMLESS
    }
    unknown = [f"{key} {value!r}" for key, value in settings.items() if key not in _PROCESSORS[name]]
    if unknown:
        raise files.refuse(
            f"{_NAME} of {files.label} has settings that onnxtool does not follow: {'; '.join(unknown)[:300]}",
            _HINT,
        )
    require_known_page_modules(files)
    return name, settings


def _processor_name(files: CheckpointFiles) -> str:
    """Return the class of the processor that a checkpoint names.

    Raises:
        OnnxtoolError: it is none of those that are followed.
    """
    # Processors that say nothing else were saved without a file of their own. Without any name, the model decides.
    names = {file: files.read(file).get("processor_class") for file in (_NAME, PROCESSOR_NAMES[0], _TOKENIZER)}
    names["config.json"] = _OF_MODELS.get(str(files.read("config.json").get("model_type")))
    file, name = next(((file, name) for file, name in names.items() if name is not None), (_NAME, None))
    if not isinstance(name, str) or name not in _PROCESSORS:
        raise files.refuse(
            f"{file} of {files.label} names the processor {name!r}, and pages and queries are written as "
            f"{', '.join(_PROCESSORS)} do",
            _HINT,
        )
    return name


def page_limit(files: CheckpointFiles) -> Limit | None:
    """Return the most tokens of a page or query; None for a checkpoint without modules: transformers cuts none."""
    modules = SentenceModules.of(files)
    if not modules.modules:
        return None
    own, of_tokenizer = modules.max_sequence_length, positive(files.read(_TOKENIZER).get("model_max_length"))
    if own is not None:
        return Limit(own, f"max_seq_length of {modules.transformer_file}")
    return None if of_tokenizer is None else Limit(of_tokenizer, f"model_max_length of {_TOKENIZER}")


def require_known_page_modules(files: CheckpointFiles) -> None:
    """Refuse what sentence-transformers computes with a retriever of pages beyond what its model gives.

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
    # Where pages are pixels alone, nobody sees the tokens beside them.
    followed = ("skiplist_tasks", *(() if name == _WHOLE else ("keep_only_token_ids",)))
    unknown += [
        f"{key} {value!r} of MultiVectorMask"
        for key, value in modules.modules[1].settings.items()
        if key not in followed and value not in _NOTHING
    ]
    read_mask(modules)
    if unknown:
        raise files.refuse(
            f"{files.label} has settings that onnxtool does not follow: {'; '.join(unknown)[:300]}", hint
        )
    if name == _NOT_OF_MODULES:
        raise files.refuse(
            f"sentence-transformers 6.2 calls {name} so that pages have no tokens, and queries lack those behind them",
            hint,
        )
