"""A loaded model, and its runs: plain ones, and such that go on from one another.

Sequences, optionals and maps are named arrays. Element `i` of the sequence `s` is `s[i]`, the keys and values of the
map `m` are `m.keys` and `m.values`, and an optional is its element, or absent; an output also has `s.length`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError, ProviderError, SessionError, first_line
from onnxtool.model_file import ModelFile
from onnxtool.reports import TensorInfo, short_repr
from onnxtool.runtime.adapters import SessionAdapter
from onnxtool.runtime.providers import CPU, ExecutionProvider

NESTED = ("sequence", "map", "optional")  # what their dtypes begin with
_ELEMENT = re.compile(r"\[(\d+)\]")


def is_nested(info: TensorInfo) -> bool:
    """Whether an input or output is not a tensor."""
    return info.dtype.startswith(NESTED)


def flattened(name: str, value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the named arrays of an onnxruntime output; the output itself if it is a tensor."""
    if isinstance(value, Mapping):
        yield f"{name}.keys", np.array(list(value.keys()))
        yield f"{name}.values", np.array(list(value.values()))
    elif value is None or isinstance(value, list):
        # Its shape says how many elements there are, or that there is no sequence: shapes are compared exactly.
        yield f"{name}.length", np.zeros(() if value is None else len(value), np.int64)
        for number, element in enumerate(value or ()):
            yield from flattened(f"{name}[{number}]", element)
    else:
        yield name, np.asarray(value)


def is_part(name: str, info: TensorInfo) -> bool:
    """Whether `name` is the name of an array in a nested input."""
    return is_nested(info) and (name == info.name or name.startswith((f"{info.name}[", f"{info.name}.")))


def _nested(name: str, dtype: str, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Assemble an onnxruntime input of a type from the arrays under its name."""
    kind, _, element = dtype.partition("(")
    element = element.removesuffix(")")
    names = [key for key in arrays if key.startswith(name)]
    if kind == "optional":
        return _nested(name, element, arrays) if names else None
    if kind == "map":
        keys, values = (arrays[f"{name}.{part}"].tolist() for part in ("keys", "values"))
        return dict(zip(keys, values, strict=True))
    if kind == "sequence":
        matches = (_ELEMENT.match(key[len(name) :]) for key in names)
        places = sorted({int(match[1]) for match in matches if match})
        return [_nested(f"{name}[{place}]", element, arrays) for place in places]
    return arrays[name]


Arrays = dict[str, NDArray[Any]]


@short_repr
@dataclass(frozen=True)
class Session:
    """A loaded model.

    Attributes:
        provider: the text of the provider that runs it, as of `ExecutionProvider`.
        threads: intra-op threads; by default, the number of cores that this process may use.
        load_ms: time from the file to this session.
        intra_threads: intra-op threads requested from onnxruntime, 0 for its own choice.
        memory: the memory that inputs and outputs are bound to, `cpu` or `cuda`, and the number of the device.
        elsewhere: the nodes that the provider leaves to the CPU, as `operator name`.
        notes: notes for the user on where and how the model runs.
        adapter: the adapter of every run; None for the base.
    """

    model: ModelFile
    provider: str
    threads: int
    load_ms: float
    _inference: Any
    intra_threads: int = 0
    memory: tuple[str, int] = ("cpu", 0)
    elsewhere: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    adapter: SessionAdapter | None = None

    def running(self, model: ModelFile) -> Session:
        """Return a session that shares this one's memory, of the same model with another adapter or without one.

        Raises:
            ModelFileError: onnxruntime cannot read the adapter.
            ProviderError: adapters do not run there.
        """
        if model.adapter is None:
            return replace(self, model=model, adapter=None)
        if model.sizes or model.compiled is not None or not ExecutionProvider.parse(self.provider).row.is_reference:
            raise ProviderError(
                f"adapters run on cpu and cuda, from a graph of any size, and {model.path} runs on {self.provider}",
                "pass --provider cpu, or export the adapter merged: onnxtool export --model_name ADAPTER",
            )
        return replace(self, model=model, adapter=SessionAdapter(model.adapter))

    @property
    def on_device(self) -> bool:
        """Whether inputs and outputs are copied to the memory of a device."""
        return self.memory[0] != CPU

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

        Sequences, maps and optionals have the arrays that `flattened` describes.

        Raises:
            InputError: an input is missing or unknown.
            SessionError: onnxruntime fails on these inputs.
        """
        inputs = self.nested(feeds)
        missing = sorted(set(self.input_names) - set(inputs))
        unknown = sorted(set(inputs) - set(self.input_names))
        if unknown:  # or the values of an adapter
            unknown = sorted({*unknown} - {value.name for value in self._inference.get_overridable_initializers()})
        if missing or unknown:
            raise InputError(
                f"{self.model.path} takes {', '.join(self.input_names)}; missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}",
                "run it on the inputs that it takes; the tokenizer or checkpoint of another model gives others",
            )
        outputs = zip(self.output_names, self.run_unchecked(inputs), strict=True)
        arrays: Arrays = {}
        for output, value in outputs:
            arrays.update({output: value} if isinstance(value, np.ndarray) else flattened(output, value))
        return arrays

    def nested(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        """Return inputs for onnxruntime, with sequences, maps and optionals assembled from arrays."""
        holders = [info for info in self.model.structure.inputs if info.dtype.startswith(NESTED)]
        if not holders:
            return feeds
        plain = {name: array for name, array in feeds.items() if not any(is_part(name, info) for info in holders)}
        return plain | {info.name: _nested(info.name, info.dtype, feeds) for info in holders}

    def run_unchecked(self, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the model on `feeds` with only onnxruntime's own call, for timing.

        Raises:
            SessionError: onnxruntime fails on these inputs.
        """
        try:
            outputs: list[NDArray[Any]] = self._inference.run(None, feeds, self.adapter and self.adapter.options)
        except Exception as error:  # onnxruntime has no error class of its own
            raise self._failed(feeds, error) from error
        return outputs

    def cached(self, carried: Mapping[str, str]) -> CachedRun:
        """Prepare runs whose outputs become the next run's inputs without a copy; `carried` maps inputs to outputs."""
        run = CachedRun(self._inference, self.output_names, carried, self.memory)
        run.keep(self._values)
        return run

    @property
    def _values(self) -> Mapping[str, Any]:
        return {} if self.adapter is None else self.adapter.values

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


class CachedRun:
    """Session runs whose outputs are inputs of the next run, and stay on the provider's device.

    Attributes:
        carried: the output that feeds each carried input.
    """

    def __init__(
        self, inference: Any, outputs: Sequence[str], carried: Mapping[str, str], memory: tuple[str, int]
    ) -> None:
        self.carried = dict(carried)
        self._inference, self._outputs, self._memory = inference, tuple(outputs), memory
        self._kept: dict[str, Any] = {}
        self._binding = inference.io_binding()

    def keep(self, values: Mapping[str, Any]) -> None:
        """Set inputs of all later runs: arrays, which are copied to the device, or values of another run."""
        import onnxruntime as ort

        for name, value in values.items():
            is_value = isinstance(value, ort.OrtValue)
            self._kept[name] = value if is_value else ort.OrtValue.ortvalue_from_numpy(value, *self._memory)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Run on `feeds` and kept inputs, and keep the carried outputs; return the outputs as onnxruntime values."""
        binding = self._binding
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, value in self._kept.items():
            binding.bind_ortvalue_input(name, value)
        binding.clear_binding_outputs()
        for name in self._outputs:
            binding.bind_output(name, *self._memory)
        self._inference.run_with_iobinding(binding)
        if self._memory[0] != CPU:
            binding.synchronize_outputs()
        outputs = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        self._kept.update({name: outputs[output] for name, output in self.carried.items()})
        return outputs

    def reorder(self, places: NDArray[np.int64]) -> None:
        """Reorder the rows, on the first axis, of carried values by `places`, which may repeat a row."""
        self.keep({name: self._kept[name].numpy()[places] for name in self.carried})
