"""Which passes run, in which order. Order is meaning, so it is written out."""

from __future__ import annotations

from onnxtool.errors import PassError
from onnxtool.optimize.passes.deduplicate_initializers import deduplicate_initializers
from onnxtool.optimize.passes.float16 import float16
from onnxtool.optimize.passes.onnxoptimizer_cleanup import onnxoptimizer_cleanup
from onnxtool.optimize.passes.onnxruntime_fusions import onnxruntime_fusions
from onnxtool.optimize.pipeline import Pass

# Fusions first: their patterns are the exporters' own, and a clean-up would hide them. The clean-up takes what the
# fusions leave behind.
_FUSE = (onnxruntime_fusions, onnxoptimizer_cleanup, deduplicate_initializers)

PRESETS: dict[tuple[str, str], tuple[Pass, ...]] = {
    ("cpu", "fp32"): _FUSE,
    ("cpu", "fp16"): (*_FUSE, float16),
    ("cuda", "fp32"): _FUSE,
    ("cuda", "fp16"): (*_FUSE, float16),
}

PROVIDER_NAMES = tuple(dict.fromkeys(provider for provider, _ in PRESETS))
PRECISION_NAMES = tuple(dict.fromkeys(precision for _, precision in PRESETS))


def passes_for(provider: str, precision: str) -> tuple[Pass, ...]:
    """Return the passes for a provider and a precision.

    Raises:
        PassError: there is no such preset.
    """
    if (provider, precision) not in PRESETS:
        raise PassError(
            f"no preset for {precision} on {provider}",
            f"providers: {', '.join(PROVIDER_NAMES)}; precisions: {', '.join(PRECISION_NAMES)}",
        )
    return PRESETS[provider, precision]
