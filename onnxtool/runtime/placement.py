"""Which nodes of a file a provider takes: asked of the provider, or of documentation where it is not installed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxtool.errors import ProviderError, first_line
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild
from onnxtool.model_file import ModelFile
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.wire import read_nodes
from onnxtool.model_file.wire.structure import scope_of_node
from onnxtool.reading import read_json
from onnxtool.reports import short_repr
from onnxtool.runtime.machine import available_cores
from onnxtool.runtime.providers import (
    AUTO,
    CPU,
    ExecutionProvider,
    apply_provider,
    provider_problem,
    provider_version,
    register_operators,
)
from onnxtool.runtime.session import disabled_optimizers, find_provider, made_for

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
        found = [find_placement(model.sized(stated), text) for stated in model.sizes]
        return next((one for one in found if not one.whole), found[-1])
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


def _look_up(model: ModelFile, known: dict[str, Any]) -> dict[str, Any]:
    """Compare operators, opset and axes with what is documented."""
    nodes, reasons, listed = _nodes_of(model), [], {*known["operators"].split(), "Constant"}
    refused = [node for node in nodes if node[0] not in listed]
    if (opset := default_opset(model.structure.opsets)) < known["opset"]:
        reasons.append(f"opset {opset}, and {known['opset']} is the lowest that is listed")
    inputs = model.structure.inputs
    dynamic = [
        f"{one.name} {list(one.shape)}" for one in inputs if not all(isinstance(size, int) for size in one.shape)
    ]
    if dynamic and not known["takes_dynamic_axes"]:
        reasons.append(f"dynamic axes, which it does not take: {', '.join(dynamic)}")
    checked = "types, conditions on attributes and ranks, and what onnxruntime fuses or folds before it asks"
    answer = {"asked": False, "source": known["source"], "num_nodes": len(nodes), "opens": None, "not_checked": checked}
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
        why = str(error)
    except ChildEndedError as error:
        why = f"{provider.place} {error.reason(_SECONDS, num_bytes)}"
    return answer | _unloaded(model, why)


def _unloaded(model: ModelFile, why: str) -> dict[str, Any]:
    """Answer for a file that no session opens; providers name operators as `com.microsoft.Gelu` in their errors."""
    nodes, words = _nodes_of(model), set(re.findall(r"[\w.]+", why))
    refused = [node for node in nodes if node[0].replace("::", ".") in words and ("::" in node[0] or _CAMEL(node[0]))]
    return {"refused": refused, "num_nodes": len(nodes), "num_taken": 0, "opens": False, "reasons": [why]}


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
