"""Turn a graph partition into a session, and name the responsible nodes if that fails.

Dumps consist of the model, and the FX graph as a text file next to it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.errors import CompilationError, OutputWriteError
from onnxtool.options import checked
from onnxtool.torch_backend.cache import Cache, fingerprint
from onnxtool.torch_backend.lower import torch_onnx
from onnxtool.torch_backend.lower.finishing import apply, finish, nodes_without_kernel, racy_nodes, resolve_transforms
from onnxtool.torch_backend.lower.torch_onnx import export
from onnxtool.torch_backend.nodes import Node
from onnxtool.torch_backend.options import Converter, OrtBackendOptions, Provider
from onnxtool.torch_backend.own_translations import nodes_with_own
from onnxtool.torch_backend.partition import Partition, extract
from onnxtool.torch_backend.sessions import (
    INPUTS_KEY,
    LOAD_ERRORS,
    NUM_NODES_KEY,
    open_model,
    session_fits,
    wrong_types,
)

CONVERTER_VARIABLE = "ONNXRT_CHANGE_REWRITER"
CONVERTERS: dict[str, Converter] = {"fx": torch_onnx.translate, "export": export}
"""The default, and the one that ONNXRT_CHANGE_REWRITER=1 selects instead."""


class PartitionError(Exception):
    """A partition cannot become a session.

    Attributes:
        nodes: the nodes of the whole graph that must stay in PyTorch, each with the reason.
    """

    def __init__(self, nodes: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in nodes.items()))
        self.nodes = dict(nodes)


@dataclass(frozen=True)
class Translated:
    """A partition as a session, and which of the partition's inputs it takes."""

    session: ort.InferenceSession
    used: tuple[int, ...]
    num_onnx_nodes: int

    @classmethod
    def of(cls, session: ort.InferenceSession) -> Translated:
        """Read the inputs and number of nodes from the metadata that `finish` wrote to the model."""
        metadata = session.get_modelmeta().custom_metadata_map
        return cls(session, tuple(int(index) for index in metadata[INPUTS_KEY].split()), int(metadata[NUM_NODES_KEY]))


# Equal graphs share a session as long as one of them is alive.
_SESSIONS: weakref.WeakValueDictionary[str, ort.InferenceSession] = weakref.WeakValueDictionary()


class Translator:
    """Translates a graph's partitions; a partition that already has a session is not translated again."""

    def __init__(self, options: OrtBackendOptions) -> None:
        self.options = options
        converter_name, self._convert = resolve_converter(options.converter)
        self._transforms = resolve_transforms(options.pre_ort_model_transforms)
        # A user's function has no known result, and is expected to be called.
        known = not callable(options.converter) and all(isinstance(t, str) for t in options.pre_ort_model_transforms)
        self._salt = repr((converter_name, options.optimize, options.pre_ort_model_transforms)) if known else ""
        self.cache = Cache(options.cache_folder if known else None)
        self._alive: list[ort.InferenceSession] = []

    def translate(self, partition: Partition, providers: tuple[Provider, ...]) -> Translated:
        """Return a session for `partition`.

        Raises:
            PartitionError: the partition cannot be translated, its translation has other types, or onnxruntime cannot
                load it.
        """
        has_own = any(nodes_with_own(partition.module.graph))
        key = fingerprint(partition.module, self._salt) if self._salt and not has_own else ""
        settings = (id(self.options.ort_session_options), self.options.flush_denormals, _num_threads(partition))
        shared = f"{key} {providers!r} {settings}"
        session = _SESSIONS.get(shared) if key and not is_dumping() else None
        if session is None:
            session = self._open(partition, providers, key)
            if key:
                _SESSIONS[shared] = session
        self._alive.append(session)
        return Translated.of(session)

    @property
    def is_reproducible(self) -> bool:
        """Return whether equal graphs give equal models: no user function is involved."""
        return bool(self._salt)

    def fingerprint(self, partition: Partition) -> str:
        """Return a name for a partition's model that is valid in every process; models with the same name are equal."""
        return fingerprint(partition.module, self._salt)

    def translate_alone(self, partition: Partition, providers: tuple[Provider, ...]) -> Translated:
        """Return a session that is not shared, cached or dumped, for example for a measurement.

        Raises:
            PartitionError: as for `translate`.
        """
        model, data = self._serialized(partition)
        return Translated.of(self._load(partition, model, data, providers))

    def require_own(self, owner: torch.fx.GraphModule, stay: Container[Node]) -> None:
        """Try the own translation of each node that is not in `stay`.

        Raises:
            CompilationError: it fails, or its results have other types or shapes than the operator's.
        """
        for node in nodes_with_own(owner.graph):
            if node in stay:
                continue
            try:
                self._try_alone(
                    extract(owner, [node, *(user for user in node.users if user.target is operator.getitem)])
                )
            except PartitionError as error:
                reason = "; ".join({*error.nodes.values()})
                raise CompilationError(f"the own translation of {node.target.__name__} fails: {reason}") from error

    def _try_alone(self, partition: Partition) -> None:
        model = self._model(partition)
        for output in model.graph.outputs:
            output.shape = None  # onnxruntime infers it
        with unset_fake_temporarily():
            data = ir.to_proto(model).SerializeToString()
        session = self._load(partition, model, data, ("CPUExecutionProvider",))
        for node, output in zip(partition.outputs, session.get_outputs(), strict=True):
            expected = [size if isinstance(size, int) else None for size in node.meta["val"].shape]
            sizes = [size if isinstance(size, int) else None for size in output.shape]
            if len(sizes) != len(expected) or any(size not in (None, expected[dim]) for dim, size in enumerate(sizes)):
                raise PartitionError({node.name: f"its result has the shape {sizes} instead of {expected}"})

    def _open(self, partition: Partition, providers: tuple[Provider, ...], key: str) -> ort.InferenceSession:
        text = str(partition.module.graph)
        if cached := self.cache.read(key):
            try:
                session = open_model(cached, self.options, providers, _num_threads(partition))
            except LOAD_ERRORS:
                pass  # damaged: make it again
            else:
                if session_fits(session, partition):
                    dump(cached, text)
                    return session
        model, data = self._serialized(partition)
        dump(data, text)
        session = self._load(partition, model, data, providers)
        self.cache.write(key, data)
        return session

    def _serialized(self, partition: Partition) -> tuple[ir.Model, bytes]:
        model = self._model(partition)
        with unset_fake_temporarily():  # the constants' weights are read
            proto = ir.to_proto(model)
        apply(self._transforms, proto)
        return model, proto.SerializeToString()

    def _load(
        self, partition: Partition, model: ir.Model, data: bytes, providers: tuple[Provider, ...]
    ) -> ort.InferenceSession:
        try:
            session = open_model(data, self.options, providers, _num_threads(partition))
        except LOAD_ERRORS as error:
            raise PartitionError(_causes(partition, model, str(error))) from error
        if wrong := wrong_types(session, partition):
            raise PartitionError({node.name: f"its translation gives {given}" for node, given in wrong.items()})
        return session

    def _model(self, partition: Partition) -> ir.Model:
        try:
            model = self._convert(partition.module)
        except torch_onnx.ConversionFailedError as error:
            raise PartitionError(_known(partition, [error.node_name], f"not translated: {error}")) from error
        if isinstance(model, onnx.ModelProto):
            model = ir.from_proto(model)
        if not isinstance(model, ir.Model):
            raise CompilationError(
                f"the converter returned {type(model).__name__}", "return an onnx_ir.Model or an onnx.ModelProto"
            )
        if racy := racy_nodes(model):
            raise PartitionError(
                _known(partition, map(_origin, racy), "its translation loses updates where indices repeat")
            )
        return finish(model, len(partition.inputs), len(partition.outputs), optimize=self.options.optimize)

    def rejected_before(self, owner: torch.fx.GraphModule) -> dict[str, str]:
        """Return the nodes of this graph that an earlier process could not compile, with the reasons."""
        if not self.cache.folder:
            return {}
        record = self.cache.read_json(fingerprint(owner, self._salt))
        reasons = record if isinstance(record, dict) else {}
        nodes = enumerate(owner.graph.nodes)
        return {node.name: str(reasons[str(index)]) for index, node in nodes if str(index) in reasons}

    def remember(self, owner: torch.fx.GraphModule, rejected: Mapping[str, str]) -> None:
        """Record for later processes which nodes of this graph cannot be compiled."""
        if not self.cache.folder:
            return
        reasons = {i: rejected[node.name] for i, node in enumerate(owner.graph.nodes) if node.name in rejected}
        self.cache.write_json(fingerprint(owner, self._salt), reasons)


def _num_threads(partition: Partition) -> int:
    """Return one for a small partition: PyTorch's OpenMP threads, which are still spinning, would delay others."""
    return torch.get_num_threads() if partition.is_large else 1


def _causes(partition: Partition, model: ir.Model, message: str) -> dict[str, str]:
    """Return the nodes that keep onnxruntime from loading the model; all nodes if the message names none."""
    reason = " ".join(message.split()).removeprefix("[ONNXRuntimeError] : ")[:200]
    named = [node.name for node in model.graph if node.name and node.name in message]
    missing = nodes_without_kernel(model)
    nodes = _known(partition, map(_origin, named), f"onnxruntime does not load it: {reason}") if named else {}
    if missing:
        nodes |= _known(partition, map(_origin, missing), "onnxruntime has no kernel for its types")
    return nodes or _known(partition, (), f"onnxruntime does not load it: {reason}")


def _origin(name: str) -> str:
    return name.split(":")[0]


def _known(partition: Partition, names: Iterable[str], reason: str) -> dict[str, str]:
    """Return the nodes by their names in the whole graph; all calls of the partition if none is known."""
    reasons = {partition.names[name]: reason for name in names if name in partition.names}
    calls = (node.name for node in partition.module.graph.nodes if node.op == "call_function")
    return reasons or {partition.names.get(name, name): reason for name in calls}


def resolve_converter(converter: Converter | str) -> tuple[str, Converter]:
    """Return the name and function of a converter, or of the other one if the environment requests it.

    Raises:
        CompilationError: there is no converter of that name.
    """
    wanted = os.environ.get(CONVERTER_VARIABLE, "0")
    if wanted not in ("", "0"):
        converter = tuple(CONVERTERS)[1] if wanted == "1" else wanted
        if wanted not in ("1", *CONVERTERS):
            raise CompilationError(
                f"the environment variable {CONVERTER_VARIABLE} is {wanted!r}",
                f"unset it, or set it to 0, 1, or one of {', '.join(CONVERTERS)}",
            )
    if callable(converter):
        return f"{converter.__module__}.{getattr(converter, '__qualname__', repr(converter))}", converter
    if converter not in CONVERTERS:
        raise CompilationError(
            f"unknown converter {converter!r}", f"use one of {', '.join(CONVERTERS)}, or pass a function"
        )
    return converter, CONVERTERS[converter]


VARIABLE = "ONNXRT_DUMP_PATH"


def is_dumping() -> bool:
    """Return whether the environment requests dumps."""
    return bool(os.environ.get(VARIABLE))


def dump(model: bytes, text: str) -> None:
    """Write `{prefix}{N}.onnx` and `.txt` if the environment variable ONNXRT_DUMP_PATH sets a prefix.

    Raises:
        OutputWriteError: the files cannot be written.
    """
    prefix = os.environ.get(VARIABLE, "")
    if not prefix:
        return
    try:
        Path(f"{prefix}0").parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            with contextlib.suppress(FileExistsError), Path(f"{prefix}{number}.onnx").open("xb") as file:
                file.write(model)
                Path(f"{prefix}{number}.txt").write_text(text, encoding="utf-8")
                break
    except OSError as error:
        raise OutputWriteError(
            f"cannot dump a graph to {prefix}*.onnx: {error.strerror}", f"check {VARIABLE}"
        ) from error


@contextmanager
@checked
def dump_onnx(prefix: str, folder: str | Path | None = None, clean: bool = False) -> Iterator[None]:
    """Dump what is compiled inside the block to `{folder}/{prefix}{N}.onnx` and `.txt`.

    Args:
        prefix: the start of all file names.
        folder: the output folder, created if needed; by default the current one.
        clean: whether to remove earlier dumps, `{prefix}*.onnx` and `.txt`, from the folder first.

    Raises:
        OutputWriteError: the folder cannot be created or cleaned.
    """
    target = Path(folder or ".")
    try:
        target.mkdir(parents=True, exist_ok=True)
        if clean:
            for path in target.iterdir():
                if path.name.startswith(prefix) and path.suffix in (".onnx", ".txt"):
                    path.unlink()
    except OSError as error:
        raise OutputWriteError(f"cannot use {target} for dumps: {error.strerror}", "pass another folder") from error
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(target / prefix)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
