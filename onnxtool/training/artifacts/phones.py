"""What a phone needs to train: onnxruntime with the operators of the models, and how large builds of it are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxtool.runtime.quiet import quiet
from onnxtool.training.options import TrainingTarget

OPERATORS = "required_operators.config"
_CI = "limit of onnxruntime's CI in 2026, .github/workflows/android.yml"
_GUIDE = "documentation of onnxruntime 1.13.1, docs/tutorials/mobile"


@dataclass(frozen=True)
class LibrarySize:
    """The size of a build of onnxruntime for Android, as its authors published it; none depends on the model.

    Attributes:
        architecture: of the processor, as Android calls it.
        contents: what the build has.
        num_operators: how many operators; None for all.
        size_bytes: of the shared library; of the minimal build at most, all sections together.
        source: where it is published.
    """

    architecture: str
    contents: str
    num_operators: int | None
    size_bytes: int
    source: str


_MINIMAL = "minimal, without operators"
_MOBILE = "former onnxruntime-mobile"  # float and int8, tools/ci_build/github/android/mobile_package.required_operators
_FULL = "onnxruntime-android"
LIBRARIES = (
    LibrarySize("arm64-v8a", _MINIMAL, 0, 1_595_392, _CI),
    LibrarySize("arm64-v8a", _MOBILE, 111, 3_200_000, _GUIDE),
    LibrarySize("arm64-v8a", _FULL, None, 12_200_000, _GUIDE),
    LibrarySize("armeabi-v7a", _MOBILE, 111, 2_300_000, _GUIDE),
    LibrarySize("armeabi-v7a", _FULL, None, 8_400_000, _GUIDE),
)


@dataclass(frozen=True)
class PhoneBuild:
    """What a build of onnxruntime for the models of a folder is made from.

    Attributes:
        config: the file of all operators, with their types, that onnxruntime's build takes.
        operators: their names by domain and version, as in the file.
        libraries: published sizes for the architectures of the target.
    """

    config: str
    operators: dict[str, dict[int, tuple[str, ...]]]
    libraries: tuple[LibrarySize, ...]

    @property
    def num_operators(self) -> int:
        """How many operators there are, each counted once whatever its versions."""
        return len({(domain, name) for domain, sets in self.operators.items() for one in sets.values() for name in one})


def describe_build(target: TrainingTarget, models: Sequence[Path], folder: Path) -> PhoneBuild:
    """Write the operators of all models and their types into one file of `folder`, and describe the build.

    Args:
        target: android, or ios, whose devices are all arm64.
        models: the `.ort` files, in `folder`.
        folder: where the file goes.
    """
    with quiet():
        from onnxruntime.tools.ort_format_model import create_config_from_models
        from onnxruntime.tools.reduced_build_config_parser import parse_config

        path = folder / OPERATORS
        create_config_from_models(models, path, True)
        # The file mentions the temporary folder.
        path.write_text(path.read_text(encoding="utf-8").replace(f"{folder}{os.sep}", ""), encoding="utf-8")
        found, _types = parse_config(str(path))
    operators = {
        domain: {int(version): tuple(sorted(names)) for version, names in sorted(sets.items())}
        for domain, sets in sorted(found.items())
    }
    arm64 = tuple(one for one in LIBRARIES if one.architecture == LIBRARIES[0].architecture)
    return PhoneBuild(OPERATORS, operators, LIBRARIES if target is TrainingTarget.android else arm64)
