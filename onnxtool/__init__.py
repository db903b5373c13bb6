"""onnxtool: turn a Hugging Face checkpoint into a verified, optimized, timed and documented ONNX model.

Public names are imported on first use, so that `import onnxtool` costs nothing.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names
from onnxtool.version import __version__ as __version__

if TYPE_CHECKING:
    from onnxtool.agreement import VerifyOptions as VerifyOptions
    from onnxtool.agreement import compare_layers as compare_layers
    from onnxtool.agreement import verify as verify
    from onnxtool.benchmarking.measurement import benchmark as benchmark
    from onnxtool.benchmarking.options import BenchmarkOptions as BenchmarkOptions
    from onnxtool.consumers import verify_in_consumer as verify_in_consumer
    from onnxtool.encoding import CorpusOptions as CorpusOptions
    from onnxtool.encoding import encode_corpus as encode_corpus
    from onnxtool.errors import OnnxtoolError as OnnxtoolError
    from onnxtool.errors import VerificationError as VerificationError
    from onnxtool.evaluation.drift import DriftReport as DriftReport
    from onnxtool.evaluation.drift import measure_drift as measure_drift
    from onnxtool.evaluation.options import DriftOptions as DriftOptions
    from onnxtool.evaluation.options import EvaluateOptions as EvaluateOptions
    from onnxtool.evaluation.run import evaluate_model as evaluate_model
    from onnxtool.export.options import ExportOptions as ExportOptions
    from onnxtool.export.run import export_model as export_model
    from onnxtool.guarded import trusted as trusted
    from onnxtool.infer import encode as encode
    from onnxtool.infer import load as load
    from onnxtool.infer import restore_vectors as restore_vectors
    from onnxtool.model_file import ModelFile as ModelFile
    from onnxtool.optimize.options import OptimizeOptions as OptimizeOptions
    from onnxtool.optimize.run import optimize_model as optimize_model
    from onnxtool.release import export_variants as export_variants
    from onnxtool.runtime.session import open_session as open_session
    from onnxtool.stats import compare_models as compare_models
    from onnxtool.stats import summarize_model as summarize_model

# No telemetry is sent or queued. Each variable is read when its library is imported, in child processes too.
for _variable, _off in {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_variable, _off)

_NAMES = {
    "onnxtool.agreement": ("VerifyOptions", "compare_layers", "verify"),
    "onnxtool.errors": ("OnnxtoolError", "VerificationError"),
    "onnxtool.evaluation.options": ("DriftOptions", "EvaluateOptions"),
    "onnxtool.evaluation.drift": ("DriftReport", "measure_drift"),
    "onnxtool.evaluation.run": ("evaluate_model",),
    "onnxtool.export.options": ("ExportOptions",),
    "onnxtool.export.run": ("export_model",),
    "onnxtool.benchmarking.options": ("BenchmarkOptions",),
    "onnxtool.encoding": ("CorpusOptions", "encode_corpus"),
    "onnxtool.benchmarking.measurement": ("benchmark",),
    "onnxtool.guarded": ("trusted",),
    "onnxtool.consumers": ("verify_in_consumer",),
    "onnxtool.infer": ("encode", "load", "restore_vectors"),
    "onnxtool.model_file": ("ModelFile",),
    "onnxtool.optimize.options": ("OptimizeOptions",),
    "onnxtool.optimize.run": ("optimize_model",),
    "onnxtool.release": ("export_variants",),
    "onnxtool.runtime.session": ("open_session",),
    "onnxtool.stats": ("compare_models", "summarize_model"),
}

__all__ = ["__version__", *chain(*_NAMES.values())]


__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
