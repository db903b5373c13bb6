"""Inspect installed packages, execution providers, and problems that keep onnxtool from working."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from onnxtool.errors import OptionError
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild
from onnxtool.options import UNSET, Option, OptionalPath, Options
from onnxtool.runtime.providers import (
    PROVIDERS,
    ROWS,
    cuda_device_problem,
    cuda_problem,
    describe_provider,
    is_built_in,
    is_installed,
    provider_effect,
)
from onnxtool.version import DISTRIBUTION, commit, installed

# Both write the module `onnxruntime`; if both are installed, the last one written runs.
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
_MISSING = "not installed"
_EXTRAS = ("export", "text")
_LOAD_SECONDS, _LOAD_BYTES = 60, 8 << 30  # to load the library of a plugin


@dataclass(frozen=True)
class EnvironmentReport:
    """Installed packages, usable execution providers, and problems; `commit` is empty if unknown."""

    commit: str
    python: str
    platform: str
    packages: dict[str, str]
    providers: dict[str, str]
    problems: tuple[str, ...]


class PlacementOptions(Options):
    """The file that `onnxtool env` asks a provider about.

    Attributes:
        model: None for a description of the installation.
        provider: None for the provider that the file was made for, or else cpu.
    """

    model: Annotated[
        OptionalPath, Option("Show which nodes of this ONNX file the provider takes, instead of the installation.")
    ] = UNSET
    provider: Annotated[
        str | None,
        Option(
            "With --model, the execution provider; of coreml, qnn and webnn, documentation is read where they are not "
            "installed.",
            metavar="NAME[:DEVICE]",
            default="the one that the file was made for, else cpu",
            effect=provider_effect,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.provider is not None and self.model is None:
            raise OptionError("--provider is for a file, and none was given", "pass --model")


def describe_environment() -> EnvironmentReport:
    """Read versions from the packages' metadata; of the packages, only onnxruntime is imported."""
    requirements, problems = _requirements()
    names = sorted({*_RUNTIMES, *(requirement.name for requirement in requirements)})
    found = {"onnxtool": installed(DISTRIBUTION), **{name: installed(name) for name in names}}
    packages = {name: version or _MISSING for name, version in found.items()}
    problems += _runtime_problems(packages)
    problems += [problem for requirement in requirements for problem in _requirement_problems(requirement, packages)]
    if packages.get("transformers", _MISSING) != _MISSING and not _has_exporters():
        problems.append(
            f"transformers {packages['transformers']} has no transformers.exporters, which `onnxtool export` uses "
            "first; upgrade transformers"
        )
    providers, provider_problems = _providers()
    return EnvironmentReport(
        commit=commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        providers=providers,
        problems=(*problems, *provider_problems),
    )


def _requirements() -> tuple[list[Requirement], list[str]]:
    """Return the requirements of onnxtool and these extras on this platform, or why they are unknown."""
    try:
        stated = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return [], ["onnxtool runs from its source folder, so its requirements were not checked; pip install -e ."]
    requirements = [Requirement(line) for line in stated]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in _EXTRAS)], []


def _runtime_problems(packages: dict[str, str]) -> Iterator[str]:
    installed = [name for name in _RUNTIMES if packages[name] != _MISSING]
    if len(installed) > 1:
        yield (
            f"{' and '.join(installed)} are both installed, and the last one written is the one that runs; "
            "pip uninstall both, then install onnxtool again"
        )
    if not installed:
        yield f"neither {' nor '.join(_RUNTIMES)} is installed; pip install onnxtool-cli installs the right one"


def _requirement_problems(requirement: Requirement, packages: dict[str, str]) -> Iterator[str]:
    version = packages[requirement.name]
    if version == _MISSING:
        # Either runtime will do; a missing one has already been reported. Exported models run without the extra.
        if requirement.name not in _RUNTIMES and requirement.marker is None:
            yield f"{requirement.name} is not installed; pip install '{requirement.name}{requirement.specifier}'"
        return
    try:
        fits = requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return  # a custom build, to which bounds do not apply
    if not fits:
        yield (
            f"{requirement.name} is {version}, and onnxtool requires {requirement.specifier}; "
            f"pip install '{requirement.name}{requirement.specifier}'"
        )


def _has_exporters() -> bool:
    """Whether transformers.exporters exists, without importing transformers, which takes seconds."""
    spec = importlib.util.find_spec("transformers")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any((Path(folder) / "exporters" / "__init__.py").is_file() for folder in folders)


def _providers() -> tuple[dict[str, str], list[str]]:
    """Return `ok` or an obstacle for each provider, and problems; a missing GPU is not a problem."""
    try:
        importlib.import_module("onnxruntime")
    except ImportError as error:
        return dict.fromkeys(PROVIDERS, "onnxruntime cannot be imported"), [f"onnxruntime cannot be imported: {error}"]
    problem = cuda_problem()
    libraries = [] if cuda_device_problem() or not problem else [f"a CUDA device is here, but {problem}"]
    return {name: _describe(name) for name in PROVIDERS} | {"cuda": problem or "ok"}, libraries


def _describe(name: str) -> str:
    """Return what a provider offers here; another process loads the library of a plugin, which may end it."""
    row = ROWS[name]
    if is_built_in(row) or not is_installed(row):
        return describe_provider(name)
    try:
        with GuardedChild("onnxtool.runtime.providers:describe_provider", ("onnxruntime",)) as child:
            return str(child.call(name, seconds=_LOAD_SECONDS, num_bytes=_LOAD_BYTES))
    except ChildError as error:
        return f"its library cannot be loaded: {error}"
    except ChildEndedError as error:
        return f"its library {error.reason(_LOAD_SECONDS, _LOAD_BYTES)}"
