"""The passes of each preset, in order. The order matters, so it is written out."""

from __future__ import annotations

from onnxtool.optimize.passes.attention import attention
from onnxtool.optimize.passes.convert_opset import convert_opset
from onnxtool.optimize.passes.duplicates import common_subexpressions, deduplicate_initializers, tied_transposes
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.gelu import bias_gelu, gelu
from onnxtool.optimize.passes.input_sizes import input_sizes
from onnxtool.optimize.passes.maxima import blocked_maximum, softmax_maximum, token_maximum
from onnxtool.optimize.passes.neutral_operators import neutral_operators
from onnxtool.optimize.passes.normalizations import (
    embed_layer_normalization,
    layer_normalization,
    rms_normalization,
    skip_layer_normalization,
    sums,
)
from onnxtool.optimize.passes.onnxoptimizer_passes import ALLOWED
from onnxtool.optimize.passes.onnxruntime_fusions import onnxruntime_fusions
from onnxtool.optimize.passes.products import einsum_products, matmul_add, transposed_weights
from onnxtool.optimize.passes.repeated_heads import repeated_heads
from onnxtool.optimize.passes.rotary_embedding import rotary_embedding
from onnxtool.optimize.pipeline import Pass

# Patterns contain constants, sizes and shared masks, so these are simplified first.
# onnxoptimizer's passes only see constants as initializers, and give int8 the layers whose weights are transposed.
_SETTLE = (convert_opset, fold_constants, input_sizes, common_subexpressions, *ALLOWED)
# Attention looks for the MatMuls with weights that transposed_weights rewrites, so it runs before.
_FUSE = (
    *(layer_normalization, rms_normalization, gelu, rotary_embedding),
    *(softmax_maximum, einsum_products, attention, onnxruntime_fusions),
    neutral_operators,  # attention looks for biases, also those of zeros; the next ones would fuse them
    *(tied_transposes, transposed_weights, token_maximum, matmul_add, embed_layer_normalization, bias_gelu),
)
# Nodes and initializers left behind by the other passes.
_CLEAN = (deduplicate_initializers,)

_CPU = (*_SETTLE, *_FUSE, *_CLEAN)
# Not on the CPU, where Add and LayerNormalization take a sixth of the fused operator's time.
_CUDA = (*_SETTLE, *_FUSE, skip_layer_normalization, *_CLEAN)

# OpenVINO runs int8 products fastest between fused attentions. What it misreads, such as the scale of an Attention,
# or does not take, such as FastGelu, is found when the result is verified on it: its pass is left out.
_OPENVINO = _CPU

PRESETS: dict[str, tuple[Pass, ...]] = {"cpu": _CPU, "cuda": _CUDA, "openvino": _OPENVINO}
"""The passes of each provider. They keep float32; onnxtool/optimize/quantization/ converts the result."""

FINISHING: dict[str, tuple[Pass, ...]] = {
    "cpu": (repeated_heads, sums, blocked_maximum),
    "cuda": (repeated_heads,),
    "openvino": (),
}
"""The passes that run last, after the conversion to a precision: no other pass matches what they write."""

# onnxruntime's own optimizers that a session must not run on the file; the metadata lists them.
DISABLED_OPTIMIZERS: dict[str, tuple[str, ...]] = {"cpu": ("SkipLayerNormFusion",), "cuda": (), "openvino": ()}
