"""Measure a model's retrieval quality on a test collection, and compare it with another model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.evaluation.options import EvaluateOptions as EvaluateOptions
    from onnxtool.evaluation.report import EvaluationReport as EvaluationReport
    from onnxtool.evaluation.run import evaluate_model as evaluate_model
    from onnxtool.evaluation.run import judge_by_retrieval as judge_by_retrieval

_MODULES = {
    "EvaluateOptions": "onnxtool.evaluation.options",
    "judge_by_retrieval": "onnxtool.evaluation.run",
    "EvaluationReport": "onnxtool.evaluation.report",
    "evaluate_model": "onnxtool.evaluation.run",
}

__all__ = ["EvaluateOptions", "EvaluationReport", "evaluate_model", "judge_by_retrieval"]

__getattr__ = lazy_names(__name__, _MODULES)
