"""Load an untrusted graph in a child process first if onnxruntime's computations could end this process.

onnxruntime folds constants while loading a graph, without limits on time, size or operands: dividing -2^63 by -1 ends
the process. Few files have such parts, and only these pay for the child: files from exporters and `onnxtool.optimize`
have none that grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from onnxtool.errors import ModelFileError
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild, attempt
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Constant, Node, read_constants, read_nodes

MAX_SECONDS = 5  # the child's CPU time, and the same again for every 500 MB or 10,000 nodes of the model
MAX_GROWTH_BYTES = 640 << 20  # of memory in addition to four times the model
_BYTES_A_TURN, _NODES_A_TURN = 500_000_000, 10_000
_MAX_TRIED_ELEMENTS = 1 << 22  # of one input, of the smallest inputs that the model takes
_TRIED_LENGTH = 8  # of texts, if a graph takes no smaller inputs, e.g. because sizes are sums of others
_MOST_DOUBLINGS = 8
# onnxruntime 1.31 takes time that grows with the square of both: 58 s for 20,000 outputs, 6 s for as many consumers.
_MOST_OUTPUTS, _MOST_CONSUMERS = 2000, 5000
_NO_MEMORY = ("bad_alloc", "allocate", "memory")  # in onnxruntime's messages when out of memory

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
# Inputs whose values determine the size of a result.
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
    """Refuse a graph that is unsound, or that ends or exhausts a child process which loads it and runs it once.

    Raises:
        ModelFileError: the problem with the graph, or how the child ended.
    """
    model.check_sound()
    if not needs_probation(model):
        return
    status = model.path.stat()
    version = (str(model.path.resolve()), status.st_mtime_ns, status.st_size)
    if version not in _passed:
        ended = _ending(model)
        if ended is not None:
            raise ModelFileError(
                f"{model.path} cannot be run: on the smallest inputs it {ended.reason(*_limits(model))}",
                "export the model again, or do not trust this file",
            )
        _passed.add(version)


def needs_probation(model: ModelFile) -> bool:
    """Return whether onnxruntime may take very long for the graph, or folds constants that grow, loop or trap."""
    structure = model.structure
    consumers: Counter[str] = Counter()
    if (
        len(structure.outputs) > _MOST_OUTPUTS
        or structure.functions
        or structure.num_trainings
        or not _CONTROL_FLOW.isdisjoint(structure.ops)
    ):
        return True
    constants = read_constants(model.path)
    in_all = doublings = 0
    for node in read_nodes(model.path):
        inputs = [name for name in node.inputs if name]
        consumers.update(inputs)
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
    return doublings > _MOST_DOUBLINGS or max(consumers.values(), default=0) > _MOST_CONSUMERS


def _elements_of_result(node: Node, constants: Mapping[str, Constant]) -> int:
    """Return the maximum number of elements of an operator on constants; more than allowed if unknown."""
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
    """Return the integers of an operator that only rearranges its inputs, as exporters assemble shapes."""
    known = [constants[name].integers for name in node.inputs if name]
    if node.op_type in _KEEPING and known:
        return known[0]
    if node.op_type != "Concat" or None in known:
        return None
    return tuple(chain.from_iterable(filter(None, known)))


def _growth(node: Node, constants: Mapping[str, Constant]) -> int:
    """Return the result size given by constant sizes; more than allowed if their values are unknown."""
    growth = 1
    for place in _SIZES.get(node.op_type, ()):
        constant = constants.get(node.inputs[place]) if place < len(node.inputs) else None
        if constant is not None:
            integers = (_MAX_ELEMENTS,) if constant.integers is None else constant.integers
            growth *= prod(1 + abs(value) for value in integers)
    return growth


def death_on(model: ModelFile) -> str:
    """Return how a child process that loads the graph and runs it once dies; empty if it does not, or is stopped."""
    ended = _ending(model)
    return ended.detail if ended is not None and ended.kind == "death" else ""


def _limits(model: ModelFile) -> tuple[int, int]:
    """Return the seconds and bytes that a child may take."""
    turns = 1 + model.size_bytes // _BYTES_A_TURN + model.structure.num_nodes // _NODES_A_TURN
    return MAX_SECONDS * turns, MAX_GROWTH_BYTES + 4 * model.size_bytes


def _ending(model: ModelFile) -> ChildEndedError | None:
    """Return how a child that loads the model and runs it once ended; None if it succeeded.

    An onnxruntime error is ignored here, because the caller will encounter and report it.
    """
    seconds, num_bytes = _limits(model)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        argument = [str(model.path.resolve()), [*model.structure.opsets]]
        with GuardedChild(f"{__name__}:load_and_run", ("onnxruntime",), threads) as child:
            attempt(child, argument, seconds=seconds, num_bytes=num_bytes)
    except ChildError:
        return None
    except ChildEndedError as error:
        return error
    return None


def load_and_run(argument: tuple[str, Sequence[str]]) -> None:
    """Load a model, and run it on the smallest inputs that it takes; called in the child with its path and domains.

    Raises:
        MemoryError: onnxruntime ran out of memory, which it reports as an ordinary error.
        Exception: any other onnxruntime error.
    """
    try:
        _load_and_run(*argument)
    except Exception as error:
        if any(text in str(error) for text in _NO_MEMORY):
            raise MemoryError from error
        raise


def _load_and_run(path: str, domains: Sequence[str]) -> None:
    import onnxruntime as ort

    from onnxtool.runtime.providers import register_operators

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_mem_reuse = False  # planning it takes time that grows with the square of the nodes
    register_operators(options, domains)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = _smallest_feeds(session)
    if feeds is None:
        return
    try:
        session.run(None, feeds)
    except Exception as error:  # onnxruntime's own errors have no common class
        if any(text in str(error) for text in _NO_MEMORY):
            raise
        # An operator refuses such sizes, so the operators after it have not run.
        from onnxtool.runtime.input_cases import FeedShape, sized_feeds

        session.run(None, sized_feeds(ModelFile.open(Path(path)), FeedShape.full(1, _TRIED_LENGTH)))


def _smallest_feeds(session: Any) -> dict[str, Any] | None:
    """Return zeros, with size one for every dynamic axis; None if fixed sizes are large."""
    import numpy as np

    feeds: dict[str, Any] = {}
    dtypes = {"float": "float32", "double": "float64", "string": "object"}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) and size >= 0 else 1 for size in value.shape]
        name = value.type.removeprefix("tensor(").removesuffix(")")
        if np.prod(shape, dtype=float) > _MAX_TRIED_ELEMENTS:
            return None
        feeds[value.name] = np.full(shape, "" if name == "string" else 0, dtypes.get(name, name))
    return feeds
