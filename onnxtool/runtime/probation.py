"""Let a child process load an untrusted graph first, where this process could die on what onnxruntime computes there.

onnxruntime computes what is constant while it loads a graph, and nothing limits how long, how large, or with which
operands: a division of -2^63 by -1 ends the process. Few files have such a part, and only these pay for the child:
what exporters and `onnxtool.optimize` write has none that grows.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Constant, Node, read_constants, read_nodes
from onnxtool.runtime.child_process import module_command, module_environment

MAX_SECONDS = 5  # of the child's processor time, and as much again for every 500 MB of the model
MAX_GROWTH_BYTES = 640 << 20  # of memory beside four times the model
_BYTES_A_TURN = 500_000_000
_MAX_TRIED_ELEMENTS = 1 << 22  # of one input, of the smallest inputs that the model takes
_TRIED_LENGTH = 8  # of texts, where a graph takes no smaller inputs, such as those whose sizes are a sum of others
_MOST_DOUBLINGS = 8

_OUT_OF_MEMORY = 3  # the child's exit status
_MAX_ELEMENTS = 1 << 24  # of one constant that may be computed here
_MAX_ELEMENTS_IN_ALL = 1 << 27
# Results have no more elements than the largest input, and none ends a process.
_SAME_SIZE = frozenset(
    (
        *("Abs", "Cast", "CastLike", "Ceil", "Cos", "DequantizeLinear", "Erf", "Exp", "Floor", "Identity", "Log"),
        *("Neg", "Not", "QuantizeLinear", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape"),
        *("Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Sqrt", "Squeeze", "Tanh", "Transpose", "Unsqueeze"),
    )
)
_KEEPING = frozenset(("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
# Results have no more elements than the product of all inputs.
_PRODUCT_OF_SIZES = frozenset(
    (
        *("Add", "And", "Equal", "Gather", "GatherElements", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
        *("MatMul", "Max", "Min", "Mul", "Or", "Sub", "Where", "Xor"),
    )
)
# The inputs whose values say how large a result gets.
_SIZES = {
    "AffineGrid": (1,),
    "CenterCropPad": (1,),
    "Col2Im": (0, 1),
    "ConstantOfShape": (0,),
    "DFT": (1,),
    "Expand": (1,),
    "MaxUnpool": (2,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (1,),
    "Resize": (2, 3),
    "Tile": (1,),
    "Upsample": (1,),
}
_CONTROL_FLOW = frozenset(("If", "Loop", "Scan", "SequenceMap"))
_passed: set[tuple[str, int, int]] = set()


def check_harmless(model: ModelFile) -> None:
    """Refuse a graph that is unsound, or that ends or fills a child process which loads it and runs it once.

    Raises:
        ModelFileError: what is wrong with the graph, or what became of the child.
    """
    model.check_sound()
    if not needs_probation(model):
        return
    found = model.path.stat()
    version = (str(model.path.resolve()), found.st_mtime_ns, found.st_size)
    if version not in _passed:
        _try(model)
        _passed.add(version)


def needs_probation(model: ModelFile) -> bool:
    """Return whether onnxruntime would compute a constant part of the graph that may grow, loop or end the process."""
    structure = model.structure
    if structure.functions or structure.trainings or not _CONTROL_FLOW.isdisjoint(structure.ops):
        return True
    constants = read_constants(model.path)
    in_all = doublings = 0
    for node in read_nodes(model.path):
        inputs = [name for name in node.inputs if name]
        if all(name in constants for name in inputs) and node.op_type != "Constant":
            num_elements = _elements_of_result(node, constants)
            in_all += num_elements
            if num_elements > _MAX_ELEMENTS or in_all > _MAX_ELEMENTS_IN_ALL:
                return True
            result = Constant(num_elements, _integers_of_result(node, constants))
            constants.update(dict.fromkeys(node.outputs, result))
        elif _growth(node, constants) > _MAX_ELEMENTS:
            return True
        elif node.op_type == "Concat" and len(set(inputs)) < len(inputs):
            doublings += 1
    return doublings > _MOST_DOUBLINGS


def _elements_of_result(node: Node, constants: Mapping[str, Constant]) -> int:
    """Return how many elements an operator on constants makes at most; more than allowed where that is not known."""
    sizes = [constants[name].num_elements for name in node.inputs if name]
    if node.domain:
        return _MAX_ELEMENTS + 1
    if node.op_type in _SAME_SIZE:
        return max(sizes, default=_MAX_ELEMENTS + 1)
    if node.op_type == "Concat":
        return sum(sizes)
    if node.op_type in _PRODUCT_OF_SIZES or node.op_type in _SIZES:
        return prod(sizes) * _growth(node, constants)
    return _MAX_ELEMENTS + 1


def _integers_of_result(node: Node, constants: Mapping[str, Constant]) -> tuple[int, ...] | None:
    """Return the integers of an operator that only moves those of its inputs, as exporters put shapes together."""
    known = [constants[name].integers for name in node.inputs if name]
    if node.op_type in _KEEPING and known:
        return known[0]
    if node.op_type != "Concat" or None in known:
        return None
    return tuple(chain.from_iterable(filter(None, known)))


def _growth(node: Node, constants: Mapping[str, Constant]) -> int:
    """Return how large constant sizes make a result; more than allowed where their values are not known."""
    growth = 1
    for place in _SIZES.get(node.op_type, ()):
        constant = constants.get(node.inputs[place]) if place < len(node.inputs) else None
        if constant is not None:
            integers = (_MAX_ELEMENTS,) if constant.integers is None else constant.integers
            growth *= prod(1 + abs(value) for value in integers)
    return growth


def death_on(model: ModelFile) -> str:
    """Return how a child process dies that loads the graph and runs it once; empty where it does not, or is stopped."""
    try:
        ended = _run_child(model, *_limits(model)) or 0
    except subprocess.TimeoutExpired:
        return ""
    return _name_of(-ended) if ended < 0 and not _is_stopped(ended) else ""


def _limits(model: ModelFile) -> tuple[int, int]:
    """Return the seconds and bytes that a child may take."""
    return MAX_SECONDS * (1 + model.size_bytes // _BYTES_A_TURN), MAX_GROWTH_BYTES + 4 * model.size_bytes


def _is_stopped(ended: int) -> bool:
    """Whether a limit has ended a child."""
    import signal

    return -ended in (getattr(signal, "SIGXCPU", 0), getattr(signal, "SIGKILL", 0))


def _run_child(model: ModelFile, seconds: int, num_bytes: int) -> int | None:
    """Return the exit status of a child that loads and runs the model; None where no process can be started.

    Raises:
        TimeoutExpired: it does not end.
    """
    command = module_command(__name__, str(model.path.resolve()), str(seconds), str(num_bytes))
    environment = module_environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        # Four times as long as it may compute: a busy machine is not the model's fault.
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=4 * seconds,
        ).returncode
    except OSError:
        return None  # onnxruntime is as safe as it is without


def _try(model: ModelFile) -> None:
    seconds, num_bytes = _limits(model)
    try:
        ended = _run_child(model, seconds, num_bytes) or 0
    except subprocess.TimeoutExpired:
        raise _refused(model.path, f"it took more than {seconds} s to load and run on the smallest inputs") from None
    if ended == _OUT_OF_MEMORY:
        raise _refused(model.path, f"it took more than {num_bytes / 1e6:.0f} MB to load and run on the smallest inputs")
    if ended < 0:
        if _is_stopped(ended):
            raise _refused(model.path, f"it took more than {seconds} s to load and run on the smallest inputs")
        raise _refused(model.path, f"onnxruntime dies on it ({_name_of(-ended)})")


def _name_of(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _refused(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"{path} cannot be run: {reason}", "export the model again, or do not trust this file")


def _limit(seconds: int, num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows; the parent's patience is the limit there
        return
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_DATA, num_bytes),
    ):
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _load_and_run(path: str) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = _smallest_feeds(session)
    if feeds is None:
        return
    try:
        session.run(None, feeds)
    except Exception as error:  # onnxruntime's own are of no common kind
        if _ran_out_of_memory(error):
            raise
        # An operator refuses such sizes, and what comes behind it has not run.
        from onnxtool.runtime.feeds import FeedShape
        from onnxtool.runtime.input_cases import sized_feeds

        session.run(None, sized_feeds(ModelFile.open(Path(path)), FeedShape.full(1, _TRIED_LENGTH)))


def _smallest_feeds(session: Any) -> dict[str, Any] | None:
    """Return zeros, with one in place of every size that is not fixed; None where fixed ones are large."""
    import numpy as np

    feeds: dict[str, Any] = {}
    dtypes = {"float": "float32", "double": "float64", "string": "object"}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) and size >= 0 else 1 for size in value.shape]
        name = value.type.removeprefix("tensor(").removesuffix(")")
        if np.prod(shape, dtype=float) > _MAX_TRIED_ELEMENTS:
            return None
        feeds[value.name] = np.zeros(shape, dtypes.get(name, name))
    return feeds


def _main(path: str, seconds: str, num_bytes: str) -> int:
    import onnxruntime as ort  # noqa: F401  # before the limits: what its libraries take is not the model's

    _limit(int(seconds), int(num_bytes))
    try:
        _load_and_run(path)
    except Exception as error:  # noqa: BLE001  an error is the parent's to meet again, and to report
        return _OUT_OF_MEMORY if _ran_out_of_memory(error) else 0
    return 0


def _ran_out_of_memory(error: Exception) -> bool:
    """Return whether Python or onnxruntime, which says it by an error like any other, got no memory."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in ("bad_alloc", "allocate", "memory"))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
