"""Turns a piece of a graph into a session, and says which nodes are to blame where that fails."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir
import onnxruntime as ort
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.errors import CompilationError
from onnxtool.torch_backend.lower.converters import resolve_converter
from onnxtool.torch_backend.lower.finishing import INPUTS_KEY, NUM_NODES_KEY, finish, racy_nodes
from onnxtool.torch_backend.lower.kernels import nodes_without_kernel
from onnxtool.torch_backend.lower.torch_onnx import ConversionFailedError
from onnxtool.torch_backend.lower.transforms import apply, resolve_transforms
from onnxtool.torch_backend.run.cache import Cache, fingerprint
from onnxtool.torch_backend.run.dumps import dump, is_dumping
from onnxtool.torch_backend.run.sessions import LOAD_ERRORS, open_model
from onnxtool.torch_backend.run.signatures import is_of, wrong_types

if TYPE_CHECKING:
    from onnxtool.torch_backend.options import OrtBackendOptions, Provider
    from onnxtool.torch_backend.partition.partitions import Piece


class PieceError(Exception):
    """A piece cannot become a session.

    Attributes:
        nodes: which nodes of the whole graph have to stay in PyTorch, each with the reason.
    """

    def __init__(self, nodes: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in nodes.items()))
        self.nodes = dict(nodes)


@dataclass(frozen=True)
class Translated:
    """A piece as a session, and which of its inputs the session takes."""

    session: ort.InferenceSession
    used: tuple[int, ...]
    num_onnx_nodes: int

    @classmethod
    def of(cls, session: ort.InferenceSession) -> Translated:
        """Read the rest off the metadata that `finish` wrote into the model."""
        metadata = session.get_modelmeta().custom_metadata_map
        return cls(session, tuple(int(index) for index in metadata[INPUTS_KEY].split()), int(metadata[NUM_NODES_KEY]))


# Graphs that are equal share a session as long as one of them is alive.
_SESSIONS: weakref.WeakValueDictionary[str, ort.InferenceSession] = weakref.WeakValueDictionary()


class Translator:
    """Translates the pieces of one graph; what succeeded once is not done again."""

    def __init__(self, options: OrtBackendOptions) -> None:
        self.options = options
        converter_name, self._convert = resolve_converter(options.converter)
        self._transforms = resolve_transforms(options.pre_ort_model_transforms)
        # What a function of the user does is not known, and whoever passes one expects it to be called.
        known = not callable(options.converter) and all(isinstance(t, str) for t in options.pre_ort_model_transforms)
        self._salt = repr((converter_name, options.optimize, options.pre_ort_model_transforms)) if known else ""
        self._cache = Cache(options.cache_folder if known else None)
        self._alive: list[ort.InferenceSession] = []

    def translate(self, piece: Piece, providers: tuple[Provider, ...]) -> Translated:
        """Return a session for `piece`.

        Raises:
            PieceError: the piece cannot be translated, its translation gives other types, or onnxruntime cannot load
                it.
        """
        key = fingerprint(piece.module, self._salt) if self._salt else ""
        settings = (id(self.options.ort_session_options), self.options.flush_denormals, torch.get_num_threads())
        shared = f"{key} {providers!r} {settings}"
        session = _SESSIONS.get(shared) if key and not is_dumping() else None
        if session is None:
            session = self._open(piece, providers, key)
            if key:
                _SESSIONS[shared] = session
        self._alive.append(session)
        return Translated.of(session)

    def _open(self, piece: Piece, providers: tuple[Provider, ...], key: str) -> ort.InferenceSession:
        text = str(piece.module.graph)
        if cached := self._cache.read(key):
            try:
                session = open_model(cached, self.options, providers)
            except LOAD_ERRORS:
                pass  # damaged: make it again
            else:
                if is_of(session, piece):
                    dump(cached, text)
                    return session
        model = self._model(piece)
        with unset_fake_temporarily():  # the weights of constants are read
            proto = ir.to_proto(model)
        apply(self._transforms, proto)
        data: bytes = proto.SerializeToString()
        dump(data, text)
        try:
            session = open_model(data, self.options, providers)
        except LOAD_ERRORS as error:
            raise PieceError(_blame(piece, model, str(error))) from error
        if wrong := wrong_types(session, piece):
            raise PieceError({node.name: f"its translation gives {given}" for node, given in wrong.items()})
        self._cache.write(key, data)
        return session

    def _model(self, piece: Piece) -> ir.Model:
        import onnx

        try:
            model = self._convert(piece.module)
        except ConversionFailedError as error:
            raise PieceError(_known(piece, [error.node_name], f"not translated: {error}")) from error
        if isinstance(model, onnx.ModelProto):
            model = ir.from_proto(model)
        if not isinstance(model, ir.Model):
            raise CompilationError(
                f"the converter returned {type(model).__name__}", "return an onnx_ir.Model or an onnx.ModelProto"
            )
        if racy := racy_nodes(model):
            raise PieceError(_known(piece, map(_origin, racy), "its translation loses updates where indices repeat"))
        return finish(model, len(piece.inputs), len(piece.outputs), optimize=self.options.optimize)

    def rejected_before(self, owner: torch.fx.GraphModule) -> dict[str, str]:
        """Return what an earlier process learned about the nodes of this graph."""
        if not self._cache.folder:
            return {}
        names = [node.name for node in owner.graph.nodes]
        found = self._cache.read_reasons(fingerprint(owner, self._salt))
        return {names[index]: reason for index, reason in found.items() if index < len(names)}

    def remember(self, owner: torch.fx.GraphModule, rejected: Mapping[str, str]) -> None:
        """Keep for later processes which nodes of this graph cannot be compiled."""
        if not self._cache.folder:
            return
        reasons = {i: rejected[node.name] for i, node in enumerate(owner.graph.nodes) if node.name in rejected}
        self._cache.write_reasons(fingerprint(owner, self._salt), reasons)


def _blame(piece: Piece, model: ir.Model, message: str) -> dict[str, str]:
    """Return the nodes because of which onnxruntime did not load the model: all of them where it names none."""
    reason = " ".join(message.split()).removeprefix("[ONNXRuntimeError] : ")[:200]
    named = [node.name for node in model.graph if node.name and node.name in message]
    missing = nodes_without_kernel(model)
    nodes = _known(piece, map(_origin, named), f"onnxruntime does not load it: {reason}") if named else {}
    if missing:
        nodes |= _known(piece, map(_origin, missing), "onnxruntime has no kernel for its types")
    return nodes or _known(piece, (), f"onnxruntime does not load it: {reason}")


def _origin(name: str) -> str:
    return name.split(":")[0]


def _known(piece: Piece, names: Iterable[str], reason: str) -> dict[str, str]:
    """Name the nodes as the whole graph does; all calls of the piece where none is known."""
    found = {piece.names[name]: reason for name in names if name in piece.names}
    calls = (node.name for node in piece.module.graph.nodes if node.op == "call_function")
    return found or {piece.names.get(name, name): reason for name in calls}
