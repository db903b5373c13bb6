"""Write docs/onnxoptimizer.md: what each pass of onnxoptimizer does to graphs, and what `optimize` does with some.

    python scripts/onnxoptimizer_table.py --folder DIR

DIR keeps the packages of scripts/foreign/files.py, which are downloaded if they are not there. Each pass runs alone on
each graph: onnx's cases of one node, these files, and the graphs of the tests of passes. onnxruntime runs the results
without its own optimizations, and compares them with the graph itself. Then the presets run on the same graphs, and on
small networks as both exporters write them. Exit code 1: a result of a preset is wrong, or has lost something.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnx
import onnx_ir as ir
import onnxoptimizer
import onnxruntime as ort
from foreign.files import FILES
from harness.pages import replace, replace_rows
from rich.console import Console
from rich.progress import track

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.onnxoptimizer_passes import ALLOWED
from onnxtool.optimize.pipeline import Context, run_passes
from onnxtool.optimize.presets import PRESETS
from tests.optimize.passes.builders import normal
from tests.optimize.passes.test_every_pass import ROWS
from tests.optimize.passes.test_onnxoptimizer_passes import WRONG, wrong_graph
from tests.optimize.test_backend_suite import Feeds, backend_cases, difference

PAGE = Path(__file__).resolve().parents[1] / "docs" / "onnxoptimizer.md"
_PASSES = ("pass", "in its default set", "used", "right", "no change", "wrong", "dies", "such as")
_SUITES = (
    "graphs",
    "run",
    "with changes by its passes",
    "right",
    "wrong",
    "passes that died",
    "lost names or metadata",
)
_NETWORKS = ("network", "exporter", "BatchNormalization", "afterwards", "nodes", "nodes afterwards", "error")
_VERSIONS = r"onnxoptimizer [\d.]+, onnxruntime [\d.]+"
_LIMIT_S = 60  # that one pass may take on one graph
_LARGEST = 8 << 20  # bytes of a graph that all passes run on
_NOTHING = "nop"  # the pass that only converts a graph to onnxoptimizer's form and back
_FORK, _STDERR = multiprocessing.get_context("fork"), Console(stderr=True)
_RIGHT, _SAME, _WRONG, _DIES = "right", "no change", "wrong", "dies"


@dataclass(frozen=True)
class Graph:
    """A graph with inputs for it."""

    suite: str
    name: str
    load: Callable[[], onnx.ModelProto]
    feeds: Callable[[], list[Feeds]]


def graphs(folder: Path) -> Iterator[Graph]:
    """Yield all graphs."""
    for case in backend_cases():
        yield Graph("cases of one node", case.name, partial(_same, case.model), partial(_same, list(case.feeds)))
    for file in FILES:
        path = file.fetch(folder)
        yield Graph("files of others", file.name, partial(onnx.load, path), partial(file.make_feeds, path))
    for row in ROWS.values():
        for name, build in {**row.fires, **{name: graph for name, (graph, _) in row.stays.items()}}.items():
            if isinstance(build, partial):  # not exported, which takes seconds: the networks stand for these
                model = ir.to_proto(build())
                feeds = partial(_feeds, model, row.feeds)
                yield Graph("graphs of tests", f"{row.step.name}, {name}", partial(_same, model), feeds)
    for name in WRONG:
        model = wrong_graph(name)
        yield Graph("graphs of tests", name, partial(_same, model), partial(_feeds, model, None))


def _same(value: Any) -> Any:
    return value


def _feeds(model: onnx.ModelProto, given: Any) -> list[Feeds]:
    """Return inputs; those that are made up are random."""
    feeds = dict(given or {})
    initializers = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in feeds and value.name not in initializers:
            kind = value.type.tensor_type
            shape = [size.dim_value or 2 + axis for axis, size in enumerate(kind.shape.dim)]
            feeds[value.name] = normal(*shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return [feeds]


def run(model: bytes, feeds: list[Feeds]) -> list[Any]:
    """Return the outputs without onnxruntime's own optimizations, which fold Pad into MaxPool as wrongly."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return [session.run(None, {name: array for name, array in case.items() if name in names}) for case in feeds]


class Reference:
    """A graph and its outputs.

    Raises:
        Exception: onnxruntime does not run it.
    """

    def __init__(self, graph: Graph) -> None:
        self.model, self.feeds = graph.load(), graph.feeds()
        self.outputs = run(self.model.SerializeToString(), self.feeds)
        self.draws = bool(difference(run(self.model.SerializeToString(), self.feeds), self.outputs))

    def problem(self, model: onnx.ModelProto) -> str:
        """Return what is wrong with the outputs of a model."""
        try:
            outputs = run(model.SerializeToString(), self.feeds)
        except Exception as error:  # noqa: BLE001  onnxruntime's errors have no common class
            return f"does not run: {str(error).splitlines()[0][:60]}"
        return difference(outputs, self.outputs, only_types=self.draws)


def judge_passes(graph: Graph, passes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each pass with its verdict on a graph, `nop` first; nothing if onnxruntime does not run the graph.

    Nothing is yielded for the others if `nop`, and so each of them, makes a graph that does not run.
    """
    try:
        reference = Reference(graph)
    except Exception:  # noqa: BLE001  as above
        return
    kept: dict[bytes, str] = {}  # verdicts by result: most passes leave most graphs alone
    for name in passes:
        signal.alarm(_LIMIT_S)
        yield name, _DIES  # if the process ends here
        try:
            result = onnxoptimizer.optimize(reference.model, [name])
        except Exception as error:  # noqa: BLE001  it raises any error
            yield name, f"{_DIES}: {str(error).splitlines()[0][-60:]}"
            continue
        content = result.SerializeToString(deterministic=True)
        if content not in kept:
            problem = reference.problem(result)
            kept[content] = f"{_WRONG}: {problem}" if problem else _RIGHT if kept else _SAME
        yield name, kept[content]
        if name == _NOTHING and kept[content] != _SAME:
            return


def judge_in_processes(graph: Graph, passes: list[str]) -> dict[str, str]:
    """Return what `judge_passes` yields for a graph, from processes that a pass may end."""
    verdicts: dict[str, str] = {}
    remaining = passes
    while True:
        receiver, sender = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_send_verdicts, args=(graph, [_NOTHING, *remaining], sender))
        child.start()
        sender.close()
        name = _NOTHING
        with suppress(EOFError):
            while True:
                name, verdict = receiver.recv()
                verdicts[name] = verdict
        child.join()
        if child.exitcode is None or child.exitcode >= 0:
            return verdicts
        verdicts[name] = f"{_DIES}: {signal.Signals(-child.exitcode).name}"
        if name in (_NOTHING, passes[-1]):
            return verdicts
        remaining = passes[passes.index(name) + 1 :]


def _send_verdicts(graph: Graph, passes: list[str], sender: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for verdict in judge_passes(graph, passes):
        sender.send(verdict)


def table_of_passes(every: list[Graph]) -> list[tuple[str, ...]]:
    """Return a row for each pass."""
    passes = sorted(set(onnxoptimizer.get_available_passes()) - {_NOTHING})
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, str], str] = {}
    small = [graph for graph in every if graph.load().ByteSize() <= _LARGEST]
    verdicts = {graph.name: judge_in_processes(graph, passes) for graph in track(small, "passes", console=_STDERR)}
    for graph, by_pass in verdicts.items():
        for name, result in by_pass.items():
            verdict, _, reason = result.partition(": ")
            counts[name][verdict] += 1
            if reason:
                examples.setdefault((name, verdict), f"{graph}: {reason}".replace("|", "/"))
    defaults, used = onnxoptimizer.get_fuse_and_elimination_passes(), {step.name for step in ALLOWED}
    return [
        (
            f"`{name}`",
            "yes" if name in defaults else "",
            "**yes**" if name in used else "",
            *(str(counts[name][verdict]) for verdict in (_RIGHT, _SAME, _WRONG, _DIES)),
            "; ".join(text for (example, _), text in examples.items() if example == name),
        )
        for name in [*passes, _NOTHING]
    ]


def notes(model: ir.Model) -> dict[str, tuple[Any, ...]]:
    """Return name, metadata and documentation of nodes and values, subgraphs included, by operator and output."""
    noted: dict[str, tuple[Any, ...]] = {"model": (dict(model.metadata_props), model.doc_string)}
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            for value in node.outputs:
                noted[f"{node.op_type} {value.name}"] = (node.name, dict(node.metadata_props), node.doc_string)
                metadata = dict(value.metadata_props)
                noted[f"value {value.name}"] = (metadata, value.doc_string, value.type, str(value.meta))
    return noted


def judge_presets(graph: Graph, folder: Path) -> tuple[str, bool, int, int] | None:
    """Return what is wrong, whether its passes changed anything, how many died, and how much was lost."""
    try:
        reference = Reference(graph)
    except Exception:  # noqa: BLE001  as above
        return None
    path = folder / "graph.onnx"
    onnx.save(reference.model, path)
    before, after = PRESETS["cpu"][: PRESETS["cpu"].index(ALLOWED[0])], ALLOWED
    model, _ = run_passes(load_model(path), before, Context())
    for part in model.graphs():
        for node in part:
            node.metadata_props["noted"] = f"of {node.name}"
            for value in node.outputs:
                value.metadata_props["noted"] = f"of {value.name}"
    noted = notes(model)
    model, results = run_passes(model, after, Context())
    num_lost = sum(noted[key] != kept for key, kept in notes(model).items() if key in noted)
    problem = reference.problem(ir.to_proto(ir.external_data.load_to_model(model)))
    return problem, any(result.num_changes for result in results), sum(result.left_out for result in results), num_lost


def table_of_suites(every: list[Graph], folder: Path) -> tuple[list[tuple[str, ...]], bool]:
    """Return a row for each suite, and whether something is wrong."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for graph in track(every, "presets", console=_STDERR):
        verdict = judge_presets(graph, folder)
        count = counts[graph.suite]
        if verdict is not None:
            problem, is_changed, num_dead, num_lost = verdict
            count.update(
                run=1, changed=is_changed, right=not problem, wrong=bool(problem), died=num_dead, lost=num_lost
            )
            if problem or num_dead or num_lost:
                print(graph.name, verdict, file=sys.stderr)
    keys = ("run", "changed", "right", "wrong", "died", "lost")
    is_wrong = any(count["wrong"] + count["died"] + count["lost"] for count in counts.values())
    return [(suite, *(str(count[key]) for key in keys)) for suite, count in counts.items()], is_wrong


def table_of_networks() -> Iterator[tuple[str, ...]]:
    """Yield a row for each network and exporter."""
    from tests.optimize.passes import networks  # PyTorch, which makes a fork slow

    for name in networks.NETWORKS:
        network, sample = networks.make(name)
        expected = network(sample).detach().numpy()
        for exporter in ("torchscript", "dynamo"):
            model = networks.exported(network, sample, dynamo=exporter == "dynamo")
            counts = [(num_normalizations(model.graph), model.graph.num_nodes())]
            result, _ = run_passes(model, PRESETS["cpu"], Context())
            counts.append((num_normalizations(result.graph), result.graph.num_nodes()))
            feeds = {str(result.graph.inputs[0].name): sample.numpy()}
            (output,) = run(ir.to_proto(result).SerializeToString(), [feeds])[0]
            error = float(np.abs(output - expected).max() / np.abs(expected).max())
            yield name, exporter, *(str(count) for pair in zip(*counts, strict=True) for count in pair), f"{error:.0e}"


def num_normalizations(graph: ir.Graph) -> int:
    """Return the number of BatchNormalization nodes."""
    return sum(node.op_type == "BatchNormalization" for node in graph)


def main() -> int:
    """Judge everything, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where packages are kept; not in the repository")
    parser.add_argument(
        "--only", choices=("passes", "suites", "networks"), nargs="+", default=("passes", "suites", "networks")
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    text, is_wrong = PAGE.read_text(encoding="utf-8"), False
    every = list(graphs(arguments.folder.resolve()))
    if "suites" in arguments.only:
        rows, is_wrong = table_of_suites(every, arguments.folder)
        text = replace_rows(text, _SUITES, rows)
    if "networks" in arguments.only:
        text = replace_rows(text, _NETWORKS, table_of_networks())
    if "passes" in arguments.only:
        text = replace_rows(text, _PASSES, table_of_passes(every))
    versions = f"onnxoptimizer {onnxoptimizer.__version__}, onnxruntime {ort.__version__}"
    PAGE.write_text(replace(text, _VERSIONS, versions), encoding="utf-8")
    print(f"wrote {PAGE}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
