"""Resolve the execution provider of a session, or explain what is missing.

onnxruntime lists a provider that was compiled in even if its driver is absent, and a session that cannot create it
falls back to the CPU with a line in a log (onnxruntime#23372). Here a provider either runs or raises.

A provider is built into onnxruntime, or is a plugin: a library that a package such as onnxruntime-ep-openvino brings,
and that lists its own devices. Each is a row of `ROWS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote

from onnxtool.errors import OptionError, ProviderError, first_line
from onnxtool.model_file.domains import STRINGS
from onnxtool.options import NOTHING, UNSET, Effect, Many, Option, OptionalPath, Options, not_a_choice
from onnxtool.runtime.machine import available_cores, device_memory, processor_features, vector_instructions
from onnxtool.version import installed

BF16, FP32 = "bf16", "fp32"
_LIBRARY, _FALLBACK = "library", "allow_fallback"  # in the text of a provider, next to its own options


@dataclass(frozen=True)
class ExecutionProvider:
    """A provider as a user names it: `cuda`, `openvino:CPU`, `openvino?NUM_STREAMS=2`.

    The text carries everything, so that it can be passed on, written down and compared.

    Attributes:
        name: a key of ROWS, or `auto`.
        device: one of the provider's devices; empty for its first.
        options: the provider's own options.
        library: the plugin's library; empty for the installed package's.
        allow_fallback: whether nodes that it does not take may run on the CPU.
        precision: the precision of float32 products, `fp32` or `bf16`; a property of the file, not of the text.
    """

    name: str
    device: str = ""
    options: tuple[tuple[str, str], ...] = ()
    library: str = ""
    allow_fallback: bool = False
    precision: str = FP32

    @classmethod
    def parse(cls, text: str) -> ExecutionProvider:
        """Parse `NAME[:DEVICE][?KEY=VALUE&...]`.

        Raises:
            OptionError: there is no such provider, or the options have no such form.
        """
        place, _, query = text.partition("?")
        name, _, device = place.partition(":")
        try:
            options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else ())
        except ValueError:
            raise OptionError(f"{query!r} is not KEY=VALUE, or several joined with &") from None
        library, fallback = options.pop(_LIBRARY, ""), options.pop(_FALLBACK, "0")
        if name not in ROWS and name != AUTO:
            raise OptionError(not_a_choice(name, (AUTO, *ROWS)), "onnxtool env lists what can run here")
        if fallback not in ("0", "1"):
            raise OptionError(f"{_FALLBACK} is {fallback!r}, and takes 0 or 1")
        provider = cls(name, device, tuple(sorted(options.items())), library, fallback == "1")
        provider._require_effect()
        return provider

    def _require_effect(self) -> None:
        """Refuse what would have no effect: the CPU has nothing to choose, and CUDA's provider is no plugin."""
        settings = {"a library": self.library, f"--{_FALLBACK}": self.allow_fallback}
        if self.name in (AUTO, CPU):
            settings |= {"an option": self.options, "a device": self.device}
        elif not self.row.is_reference:
            return
        if named := [setting for setting, value in settings.items() if value]:
            hint = "name one with --provider" if self.name == AUTO else "leave it out"
            raise OptionError(f"{named[-1]} was given for the provider {self.name}", hint)

    def __str__(self) -> str:
        extra = [*self.options, *([(_LIBRARY, self.library)] if self.library else [])]
        extra += [(_FALLBACK, "1")] if self.allow_fallback else []
        query = "&".join(f"{quote(key)}={quote(value, safe='/:')}" for key, value in extra)
        return self.place + (f"?{query}" if query else "")

    @property
    def place(self) -> str:
        """Its name and device."""
        return f"{self.name}:{self.device}" if self.device else self.name

    @property
    def row(self) -> ProviderRow:
        """Its row in `ROWS`."""
        return ROWS[self.name]

    @property
    def arithmetic(self) -> str:
        """The precision that its own options ask for, or else the file's."""
        return self.row.asked_precision(dict(self.options)) or self.precision

    @property
    def is_processor(self) -> bool:
        """Whether it computes on the processor, so that CPU time is all the time that it takes."""
        return self.name == CPU or (self.name == OPENVINO and (self.device or "CPU") == "CPU")

    @property
    def memory(self) -> tuple[str, int]:
        """The memory that inputs and outputs are bound to, and the number of the device."""
        return self.row.memory, int(self.device) if self.row.memory != CPU and self.device.isdigit() else 0


@dataclass(frozen=True)
class ProviderRow:
    """An execution provider as onnxruntime knows it, and its settings.

    Attributes:
        runtime_name: onnxruntime's name for it.
        plugin: the module of the package that brings it as a plugin; empty if it is only built in.
        distribution: the package to install.
        memory: the memory that inputs and outputs are bound to, `cpu` or `cuda`.
        settings: makes onnxruntime's options for it, from the provider and the number of threads; they state the
            precision that it computes in, which is never left to its default.
        is_reference: whether onnxruntime's own tests hold for its results. Results of others are compared with the
            CPU's before they are used, and nodes that they do not take are an error.
        asked_precision: the precision that a user's options ask for; empty for none.
    """

    runtime_name: str
    plugin: str = ""
    distribution: str = ""
    memory: str = "cpu"
    settings: Callable[[ExecutionProvider, int], Mapping[str, str]] = field(
        default=lambda provider, _threads: dict(provider.options)
    )
    is_reference: bool = False
    asked_precision: Callable[[Mapping[str, str]], str] = field(default=lambda _options: "")


def _with(**fixed: str) -> Callable[[ExecutionProvider, int], Mapping[str, str]]:
    """Return settings that are `fixed` unless the user gives others."""
    return lambda provider, _threads: {**fixed, **dict(provider.options)}


def _on_cuda(provider: ExecutionProvider, _threads: int) -> Mapping[str, str]:
    """Return float32 as the precision: products are in TF32 by default, with the mantissa of half precision."""
    device = {"device_id": provider.device} if provider.device else {}
    return {"use_tf32": "0"} | device | dict(provider.options)


_OPENVINO_HINT = "INFERENCE_PRECISION_HINT"
_OPENVINO_PRECISIONS = {"f32": FP32, "bf16": BF16, "f16": "fp16"}


def _on_openvino(provider: ExecutionProvider, threads: int) -> Mapping[str, str]:
    """Return OpenVINO's own properties, whose names it checks; unknown options next to them are silently ignored.

    Without the hint, it multiplies in bfloat16 wherever the CPU can; onnxruntime's number of threads does not reach it.
    """
    device = provider.device or "CPU"
    wanted = next(key for key, value in _OPENVINO_PRECISIONS.items() if value == provider.precision)
    properties = {_OPENVINO_HINT: wanted, "PERFORMANCE_HINT": "LATENCY"}
    if device == "CPU":  # a run takes one stream, of so many threads; runs at the same time take the others
        streams = max(1, available_cores() // threads)
        properties |= {"NUM_STREAMS": str(streams), "INFERENCE_NUM_THREADS": str(streams * threads)}
    return {"load_config": json.dumps({device: properties | dict(provider.options)})}


AUTO, CPU, CUDA, OPENVINO = "auto", "cpu", "cuda", "openvino"
ROWS: dict[str, ProviderRow] = {
    CPU: ProviderRow("CPUExecutionProvider", is_reference=True),
    CUDA: ProviderRow("CUDAExecutionProvider", memory="cuda", settings=_on_cuda, is_reference=True),
    OPENVINO: ProviderRow(
        "OpenVINOExecutionProvider",
        "onnxruntime_ep_openvino",
        "onnxruntime-ep-openvino",
        settings=_on_openvino,
        asked_precision=lambda options: _OPENVINO_PRECISIONS.get(options.get(_OPENVINO_HINT, ""), ""),
    ),
    "tensorrt": ProviderRow(
        "TensorrtExecutionProvider", memory="cuda", settings=_with(trt_fp16_enable="0", trt_bf16_enable="0")
    ),
    "tensorrt-rtx": ProviderRow(
        "NvTensorRTRTXExecutionProvider", "onnxruntime_ep_nv_tensorrt_rtx", "onnxruntime-ep-nv-tensorrt-rtx"
    ),
    "webgpu": ProviderRow("WebGpuExecutionProvider", "onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu"),
    "qnn": ProviderRow(
        "QNNExecutionProvider", "onnxruntime_qnn", "onnxruntime-qnn", settings=_with(enable_htp_fp16_precision="0")
    ),
    "mlx": ProviderRow("MLXExecutionProvider", "onnxruntime_ep_mlx", "onnxruntime-ep-mlx"),
    "migraphx": ProviderRow("MIGraphXExecutionProvider", settings=_with(migraphx_fp16_enable="0")),
    "coreml": ProviderRow("CoreMLExecutionProvider"),
    "dml": ProviderRow("DmlExecutionProvider"),
}
"""The providers by the name that users give."""

PROVIDERS = {name: row.runtime_name for name, row in ROWS.items()}
"""onnxruntime's names for them."""


def parse_provider(text: str) -> str:
    """Return the canonical text of a provider.

    Raises:
        OptionError: as `ExecutionProvider.parse`.
    """
    return str(ExecutionProvider.parse(text))


def provider_effect(value: Any) -> Effect:
    """Return the effect of the options in a provider's text."""
    return "library" if "?" in str(value) else ""


Provider = Annotated[
    str,
    Option(
        "Execution provider: cpu, cuda, openvino, tensorrt, webgpu and others that onnxtool env lists. One that cannot "
        "run is an error; auto is the one that the file was optimized for, else cuda, else cpu.",
        metavar="NAME[:DEVICE]",
        effect=provider_effect,
        parse=parse_provider,
    ),
]


MAX_THREADS = 1024  # beyond this a number is a typing error; it protects the system's threads
Threads = Annotated[int, Option("Intra-op threads; 0: one per core.", minimum=0, maximum=MAX_THREADS)]


class ProviderOptions(Options, kw_only=True):
    """Details of a provider, which become part of the text `provider`, a field of each subclass.

    Attributes:
        provider_options: its own options, as KEY=VALUE.
        provider_library: the library of a plugin, instead of an installed package's.
        allow_fallback: let nodes that it does not take run on the CPU.
    """

    provider_options: Annotated[
        Many[str],
        Option(
            "An option of the provider itself; may be repeated.",
            name="provider_option",
            metavar="KEY=VALUE",
            effect="library",
        ),
    ] = NOTHING
    provider_library: Annotated[
        OptionalPath,
        Option("The library of a provider that is a plugin.", default="the installed package's", effect="library"),
    ] = UNSET
    allow_fallback: Annotated[
        bool, Option("Let operators that the provider does not take run on the CPU.", effect="check")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        text: str = getattr(self, "provider", AUTO)
        chosen = ExecutionProvider.parse(text)
        pairs = [text.partition("=") for text in self.provider_options]
        if wrong := next((key + sign for key, sign, _ in pairs if not key or not sign), None):
            raise OptionError(f"provider_option: {wrong!r} is not KEY=VALUE")
        options = dict(chosen.options) | {key: value for key, _, value in pairs}
        library = str(self.provider_library.absolute()) if self.provider_library else chosen.library
        fallback = self.allow_fallback or chosen.allow_fallback
        whole = replace(chosen, options=tuple(sorted(options.items())), library=library, allow_fallback=fallback)
        object.__setattr__(self, "provider", parse_provider(str(whole)))


def is_on_cuda(text: str) -> bool:
    """Whether a provider, by its text, runs on an NVIDIA GPU; for `auto` that is not known."""
    provider = ExecutionProvider.parse(text)
    return provider.name != AUTO and provider.row.memory == CUDA


def resolve_provider(name: str) -> str:
    """Return the text of a provider that can run here; `auto` is cuda if a session can start on it, else cpu.

    Raises:
        ProviderError: it cannot run here.
        OptionError: as `ExecutionProvider.parse`.
    """
    if name == AUTO:
        return CPU if cuda_problem() else CUDA
    provider = ExecutionProvider.parse(name)
    if problem := provider_problem(provider.place, provider.library):
        raise ProviderError(
            f"the provider {provider.place} cannot run here: {problem}", "fix that, or pass --provider cpu"
        )
    return str(provider)


def provider_problem(place: str, library: str = "") -> str:
    """Return what prevents a provider from running here, or an empty string."""
    import onnxruntime

    provider = ExecutionProvider.parse(place)
    row = provider.row
    if (row.memory == CUDA and (problem := cuda_problem())) or provider.name == CUDA:
        return problem
    if is_built_in(row) and not library:
        return ""
    if not library and not is_installed(row):
        package = f"; pip install {row.distribution}" if row.distribution else ""
        return f"onnxruntime {onnxruntime.__version__} was built without it{package}"
    try:
        devices = plugin_devices(provider.name, library)
    except Exception as error:  # noqa: BLE001  of the package, the loader or onnxruntime, which have no common class
        return f"its library cannot be loaded: {first_line(error)}"
    if not devices:
        source = library or f"{row.distribution} {plugin_version(row)}"
        return f"{source} lists no device of {row.runtime_name} on this machine, which has {_hardware()}"
    if provider.device and provider.device not in devices:
        return f"it has no device {provider.device!r}, only {', '.join(devices)}"
    return ""


def is_built_in(row: ProviderRow) -> bool:
    """Whether onnxruntime was built with a provider: it lists those of plugins as well, once they are loaded."""
    import onnxruntime

    return row.runtime_name in onnxruntime.get_available_providers() and row.runtime_name not in _plugins


def is_installed(row: ProviderRow) -> bool:
    """Whether the package of a plugin is installed."""
    return bool(row.plugin) and importlib.util.find_spec(row.plugin) is not None


def plugin_version(row: ProviderRow) -> str:
    """Return the version of a plugin's package; empty without one."""
    return installed(row.distribution) if row.distribution else ""


def provider_version(provider: ExecutionProvider) -> str:
    """Return the version of a plugin's package, or of the onnxruntime that a provider is built into."""
    return plugin_version(provider.row) or runtime_version()


def provider_hardware(provider: ExecutionProvider) -> str:
    """Return what a provider's kernels are chosen by: the processor's vector instructions, and the provider's devices.

    A file that was verified with AMX is not verified without it.
    """
    import onnxruntime

    row = provider.row
    devices = [entry.device for entry in onnxruntime.get_ep_devices() if entry.ep_name == row.runtime_name]
    names = {
        f"{entry.type.name} {entry.vendor_id:#x}:{entry.device_id:#x}" for entry in devices if entry.type.name != "CPU"
    }
    graphics = device_memory() if row.memory == CUDA else None
    return ", ".join([" ".join(vector_instructions()), *sorted(names | ({graphics.name} if graphics else set()))])


def _hardware() -> str:
    """Name the hardware that onnxruntime sees, by kind and vendor."""
    import onnxruntime

    names = {f"{entry.device.type.name} of {entry.device.vendor}" for entry in onnxruntime.get_ep_devices()}
    return ", ".join(sorted(names))


def _library_of(row: ProviderRow) -> Path:
    """Ask the package of a plugin for its library; most call the function `get_library_path`."""
    package = importlib.import_module(row.plugin)
    locate = getattr(package, "get_library_path", None) or package.library_path
    return Path(locate())


@cache
def plugin_devices(name: str, library: str) -> dict[str, Any]:
    """Load the library of a plugin, and return its devices by name: `CPU`, `GPU`, and `GPU.1` for a second one.

    Raises:
        Exception: it cannot be loaded; onnxruntime and the packages have no common class of errors.
    """
    import onnxruntime

    row = ROWS[name]
    path = library or str(_library_of(row))
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    onnxruntime.register_execution_provider_library(f"onnxtool.{name}.{len(_plugins)}", path)
    _plugins.append(row.runtime_name)
    devices: dict[str, Any] = {}
    for device in onnxruntime.get_ep_devices():
        if device.ep_name == row.runtime_name and device.ep_metadata.get("library_path", path) == path:
            kind = device.device.type.name
            same = sum(other.partition(".")[0] == kind for other in devices)
            devices[f"{kind}.{same}" if same else kind] = device
    return devices


_plugins: list[str] = []  # onnxruntime's names of those that were loaded


def describe_provider(name: str) -> str:
    """Return `ok` and what a provider offers here, or why it cannot run."""
    row = ROWS[name]
    if problem := provider_problem(name):
        return problem
    if not row.plugin or not is_installed(row):
        return "ok"
    devices = [
        " ".join(filter(None, (kind, device.ep_metadata.get("OPTIMIZATION_CAPABILITIES", ""))))
        for kind, device in plugin_devices(name, "").items()
    ]
    return f"ok, {row.distribution} {plugin_version(row)}: {'; '.join(devices)}"


def has_bf16(provider: ExecutionProvider) -> bool:
    """Whether the provider multiplies in bfloat16 here without emulating it."""
    if provider.name != OPENVINO:
        return False

    if is_built_in(provider.row) and not provider.library:
        return bool({"avx512_bf16", "amx_bf16"} & processor_features())
    devices = plugin_devices(provider.name, provider.library)
    chosen = devices.get(provider.device or next(iter(devices), ""))
    return chosen is not None and "BF16" in chosen.ep_metadata.get("OPTIMIZATION_CAPABILITIES", "").split()


def apply_provider(options: Any, provider: ExecutionProvider, threads: int) -> list[Any] | None:
    """Set onnxruntime's session options for a provider; return the argument `providers` of the session."""
    row, settings = provider.row, dict(provider.row.settings(provider, threads))
    if row.is_reference or (is_built_in(row) and not provider.library):
        extra = {"device_type": provider.device or "CPU"} if provider.name == OPENVINO else {}
        return [(row.runtime_name, settings | extra)] if settings or extra else [row.runtime_name]
    devices = plugin_devices(provider.name, provider.library)
    options.add_provider_for_devices([devices[provider.device or next(iter(devices))]], settings)
    return None


@cache
def cuda_problem() -> str:
    """Return what prevents CUDA from running here, or an empty string."""
    return cuda_device_problem() or _cuda_library_problem()


@cache
def cuda_device_problem() -> str:
    """Return what prevents onnxruntime from using a CUDA device, or an empty string."""
    import onnxruntime

    if PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        return (
            f"onnxruntime {onnxruntime.__version__} was built without CUDA (the onnxruntime-gpu wheel has it; "
            "a plain onnxruntime installed beside it hides it)"
        )
    driver_name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(driver_name)
    except OSError:
        return f"no NVIDIA driver ({driver_name} not found)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver is installed but reports no device"
    return ""


def _cuda_library_problem() -> str:
    """Start a one-node session on CUDA; return why it does not start, or an empty string.

    A device without CUDA's and cuDNN's libraries is common, and `auto` must not fail on it.
    """
    import onnxruntime

    # Loads the libraries of NVIDIA's wheels, which are not on any search path; its output names missing ones.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()
    try:
        session = onnxruntime.InferenceSession(identity_model(17), providers=[PROVIDERS["cuda"]])
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions have no common base class
        return f"a session does not start: {error}"
    if session.get_providers()[:1] == [PROVIDERS["cuda"]]:
        return ""
    missing = [line for line in printed.getvalue().splitlines() if line.startswith("Failed to load")]
    return f"a session does not start: {(missing or ['CUDA or cuDNN is missing, or of another version'])[0]}"


def identity_model(opset: int) -> bytes:
    """Return a one-node model, to test whether a session starts."""
    from onnx import parser

    # The oldest version of the format suffices: onnxruntime also limits the newest.
    header = f'<ir_version: 7, opset_import: ["": {opset}]>'
    model = parser.parse_model(f"{header} identity (float[1] x) => (float[1] y) {{ y = Identity(x) }}")
    serialized: bytes = model.SerializeToString()
    return serialized


@cache
def highest_opset() -> int:
    """Return the newest ONNX opset that both onnxruntime and onnx support.

    onnxruntime reveals it only in the error for a graph that is too new, so one-node graphs are tried.
    """
    from onnx import defs

    newest = defs.onnx_opset_version()
    return next((opset for opset in range(newest, 1, -1) if _loads(opset)), 1)


def runtime_version() -> str:
    """Return the version of the installed onnxruntime, whichever package it comes from."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _loads(opset: int) -> bool:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(identity_model(opset), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  onnxruntime's exceptions have no common base class
        return False
    return True


# Larger sums of two neighbours do not fit 16 bits.
_ROWS, _WIDTH, _ACTIVATION, _WEIGHT = 4, 64, 255, 127

EXACT_PRODUCTS_OPTION = "session.x64quantprecision"
"""The session option that makes uint8 by int8 products exact if they would saturate, at the cost of speed."""


@cache
def products_saturate() -> bool:
    """Multiply the largest uint8 and int8 values, and return whether the result is too small.

    On x86 CPUs without VNNI, onnxruntime adds two products in 16 bits, where they saturate.
    """
    import numpy as np
    import onnxruntime as ort
    from onnx import numpy_helper, parser

    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        products (uint8[{_ROWS}, {_WIDTH}] x) => (int32[{_ROWS}, {_WIDTH}] y) {{ y = MatMulInteger(x, w) }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.full((_WIDTH, _WIDTH), _WEIGHT, np.int8), "w"))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (products,) = session.run(None, {"x": np.full((_ROWS, _WIDTH), _ACTIVATION, np.uint8)})
    return bool((products != _WIDTH * _ACTIVATION * _WEIGHT).any())


def register_operators(options: Any, domains: Iterable[str]) -> None:
    """Make the operators known to onnxruntime's session options, if a graph with these domains has them.

    Raises:
        ProviderError: the package is not installed.
    """
    if STRINGS in domains:
        options.register_custom_ops_library(find_library())


def find_library() -> str:
    """Return the path of the library with the operators; the package itself imports PyTorch and transformers.

    Raises:
        ProviderError: the package is not installed.
    """
    package = importlib.util.find_spec("onnxruntime_extensions")
    if package is None:
        raise ProviderError(
            "texts are read in a graph by operators of onnxruntime-extensions, which is not installed",
            "pip install 'onnxtool-cli[text]'",
        )
    # A private name, tested with 0.15.2; `get_library_path` returns the file of the same module.
    library = PathFinder.find_spec("_extensions_pydll", package.submodule_search_locations)
    if library is None or library.origin is None:
        return str(importlib.import_module("onnxruntime_extensions").get_library_path())
    return library.origin
