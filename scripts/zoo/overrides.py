"""What single model types need beyond the general rules of shrinking: a row a type, with its reason."""

from __future__ import annotations

from typing import Any

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},  # by default none of its layers attends, and its cache wants one
    "cohere_compass_text": {"rope_parameters": {"full_attention": _DEFAULT_ROPE, "sliding_attention": _DEFAULT_ROPE}},
    "cvt": {"depth": [1, 2, 3]},  # a stage needs as many layers as its own number
    # No list of depths or widths: factors, and a width that is 1280 times one of them.
    "efficientnet": {"depth_coefficient": 0.5, "width_coefficient": 0.5, "hidden_dim": 640},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},  # none by default
    "esm": {"mask_token_id": 32, "pad_token_id": 1},  # its defaults have none, and it asks for both
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
        "attention_hidden_size": 128,  # attention reads the layer's input beside the embeddings
        "attention_head_dim": 32,
    },
    "t5": {"decoder_start_token_id": 0},  # read, but not always there
    # Their first stage has three heads.
    **{name: {"embed_dim": 24} for name in ("swin", "swinv2", "donut-swin")},
    "xmod": {"default_language": "en_XX"},  # it refuses to run without one
}
