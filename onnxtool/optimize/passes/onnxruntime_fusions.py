"""Run the fusions of onnxruntime.transformers if the pass `attention` left an attention unfused.

They take seconds and hold all weights in memory, but support more forms of attention: with a cache, across two
sequences, in image and speech models.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtool.model_file.weights import restore_description, to_full_proto
from onnxtool.optimize.attention.scores import keeps_probabilities, match_roots
from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory
from onnxtool.runtime.quiet import quiet

# Model types in transformers whose graphs match one of onnxruntime's patterns.
_SAME_GRAPH = {
    "albert": "bert",
    "camembert": "bert",
    "distilbert": "bert",
    "electra": "bert",
    "mpnet": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
}
_FALLBACK = "bert"  # with the general fusions: normalizations, Gelu, biases


def _apply(model: ir.Model, context: Context) -> Outcome:
    """Replace `MatMul(Softmax(…), v)` and other subgraphs by com.microsoft operators, if an attention is left."""
    from onnxruntime.transformers.optimizer import MODEL_TYPES

    left = list(match_roots(model.graph))
    if not left:
        return Outcome(model, 0)
    if any(keeps_probabilities(node) for node in left):
        # The fusions would remove the Softmax anyway, and the graph would lack a value that others read.
        return Outcome(
            model,
            0,
            "not run: not one product alone reads the probabilities of attentions, which onnxruntime's fusions drop",
        )
    model_type, note = _SAME_GRAPH.get(context.model_type, context.model_type), ""
    if model_type not in MODEL_TYPES:
        note = f"onnxruntime has no patterns for model_type {model_type or 'unknown'!r}; {_FALLBACK}'s were used"
        model_type = _FALLBACK
    before = inventory(model)
    try:
        result = _fuse(model, model_type, context)
    except Exception as error:  # noqa: BLE001  its patterns raise any error
        failed = f"onnxruntime's patterns for {model_type} fail on this graph ({_named(error)})"
        if model_type == _FALLBACK:
            return Outcome(model, 0, failed)
        note = f"{failed}; {_FALLBACK}'s were used"
        result = _fuse(model, _FALLBACK, context)
    return Outcome(result, count_changes(before, inventory(result)), note)


def _named(error: Exception) -> str:
    """Return an error's message, or where it was raised if the message is empty, as for assertions."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return str(error) or f"{type(error).__name__} in {Path(place.filename).name}, {place.name}"


def _fuse(model: ir.Model, model_type: str, context: Context) -> ir.Model:
    from onnxruntime.transformers.optimizer import optimize_model

    # It fails on inconsistent numbers, as in an encoder whose heads increase by stage.
    is_known = context.num_heads > 0 and context.hidden_size % context.num_heads == 0
    with quiet():  # it logs, and sometimes prints, each pattern that it fails to find
        # opt_level 0: its Python fusions only. The session does onnxruntime's own graph optimizations when it loads
        # the file, for the machine it runs on.
        fused = optimize_model(
            to_full_proto(model),
            model_type=model_type,
            num_heads=context.num_heads if is_known else 0,
            hidden_size=context.hidden_size if is_known else 0,
            optimization_options=_options(model_type, context.provider),
            opt_level=0,
            use_gpu=context.provider == "cuda",
        )
    result: ir.Model = ir.from_proto(fused.model)
    result.opset_imports.setdefault("com.microsoft", 1)  # the fusions do not add the domain that they use
    restore_description(result, model)
    return result


def _options(model_type: str, provider: str) -> Any:
    from onnxruntime.transformers.fusion_options import FusionOptions

    options = FusionOptions(model_type)
    # Otherwise the mask becomes a token count per row, which is wrong for left padding.
    options.use_raw_attention_mask(True)
    if provider == "cpu":
        # Six times slower than Add and LayerNormalization on the CPU provider (1024x768: 3.0 against 0.49 ms).
        options.enable_skip_layer_norm = False
        options.enable_bias_skip_layer_norm = False
    return options


onnxruntime_fusions = Pass("onnxruntime_fusions", _apply)
