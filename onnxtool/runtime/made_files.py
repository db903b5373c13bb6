"""Make files for the machine that they go to: of fixed sizes over one file of weights, and compiled for a provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnxtool.errors import InputError, SessionError, first_line
from onnxtool.graph.fixed_sizes import fix_sizes
from onnxtool.model_file import ModelFile, Staging
from onnxtool.model_file.metadata import INPUTS_KEY, STEPS_KEY, SizedFile, digest_of_start, sizes_entry, step_entry
from onnxtool.model_file.weights import load_model, to_proto, write_inline
from onnxtool.model_file.wire import read_texts
from onnxtool.progress import tell
from onnxtool.runtime.comparison import Case, require_passed, run_reference, verify
from onnxtool.runtime.compiled import CONTEXT, describe
from onnxtool.runtime.difference import TOLERANCES, Tolerance
from onnxtool.runtime.given_inputs import GivenInputs
from onnxtool.runtime.input_cases import LONGEST_CASE, input_cases
from onnxtool.runtime.machine import available_cores
from onnxtool.runtime.providers import CPU, ExecutionProvider, apply_provider
from onnxtool.runtime.recipes import InputStamp
from onnxtool.runtime.session import find_provider, open_alike, open_session, prove_elsewhere, tolerance_of
from onnxtool.runtime.signature import is_mask
from onnxtool.runtime.sizes import SizeResult, Sizes, input_axes, label, rows_axis, sized_path
from onnxtool.verification import Verification

_HINT = (
    "no file was written; what fills up a batch must not change it: several sizes need a mask, and --activations "
    "dynamic takes ranges over all of it"
)
_EQUAL = Tolerance(atol=0.0, rtol=0.0, cosine=-1.0, rounding=0.0)


def write_sizes(
    model: ModelFile,
    staging: Staging,
    all_sizes: Mapping[str, Sizes],
    provider: ExecutionProvider | None,
    check: Callable[[ModelFile], object] | None = None,
    *,
    compiles: bool = False,
) -> tuple[ModelFile, tuple[SizeResult, ...]]:
    """Write a staged model at fixed sizes: a single one in its place, several next to it, over the same weights.

    Args:
        model: the staged file with its stamps; for several sizes, with its weights in a file of their own.
        staging: where it is.
        all_sizes: by the name of their file, a size for each of its dynamic axes.
        provider: where the results are to run; None for no comparison with the file.
        check: compares a result with something else as well, given the model with this file of fixed sizes alone.
        compiles: whether the provider compiles each result.

    Returns:
        The file at the path of the model, and a result for each size.

    Raises:
        VerificationError: outputs differ at a size.
        ProviderError: the provider computes something else than the CPU.
    """
    results: list[SizeResult] = []
    stated: list[SizedFile] = []
    for name, sizes in all_sizes.items():
        path = sized_path(model.path, name)
        tell(f"fixing the sizes to {name}")
        cases = [] if provider is None else _cases(model, sizes)
        fixed, num_computing = _write(model, path, sizes, cases)
        alone, verification = model.with_sizes([_stated(path, sizes)]), None
        if provider is not None:
            verification = compare_sizes(model, alone, cases, fills_up=len(all_sizes) > 1)
            require_passed(verification, _HINT)
            if not provider.row.is_reference:
                prove_elsewhere(fixed, provider)
        if check is not None:
            check(alone)
        fixed.stamp(step_entry("sizes", verification, previous=model.steps, sizes={**sizes}))
        note = compile_file(fixed, provider)[1] if compiles and provider is not None else ""
        stated.append(_stated(path, sizes))
        results.append(SizeResult(path.name, sizes, fixed.structure.num_nodes, num_computing, verification, note))
    if len(results) > 1:
        model.stamp(sizes_entry(stated))
        return model, tuple(results)
    path.replace(model.path)
    note = results[0].note.replace(path.name, model.path.name)
    return ModelFile.open(model.path), (results[0]._replace(file=model.path.name, note=note),)


def _stated(path: Path, sizes: Sizes) -> SizedFile:
    return SizedFile(path.name, sizes, digest_of_start(path, path.stat().st_size))


def _write(model: ModelFile, path: Path, sizes: Sizes, cases: Sequence[Case]) -> tuple[ModelFile, int]:
    """Write the model at fixed sizes, with its stamps; return it with the number of nodes that still compute sizes."""
    graph = load_model(model.path)
    num_computing = fix_sizes(graph, sizes)
    for key in (INPUTS_KEY, STEPS_KEY):
        graph.metadata_props.pop(key, None)
    if model.external_locations:
        path.write_bytes(to_proto(graph).SerializeToString(deterministic=True))
    else:
        write_inline(graph, path)
    fixed, known = ModelFile.open(path), InputStamp.read_from(model)
    if known is not None:
        fixed.stamp({INPUTS_KEY: InputStamp.of(fixed.structure.inputs, known.inputs, cases).json})
    return fixed, num_computing


def _cases(model: ModelFile, sizes: Sizes) -> list[Case]:
    """Return inputs of exactly these sizes: full, padded on each side, and with a row of padding alone.

    The operators show what becomes constant, so these need to reveal how padding is treated, and no other sizes.
    """
    axes = dict(input_axes(model))
    shapes = {
        info.name: tuple(
            sizes[axes[info.name][place]] if place in axes[info.name] else int(size or 0)
            for place, size in enumerate(info.shape)
        )
        for info in model.structure.inputs
    }
    kinds: dict[object, Case] = {}
    for case in input_cases(model, given=GivenInputs(shapes=shapes)):
        valid = np.ones((1, 1), bool) if case.valid is None else case.valid
        kinds.setdefault((valid.all(), valid[:, 0].all(), valid.any(axis=1).all()), case)
    return [*kinds.values()]


def compare_sizes(
    model: ModelFile, alone: ModelFile, cases: Sequence[Case], *, fills_up: bool = True, provider: str = CPU
) -> Verification:
    """Compare a file of fixed sizes with the model on inputs of its sizes, and of others, which it splits and fills up.

    The others have half of each size; in a set, with one and a half times its rows.

    Args:
        model: the file.
        alone: the file, with one file of fixed sizes.
        cases: inputs of its sizes.
        fills_up: whether smaller inputs are to be filled up without a mask.
        provider: where the file of fixed sizes runs.

    Raises:
        InputError: the model itself does not run on its sizes.
    """
    (stated,) = alone.sizes
    rows = rows_axis(model) if fills_up else ""
    half = {axis: (size + 1) // 2 + (axis == rows) * size for axis, size in stated.sizes.items()}
    is_filled_up = fills_up or any(map(is_mask, model.structure.inputs))
    is_known = all(size in half or isinstance(size, int) for info in model.structure.outputs for size in info.shape)
    shorter = _cases(model, half) if is_filled_up and (fills_up or is_known) and half != stated.sizes else []
    run = open_session(model.with_sizes(), provider=CPU, frugal=True).run
    expected = run_reference(run, [*cases, *shorter], name=model.path.name, refusal=SessionError)
    del run
    if not any(case is own_case for case in expected.cases for own_case in cases):
        raise InputError(
            f"{model.path.name} itself does not run on inputs of {label(stated.sizes)}: {expected.refused[0]}",
            "pass --sizes that it takes, up to its longest text",
        )
    is_half = any(tensor.dtype == "float16" for tensor in model.structure.initializers)
    tolerance = TOLERANCES["fp16"] if is_half else tolerance_of(model, find_provider(model, provider)[0])
    return verify(open_session(alone, provider=provider, frugal=True).run, expected, tolerance)


def with_sizes(verification: Verification, model: ModelFile, provider: str) -> Verification:
    """Add the comparison of a model with each of its files of fixed sizes, on a provider, to its own verification."""
    for stated in model.sizes:
        comparison = compare_sizes(model, model.with_sizes([stated]), _cases(model, stated.sizes), provider=provider)
        cases = (replace(case, description=f"{label(stated.sizes)}: {case.description}") for case in comparison.cases)
        verification = replace(
            verification,
            passed=verification.passed and comparison.passed,
            max_abs_error=max(verification.max_abs_error, comparison.max_abs_error),
            cosine_min=min(verification.cosine_min, comparison.cosine_min),
            cases=(*verification.cases, *cases),
        )
    return verification


def compile_file(model: ModelFile, provider: ExecutionProvider) -> tuple[ModelFile, str]:
    """Replace a staged file by what a provider compiles from it, and compare both on that provider.

    Args:
        model: the file, which this provider has already run.
        provider: the provider.

    Returns:
        The file, and a note for the user.

    Raises:
        SessionError: the provider cannot compile the whole graph.
        VerificationError: the compiled file gives other outputs.
    """
    import onnxruntime as ort

    tell(f"compiling {model.path.name} for {provider.place}")
    cases = input_cases(model, longest=LONGEST_CASE)
    run = open_alike(model, provider=provider, disabled=()).run
    expected = run_reference(run, cases, name="the file before it was compiled", refusal=SessionError)
    del run
    path = model.path.parent / "compiled" / model.path.name  # the compiled part is named after it
    path.parent.mkdir()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    flags = ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED
    level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL  # as in a session
    try:
        apply_provider(options, provider, available_cores())
        compiler = ort.ModelCompiler(options, str(model.path), flags=flags, graph_optimization_level=level)
        compiler.compile_to_file(str(path))
    except Exception as error:  # onnxruntime has no error class of its own
        raise SessionError(
            f"{provider.place} cannot compile {model.path.name}: {first_line(error)}", "leave --compile out"
        ) from error
    compiled, contexts = ModelFile.open(path), [*read_texts(path, CONTEXT)]
    if compiled.structure.num_nodes != 1 or len(contexts) != 1:
        nodes = ", ".join(f"{count} {name}" for name, count in compiled.structure.ops.items())
        raise SessionError(
            f"{provider.place} compiles only a part of {model.path.name}: {nodes}", "leave --compile out"
        )
    verification = verify(open_alike(compiled, provider=provider, disabled=()).run, expected, _EQUAL)
    require_passed(verification, "no file was written; leave --compile out")
    for file in path.parent.iterdir():
        file.replace(model.path.parent / file.name)
    path.parent.rmdir()
    compiled = ModelFile.open(model.path)
    compiled.stamp(describe(compiled, provider, contexts[0]).entry)
    num_runs = len(verification.cases)
    return compiled, f"{model.path.name} is compiled, and {num_runs} runs give the same as before, bit by bit"
