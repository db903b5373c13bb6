"""An onnxruntime session on exactly the requested provider."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.errors import InputError, ProviderError, SessionError, first_line
from onnxtool.model_file import MAX_INLINE_BYTES, ModelFile
from onnxtool.model_file.metadata import DISABLED_OPTIMIZERS_KEY, EXACT_PRODUCTS_KEY, REQUIRED
from onnxtool.model_file.wire import externalized
from onnxtool.options import StrPath, checked
from onnxtool.runtime.bounds import InterThreads, Threads
from onnxtool.runtime.nesting import flattened, is_nested, is_part, nested
from onnxtool.runtime.probation import check_harmless
from onnxtool.runtime.providers import EXACT_PRODUCTS_OPTION, PROVIDERS, Provider, products_saturate, resolve_provider

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Arrays = dict[str, "NDArray[Any]"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """A loaded model.

    Attributes:
        provider: the short name of the provider that runs it.
        threads: intra-op threads; by default, the number of cores that this process may use.
        load_ms: time from the file to this session.
        intra_threads: intra-op threads requested from onnxruntime, 0 for its own choice.
        inter_threads: inter-op threads, likewise.
    """

    model: ModelFile
    provider: str
    threads: int
    load_ms: float
    _inference: Any
    intra_threads: int = 0
    inter_threads: int = 0

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs in graph order."""
        return tuple(value.name for value in self.model.structure.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs in graph order."""
        return tuple(value.name for value in self.model.structure.outputs)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        """Run the model on `feeds` (arrays by input name) and return arrays by output name.

        Sequences, maps and optionals have the arrays that `runtime.nesting` describes.

        Raises:
            InputError: an input is missing or unknown.
            SessionError: onnxruntime fails on these inputs.
        """
        given = self.nested(feeds)
        missing = sorted(set(self.input_names) - set(given))
        unknown = sorted(set(given) - set(self.input_names))
        if missing or unknown:
            raise InputError(
                f"{self.model.path} takes {', '.join(self.input_names)}; missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}",
                "the tokenizer may belong to another model; pass --model_name",
            )
        outputs = zip(self.output_names, self.run_unchecked(given), strict=True)
        return {name: array for output, value in outputs for name, array in flattened(output, value)}

    def nested(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        """Return inputs for onnxruntime, with sequences, maps and optionals assembled from arrays."""
        holders = [info for info in self.model.structure.inputs if is_nested(info)]
        if not holders:
            return feeds
        plain = {name: array for name, array in feeds.items() if not any(is_part(name, info) for info in holders)}
        return plain | {info.name: nested(info, feeds) for info in holders}

    def run_unchecked(self, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the model on `feeds` with only onnxruntime's own call, for timing.

        Raises:
            SessionError: onnxruntime fails on these inputs.
        """
        try:
            outputs: list[NDArray[Any]] = self._inference.run(None, feeds)
        except Exception as error:  # onnxruntime has no error class of its own
            raise self._failed(feeds, error) from error
        return outputs

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        """Place `feeds` and output buffers on the provider's device, and run once.

        Raises:
            SessionError: onnxruntime fails on these inputs.
        """
        try:
            return BoundRun(self._inference, feeds, self.output_names, self.provider)
        except Exception as error:  # onnxruntime has no error class of its own
            raise self._failed(feeds, error) from error

    def cached(self, carried: Mapping[str, str]) -> CachedRun:
        """Prepare runs whose outputs become the next run's inputs without a copy; `carried` maps inputs to outputs."""
        return CachedRun(self._inference, self.output_names, carried, self.provider)

    def step(self, run: CachedRun, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Run `run`, which belongs to this session, on `feeds`; return onnxruntime values by output name.

        Raises:
            SessionError: onnxruntime fails on these inputs.
        """
        try:
            return run.run(feeds)
        except Exception as error:  # onnxruntime has no error class of its own
            raise self._failed(feeds, error) from error

    def _failed(self, feeds: Mapping[str, NDArray[Any]], error: Exception) -> SessionError:
        shapes = ", ".join(f"{name} {list(getattr(array, 'shape', ''))}" for name, array in feeds.items())
        return SessionError(
            f"onnxruntime cannot run {self.model.path} on {shapes}: {first_line(error)}",
            "the model may be fixed to other shapes; see its inputs with onnxtool stats",
        )


@checked
def open_session(
    path: StrPath,
    *,
    provider: Provider = "auto",
    threads: Threads = 0,
    inter_threads: InterThreads = 0,
    frugal: bool = False,
    plain: bool = False,
) -> Session:
    """Load the model at `path` on `provider` (`auto`, `cpu` or `cuda`) with `threads` intra-op threads (0: all cores).

    With `inter_threads` above one, independent operators run in parallel.

    A `frugal` session is for a few untimed runs: it computes the same with less memory, and does not occupy the cores
    between operators. A `plain` session ignores the session options in the file's metadata, as other applications do.

    Raises:
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here; there is no silent fallback to another one.
        SessionError: onnxruntime cannot load the model.
    """
    return _open(Path(path), provider, threads, inter_threads, frugal=frugal, plain=plain)


def open_alike(path: Path, *, provider: str, disabled: Sequence[str], level: str = "ENABLE_ALL") -> Session:
    """Load the model at `path` to compare it with another, with session options common to both.

    Args:
        path: the model.
        provider: `cpu` or `cuda`.
        disabled: onnxruntime optimizers to disable, instead of the file's own list.
        level: onnxruntime's optimization level: `DISABLE_ALL`, `ENABLE_BASIC`, `ENABLE_EXTENDED` or `ENABLE_ALL`.

    Raises:
        OnnxtoolError: as for `open_session`.
    """
    return _open(path, provider, frugal=True, disabled=disabled, level=level)


def _open(
    path: Path,
    provider: str,
    threads: int = 0,
    inter_threads: int = 0,
    *,
    frugal: bool,
    plain: bool = False,
    disabled: Sequence[str] | None = None,
    level: str = "ENABLE_ALL",
) -> Session:
    import onnxruntime as ort

    model = ModelFile.open(path)
    check_harmless(model)
    provider = resolve_provider(provider)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or _threads_to_ask_for()
    if inter_threads > 1:  # without this mode they would have no effect
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = inter_threads
    source: str | bytes = _make_frugal(options, model) if frugal else str(path)
    if not plain and provider == "cpu" and model.metadata.get(EXACT_PRODUCTS_KEY) == REQUIRED and products_saturate():
        options.add_session_config_entry(EXACT_PRODUCTS_OPTION, "1")
    options.log_severity_level = 4  # warnings about node placement are not news; errors are raised, not logged
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    without = [] if plain else disabled_optimizers(model) if disabled is None else list(disabled)
    start = time.perf_counter()
    try:
        inference = ort.InferenceSession(source, options, providers=[PROVIDERS[provider]], disabled_optimizers=without)
    except Exception as error:  # onnxruntime has no error class of its own
        raise _not_loaded(path, error) from error
    load_ms = (time.perf_counter() - start) * 1e3
    _LOGGER.debug("onnxruntime %s loaded %s on %s in %.0f ms", ort.__version__, path, provider, load_ms)
    if inference.get_providers()[0] != PROVIDERS[provider]:
        raise ProviderError(
            f"onnxruntime could not start {PROVIDERS[provider]} and fell back to {inference.get_providers()[0]}",
            "a CUDA or cuDNN library is missing or of another version; see onnxtool env, or pass --provider cpu",
        )
    return Session(
        model,
        provider,
        threads or available_cores(),
        load_ms,
        inference,
        intra_threads=options.intra_op_num_threads,
        inter_threads=options.inter_op_num_threads,
    )


def require_loadable(path: Path) -> None:
    """Check that onnxruntime accepts the graph, so that other code can rely on its names, types and shapes.

    Nothing is optimized, and no weights are read. A graph with operators that lack CPU kernels passes.

    Raises:
        SessionError: onnxruntime does not load the model.
    """
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernelError

    options = ort.SessionOptions()
    source = _make_frugal(options, ModelFile.open(path))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        ort.InferenceSession(source, options, providers=[PROVIDERS["cpu"]])
    except NoKernelError:
        return
    except Exception as error:  # onnxruntime has no error class of its own
        raise _not_loaded(path, error) from error


def _not_loaded(path: Path, error: Exception) -> SessionError:
    import onnxruntime as ort

    return SessionError(
        f"onnxruntime {ort.__version__} cannot load {path}: {first_line(error)}",
        "check it with onnxtool stats; a newer onnxruntime may be needed for its opsets",
    )


def disabled_optimizers(model: ModelFile) -> list[str]:
    """Return onnxruntime optimizers that the file was tuned to run without."""
    return [name for name in model.metadata.get(DISABLED_OPTIMIZERS_KEY, "").split(",") if name]


def _make_frugal(options: Any, model: ModelFile) -> bytes:
    """Set `options` for low memory, and return the object to load instead of the model's path."""
    # Threads that spin while waiting keep the cores of a busy machine from the threads they wait for.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # An arena keeps the maximum that any run needed until the session ends.
    options.enable_cpu_mem_arena = False
    if model.size_bytes > MAX_INLINE_BYTES:
        # Repacked weights are a second copy of all of them. They save a fifth of the time of a run.
        options.add_session_config_entry("session.disable_prepacking", "1")
    # onnxruntime maps weights that are located in a file, but parses and copies weights inside a message.
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


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def tensor_type(dtype: str) -> str:
    """Return onnxruntime's name for a tensor of a dtype such as `float32`."""
    return f"tensor({ {'float32': 'float', 'float64': 'double'}.get(dtype, dtype) })"


class CachedRun:
    """Session runs whose outputs are inputs of the next run, and stay on the provider's device.

    Attributes:
        carried: the output that feeds each carried input.
    """

    def __init__(self, inference: Any, outputs: Sequence[str], carried: Mapping[str, str], device: str) -> None:
        self.carried = dict(carried)
        self._inference, self._outputs, self._device = inference, tuple(outputs), device
        self._kept: dict[str, Any] = {}
        self._binding = inference.io_binding()

    def keep(self, values: Mapping[str, Any]) -> None:
        """Set inputs of all later runs: arrays, which are copied to the device, or values of another run."""
        import onnxruntime as ort

        for name, value in values.items():
            is_value = isinstance(value, ort.OrtValue)
            self._kept[name] = value if is_value else ort.OrtValue.ortvalue_from_numpy(value, self._device, 0)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Run on `feeds` and kept inputs, and keep the carried outputs; return the outputs as onnxruntime values."""
        binding = self._binding
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, value in self._kept.items():
            binding.bind_ortvalue_input(name, value)
        binding.clear_binding_outputs()
        for name in self._outputs:
            binding.bind_output(name, self._device)
        self._inference.run_with_iobinding(binding)
        if self._device != "cpu":
            binding.synchronize_outputs()
        outputs = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        self._kept.update({name: outputs[output] for name, output in self.carried.items()})
        return outputs

    def reorder(self, places: NDArray[np.int64]) -> None:
        """Reorder the rows, on the first axis, of carried values by `places`, which may repeat a row."""
        self.keep({name: self._kept[name].numpy()[places] for name in self.carried})


class BoundRun:
    """A run of an onnxruntime session on `feeds`, which are copied to the device only here.

    Outputs get their buffers in a first run, made here, so their shapes may depend on the values of the inputs.
    """

    def __init__(self, inference: Any, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str], device: str) -> None:
        import onnxruntime as ort

        self._inference, self._device = inference, device
        self._arrays = dict(feeds)
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in self._arrays.items()
        }
        self._binding = inference.io_binding()
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)
        for name in outputs:
            self._binding.bind_output(name, device)
        self()
        for name, value in zip(outputs, self._binding.get_outputs(), strict=True):
            self._binding.bind_ortvalue_output(name, value)

    def __call__(self) -> None:
        """Run, and wait until the device is done."""
        self._inference.run_with_iobinding(self._binding)
        if self._device != "cpu":
            self._binding.synchronize_outputs()

    def outputs(self) -> list[NDArray[Any]]:
        """Copy the outputs of the last run to the host."""
        return [value.numpy() for value in self._binding.get_outputs()]

    def time_transfer(self) -> tuple[float, float, float]:
        """Copy the inputs to the device, run and copy the outputs back; return the milliseconds of each part.

        Inputs are copied into their existing buffers, as in an application that serves requests.
        """
        start = time.perf_counter()
        for name, array in self._arrays.items():
            self._values[name].update_inplace(array)
        self._binding.synchronize_inputs()
        copied = time.perf_counter()
        self()
        computed = time.perf_counter()
        self.outputs()
        end = time.perf_counter()
        return (copied - start) * 1e3, (computed - copied) * 1e3, (end - computed) * 1e3
