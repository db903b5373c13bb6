"""Measure a model's retrieval quality on a test collection, and compare it with another model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.evaluation.options import EvaluateOptions as EvaluateOptions
    from onnxtool.evaluation.report import EvaluationReport as EvaluationReport
    from onnxtool.evaluation.run import evaluate_model as evaluate_model

_MODULES = {
    "EvaluateOptions": "onnxtool.evaluation.options",
    "EvaluationReport": "onnxtool.evaluation.report",
    "evaluate_model": "onnxtool.evaluation.run",
}

__all__ = ["EvaluateOptions", "EvaluationReport", "evaluate_model"]

__getattr__ = lazy_names(__name__, _MODULES)
