"""Turn the default configuration of a model type into one of a small model of the same kind.

Sizes are recognized by the names that configurations give them. What must fit together (a width and its heads, a list
and the number of layers) is cut together, and every kind of layer that a model mixes stays in it. A type whose parts
do not fit after that is tried again with less cut: see EFFORTS.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from zoo.overrides import OVERRIDES

# How much is cut: everything; widths and heads stay; only depth and vocabulary.
EFFORTS = ("all", "counts", "depth")

# A number above the one here becomes it. Widths and what is derived from them:
_WIDTHS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embed_dim", "emb_dim"), 64),
    **dict.fromkeys(("output_embedding_size", "d_latents", "prediction_head_size", "backbone_hidden_size"), 64),
    **dict.fromkeys(("input_dim", "encoder_hidden_size", "decoder_hidden_size", "classifier_proj_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "projection_dim", "intra_bottleneck_size"), 32),
    **dict.fromkeys(("entity_emb_size", "embedding_rank", "router_hidden_size"), 32),
    **dict.fromkeys(("hidden_size_per_layer_input", "xpath_unit_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("decoder_ffn_dim", "dff", "dim_ff", "d_inner", "feed_forward_size", "ffn_hidden_size"), 128),
    **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp", "speech_encoder_intermediate_size"), 128),
}
# Sizes of one head, and what a linear attention or a state space has in place of it:
_HEAD_SIZES: dict[str, int] = {
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size", "swa_head_dim"), 16),
    **dict.fromkeys(("dim_head", "v_head_dim", "qk_nope_head_dim", "index_head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "mamba_n_heads", "mamba_num_heads", "mamba_chunk_size"), 8),
    **dict.fromkeys(("chunk_size", "state_size", "adapter_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads", "n_mamba_heads", "attn_layer_period"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("n_groups", "attn_layer_offset"), 1),
    "num_nextn_predict_layers": 0,
}
# Windows become shorter than the texts that are tried, or they would never be seen to work:
_WINDOWS: dict[str, int] = {
    **dict.fromkeys(("sliding_window", "local_attention", "sliding_window_size", "attention_window"), 8),
    **dict.fromkeys(("attention_window_size", "attention_chunk_size", "block_size", "keep_window_size"), 8),
    **dict.fromkeys(("lsh_attn_chunk_length", "local_attn_chunk_length"), 16),
}
_HEADS = (
    *("num_attention_heads", "n_heads", "n_head", "num_heads", "attention_heads", "encoder_attention_heads"),
    *("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
    *("num_self_attention_heads", "num_cross_attention_heads", "swa_num_attention_heads"),
    *("encoder_num_attention_heads", "decoder_num_attention_heads", "speech_encoder_attention_heads"),
)
_KEY_VALUE_HEADS = ("num_key_value_heads", "swa_num_key_value_heads")
_EXPERTS: dict[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    "o_lora_rank": 16,
}
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"),
    "original_max_position_embeddings",
)
_MAX_POSITIONS = 256
_VOCABULARIES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "shape_vocab_size", "ngram_vocab_size_base"), 1000),
    "unpadded_vocab_size": 1000,
    "entity_vocab_size": 50,
    "num_hash_buckets": 256,
    "encoder_hash_byte_group_vocab": 500,
}
_DEPTHS = (
    *("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
    *("num_self_attends_per_block", "num_layers_per_stack", "speech_encoder_layers", "t2u_encoder_layers"),
    *("t2u_decoder_layers", "num_adapter_layers"),
)
_MAX_KINDS = 5
_IMAGE_SIZE = 64


def shrink(base: Any, effort: str = "all") -> Any:
    """Return a small configuration of the same class as `base`, which stays as it is.

    Args:
        base: a PretrainedConfig.
        effort: one of EFFORTS.

    Raises:
        Exception: whatever the class raises where the parts do not fit; less effort may help.
    """
    fields = _Fields(base)
    values: dict[str, Any] = {}
    for cut in _CUTS[effort]:
        values.update(cut(fields))
    values.update(_sub_configs(fields, effort))
    values.update(copy.deepcopy(OVERRIDES.get(base.model_type, {})))
    values.update(_special_ids(fields, values))
    values = {name: value for name, value in values.items() if name in fields.names or name in _ALWAYS_ACCEPTED}
    try:
        return type(base)(**values)
    except Exception:  # noqa: BLE001  some classes take their parts as dictionaries only
        return type(base)(
            **{name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in values.items()}
        )


# Taken by every class, though not all of them list it.
_ALWAYS_ACCEPTED = ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id")


class _Fields:
    """What a configuration class takes, with its default values."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.names = frozenset(inspect.signature(type(base).__init__).parameters)

    def get(self, name: str) -> Any:
        """Return the value of a field; None where it has none."""
        if name not in self.names:
            return None
        try:
            return getattr(self.base, name, None)
        except Exception:  # noqa: BLE001  a configuration that differs from layer to layer refuses to be asked at once
            return None

    def number(self, name: str) -> int | None:
        """Return the value of a field that is a whole number."""
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def over(self, limits: Mapping[str, int]) -> dict[str, int]:
        """Return the limits of those fields that exceed theirs."""
        return {name: limit for name, limit in limits.items() if (self.number(name) or 0) > limit}


def _cut_vocabulary(fields: _Fields) -> dict[str, Any]:
    missing = {"vocab_size": 1000} if "vocab_size" in fields.names and fields.get("vocab_size") is None else {}
    return {**fields.over(_VOCABULARIES), **missing}


def _cut_counts(fields: _Fields) -> dict[str, Any]:
    unset = {"num_experts_per_tok": 2} if "num_experts_per_tok" in fields.names else {}
    return {
        **(unset if fields.get("num_experts_per_tok") is None else {}),
        **fields.over(dict.fromkeys(_POSITIONS, _MAX_POSITIONS)),
        **fields.over(_EXPERTS),
    }


def _cut_widths(fields: _Fields) -> dict[str, Any]:
    values: dict[str, Any] = fields.over(_WIDTHS) | fields.over(_HEAD_SIZES) | fields.over(_WINDOWS)
    heads = {name: 4 for name in _HEADS if fields.number(name)}
    own = next((fields.number(name) for name in _HEADS if fields.number(name)), None)
    for name in _KEY_VALUE_HEADS:
        found = fields.number(name)
        if name in fields.names and found is None and own is not None:
            found = own
        if found is not None:
            heads[name] = 4 if found == own else min(found, 2)  # grouped heads stay grouped
    values.update(heads)
    if "head_dim" in fields.names and fields.get("head_dim") is None:
        values["head_dim"] = 16  # what 4 heads of a width of 64 have; some classes do not work it out
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        values["rope_parameters"] = {**copy.deepcopy(rope), "mrope_section": [2, 3, 3]}
    for name in ("conv_dim", "tdnn_dim"):
        channels = fields.get(name)
        if isinstance(channels, (list, tuple)):
            values[name] = [min(size, 32) for size in channels]
    return values


def _cut_image(fields: _Fields) -> dict[str, Any]:
    """Cut images to about 64 x 64: whole patches, and enough for five halvings."""
    patch = fields.number("patch_size") or 1
    size = patch * math.ceil(_IMAGE_SIZE / patch)
    found = fields.get("image_size")
    if isinstance(found, (list, tuple)):
        return {"image_size": [size] * len(found)} if min(found) > size else {}
    return fields.over({"image_size": size})


def _cut_depth(fields: _Fields) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("depths", "depth"):
        stages = fields.get(name)
        if isinstance(stages, (list, tuple)):
            values[name] = [min(2, depth) for depth in stages]
    main = next((name for name in _DEPTHS if fields.number(name)), None)
    if main is None:
        return values
    depth = fields.number(main) or 0
    by_layer = {
        name: list(value)
        for name in fields.names
        if isinstance(value := fields.get(name), (list, tuple)) and len(value) == depth > 3 and name != "out_features"
    }
    kept = _layers_of_each_kind(depth, by_layer)
    for name in _DEPTHS:
        if number := fields.number(name):
            values[name] = min(number, len(kept) if name == main else 2)
    for name, entries in by_layer.items():
        values[name] = _entries_of(entries, kept)
    return values


def _layers_of_each_kind(depth: int, by_layer: Mapping[str, list[Any]]) -> list[int]:
    """Return the indices of one layer of each kind, and of two layers at least."""
    named = [entries for entries in by_layer.values() if all(isinstance(entry, (str, bool)) for entry in entries)]
    kinds: dict[tuple[Any, ...], int] = {}
    for index in range(depth):
        kinds.setdefault(tuple(entries[index] for entries in named), index)
    kept = sorted(kinds.values())[:_MAX_KINDS]
    kept += [index for index in range(depth) if index not in kept][: max(0, 2 - len(kept))]
    return sorted(kept)


def _entries_of(entries: list[Any], kept: list[int]) -> list[Any]:
    are_indices = all(isinstance(entry, int) for entry in entries) and entries == sorted(set(entries))
    if are_indices and not all(isinstance(entry, bool) for entry in entries):
        return [entry for entry in entries if entry < len(kept)]
    return [entries[index] for index in kept]


def _sub_configs(fields: _Fields, effort: str) -> dict[str, Any]:
    parts = {name: fields.get(name) for name in getattr(type(fields.base), "sub_configs", None) or {}}
    return {name: shrink(part, effort) for name, part in parts.items() if hasattr(part, "to_dict")}


def _special_ids(fields: _Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the ids of special tokens into the vocabulary, and give every type a padding id."""
    size = values.get("vocab_size", fields.get("vocab_size"))
    if not isinstance(size, int):
        sizes = [getattr(value, "vocab_size", None) for value in values.values()]
        size = min([number for number in sizes if isinstance(number, int)], default=10**9)
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ids: dict[str, Any] = {}
    free = 5
    for name in sorted(fields.names):
        is_id = name.endswith(("_token_id", "_token_index")) or name.startswith("mask_id")
        if name in values or not is_id:
            continue
        found = fields.get(name)
        if isinstance(found, int) and found >= size:
            ids[name] = usual.get(name, free)
            free += name not in usual
        elif isinstance(found, list) and any(isinstance(entry, int) and entry >= size for entry in found):
            ids[name] = [2]
    if ids.get("pad_token_id", fields.get("pad_token_id")) in (None, -1) and "pad_token_id" not in values:
        ids["pad_token_id"] = 0
    return ids


_Cut = Callable[[_Fields], dict[str, Any]]
_CUTS: dict[str, tuple[_Cut, ...]] = {
    "all": (_cut_vocabulary, _cut_counts, _cut_widths, _cut_image, _cut_depth),
    "counts": (_cut_vocabulary, _cut_counts, _cut_depth),
    "depth": (_cut_vocabulary, _cut_depth),
}
