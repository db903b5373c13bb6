"""Modules and names where they were before 0.2: each gives its successor, with a DeprecationWarning that names it.

This serves one release; delete the row, then the file.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:  # `importlib.abc` takes longer to load than all else that `onnxtool --help` needs
    Loader = object

# Old name to new name; modules inside a package follow it.
RENAMED = {
    "onnxtool.figures": "onnxtool.summary.figures",
    "onnxtool.gates": "onnxtool.summary.gates",
    "onnxtool.infer.benchmark": "onnxtool.benchmarking",
    "onnxtool.infer.corpus": "onnxtool.encoding",
    "onnxtool.metadata": "onnxtool.model_file.metadata",
    "onnxtool.optimize.precision": "onnxtool.optimize.quantization",
    "onnxtool.sentence_modules": "onnxtool.checkpoint.sentence_modules",
    "onnxtool.texts": "onnxtool.checkpoint",
    "onnxtool.training.autodiff": "onnxtool.autodiff",
    "onnxtool.training.checkpoint": "onnxtool.training.checkpoints.checkpoint",
    "onnxtool.training.with_loss": "onnxtool.training.trainer",
    "onnxtool.weights": "onnxtool.model_file.weights",
    "onnxtool.wire": "onnxtool.model_file.wire",
}
# Names that left a module which is still there, by the module that has them now.
MOVED: dict[str, dict[str, tuple[str, ...]]] = {
    "onnxtool.infer": {"onnxtool.benchmarking": ("BenchmarkOptions",)},
    "onnxtool.reports": {
        "onnxtool.benchmarking.report": (
            *("BenchmarkEnvironment", "BenchmarkReport", "BenchmarkResult", "ComparedShape", "Comparison"),
            *("GateOutcome", "ModelIdentity", "StageTimes", "TokenLengths", "TransferTimes"),
        ),
        "onnxtool.export.report": ("ExportReport",),
        "onnxtool.infer.report": ("InferReport", "Ranking", "Scored", "Span", "TextAnswer"),
        "onnxtool.optimize.report": ("Candidate", "FusionCount", "OptimizeReport", "PassResult", "Quantization"),
        "onnxtool.runtime.environment": ("EnvironmentReport",),
        "onnxtool.runtime.timing": ("LatencySummary",),
        "onnxtool.summary.figures": ("Change", "Difference", "MappingDelta", "Stats", "StatsDelta"),
        "onnxtool.verification": ("Verification", "VerificationCase"),
    },
}


class RenamedModules(Loader):
    """Finds a renamed module under its old name.

    It goes before all other finders: once the package is there under its old name, they would find its modules and load
    each a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        if not successor(fullname):
            return None
        from importlib.machinery import ModuleSpec  # here, as no command needs it

        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the module to the import system: it is replaced."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name under the old one."""
        old = module.__name__
        new = successor(old)
        warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def successor(name: str) -> str:
    """Return the new name of a module; an empty string where `name` is not an old one."""
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return ""


def moved_name(module: str, name: str) -> object:
    """Return what `module` had under this name until 0.2, with a DeprecationWarning that names its new module.

    Raises:
        AttributeError: it had nothing of this name.
    """
    for new, names in MOVED.get(module, {}).items():
        if name in names:
            warnings.warn(f"{name} is now in {new}; {module} has it for one release", DeprecationWarning, stacklevel=3)
            return getattr(importlib.import_module(new), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    """Let `import` find renamed modules."""
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedModules())
