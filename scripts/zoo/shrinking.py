"""Turn the default configuration of a model type into one of a small model of the same kind.

Sizes are recognized by the names that configurations give them. What must fit together (a width and its heads, a list
and the number of layers) is cut together, and every kind of layer that a model mixes stays in it.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

EFFORTS = ("all", "depth")  # what is cut: everything, or depth and vocabulary alone

# A number above the one here becomes it, by the first pattern that is its name.
_LIMITS = {
    # Vocabularies and positions.
    "(shape_|unpadded_)?vocab_size(_per_layer_input)?|ngram_vocab_size_base": 1000,
    "encoder_hash_byte_group_vocab": 500,
    "max_position_embeddings|original_max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length": 256,
    "num_hash_buckets": 256,
    "entity_vocab_size": 50,
    # Windows become shorter than the texts that are tried, or they would never be seen to work.
    "sliding_window(_size)?|local_attention|attention_(chunk_size|window(_size)?)|block_size": 8,
    # Sizes of one head, and the equivalent of a linear attention or a state space.
    "qk_rope_head_dim|rotary_dim|mamba_(n|num)_heads|(mamba_)?chunk_size|state_size|adapter_rank": 8,
    "(?!qk_head).*head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|query_pre_attn_scalar": 16,
    "mamba_d_state|ssm_state_size|(lsh|local)_attn_chunk_length": 16,
    "linear_num(_value)?_heads": 4,
    "linear_num_key_heads|index_n_heads|n_mamba_heads|attn_layer_period": 2,
    "n_groups|attn_layer_offset": 1,
    # Widths.
    "hidden_size_per_layer_input|xpath_unit_hidden_size|o_lora_rank": 16,
    "(input_)?embedding_size|entity_emb_size|embedding_rank|projection_dim|intra_bottleneck_size": 32,
    "router_hidden_size|q_lora_rank|kv_lora_rank": 32,
    "(moe_|shared_|moe_shared_)(experts?_)?intermediate_size|expert_ffn_hidden_size": 64,
    "((en|de)coder_|backbone_)?hidden_size|d_model|(input_)?dim|n_embd|emb(ed)?_dim|d_latents": 64,
    "output_embedding_size|prediction_head_size|classifier_proj_size": 64,
    "((dense|speech_encoder)_)?intermediate_size(_mlp)?|((en|de)coder_)?ffn_dim|feed_forward_size": 128,
    "d_ff|dff|dim_ff|hidden_dim|d_inner|ffn_hidden_size": 128,
    # Experts.
    "(moe_)?num_(local_)?experts|n_routed_experts": 4,
    "num_experts_per_tok|moe_topk|moe_k|zero_expert_num": 2,
    "n_group|topk_group|first_k_dense_replace|num_dense_layers": 1,
    "num_nextn_predict_layers": 0,
}
# The same for each entry of a list.
_LISTS = {"conv_dim": 32, "tdnn_dim": 32, "depths": 2, "depth": 2}
# What a class does not work out where nothing says it; 4 heads of a width of 64 have a size of 16.
_UNSET = {"vocab_size": 1000, "num_experts_per_tok": 2, "head_dim": 16}
_HEADS = (
    *("num_attention_heads", "n_heads", "n_head", "num_heads", "attention_heads", "encoder_attention_heads"),
    *("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
    *("num_self_attention_heads", "num_cross_attention_heads", "swa_num_attention_heads"),
    *("encoder_num_attention_heads", "decoder_num_attention_heads", "speech_encoder_attention_heads"),
)
_KEY_VALUE_HEADS = ("num_key_value_heads", "swa_num_key_value_heads")
_DEPTHS = (
    *("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
    *("num_self_attends_per_block", "num_layers_per_stack", "speech_encoder_layers", "t2u_encoder_layers"),
    *("t2u_decoder_layers", "num_adapter_layers"),
)
_MAX_KINDS = 5
_IMAGE_SIZE = 64
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What single model types need for the smaller widths, with the reason.
_WIDTHS_OF_TYPES: dict[str, dict[str, Any]] = {
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},  # four of the one and two of the other are the width
    "lilt": {"hidden_size": 96},  # in six parts
    "squeezebert": {"embedding_size": 64},  # its width
}
# What they need beyond these rules in any case.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},  # by default none of its layers attends, and its cache wants one
    "cohere_compass_text": {"rope_parameters": {"full_attention": _DEFAULT_ROPE, "sliding_attention": _DEFAULT_ROPE}},
    "cvt": {"depth": [1, 2, 3]},  # a stage needs as many layers as its own number
    # No list of depths or widths: factors, and a width that is 1280 times one of them.
    "efficientnet": {"depth_coefficient": 0.5, "width_coefficient": 0.5, "hidden_dim": 640},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},  # none by default
    "gemma3n_text": {"num_kv_shared_layers": 0},  # shared layers need one of each kind before them
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},  # as bamba
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},  # one entry tells the kinds and the depth
    "mamba2": {"num_heads": 8, "head_dim": 16},  # together twice the width
    # As long as its texts, as in every checkpoint there is: it limits the cache alone, and its mask knows of no window.
    "moshi": {"sliding_window": 256},
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "hash_seed": 0,  # hashes are drawn anew in every run otherwise
        "num_buckets": 8,
        "attn_layers": ["local", "lsh"],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},  # two layers, one of each kind
    # The layers that share their weights are found as those that are like the first: there must be two.
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,  # attention reads the layer's input and the embeddings
        "attention_head_dim": 32,
    },
    # Their first stage has three heads, and windows do not become smaller than 7.
    **{name: {"embed_dim": 24, "image_size": 224} for name in ("swin", "donut-swin")},
    "swinv2": {"embed_dim": 24},
    "xmod": {"default_language": "en_XX"},  # it refuses to run without one
}


def shrink(base: Any, effort: str = "all") -> Any:
    """Return a small configuration of the same class as `base`, which stays as it is.

    Args:
        base: a PretrainedConfig.
        effort: one of EFFORTS.

    Raises:
        Exception: whatever the class raises where the parts do not fit.
    """
    fields = _Fields(base)
    values: dict[str, Any] = {
        name: limit for name in fields.names if (fields.number(name) or 0) > (limit := _limit(name))
    }
    values |= {name: value for name, value in _UNSET.items() if name in fields.names and fields.get(name) is None}
    values |= _cut_lists(fields)
    if effort == "depth":
        values = {name: value for name, value in values.items() if name in ("depth", "depths") or "vocab" in name}
    else:
        values |= _cut_heads(fields) | _cut_image(fields) | _WIDTHS_OF_TYPES.get(base.model_type, {})
    values |= _cut_depth(fields)
    parts = {name: fields.get(name) for name in getattr(type(base), "sub_configs", None) or {}}
    values |= {name: shrink(part, effort) for name, part in parts.items() if hasattr(part, "to_dict")}
    values |= copy.deepcopy(_OVERRIDES.get(base.model_type, {}))
    values |= _special_ids(fields, values)
    # Every class takes a padding id, though not all of them list it.
    return type(base)(**{name: value for name, value in values.items() if name in {*fields.names, "pad_token_id"}})


def _limit(name: str) -> float:
    return next((limit for pattern, limit in _LIMITS.items() if re.fullmatch(pattern, name)), math.inf)


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


def _cut_lists(fields: _Fields) -> dict[str, Any]:
    lists = {name: fields.get(name) for name in _LISTS}
    return {name: [min(size, _LISTS[name]) for size in sizes] for name, sizes in lists.items() if _is_list(sizes)}


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _cut_heads(fields: _Fields) -> dict[str, Any]:
    heads = {name: 4 for name in _HEADS if fields.number(name)}
    own = next((number for name in _HEADS if (number := fields.number(name))), None)
    for name in _KEY_VALUE_HEADS:
        number = own if name in fields.names and fields.number(name) is None else fields.number(name)
        if number is not None:
            heads[name] = 4 if number == own else min(number, 2)  # grouped heads stay grouped
    return heads


def _cut_image(fields: _Fields) -> dict[str, Any]:
    """Cut images to about 64 x 64: whole patches, and enough for five halvings."""
    patch = fields.number("patch_size") or 1
    size = patch * math.ceil(_IMAGE_SIZE / patch)
    image_size = fields.get("image_size")
    if _is_list(image_size):
        return {"image_size": [size] * len(image_size)} if min(image_size) > size else {}
    return {"image_size": size} if isinstance(image_size, int) and image_size > size else {}


def _cut_depth(fields: _Fields) -> dict[str, Any]:
    main = next((name for name in _DEPTHS if fields.number(name)), None)
    if main is None:
        return {}
    depth = fields.number(main) or 0
    by_layer = {
        name: list(value) for name in fields.names if _is_list(value := fields.get(name)) and len(value) == depth > 3
    }
    kept = _layers_of_each_kind(depth, by_layer)
    depths = {name: number for name in _DEPTHS if (number := fields.number(name))}
    cut = {name: min(number, len(kept) if name == main else 2) for name, number in depths.items()}
    return cut | {name: _entries_of(entries, kept) for name, entries in by_layer.items()}


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
    if all(isinstance(entry, int) for entry in entries) and entries == sorted(set(entries)):  # indices of layers
        return [entry for entry in entries if entry < len(kept)]
    return [entries[index] for index in kept]


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
        if name in values or not name.endswith(("_token_id", "_token_index")):
            continue
        token_id = fields.get(name)
        if isinstance(token_id, int) and token_id >= size:
            ids[name] = usual.get(name, free)
            free += name not in usual
        elif isinstance(token_id, list) and any(isinstance(entry, int) and entry >= size for entry in token_id):
            ids[name] = [2]
    if ids.get("pad_token_id", fields.get("pad_token_id")) in (None, -1) and "pad_token_id" not in values:
        ids["pad_token_id"] = 0
    return ids
