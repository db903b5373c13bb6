"""onnxtool: turn a Hugging Face checkpoint into a verified, optimized, timed and documented ONNX model.

Public names are imported on first use, so that `import onnxtool` costs nothing.
"""

from __future__ import annotations

import os
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

_MODULES = {
    "VerifyOptions": "onnxtool.agreement",
    "compare_layers": "onnxtool.agreement",
    "verify": "onnxtool.agreement",
    "OnnxtoolError": "onnxtool.errors",
    "VerificationError": "onnxtool.errors",
    "DriftOptions": "onnxtool.evaluation.options",
    "DriftReport": "onnxtool.evaluation.drift",
    "measure_drift": "onnxtool.evaluation.drift",
    "EvaluateOptions": "onnxtool.evaluation.options",
    "evaluate_model": "onnxtool.evaluation.run",
    "ExportOptions": "onnxtool.export.options",
    "export_model": "onnxtool.export.run",
    "BenchmarkOptions": "onnxtool.benchmarking.options",
    "CorpusOptions": "onnxtool.encoding",
    "benchmark": "onnxtool.benchmarking.measurement",
    "trusted": "onnxtool.guarded",
    "verify_in_consumer": "onnxtool.consumers",
    "encode": "onnxtool.infer",
    "encode_corpus": "onnxtool.encoding",
    "load": "onnxtool.infer",
    "restore_vectors": "onnxtool.infer",
    "ModelFile": "onnxtool.model_file",
    "OptimizeOptions": "onnxtool.optimize.options",
    "optimize_model": "onnxtool.optimize.run",
    "export_variants": "onnxtool.release",
    "open_session": "onnxtool.runtime.session",
    "compare_models": "onnxtool.stats",
    "summarize_model": "onnxtool.stats",
}

__all__ = ["__version__", *_MODULES]


__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
