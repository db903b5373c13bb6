"""An onnxruntime session on exactly the requested provider."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onnxtool.errors import ModelFileError, ProviderError, SessionError, first_line, shorten, some
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import MAX_INLINE_BYTES, ModelFile, ModelPath
from onnxtool.model_file.metadata import DISABLED_OPTIMIZERS_KEY, EXACT_PRODUCTS_KEY, REQUIRED, digest_of_start
from onnxtool.model_file.weights import externalized
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.reading import read_json
from onnxtool.runtime.comparison import failure, run_reference, verify
from onnxtool.runtime.difference import TOLERANCES, Tolerance
from onnxtool.runtime.input_cases import LONGEST_CASE, input_cases
from onnxtool.runtime.machine import available_cores, release_freed_memory
from onnxtool.runtime.probation import check_harmless
from onnxtool.runtime.providers import (
    AUTO,
    BF16,
    CPU,
    EXACT_PRODUCTS_OPTION,
    FP32,
    PROVIDERS,
    ROWS,
    ExecutionProvider,
    Provider,
    Threads,
    apply_provider,
    has_bf16,
    products_saturate,
    provider_hardware,
    provider_problem,
    provider_version,
    register_operators,
    resolve_provider,
)
from onnxtool.runtime.running import Session

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOGGER = logging.getLogger(__name__)

# A provider sums in another order than the CPU, and rounds no further: half precision, with steps of 5e-4, is outside.
SAME = Tolerance(atol=1e-6, rtol=1e-4, cosine=0.99999)
# An activation near the middle of two integers may be rounded to the other one.
SAME_QUANTIZED = Tolerance(atol=1e-3, rtol=0.1, cosine=0.99)
_QUANTIZED = frozenset(("DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "DequantizeLinear")) | {
    f"com.microsoft::{name}" for name in ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits")
}
_PROOF_SECONDS = 1800  # of processor time
_PROOF_BYTES, _PROOF_COPIES = 4 << 30, 6  # of memory, and of the model's weights in it
_DIGITS = 15  # of a number of bytes
# onnxruntime 1.31 plans which buffers are reused in time that grows with the square of the nodes: 10 of the 12 s for
# loading 25,000. Runs take as long without it.
_MANY_NODES = 5000
_PROFILED_RUNS = 5


@checked
def open_session(
    path: ModelPath,
    *,
    provider: Provider = "auto",
    threads: Threads = 0,
    frugal: bool = False,
) -> Session:
    """Load the model at `path`, or an open one, on `provider` with `threads` intra-op threads (0: all cores).

    A provider other than the CPU's and CUDA's has to prove itself: unless the file's stamp says that it was verified on
    this provider, in this version and on such hardware, another process first runs the file on it and on the CPU and
    compares the outputs.
    Nodes that it does not take are an error, unless the provider's text allows them.

    A `frugal` session is for a few untimed runs: it computes the same with less memory, and does not occupy the cores
    between operators.

    Raises:
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here, leaves nodes to another one, or computes something else than the
            CPU; there is no silent fallback.
        SessionError: onnxruntime cannot load the model.
    """
    model, settings = ModelFile.open(path), _Settings(threads, frugal, prove=True)
    if model.sizes and model.adapter is None:
        from onnxtool.runtime.sized_session import open_sizes

        return open_sizes(model, lambda file: _open(file, provider, settings))
    return _open(model, provider, settings)


def open_alike(
    path: ModelPath, *, provider: str | ExecutionProvider, disabled: Sequence[str], level: str = "ENABLE_ALL"
) -> Session:
    """Load the model at `path` to compare it with another, with session options common to both.

    Args:
        path: the model.
        provider: where it runs; the comparison is the proof that other providers need.
        disabled: onnxruntime optimizers to disable, instead of the file's own list.
        level: onnxruntime's optimization level: `DISABLE_ALL`, `ENABLE_BASIC`, `ENABLE_EXTENDED` or `ENABLE_ALL`.

    Raises:
        OnnxtoolError: as for `open_session`.
    """
    return _open(path, provider, _Settings(frugal=True, disabled=disabled, level=level))


def open_plain(path: ModelPath, provider: ExecutionProvider) -> Session:
    """Load the model at `path` with one thread, as other applications do, without the session options of its metadata.

    Raises:
        OnnxtoolError: as for `open_session`.
    """
    return _open(path, provider, _Settings(threads=1, exact=False, mapped=True, disabled=()))


def open_own(path: ModelPath) -> Session:
    """Load a scratch file that this process wrote from a model known to be harmless, frugally and on the CPU.

    It is not tried in a child first, whose memory is limited by the size of the file: a graph that stands for another
    one, with its int8 weights as float32, takes many times its file.

    Raises:
        OnnxtoolError: as for `open_session`.
    """
    return _open(path, CPU, _Settings(frugal=True, own=True))


class _Settings(NamedTuple):
    """Settings of a session, which `open_session` and `open_alike` describe.

    Attributes:
        exact: whether int8 products may be computed exactly, as the file's metadata may require.
        prove: whether a provider has to prove itself.
        mapped: whether the weights are mapped from the file even if the session is not frugal.
        own: whether the file was written here, from a model that is known to be harmless.
        disabled: onnxruntime optimizers to disable; None for the file's own list.
    """

    threads: int = 0
    frugal: bool = False
    exact: bool = True
    prove: bool = False
    mapped: bool = False
    own: bool = False
    disabled: Sequence[str] | None = None
    level: str = "ENABLE_ALL"


def _open(path: ModelPath, provider: str | ExecutionProvider, settings: _Settings) -> Session:
    import onnxruntime as ort

    model = ModelFile.open(path)
    if not settings.own:
        check_harmless(model)
    chosen, notes = find_provider(model, provider)
    if (compiled := model.compiled) is not None:
        from onnxtool.runtime.compiled import require_runs_here

        require_runs_here(model, compiled, chosen)
    is_known = chosen.row.is_reference or compiled is not None
    is_known = is_known or (not chosen.allow_fallback and _is_verified(model, chosen))
    if settings.prove and not is_known:
        notes += prove_elsewhere(model, chosen, settings.threads).notes
    options, source = _session_options(model, chosen, settings)
    without = disabled_optimizers(model) if settings.disabled is None else settings.disabled
    if settings.frugal or settings.mapped:  # what the sessions before it held
        release_freed_memory()
    threads, start = settings.threads or available_cores(), time.perf_counter()
    try:
        providers = apply_provider(options, chosen, threads)
        inference = ort.InferenceSession(source, options, providers=providers, disabled_optimizers=list(without))
    except Exception as error:  # onnxruntime has no error class of its own
        raise _not_loaded(model.path, error, chosen) from error
    load_ms = (time.perf_counter() - start) * 1e3
    _LOGGER.debug("onnxruntime %s loaded %s on %s in %.0f ms", ort.__version__, model.path, chosen, load_ms)
    if inference.get_providers()[0] != chosen.row.runtime_name:
        raise ProviderError(
            f"onnxruntime could not start {chosen.row.runtime_name} and fell back to {inference.get_providers()[0]}",
            "a library of it is missing or of another version, or it does not know an option; see onnxtool env, or "
            "pass --provider cpu",
        )
    elsewhere = () if chosen.row.is_reference else _left_to_others(inference, chosen)
    if elsewhere and not chosen.allow_fallback:
        raise _falls_back(model.path, chosen, elsewhere)
    return Session(
        model,
        str(chosen),
        threads,
        load_ms,
        inference,
        intra_threads=options.intra_op_num_threads,
        memory=chosen.memory,
        elsewhere=elsewhere,
        notes=notes,
    ).running(model)


def _session_options(model: ModelFile, chosen: ExecutionProvider, settings: _Settings) -> tuple[Any, str | bytes]:
    """Return onnxruntime's options, and what it loads: the model's path, or a graph for a frugal session."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads or _threads_to_ask_for()
    is_frugal = settings.frugal and chosen.row.is_reference
    source: str | bytes = str(model.path)
    if is_frugal:
        _make_frugal(options, model)
    if is_frugal or (settings.mapped and chosen.row.is_reference):
        source = _map_weights(options, model)
    is_exact = settings.exact and model.metadata.get(EXACT_PRODUCTS_KEY) == REQUIRED
    if is_exact and chosen.name == CPU and products_saturate():
        options.add_session_config_entry(EXACT_PRODUCTS_OPTION, "1")
    options.enable_mem_reuse = model.structure.num_nodes <= _MANY_NODES
    options.log_severity_level = 4  # warnings about node placement are not news; errors are raised, not logged
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{settings.level}")
    register_operators(options, model.structure.opsets)
    if not chosen.row.is_reference:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options, source


def find_provider(model: ModelFile, text: str | ExecutionProvider) -> tuple[ExecutionProvider, tuple[str, ...]]:
    """Return the provider that runs a model here, with the precision that the file is for, and notes for the user.

    `auto` is the provider that the file was optimized for if it can run here. A provider that is no text already has
    its precision.

    Raises:
        ProviderError: it cannot run here.
    """
    if isinstance(text, ExecutionProvider):
        resolve_provider(str(text))
        return text, ()
    stamp = made_for(model)
    wanted, precision = stamp.get("provider", ""), stamp.get("precision", "")
    notes: list[str] = []
    if text == AUTO and _is_other(wanted):
        problem = provider_problem(wanted)
        text = AUTO if problem else wanted
        notes += [f"the file is for {wanted}, which cannot run here: {problem}"] if problem else []
    chosen = ExecutionProvider.parse(resolve_provider(text))
    if precision == BF16:
        if has_bf16(chosen):
            return replace(chosen, precision=BF16), tuple(notes)
        notes.append(f"the file is for bfloat16, and {chosen.place} multiplies in float32 here")
    return chosen, tuple(notes)


def _is_other(text: str) -> bool:
    """Whether a stamp names a provider other than the CPU's and CUDA's; one with options may load any library."""
    row = ROWS.get(text.partition(":")[0])
    return row is not None and not row.is_reference and "?" not in text


def made_for(model: ModelFile) -> dict[str, str]:
    """Return what the last optimization of a file says of itself, as far as it is text: metadata are untrusted."""
    try:
        steps = [step for step in model.steps if step.get("step") == "optimize"]
    except ModelFileError:
        return {}
    return {key: value for key, value in steps[-1].items() if isinstance(value, str)} if steps else {}


@dataclass(frozen=True)
class Proof:
    """Comparison of a provider's outputs with the CPU's, of the same file on generated inputs.

    Attributes:
        failure: how the outputs differ; empty if they agree.
        share: the share of the time of the nodes that run on the CPU; 0 without any.
        left: these nodes.
    """

    cases: int
    max_abs_error: float
    cosine_min: float
    failure: str = ""
    left: tuple[str, ...] = ()
    share: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on nodes that run on the CPU."""
        if not self.left:
            return ()
        return (f"{len(self.left)} nodes run on the CPU, {self.share:.0%} of the time: {some(self.left)}",)


def prove_elsewhere(
    model: ModelFile, provider: ExecutionProvider, threads: int = 0, *, is_trial: bool = False
) -> Proof:
    """Let another process compare the provider's outputs with the CPU's, of the same file on generated inputs.

    Raises:
        ProviderError: the child dies; or, outside a trial, outputs differ or the model is not supported.
    """
    seconds, num_bytes = _PROOF_SECONDS, _PROOF_BYTES + _PROOF_COPIES * model.size_bytes
    hint = f"pass --provider cpu, or a file of onnxtool optimize --provider {provider.name}"
    argument = [str(model.path.resolve()), str(provider), provider.precision, threads]
    tell(f"comparing {provider.place} with the CPU on {model.path.name}")
    try:
        with GuardedChild(f"{__name__}:prove", ("onnxruntime", __name__)) as child:
            proof = Proof(**child.call(argument, seconds=seconds, num_bytes=num_bytes))
    except ChildEndedError as error:
        reason = f"{provider.place} on {model.path} {error.reason(seconds, num_bytes)}"
        raise ProviderError(reason, hint) from error
    except ChildError as error:
        proof = Proof(0, math.inf, -1.0, str(error))
    if proof.failure and not is_trial:
        raise ProviderError(f"{provider.place} on {model.path}: {proof.failure}", hint)
    return proof


def prove(argument: Sequence[Any]) -> dict[str, Any]:
    """Compare a provider's outputs with the CPU's; called in the child with path, provider, precision and threads.

    Raises:
        OnnxtoolError: they differ, or one of the two does not run the file.
    """
    path, text, precision, threads = argument
    provider, model = replace(ExecutionProvider.parse(text), precision=precision), ModelFile.open(Path(path))
    return vars(_prove(model, provider, threads))


def _prove(model: ModelFile, provider: ExecutionProvider, threads: int) -> Proof:
    cases = input_cases(model, longest=LONGEST_CASE)
    session = _open(model, CPU, _Settings(frugal=True))
    expected = run_reference(session.run, cases, name="the CPU's result", refusal=SessionError)
    del session
    session = _open(model, provider, _Settings(threads))
    verification = verify(session.run, expected, tolerance_of(model, provider))
    reason = "" if verification.passed else failure(verification, "").message
    share = _share_of_others(model, provider, expected.cases[-1].feeds) if session.elsewhere else 0.0
    figures = len(verification.cases), verification.max_abs_error, verification.cosine_min
    return Proof(*figures, reason, session.elsewhere, share)


def tolerance_of(model: ModelFile, provider: ExecutionProvider) -> Tolerance:
    """Return how far a provider's outputs of a file may be from the CPU's outputs of the same file."""
    own = SAME if provider.arithmetic == FP32 else TOLERANCES[provider.arithmetic]
    if not _QUANTIZED & set(model.structure.ops):
        return own
    also = SAME_QUANTIZED  # layers that are not quantized may still run in bfloat16
    return replace(
        own, atol=max(own.atol, also.atol), rtol=max(own.rtol, also.rtol), cosine=min(own.cosine, also.cosine)
    )


def _share_of_others(model: ModelFile, provider: ExecutionProvider, feeds: Mapping[str, NDArray[Any]]) -> float:
    """Profile a run, and return the share of the time in nodes that other providers run."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.enable_profiling, options.log_severity_level = True, 4
    with temporary_folder() as folder:
        options.profile_file_prefix = str(folder / "profile")
        register_operators(options, model.structure.opsets)
        providers = apply_provider(options, provider, available_cores())
        session = ort.InferenceSession(str(model.path), options, providers=providers)
        for _ in range(_PROFILED_RUNS):
            session.run(None, dict(feeds))
        events = read_json(Path(session.end_profiling()))
    spent: dict[bool, float] = {True: 0.0, False: 0.0}
    for event in events:
        if event.get("cat") == "Node" and "provider" in event["args"]:
            spent[event["args"]["provider"] == provider.row.runtime_name] += event["dur"]
    return spent[False] / (sum(spent.values()) or 1.0)


def _is_verified(model: ModelFile, provider: ExecutionProvider) -> bool:
    """Whether the step that made the file verified it on this provider, in its present version, and on such hardware.

    Other tools keep the stamp of a graph that they change: its bytes have to be the same as well.
    """
    stamp = made_for(model)
    if provider.options or provider.library or stamp.get("verified_on") != provider.place or model.external_locations:
        return False
    if (stamp.get("precision") == BF16) != (provider.arithmetic == BF16):
        return False
    size = stamp.get("content_bytes", "")
    if not (size.isascii() and size.isdecimal()):
        return False
    return proof_of(model.path, provider, int(size[:_DIGITS])).items() <= stamp.items()


def proof_of(path: Path, provider: ExecutionProvider, size: int | None = None) -> dict[str, str]:
    """Return what a stamp records of a verification: the provider's version and hardware, and the bytes before it."""
    size = path.stat().st_size if size is None else size
    proof = {"provider_version": provider_version(provider), "provider_hardware": provider_hardware(provider)}
    return proof | {"content_bytes": str(size), "content_sha256": digest_of_start(path, size)}


def _falls_back(path: Path, provider: ExecutionProvider, nodes: Sequence[str]) -> ProviderError:
    return ProviderError(
        f"{provider.place} does not take {len(nodes)} nodes of {path}: {some(nodes)}",
        f"onnxtool optimize --provider {provider.name} writes what it takes; or pass --allow_fallback, which runs them "
        "on the CPU",
    )


def _left_to_others(inference: Any, provider: ExecutionProvider) -> tuple[str, ...]:
    """Return the nodes that another provider runs, as `operator name`."""
    return tuple(
        f"{node.op_type} {node.name}".strip()
        for part in inference.get_provider_graph_assignment_info()
        if part.ep_name != provider.row.runtime_name
        for node in part.get_nodes()
    )


def require_loadable(model: ModelFile) -> None:
    """Check that onnxruntime accepts the graph, so that other code can rely on its names, types and shapes.

    Nothing is optimized, and no weights are read. A graph with operators that lack CPU kernels passes.

    Raises:
        SessionError: onnxruntime does not load the model.
    """
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernelError

    options = ort.SessionOptions()
    _make_frugal(options, model)
    source = _map_weights(options, model)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_mem_reuse = False
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    register_operators(options, model.structure.opsets)
    try:
        ort.InferenceSession(source, options, providers=[PROVIDERS["cpu"]])
    except NoKernelError:
        return
    except Exception as error:  # onnxruntime has no error class of its own
        raise _not_loaded(model.path, error) from error


def _not_loaded(path: Path, error: Exception, provider: ExecutionProvider | None = None) -> SessionError:
    import onnxruntime as ort

    if provider is not None and not provider.row.is_reference:
        # OpenVINO first lists where in its source the error came from.
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Exception from")]
        return SessionError(
            f"{provider.place} cannot load {path}: {shorten(' '.join(lines[-1:]), 300)}",
            f"pass --provider cpu, or a file of onnxtool optimize --provider {provider.name}",
        )
    return SessionError(
        f"onnxruntime {ort.__version__} cannot load {path}: {first_line(error)}",
        "check it with onnxtool stats; a newer onnxruntime may be needed for its opsets",
    )


def disabled_optimizers(model: ModelFile) -> list[str]:
    """Return onnxruntime optimizers that the file was tuned to run without."""
    return [name for name in model.metadata.get(DISABLED_OPTIMIZERS_KEY, "").split(",") if name]


def _make_frugal(options: Any, model: ModelFile) -> None:
    """Set `options` for runs in little memory."""
    # Threads that spin while waiting keep the cores of a busy machine from the threads they wait for.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # An arena keeps the maximum that any run needed until the session ends.
    options.enable_cpu_mem_arena = False
    if model.size_bytes > MAX_INLINE_BYTES:
        # Repacked weights are a second copy of all of them. They save a fifth of the time of a run.
        options.add_session_config_entry("session.disable_prepacking", "1")


def _map_weights(options: Any, model: ModelFile) -> bytes:
    """Return what to load instead of the model's path, with its weights where they are in the file.

    onnxruntime maps weights that are located in a file, but parses and copies weights inside a message.
    """
    source, folder = externalized(model.path), model.path.parent.resolve()
    if model.leads_elsewhere:
        from onnxtool.model_file.weights import read_located

        proto, folder = read_located(model.path)
        source = proto.SerializeToString()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return source


def _threads_to_ask_for() -> int:
    """Return 0, leaving the choice to onnxruntime, unless this process may not use all cores.

    onnxruntime starts a thread for each physical core of the machine, even for cores that taskset or a cpuset excludes.
    """
    cores = available_cores()
    return cores if cores < (os.cpu_count() or 1) else 0


def tensor_type(dtype: str) -> str:
    """Return onnxruntime's name for a tensor of a dtype such as `float32`."""
    return f"tensor({ {'float32': 'float', 'float64': 'double'}.get(dtype, dtype) })"
