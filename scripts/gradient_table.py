"""Write docs/gradients.md: the operators that have a gradient, and how far each was off when this was run.

    python scripts/gradient_table.py

The errors are of float32 on two threads of the installed onnxruntime against PyTorch's autograd in float64, relative to
the largest element of a gradient. All else follows from the tables of rules and of test cases, and a test compares it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool.autodiff.rules import ALL_INPUTS, NON_DIFFERENTIABLE, RULES
from tests.autodiff import gradients, networks
from tests.autodiff.cases import CASES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gradients.md"
_LOWEST_OPSET = 18
_INTRODUCTION = """# Operators that have a gradient

Written by `python scripts/gradient_table.py`. Every row is tested: float32 in onnxruntime on two threads against
PyTorch's autograd in float64, with fixed and, where possible, dynamic axes; and, if onnx.reference computes the
operator, float64 against finite differences of the forward graph (slopes). Errors are for float32 against PyTorch,
relative to the largest element of a gradient or to one, on {machine}.

Operators without a rule use the gradient of the function that defines them in ONNX, and so do operators whose rule
does not cover an input or output, such as the second output of a loss. `If`, `Loop` and `Scan` have the gradients of
their bodies: those of the branch taken, and those of all steps, whose states must keep their shape. Everything that is
not in this table has none: the error lists all such nodes of a model, and the parameters to freeze to avoid them.
`python scripts/check_gradients.py` compares the gradients of the onnx package's own test cases with finite differences.

| operator | from opset | by its inputs | gradient from | tested against | cases | largest error |
|---|---|---|---|---|---|---|
"""
_NETWORKS = """
## Networks

Small networks with random weights, as torch.onnx exports them. Each error is the largest over all parameters, compared
with PyTorch in float64 and relative to the network's largest gradient. A test allows each parameter three times
PyTorch's error.

| network | parameters | error of the gradient graph | error of PyTorch in float32 |
|---|---|---|---|
"""
_STOPS = """
No gradient passes through {stops}: their derivative is zero, or they only take a shape, dtype or position.
The same holds for integers and booleans, such as the results of `Cast` and comparisons and the indices of `TopK`.
Quantized numbers are an exception. The gradient passes straight through QuantizeLinear and DequantizeLinear, which
together act as fake quantization; any other consumer of the integers between them, such as `MatMulInteger`, is refused.
"""


def page(errors: Mapping[tuple[str, str], str], machine: str) -> str:
    """Return the whole page.

    Args:
        errors: the largest error of each operator, by domain and name.
        machine: where they were measured.
    """
    operators = sorted({(case.domain, case.op_type) for case in CASES})
    rows = [_row(domain, op_type, errors.get((domain, op_type), "")) for domain, op_type in operators]
    whole = sorted(op_type for (_, op_type), inputs in NON_DIFFERENTIABLE.items() if inputs is ALL_INPUTS)
    stops = ", ".join(f"`{op_type}`" for op_type in whole)
    return _INTRODUCTION.format(machine=machine) + "".join(rows) + _STOPS.format(stops=stops)


def measure_networks() -> str:
    """Return a table of whole networks."""
    rows = []
    for name in networks.NETWORKS:
        network = networks.make_network(name)
        errors = networks.measure(network, networks.exported(network)).values()
        ours, theirs = max(one.ours for one in errors), max(one.theirs for one in errors)
        rows.append(f"| {name} | {len(errors)} | {_rounded_up(ours)} | {_rounded_up(theirs)} |\n")
        print(rows[-1], end="", flush=True)
    return _NETWORKS + "".join(rows)


def _row(domain: str, op_type: str, error: str) -> str:
    cases = [case for case in CASES if (case.domain, case.op_type) == (domain, op_type)]
    against = "PyTorch, slopes" if any(case.reference for case in cases) else "PyTorch"
    source = "rule" if (domain, op_type) in RULES else "function"
    names = ", ".join(_names(domain, op_type))
    name = f"`{domain}.{op_type}`" if domain else f"`{op_type}`"
    return f"| {name} | {_first_opset(domain, op_type)} | {names} | {source} | {against} | {len(cases)} | {error} |\n"


def _first_opset(domain: str, op_type: str) -> str:
    if domain:
        return "1"
    versions = [one.since_version for one in onnx.defs.get_all_schemas_with_history() if one.name == op_type]
    return str(max(_LOWEST_OPSET, min(versions, default=_LOWEST_OPSET)))


def _names(domain: str, op_type: str) -> list[str]:
    """Return the names of the inputs that cases differentiate by."""
    places = sorted(
        {place for case in CASES if (case.domain, case.op_type) == (domain, op_type) for place in case.wanted}
    )
    schemas = [one for one in get_all_operator_schema() if (one.name, one.domain) == (op_type, domain)]
    if not schemas:
        return [f"input {place}" for place in places]
    inputs = [one.name for one in max(schemas, key=lambda one: one.since_version).inputs]
    return list(dict.fromkeys(inputs[min(place, len(inputs) - 1)] for place in places))


def measure() -> dict[tuple[str, str], str]:
    """Return the largest error of each operator over its cases, rounded up to one digit."""
    largest: dict[tuple[str, str], float] = {}
    for case in CASES:
        expected = gradients.torch_gradients(case)
        run = gradients.run_onnxruntime if case.onnxruntime else gradients.run_reference
        for dynamic in (False, True)[: 1 if case.fixed else 2]:
            forward = gradients.forward_model(case, np.float32, dynamic=dynamic)
            model, places = gradients.gradient_model(forward, case.wanted)
            _, *found = run(model, gradients.feeds(case, model, np.float32))
            for place, gradient in zip(places, found, strict=True):
                scale = max(1.0, float(np.abs(expected[place]).max(initial=0.0)))
                error = float(np.abs(gradient - expected[place]).max(initial=0.0)) / scale
                key = (case.domain, case.op_type)
                largest[key] = max(largest.get(key, 0.0), error)
    return {key: _rounded_up(error) for key, error in largest.items()}


def _rounded_up(number: float) -> str:
    if number == 0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(number))
    return f"{math.ceil(number / unit) * unit:.0e}"


def main() -> None:
    """Measure, and write the page."""
    tables = measure_networks()
    PAGE.write_text(page(measure(), f"onnxruntime {onnxruntime.__version__}, CPU") + tables, encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
