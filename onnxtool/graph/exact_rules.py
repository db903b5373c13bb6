"""onnxscript's rewrite rules, made exact: 0 and 1 match only 0 and 1, not numbers close to them.

Each rule looks only at nodes with its own operator, which is faster. This is the only module that uses onnxscript's
private names. Tested with 0.7.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exact_optimizer() -> Iterator[None]:
    """Make `onnxscript.optimizer` apply exact rules inside the block; torch.onnx calls it at the end of a trace.

    Its own rules for `x + 0` and `x * 1` match every number up to 1e-8 and within 1e-5: the logarithm of `x + 1e-9`
    would become infinite. Rules live as long as the process, so at the end they are reset to forget the last graph,
    whose weights would otherwise all stay in memory.
    """
    from onnxscript import rewriter

    original, rewriter._DEFAULT_REWRITE_RULES = rewriter._DEFAULT_REWRITE_RULES, _exact_rules()
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = original
        for rule in _exact_rules():
            state = vars(rule._matcher.matcher)
            state["_current_node"] = None
            state.pop("_match", None)
            state.pop("_graph", None)


class _OperatorFirst:
    """Compare a node's operator with the last one of a pattern before `matcher` compares node and pattern.

    onnxscript prepares a match for each rule and node, and for patterns with two outputs lists all nodes of the graph,
    at every node regardless of its operator.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._op_type = matcher.pattern.output_nodes[0].op_type

    def match(self, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        """Return a match, or a failed one if the operator differs."""
        return self.matcher.match(model, graph, node, **options) if node.op_type == self._op_type else None


@functools.cache
def _exact_rules() -> tuple[Any, ...]:
    """Return onnxscript's default rules, with the ones for neutral elements made exact."""
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _no_op

    tolerant = {id(rule) for rule in _no_op.rules}
    kept = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if id(rule) not in tolerant]
    dropouts = [_no_op.dropout_zero_rule, _no_op.dropout_inference_rule]
    rules = [copy.copy(rule) for rule in (*_neutral_elements(), *dropouts, *kept)]
    for rule in rules:
        rule._matcher = _OperatorFirst(rule._matcher)
    return tuple(rules)


def _neutral_elements() -> list[Any]:
    """Return rules that replace `x + 0`, `x - 0`, `x * 1` and `x / 1` with x."""
    from onnxscript.rewriter import RewriteRule
    from onnxscript.rewriter._pattern_ir import Constant

    zero, one = (Constant(value, rel_tol=0, abs_tol=0) for value in (0.0, 1.0))

    def rule(pattern: Callable[[Any, Any], Any]) -> Any:
        return RewriteRule(pattern, lambda op, x, **_: op.Identity(x))

    return [
        *rule(lambda op, x: op.Add(x, zero)).commute(),
        rule(lambda op, x: op.Sub(x, zero)),
        *rule(lambda op, x: op.Mul(x, one)).commute(),
        rule(lambda op, x: op.Div(x, one)),
    ]
