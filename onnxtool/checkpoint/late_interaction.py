"""Describe late-interaction encoders (ColBERT) as MultiVectorEncoder of sentence-transformers 6.2 reads them.

Three layouts become one description: sentence-transformers' own; PyLate's, with its settings in
config_sentence_transformers.json; and that used by Stanford's ColBERT, which has no modules.json, keeps its settings in
artifact.metadata, and stores the projection with the transformer's weights.

Khattab and Zaharia, 2020, arXiv:2004.12832.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.sentence_modules import (
    ENCODER_NAME,
    MULTI_VECTOR,
    PYLATE,
    TOKENS,
    VECTOR,
    SentenceModules,
    StoredModule,
    as_object,
    positive,
)
from onnxtool.reports import Json

METADATA_NAME = "artifact.metadata"
_ROLES = ("query", "document")
# Default query length of Stanford's ColBERT and of PyLate.
_USUAL_LENGTH = 32
# Settings of the transformer module that PyLate keeps with the encoder settings.
_TRANSFORMER_KEYS = ("query_length", "document_length", "query_expansion")
_MAX_TOKENS = 1 << 16  # tokens in an expanded query: more than any encoder takes
# If any of these keys is present, queries are expanded unless do_query_expansion is false.
_PYLATE_KEYS = (
    *_TRANSFORMER_KEYS,
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
    *("query_prefix", "document_prefix", "skiplist_words"),
)


@dataclass(frozen=True)
class QueryExpansion:
    """Tokens appended to a short query, whose vectors count too.

    Attributes:
        length: the minimum number of tokens in an expanded query.
        is_exact: whether a longer query is truncated to that length; otherwise it stays as it is.
        attend: whether the model attends to them. In ColBERT it does not, but they attend to the query.
        token: the repeated token; None for the tokenizer's mask token, or its end-of-text token if it has no mask.
    """

    length: int
    is_exact: bool
    attend: bool = False
    token: str | None = None

    @classmethod
    def of(cls, modules: SentenceModules, files: CheckpointFiles) -> QueryExpansion | None:
        """Read the transformer module's settings; None if queries are not expanded.

        Raises:
            OnnxtoolError: a setting is unknown, or not accepted by sentence-transformers.
        """
        stated = modules.transformer.get("query_expansion")
        if stated is None:
            return None
        settings = as_object(stated)
        length, strategy = positive(settings.get("length")), settings.get("strategy")
        attend, token = settings.get("attend", False), settings.get("token")
        if length is not None and length > _MAX_TOKENS:
            raise files.refuse(f"{files.label} expands queries to {length} tokens", "it may be malicious")
        is_known = settings.keys() <= {"strategy", "attend", "token", "length"} and strategy in ("fixed", "min")
        if not is_known or length is None or not isinstance(attend, bool) or not isinstance(token, str | None):
            raise files.refuse(
                f"{files.label} expands queries by {stated!r}; sentence-transformers knows the strategies fixed and "
                "min, with a length, and with attend and token"
            )
        if "message" in as_object(modules.transformer.get("modality_config")):
            raise files.refuse(
                f"{files.label} expands queries that are put into a chat template, which sentence-transformers refuses "
                "as well"
            )
        content = positive(modules.transformer.get("query_length"))
        if content is not None and content < length:
            raise files.refuse(
                f"{files.label} cuts queries to {content} tokens and expands them to {length}, "
                "which sentence-transformers also refuses"
            )
        return cls(length, strategy == "fixed", attend, token)

    def find_token(
        self,
        id_of: Callable[[str], int | None],
        default_tokens: Sequence[str | None],
        files: CheckpointFiles,
        *,
        pads_left: bool,
    ) -> int:
        """Return the id of the token that is repeated.

        Args:
            id_of: returns the id of a token; None for an unknown one.
            default_tokens: the mask token and the end-of-text token; None if the tokenizer has none.
            files: the checkpoint, for errors.
            pads_left: whether the tokenizer pads on the left.

        Raises:
            OnnxtoolError: the tokenizer has no such token, or tokens before a text have no meaningful vectors.
        """
        if pads_left and not (self.is_exact and self.attend):
            effect = (
                "a decoder would give them vectors of nothing: none of them sees a token"
                if self.is_exact
                else "the vectors of a query would depend on the queries that are padded with it"
            )
            raise files.refuse(
                f"{files.label} pads on the left and expands queries before their texts (query_expansion "
                f"{'fixed, attend false' if self.is_exact else 'min'}), where {effect}"
            )
        named = next((token for token in (self.token, *default_tokens) if token is not None), None)
        token_id = None if named is None else id_of(named)
        if token_id is None:
            raise files.refuse(
                f"{files.label} expands queries by "
                + ("a mask token, and its tokenizer has none" if named is None else f"{named!r}, no token of its own"),
            )
        return token_id


def as_multi_vector(modules: SentenceModules, files: CheckpointFiles) -> SentenceModules:
    """Return the modules of a late-interaction encoder as in sentence-transformers 6.2.

    Raises:
        OnnxtoolError: a file is malformed.
    """
    return _from_settings(modules, files) if modules.modules else _from_stanford(files)


def _from_settings(modules: SentenceModules, files: CheckpointFiles) -> SentenceModules:
    """Convert PyLate's settings to sentence-transformers' layout, and its inline steps to modules."""
    encoder = modules.encoder
    prompts = dict(as_object(encoder.get("prompts")))
    prefixes = {}
    for role in _ROLES:
        if f"{role}_prefix" in encoder:
            prefixes[role] = _text(files, ENCODER_NAME, f"{role}_prefix", encoder[f"{role}_prefix"])
            prompt = _text(files, ENCODER_NAME, f"the prompt {role}", prompts.get(role))
            prompts[role] = prefixes[role] + prompt.removeprefix(prefixes[role])
    chain = [_on_tokens(module) for module in modules.modules]
    if modules.encoder_class != MULTI_VECTOR:
        skipped = encoder.get("skiplist_words")
        if skipped is None and (modules.encoder_class == PYLATE or prefixes):
            skipped = list(string.punctuation)
        if modules.encoder_class != PYLATE:  # read like any embedder, without the pooling to one vector
            chain = [module for module in chain if module.kind != "Pooling" and not _is_of_vectors(module)]
        chain += _counting(files, skipped)
    return replace(
        modules,
        modules=tuple(chain),
        encoder={**encoder, "model_type": MULTI_VECTOR, "prompts": prompts},
        # The transformer module's own settings take precedence.
        transformer={**_settings_of_transformer(encoder), **modules.transformer},
        prefixes=tuple(prefixes.values()),
    )


def _settings_of_transformer(encoder: Mapping[str, Json]) -> dict[str, Json]:
    settings = {
        key: encoder[key]
        for key in _TRANSFORMER_KEYS
        if key in encoder and (encoder[key] is not None or key == "query_expansion")
    }
    if "query_expansion" in settings or not any(key in encoder for key in _PYLATE_KEYS):
        return settings
    if encoder.get("do_query_expansion") is False:
        return {**settings, "query_expansion": None}
    attend = encoder.get("attend_to_expansion_tokens", encoder.get("attend_to_mask_tokens"))
    length = settings.pop("query_length", None) or _USUAL_LENGTH
    return {**settings, "query_expansion": {"strategy": "fixed", "attend": bool(attend), "length": length}}


def _from_stanford(files: CheckpointFiles) -> SentenceModules:
    """Describe a checkpoint of Stanford's ColBERT from its artifact.metadata, or by defaults if that is missing."""
    metadata = files.read_object(METADATA_NAME)
    markers = zip(_ROLES, ("query_token_id", "doc_token_id"), ("[unused0]", "[unused1]"), strict=True)
    prompts = {
        role: (_text(files, METADATA_NAME, key, metadata.get(key)) or usual) + " " for role, key, usual in markers
    }
    attend, length = bool(metadata.get("attend_to_mask_tokens")), metadata.get("query_maxlen") or _USUAL_LENGTH
    settings: dict[str, Json] = {"query_expansion": {"strategy": "fixed", "attend": attend, "length": length}}
    if metadata.get("doc_maxlen") is not None:
        settings["document_length"] = metadata["doc_maxlen"]
    # The projection is stored with the transformer's weights, and its shape comes from its weight.
    projection: dict[str, Json] = {
        "bias": False,
        "activation_function": "torch.nn.Identity",
        "module_input_name": TOKENS,
    }
    skipped: Json = [*string.punctuation] if metadata.get("mask_punctuation", True) else []
    return SentenceModules(
        (
            StoredModule("Transformer", "", {}, files),
            StoredModule("Dense", "", projection, files),
            *_counting(files, skipped),
        ),
        {"model_type": MULTI_VECTOR, "prompts": {**prompts}},
        settings,
        METADATA_NAME,
        prefixes=tuple(prompts.values()),
    )


def _counting(files: CheckpointFiles, skipped: Json) -> tuple[StoredModule, ...]:
    """Return the modules that select the tokens and scale their vectors."""
    return (
        StoredModule("MultiVectorMask", "", {"skiplist_words": skipped}, files),
        StoredModule("Normalize", "", {"module_input_name": TOKENS}, files),
    )


def _on_tokens(module: StoredModule) -> StoredModule:
    """Apply a Dense without a stated input to tokens, as in a multi-vector encoder."""
    if module.kind != "Dense" or module.settings.get("module_input_name") is not None:
        return module
    return replace(module, settings={**module.settings, "module_input_name": TOKENS})


def _is_of_vectors(module: StoredModule) -> bool:
    return module.kind == "Normalize" and module.settings.get("module_input_name", VECTOR) == VECTOR


def _text(files: CheckpointFiles, name: str, key: str, value: Json) -> str:
    if not isinstance(value, str | None):
        raise files.malformed(name, f"{key} is {value!r}, which is not a text")
    return value or ""
