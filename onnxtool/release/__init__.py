"""Release a model: evaluated, described and signed."""

from __future__ import annotations

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

_MODULES = {
    **dict.fromkeys(("CheckReport", "check_release"), "onnxtool.release.check"),
    **dict.fromkeys(("ReleaseConfig", "read_config"), "onnxtool.release.config"),
    **dict.fromkeys(("ReleaseReport", "make_release"), "onnxtool.release.run"),
    **dict.fromkeys(("VariantsReport", "export_variants"), "onnxtool.release.variants"),
}

__all__ = [*_MODULES]

__getattr__ = lazy_names(__name__, _MODULES)
