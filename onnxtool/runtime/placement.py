"""Which nodes of a file a provider takes: asked of the provider, or of documentation where it is not installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxtool.errors import ProviderError, first_line
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild
from onnxtool.model_file import ModelFile
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.wire import Node, read_nodes
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
        num_nodes: nodes of the file; of the graph as the provider gets it, if it was asked.
        refused: nodes that it leaves to the CPU, or that its documentation does not list.
        opens: whether a session opens that forbids the CPU to step in; None if nothing was asked.
        reasons: what else is in the way.
        whole: whether nothing is.
        not_checked: what the answer does not cover.
    """

    model: str
    provider: str
    asked: bool
    source: str
    num_nodes: int
    refused: tuple[RefusedNode, ...]
    opens: bool | None
    reasons: tuple[str, ...]
    whole: bool
    not_checked: str = ""


def find_placement(model: ModelFile, text: str | None = None) -> Placement:
    """Return which nodes of a model a provider takes; by default, the one that the file was made for, or else the CPU.

    Raises:
        OptionError: there is no such provider.
        ProviderError: it cannot run here, and no documentation lists its operators.
    """
    if text in (None, AUTO):
        text = made_for(model).get("provider", CPU).partition("?")[0]  # an option in a stamp may load any library
    documented = read_json(_DOCUMENTED)
    name = text.partition("?")[0].partition(":")[0]
    if name in documented and (name == "webnn" or provider_problem(name)):
        return _look_up(model, name, documented[name])
    provider = ExecutionProvider.parse(text)
    if problem := provider_problem(provider.place, provider.library):
        raise ProviderError(
            f"{provider.place} cannot be asked here, and no documentation lists its operators: {problem}",
            f"run this where it is installed; documentation is known for {', '.join(documented)}",
        )
    return _ask(model, find_provider(model, text)[0])


def _look_up(model: ModelFile, name: str, known: dict[str, Any]) -> Placement:
    """Compare operators, opset and axes with what is documented."""
    operators, nodes = set(known["operators"].split()), list(read_nodes(model.path))
    named = [(f"{node.domain}::{node.op_type}" if node.domain else node.op_type, node.name) for node in nodes]
    reasons = []
    if (opset := default_opset(model.structure.opsets)) < known["opset"]:
        reasons.append(f"opset {opset}, and {known['opset']} is the lowest that is listed")
    dynamic = [f"{one.name} {list(one.shape)}" for one in model.structure.inputs if not _is_fixed(one.shape)]
    if dynamic and not known["takes_dynamic_axes"]:
        reasons.append(f"dynamic axes, which it does not take: {', '.join(dynamic)}")
    refused = _refused(nodes, (pair for pair in named if pair[0] not in operators and pair[0] != "Constant"))
    return Placement(
        str(model.path),
        name,
        asked=False,
        source=known["source"],
        num_nodes=len(nodes),
        refused=refused,
        opens=None,
        reasons=tuple(reasons),
        whole=not refused and not reasons,
        not_checked="types, conditions on attributes and ranks, and what onnxruntime fuses or folds before it asks",
    )


def _is_fixed(shape: Sequence[int | str | None]) -> bool:
    return all(isinstance(size, int) and size > 0 for size in shape)


def _refused(nodes: Iterable[Node], pairs: Iterable[Sequence[str]]) -> tuple[RefusedNode, ...]:
    inputs = {node.name: node.inputs for node in nodes}  # of which weights may name the layer
    return tuple(RefusedNode(operator, name, scope_of_node(name, "", inputs.get(name, ()))) for operator, name in pairs)


def _ask(model: ModelFile, provider: ExecutionProvider) -> Placement:
    """Let another process open sessions on the provider, which may end it."""
    num_bytes, answer = _BYTES + _COPIES * model.size_bytes, dict[str, Any]()
    try:
        with GuardedChild(f"{__name__}:ask", ("onnxruntime", __name__)) as child:
            argument = [str(model.path.resolve()), str(provider), provider.precision]
            answer = child.call(argument, seconds=_SECONDS, num_bytes=num_bytes)
    except ChildError as error:
        reasons = [str(error)]
    except ChildEndedError as error:
        reasons = [f"{provider.place} {error.reason(_SECONDS, num_bytes)}"]
    else:
        reasons = answer["reasons"]
    refused = _refused(read_nodes(model.path), answer.get("refused", ()))
    return Placement(
        str(model.path),
        str(provider),
        asked=True,
        source=f"{provider.row.runtime_name} {provider_version(provider)}",
        num_nodes=answer.get("num_nodes", model.structure.num_nodes),
        refused=refused,
        opens=answer.get("opens", False),
        reasons=tuple(reasons),
        whole=not refused and not reasons,
    )


def ask(argument: Sequence[str]) -> dict[str, Any]:
    """Open a session that notes who runs each node, and one that forbids the CPU to step in; called in the child."""
    path, text, precision = argument
    model, provider = ModelFile.open(Path(path)), replace(ExecutionProvider.parse(text), precision=precision)
    parts = _open(model, provider, "record_ep_graph_assignment_info").get_provider_graph_assignment_info()
    refused = [
        (f"{node.domain}::{node.op_type}" if node.domain else node.op_type, node.name)
        for part in parts
        if part.ep_name != provider.row.runtime_name
        for node in part.get_nodes()
    ]
    reason = ""
    if provider.name != CPU:  # which no session can be opened without
        try:
            _open(model, provider, "disable_cpu_ep_fallback")
        except Exception as error:  # noqa: BLE001  onnxruntime has no error class of its own
            reason = first_line(error)
    num_nodes, reasons = sum(len(part.get_nodes()) for part in parts), [reason] if reason and not refused else []
    return {"refused": refused, "num_nodes": num_nodes, "opens": not reason, "reasons": reasons}


def _open(model: ModelFile, provider: ExecutionProvider, entry: str) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(f"session.{entry}", "1")
    register_operators(options, model.structure.opsets)
    providers, without = apply_provider(options, provider, available_cores()), disabled_optimizers(model)
    return ort.InferenceSession(str(model.path), options, providers=providers, disabled_optimizers=without)
