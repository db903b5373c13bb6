"""Inspect installed packages, providers and the nodes of files that they take, and what keeps onnxtool from working."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from onnxtool.errors import OptionError, ProviderError, first_line
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild
from onnxtool.model_file import ModelFile
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.wire import read_nodes
from onnxtool.model_file.wire.structure import scope_of_node
from onnxtool.options import UNSET, Option, OptionalPath, Options
from onnxtool.reading import read_json
from onnxtool.reports import short_repr
from onnxtool.runtime.machine import available_cores
from onnxtool.runtime.providers import (
    AUTO,
    CPU,
    PROVIDERS,
    ROWS,
    ExecutionProvider,
    apply_provider,
    cuda_device_problem,
    cuda_problem,
    describe_provider,
    is_built_in,
    is_installed,
    provider_effect,
    provider_problem,
    provider_version,
    register_operators,
)
from onnxtool.runtime.session import disabled_optimizers, find_provider, made_for
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
    versions = {"onnxtool": installed(DISTRIBUTION), **{name: installed(name) for name in names}}
    packages = {name: version or _MISSING for name, version in versions.items()}
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


_SECONDS, _BYTES, _COPIES = 600, 4 << 30, 6  # of processor time; of memory, and of the model's weights in it
_MOST_CHARACTERS = 2000  # of an error
_CAMEL = re.compile(r"[A-Z][a-z0-9]+[A-Z]").match  # no English word is written like that
_DOCUMENTED = Path(__file__).with_name("documented_operators.json")


@short_repr
@dataclass(frozen=True)
class RefusedNode:
    """A node that a provider does not take; `layer` is the part of the model that its name shows."""

    operator: str
    name: str
    layer: str


@short_repr
@dataclass(frozen=True)
class Placement:
    """Whether a file runs on a provider, wholly.

    Attributes:
        asked: whether the provider itself answered, in a session of this onnxruntime; otherwise it is documentation.
        source: the version of the provider, or the documentation and its version.
        num_nodes: nodes of the graph as the provider gets it, or of the file; `num_taken` of them run there.
        refused: nodes that it leaves to the CPU, that its error names, or that its documentation does not list.
        opens: whether a session opens that forbids the CPU to step in; None if nothing was asked.
        reasons: what else is in the way.
        whole: whether nothing is.
        not_checked: what the answer does not cover.
    """

    model: str
    provider: str
    refused: tuple[RefusedNode, ...]
    whole: bool
    asked: bool
    source: str
    num_nodes: int
    num_taken: int
    opens: bool | None
    reasons: Sequence[str]
    not_checked: str = ""


def find_placement(model: ModelFile, text: str | None = None) -> Placement:
    """Return which nodes of a model a provider takes; by default, the one that the file was made for, or else the CPU.

    Of a model with files of fixed sizes, each of these is asked for, and the answer is about the first that does not
    run wholly, or else about the last one.

    Raises:
        OptionError: there is no such provider.
        ProviderError: it cannot run here, and no documentation lists its operators.
    """
    if model.sizes:
        placements = [find_placement(model.sized(stated), text) for stated in model.sizes]
        return next((placement for placement in placements if not placement.whole), placements[-1])
    if text in (None, AUTO):
        text = made_for(model).get("provider", CPU).partition("?")[0]  # an option in a stamp may load any library
    documented = read_json(_DOCUMENTED)
    name = text.partition("?")[0].partition(":")[0]
    if name in documented and (name == "webnn" or provider_problem(name)):
        text, answer = name, _look_up(model, documented[name])
    else:
        provider = ExecutionProvider.parse(text)
        if problem := provider_problem(provider.place, provider.library):
            raise ProviderError(
                f"{provider.place} cannot be asked here, and no documentation lists its operators: {problem}",
                f"run this where it is installed; documentation is known for {', '.join(documented)}",
            )
        answer = _ask(model, find_provider(model, text)[0])
    inputs = {node.name: node.inputs for node in read_nodes(model.path)}  # of which weights may name the layer
    refused = tuple(
        RefusedNode(operator, name, scope_of_node(name, "", inputs.get(name, ())))
        for operator, name in answer.pop("refused")
    )
    return Placement(str(model.path), text, refused, whole=not refused and not answer["reasons"], **answer)


def _look_up(model: ModelFile, results: dict[str, Any]) -> dict[str, Any]:
    """Compare operators, opset and axes with what is documented."""
    nodes, reasons, listed = _nodes_of(model), [], {*results["operators"].split(), "Constant"}
    refused = [node for node in nodes if node[0] not in listed]
    if (opset := default_opset(model.structure.opsets)) < results["opset"]:
        reasons.append(f"opset {opset}, and {results['opset']} is the lowest that is listed")
    inputs = model.structure.inputs
    dynamic = [
        f"{graph_input.name} {list(graph_input.shape)}"
        for graph_input in inputs
        if not all(isinstance(size, int) for size in graph_input.shape)
    ]
    if dynamic and not results["takes_dynamic_axes"]:
        reasons.append(f"dynamic axes, which it does not take: {', '.join(dynamic)}")
    checked = "types, conditions on attributes and ranks, and what onnxruntime fuses or folds before it asks"
    answer = {
        "asked": False,
        "source": results["source"],
        "num_nodes": len(nodes),
        "opens": None,
        "not_checked": checked,
    }
    return answer | {"num_taken": len(nodes) - len(refused), "refused": refused, "reasons": reasons}


def _nodes_of(model: ModelFile) -> list[tuple[str, str]]:
    return [(_operator(node), node.name) for node in read_nodes(model.path)]


def _operator(node: Any) -> str:
    """Return the operator of a node of ours or of onnxruntime's, with its domain."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _ask(model: ModelFile, provider: ExecutionProvider) -> dict[str, Any]:
    """Let another process open sessions on the provider, which may end it."""
    num_bytes = _BYTES + _COPIES * model.size_bytes
    answer = {"asked": True, "source": f"{provider.row.runtime_name} {provider_version(provider)}"}
    try:
        with GuardedChild(f"{__name__}:ask", ("onnxruntime", __name__)) as child:
            argument = [str(model.path.resolve()), str(provider), provider.precision]
            return answer | dict(child.call(argument, seconds=_SECONDS, num_bytes=num_bytes))
    except ChildError as error:
        reason = str(error)
    except ChildEndedError as error:
        reason = f"{provider.place} {error.reason(_SECONDS, num_bytes)}"
    return answer | _unloaded(model, reason)


def _unloaded(model: ModelFile, reason: str) -> dict[str, Any]:
    """Answer for a file that no session opens; providers name operators as `com.microsoft.Gelu` in their errors."""
    nodes, words = _nodes_of(model), set(re.findall(r"[\w.]+", reason))
    refused = [node for node in nodes if node[0].replace("::", ".") in words and ("::" in node[0] or _CAMEL(node[0]))]
    return {"refused": refused, "num_nodes": len(nodes), "num_taken": 0, "opens": False, "reasons": [reason]}


def ask(argument: Sequence[str]) -> dict[str, Any]:
    """Open a session that notes who runs each node, and one that forbids the CPU to step in; called in the child."""
    path, text, precision = argument
    model, provider = ModelFile.open(Path(path)), replace(ExecutionProvider.parse(text), precision=precision)
    try:
        parts = _open(model, provider, "record_ep_graph_assignment_info").get_provider_graph_assignment_info()
    except Exception as error:  # noqa: BLE001  onnxruntime has no error class of its own
        return _unloaded(model, " ".join(str(error).split())[:_MOST_CHARACTERS])
    nodes = [(part.ep_name == provider.row.runtime_name, node) for part in parts for node in part.get_nodes()]
    refused = [(_operator(node), node.name) for is_taken, node in nodes if not is_taken]
    reason = ""
    if provider.name != CPU:  # which no session can be opened without
        try:
            _open(model, provider, "disable_cpu_ep_fallback")
        except Exception as error:  # noqa: BLE001  as above
            reason = first_line(error)
    answer = {"refused": refused, "num_nodes": len(nodes), "num_taken": len(nodes) - len(refused)}
    return answer | {"opens": not reason, "reasons": [reason] if reason and not refused else []}


def _open(model: ModelFile, provider: ExecutionProvider, entry: str) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(f"session.{entry}", "1")
    register_operators(options, model.structure.opsets)
    providers, without = apply_provider(options, provider, available_cores()), disabled_optimizers(model)
    return ort.InferenceSession(str(model.path), options, providers=providers, disabled_optimizers=without)
