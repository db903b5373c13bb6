"""Run PyTorch's own operator tests through the backend, and write docs/operators.md.

`python scripts/audit_operators.py [OPERATOR ...]` takes two samples of each operator of PyTorch's OpInfo database, or
of some, in float32, and compares results, and gradients where they are defined, with eager PyTorch at two threads. Then
numbers of each sample become NaN, infinities, zeros of both signs, equal or extreme numbers (`SPECIALS`), and results
are compared again. So they are where one index is outside of its tensor on either side, in which case the error is the
result, and in other memory layouts (`LAYOUTS`), where the generator's state afterwards is one as well. It returns 1
where a result is wrong or a sample crashes.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from functorch.compile import aot_function, nop
from harness.pages import replace, replace_rows
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.capture import traceable_functions
from onnxtool.torch_backend.lower.decisions import DECISIONS
from onnxtool.torch_backend.lower.placement import EMPTY, RANDOM, SIZE
from onnxtool.torch_backend.nodes import called

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operators.md"
SAMPLES = 2  # of each operator
BAD = ("wrong", "crashed")
VERDICTS = ("whole", "partly", "PyTorch", "empty", *BAD, "random", "other numbers", "not traceable")
# Their results are whatever was in memory; the last one writes outside of it where an offset is too large, also eager.
UNINITIALIZED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "_segment_reduce",
)

INFINITY, NAN = float("inf"), float("nan")
SPECIALS: dict[str, tuple[float, ...]] = {
    "NaN": (NAN,),
    "infinities": (INFINITY, -INFINITY),
    "minus infinity": (-INFINITY,),
    "ties and zeros": (1.0, -1.0, 0.5, 2.5, 0.0, -0.0),
    "subnormal": (1e-40, -1e-40),
    "all of them": (NAN, INFINITY, -INFINITY, 0.0, -0.0, 1.0, -2.5, 1e-40, 1e18),
}
"""Numbers that take the place of every third one of a sample, or of all (`ONLY`)."""
ONLY = ("minus infinity",)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "permuted": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 2 else x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "expanded": lambda x: x[..., :1].expand_as(x) if x.dim() and x.numel() else x,
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0] if x.dim() else x,
}
OUTSIDE = (-1, 2**16, -(2**16))
KNOWN: dict[str, str] = {
    **dict.fromkeys(
        ("var_mean", "var_mean_unbiased", "std_mean", "std_mean_unbiased", "native_group_norm"),
        "the mean of infinities is infinite; PyTorch updates it value by value, which gives NaN",
    ),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "nn_functional_batch_norm"),
        "infinite statistics are subtracted first, where PyTorch multiplies first",
    ),
    **dict.fromkeys(
        ("_softmax_backward_data", "nn_functional_nll_loss", "nn_functional_layer_norm", "native_layer_norm"),
        "gradients of infinities are multiplied in another order",
    ),
    **dict.fromkeys(("qr", "linalg_qr", "pinverse"), "a matrix of rank 1 has no digits there"),
    **dict.fromkeys(
        ("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
        "an operator of compilers, which takes its indices unchecked",
    ),
    "nn_functional_prelu": "zero times an infinite slope is zero",
    "nn_functional_gelu": "PyTorch's kernel gives NaN for infinity",
    "log1p": "the logarithm of a rounded sum",
}
"""Samples whose results differ with special numbers, and why they may."""

_SHARES = """**{share:.1%}** of the samples run entirely in onnxruntime: {whole} of {judged}, which are all that
PyTorch can compile except the {drawn} that draw random numbers. Without the {empty} empty ones, it is
{share_of_values:.1%} of {values}; with those that draw, which can never be whole because PyTorch draws their numbers,
{share_of_all:.1%} of {all}.
"""


@dataclass(frozen=True)
class Sample:
    """One call of an operator: a function of the tensors among its arguments."""

    function: Callable[..., tuple[torch.Tensor, ...]]
    tensors: tuple[torch.Tensor, ...]


def main() -> int:
    """Audit what the command line names and write the table; return 1 where something is wrong."""
    names = sys.argv[1:]
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    results: dict[str, list[dict[str, str]]] = {}
    for operator in op_db:
        name, is_asked = operator.formatted_name, not names or operator.name in names
        if torch.float32 not in operator.dtypes or operator.name in UNINITIALIZED or not is_asked:
            continue
        results[name] = [_audit(sample) for sample in itertools.islice(_samples(operator), SAMPLES)]
        for finding in results[name]:
            if finding["verdict"] in BAD:
                print(f"{name}: {finding['verdict']}: {finding['detail']}", flush=True)
            if finding.get("specials") and name not in KNOWN:
                print(f"{name}: special numbers: {finding['specials']}", flush=True)
    if not names:
        PAGE.write_text(render(results), "utf-8")
    counts = Counter(finding["verdict"] for samples in results.values() for finding in samples)
    print(", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS))
    new = [name for name, samples in results.items() if name not in KNOWN and any(s.get("specials") for s in samples)]
    return int(any(counts[verdict] for verdict in BAD) or bool(new))


def _samples(operator: Any) -> Iterator[Sample]:
    """Yield the calls that the database makes of the operator, with the same numbers every time."""
    torch.manual_seed(0)
    for sample in operator.sample_inputs("cpu", torch.float32, requires_grad=operator.supports_autograd):
        flat, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [place for place, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        if places and all(flat[place].layout is torch.strided for place in places):
            yield Sample(_function(operator, flat, structure, places), tuple(flat[place] for place in places))


def _function(operator: Any, flat: list[Any], structure: Any, places: list[int]) -> Callable[..., Any]:
    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, positional, named = pytree.tree_unflatten(filled, structure)
        results = operator.op(first, *positional, **named)
        return tuple(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor))

    return function


def _audit(sample: Sample) -> dict[str, str]:
    """Return the verdict on one sample and its detail: what stayed in PyTorch, or what is wrong."""
    try:
        expected = _run(sample.function, sample.tensors)
    except Exception as error:  # noqa: BLE001 - some samples are there to fail
        return _finding("not traceable", error)
    backend = OrtBackend(OrtBackendOptions(flush_denormals=False))
    try:
        with traceable_functions():
            compiled = aot_function(sample.function, **backend.autograd_arguments())
            _run(compiled, sample.tensors)  # compiles, and may draw numbers while it does
            actual = _run(compiled, sample.tensors)
    except Exception as error:  # noqa: BLE001 - what it is, is the finding
        try:
            _run_traced(sample, sample.tensors)
        except Exception:  # noqa: BLE001 - then it is none of the backend's doing
            return _finding("not traceable", error)
        return _finding("crashed", error)
    try:
        _require_close(actual, expected)
    except AssertionError as error:
        return _finding("other numbers" if _draws(backend) else "wrong", error)
    edges = [*_index_differences(sample), *_layout_differences(sample)]
    if _draws(backend):
        return {"verdict": "random", "detail": "", "specials": "; ".join(edges)}
    return {**_placement(backend), "specials": "; ".join([*_differences(compiled, sample), *edges])}


def _differences(compiled: Callable[..., Any], sample: Sample) -> Iterator[str]:
    """Yield how results differ where numbers of the sample are special.

    What PyTorch itself computes otherwise in a traced graph, without any backend, is not one of them.
    """
    for kind in SPECIALS:
        tensors = tuple(_with_specials(tensor, kind, place) for place, tensor in enumerate(sample.tensors))
        try:
            expected = _run(sample.function, tensors)
        except Exception:  # noqa: BLE001, S112 - eager PyTorch refuses such numbers
            continue
        try:
            _require_close(_run(compiled, tensors), expected)
        except Exception as error:  # noqa: BLE001 - what it is, is the finding
            try:
                _require_close(_run_traced(sample, tensors), expected)
            except Exception:  # noqa: BLE001, S112 - then it is none of the backend's doing
                continue
            yield f"{kind}: {' '.join(str(error).split())[:120]}"


def _index_differences(sample: Sample) -> Iterator[str]:
    """Yield how results or errors differ where one integer is far from all sizes, which an index must not be."""
    for place, tensor in enumerate(sample.tensors):
        if tensor.dtype is torch.int64 and tensor.numel():
            for number in OUTSIDE:
                outside = tensor.flatten().index_fill(0, torch.tensor([0]), number).view_as(tensor)
                tensors = (*sample.tensors[:place], outside, *sample.tensors[place + 1 :])
                yield from _compiled_difference(f"index {number}", sample, tensors)


def _layout_differences(sample: Sample) -> Iterator[str]:
    """Yield how results or the generator's state differ where tensors have another layout."""
    for kind, change in LAYOUTS.items():
        tensors = tuple(change(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in sample.tensors)
        if any(ours.stride() != theirs.stride() for ours, theirs in zip(tensors, sample.tensors, strict=True)):
            yield from _compiled_difference(kind, sample, tensors)


def _compiled_difference(kind: str, sample: Sample, tensors: tuple[torch.Tensor, ...]) -> Iterator[str]:
    """Yield how a compiled sample differs from eager PyTorch, unless PyTorch itself compiles it so."""
    expected, reasons = _outcome(sample.function, tensors), []
    for backend in (OrtBackend(OrtBackendOptions(flush_denormals=False)), "aot_eager"):
        torch._dynamo.reset()  # noqa: SLF001 - PyTorch has no public name for it
        outcome = _outcome(torch.compile(sample.function, backend=backend), tensors)
        try:
            if isinstance(outcome, str) or isinstance(expected, str):
                assert outcome == expected, f"{outcome} for {expected}"  # noqa: S101 - as the comparison does
            else:
                _require_close(outcome, expected)
        except AssertionError as error:
            reasons.append(" ".join(str(error).split())[:120])
        else:
            break
    yield from [f"{kind}: {reason}" for reason in reasons if len(reasons) == 1]


def _outcome(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor] | str:
    """Return the results of a call, its gradients and the generator's state, or the error."""
    try:
        return [*_run(function, tensors), torch.get_rng_state().float()]
    except Exception as error:  # noqa: BLE001 - any that PyTorch raises
        return f"{type(error).__name__}: {error}"


def _with_specials(tensor: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(SPECIALS[kind]), tensor.shape, generator=generator)
    special = torch.tensor(SPECIALS[kind], dtype=tensor.dtype)[chosen]
    is_special = torch.rand(tensor.shape, generator=generator) < (1 if kind in ONLY else 1 / 3)
    return torch.where(is_special, special, tensor.detach()).requires_grad_(tensor.requires_grad)


def _finding(verdict: str, error: BaseException) -> dict[str, str]:
    text = " ".join(str(error).split())[:300]
    return {"verdict": verdict, "detail": f"{type(error).__name__}: {text}"}


def _placement(backend: Any) -> dict[str, str]:
    graphs = backend.graphs
    stayed = {node.operator: node.reason for graph in graphs for node in graph.report.eager if node.reason != SIZE}
    failed = [session.failure for graph in graphs for session in graph.sessions if session.failure]
    stayed |= {"a partition": f"onnxruntime fails to run it ({failed[0]})"} if failed else {}
    inside = any(graph.report.partitions for graph in graphs)
    detail = "; ".join(f"{operator}: {reason}" for operator, reason in sorted(stayed.items()))
    if stayed and set(stayed.values()) == {EMPTY}:
        return {"verdict": "empty", "detail": detail}
    return {"verdict": ("partly" if inside else "PyTorch") if stayed else "whole", "detail": detail}


def _draws(backend: Any) -> bool:
    return any(node.reason == RANDOM for graph in backend.graphs for node in graph.report.eager)


def _run_traced(sample: Sample, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Run a sample as PyTorch itself compiles it, without any backend."""
    return _run(aot_function(sample.function, fw_compiler=nop, bw_compiler=nop), tensors)


def _run(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return results, and the gradients of their weighted sum with respect to all inputs that have one."""
    torch.manual_seed(42)  # samples of random operators set this one themselves, and a compiled graph does not
    inputs = [_copied(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
    outputs = function(*inputs)
    generator = torch.Generator().manual_seed(4)
    weighted = [
        (output * torch.rand(output.shape, generator=generator)).sum()
        for output in outputs
        if output.requires_grad and output.dtype is torch.float32
    ]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = torch.autograd.grad(sum(weighted), leaves, materialize_grads=True) if weighted and leaves else ()
    return [*(output.detach() for output in outputs), *gradients]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same numbers in the same layout."""
    memory = tensor.detach().untyped_storage().clone()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _require_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Insist on equal types and shapes, and values within 1e-4 of the largest one."""
    if len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} results for {len(expected)}")
    for ours, theirs in zip(actual, expected, strict=True):
        finite = theirs[theirs.isfinite()].to(torch.complex128).abs()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        torch.testing.assert_close(ours, theirs, atol=1e-4 * scale, rtol=1e-4, equal_nan=True)


def render(results: dict[str, list[dict[str, str]]]) -> str:
    """Return the page for results by operator."""
    counts = Counter(finding["verdict"] for samples in results.values() for finding in samples)
    judged = sum(counts[verdict] for verdict in ("whole", "partly", "PyTorch", "empty", *BAD))
    drawn, whole = counts["random"] + counts["other numbers"], counts["whole"]
    stayed: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, samples in results.items():
        parts = (finding["detail"].split("; ") for finding in samples if finding["verdict"] in ("partly", "PyTorch"))
        for operator, _, reason in (part.partition(": ") for part in itertools.chain(*parts)):
            stayed[operator, reason].add(name)
    rows, differences = [], []
    for (operator, reason), names in sorted(stayed.items(), key=lambda item: (-len(item[1]), item[0])):
        listed = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        rows.append((f"`{operator}`", reason.replace("|", "/"), listed))
    for name, samples in sorted(results.items()):
        kinds = dict.fromkeys(
            part.split(":")[0] for finding in samples for part in finding.get("specials", "").split("; ")
        )
        if any(kinds):
            differences.append((name, ", ".join(filter(None, kinds)), KNOWN.get(name, "not known")))
    decisions = sorted((called(target), str(decided)) for target, decided in DECISIONS.items())
    shares = _SHARES.format(
        share=whole / max(1, judged),
        whole=whole,
        judged=judged,
        drawn=drawn,
        empty=counts["empty"],
        values=judged - counts["empty"],
        share_of_values=whole / max(1, judged - counts["empty"]),
        share_of_all=whole / max(1, judged + drawn),
        all=judged + drawn,
    )
    versions = f"PyTorch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    page = replace(PAGE.read_text("utf-8"), r"(?<=, float32, )PyTorch \S+, onnxruntime \S+(?=, 2$)", versions)
    page = replace(page, "(?<= with special numbers: ).*(?=[.] Differences)", ", ".join(SPECIALS))
    page = replace_rows(page, VERDICTS, [[str(counts[verdict]) for verdict in VERDICTS]])
    page = replace(page, r"^\*\*[\d.]+%\*\* of the samples(?:.+\n)+", shares)
    page = replace_rows(page, ("operator", "why", "in the samples of"), rows)
    page = replace_rows(page, ("samples of", "with", "why"), differences)
    return replace_rows(page, ("operator", "decision"), [(f"`{name}`", decision) for name, decision in decisions])


if __name__ == "__main__":
    sys.exit(main())
