"""Write docs/gradients.md: the operators that have a gradient, and how far each was off when this was run.

    python scripts/gradient_table.py

The errors are of float32 on two threads of the installed onnxruntime against PyTorch's autograd in float64, relative to
the largest element of a gradient. The other cells follow from the tables of rules and of test cases, and a test
compares them; the prose stands in the page alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from harness.pages import replace, replace_rows
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool.autodiff.rules import ALL_INPUTS, NON_DIFFERENTIABLE, RULES
from tests.autodiff import gradients, networks
from tests.autodiff.cases import CASES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gradients.md"
_LOWEST_OPSET = 18
_OPERATORS = ("operator", "from opset", "by its inputs", "gradient from", "tested against", "cases", "largest error")
_NETWORKS = ("network", "parameters", "error of the gradient graph", "error of PyTorch in float32")
_MACHINE, _STOPS = r"onnxruntime [\d.]+, CPU", r"(?<=^No gradient passes through ).*(?=: their)"


def page(errors: Mapping[tuple[str, str], str]) -> str:
    """Return the whole page as it stands, with the operators of the rules and cases.

    Args:
        errors: the largest error of each operator, by domain and name.
    """
    operators = sorted({(case.domain, case.op_type) for case in CASES})
    rows = [_row(domain, op_type, errors.get((domain, op_type), "")) for domain, op_type in operators]
    whole = sorted(op_type for (_, op_type), inputs in NON_DIFFERENTIABLE.items() if inputs is ALL_INPUTS)
    text = replace_rows(PAGE.read_text(encoding="utf-8"), _OPERATORS, rows)
    return replace(text, _STOPS, ", ".join(f"`{op_type}`" for op_type in whole))


def measure_networks() -> list[tuple[str, str, str, str]]:
    """Return the rows of whole networks."""
    rows = []
    for name in networks.NETWORKS:
        network = networks.make_network(name)
        errors = networks.measure(network, networks.exported(network)).values()
        ours, theirs = max(error.ours for error in errors), max(error.theirs for error in errors)
        rows.append((name, str(len(errors)), _rounded_up(ours), _rounded_up(theirs)))
        print(*rows[-1], flush=True)
    return rows


def _row(domain: str, op_type: str, error: str) -> tuple[str, ...]:
    cases = [case for case in CASES if (case.domain, case.op_type) == (domain, op_type)]
    against = "PyTorch, slopes" if any(case.reference for case in cases) else "PyTorch"
    source = "rule" if (domain, op_type) in RULES else "function"
    names = ", ".join(_names(domain, op_type))
    name = f"`{domain}.{op_type}`" if domain else f"`{op_type}`"
    return name, _first_opset(domain, op_type), names, source, against, str(len(cases)), error


def _first_opset(domain: str, op_type: str) -> str:
    if domain:
        return "1"
    versions = [schema.since_version for schema in onnx.defs.get_all_schemas_with_history() if schema.name == op_type]
    return str(max(_LOWEST_OPSET, min(versions, default=_LOWEST_OPSET)))


def _names(domain: str, op_type: str) -> list[str]:
    """Return the names of the inputs that cases differentiate by."""
    places = sorted(
        {place for case in CASES if (case.domain, case.op_type) == (domain, op_type) for place in case.wanted}
    )
    schemas = [schema for schema in get_all_operator_schema() if (schema.name, schema.domain) == (op_type, domain)]
    if not schemas:
        return [f"input {place}" for place in places]
    inputs = [schema.name for schema in max(schemas, key=lambda schema: schema.since_version).inputs]
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
            _, *actual = run(model, gradients.feeds(case, model, np.float32))
            for place, gradient in zip(places, actual, strict=True):
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
    networks_rows = measure_networks()
    text = replace_rows(page(measure()), _NETWORKS, networks_rows)
    PAGE.write_text(replace(text, _MACHINE, f"onnxruntime {onnxruntime.__version__}, CPU"), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
