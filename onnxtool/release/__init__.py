"""Release a model: evaluated, described and signed."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.release.check import CheckReport as CheckReport
    from onnxtool.release.check import check_release as check_release
    from onnxtool.release.config import ReleaseConfig as ReleaseConfig
    from onnxtool.release.config import read_config as read_config
    from onnxtool.release.run import ReleaseReport as ReleaseReport
    from onnxtool.release.run import make_release as make_release
    from onnxtool.release.variants import VariantsReport as VariantsReport
    from onnxtool.release.variants import export_variants as export_variants

_NAMES = {
    "onnxtool.release.check": ("CheckReport", "check_release"),
    "onnxtool.release.config": ("ReleaseConfig", "read_config"),
    "onnxtool.release.run": ("ReleaseReport", "make_release"),
    "onnxtool.release.variants": ("VariantsReport", "export_variants"),
}

__all__ = [*chain(*_NAMES.values())]

__getattr__ = lazy_names(__name__, _NAMES)
