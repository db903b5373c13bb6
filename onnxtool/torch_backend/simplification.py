"""Folds constants and removes what has no effect, by onnxscript's optimizer without the rules that change numbers.

The only module that touches the private names of onnxscript. Tested with 0.7.
"""

from __future__ import annotations

import functools

import onnx_ir as ir
import onnx_ir.passes.common as passes

_NUM_ROUNDS = 2


def simplify(model: ir.Model) -> None:
    """Do in place what `onnxscript.optimizer.optimize` does, except taking numbers for 0 and 1 that are near them.

    Its rules for `x + 0` and `x * 1` are applied for all numbers up to 1e-8 and within 1e-5: the logarithm of
    `x + 1e-9` would be infinite. onnxruntime has the same rules for 0 and 1 only.
    """
    from onnxscript import optimizer

    passes.InlinePass()(model)
    for _ in range(_NUM_ROUNDS):
        folded = optimizer.fold_constants_ir(model, onnx_shape_inference=False)
        rewritten = _rewriter()(model)
        passes.RemoveUnusedNodesPass()(model)
        passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass()(model)
        if not folded.modified and not rewritten.modified:
            break
    for last in (
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        last(model)


@functools.cache
def _rewriter() -> ir.passes.InPlacePass:
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _no_op

    tolerant = {id(rule) for rule in _no_op.rules}
    exact = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if id(rule) not in tolerant]
    rewrite: ir.passes.InPlacePass = rewriter.RewritePass(exact)
    return rewrite
