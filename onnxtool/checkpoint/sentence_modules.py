"""Read sentence-transformers files of a checkpoint: modules with their settings, and the token limit.

The only reader of modules.json, the modules' config.json and sentence_bert_config.json, both for checkpoints to export
and for folders of exported models. Tested with files of sentence-transformers 2 to 6.2; if versions differ, 6.2
decides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import TypeGuard

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.tasks import RANKING
from onnxtool.reports import Json, short_repr

MODULES_NAME = "modules.json"
ROUTER_NAME = "router_config.json"
# Asym is the older name of Router.
_ROUTERS = ("Router", "Asym")
# Tasks of texts; the last one means no particular task.
_TASKS = ("query", "document", "")
# Tasks whose texts may be messages; generation takes its prompts in another way.
_TASKS_OF_MESSAGES = ("sentence-similarity", "sparse-encoding", "feature-extraction", "text-classification", RANKING)
# Modules that look up token vectors, without a transformer.
STATIC, SPARSE_STATIC = "StaticEmbedding", "SparseStaticEmbedding"
STATIC_KINDS = (STATIC, SPARSE_STATIC)
# Modules that are a transformer, and their task if their settings name none.
TRANSFORMERS: Mapping[str, str] = {
    "Transformer": "feature-extraction",
    "MLMTransformer": "fill-mask",
    "CLIPModel": "feature-extraction",
}
# The older name of a transformer that is a dual encoder of texts and images.
_DUAL = "CLIPModel"
# Package whose classes sentence-transformers loads without trust_remote_code.
_PACKAGES = ("sentence_transformers", "pylate", "onnxtool")
ENCODER_NAME = "config_sentence_transformers.json"
# The class of encoders that return a vector per token.
MULTI_VECTOR = "MultiVectorEncoder"
PYLATE = "ColBERT"  # the class of PyLate's
_STANFORD = "HF_ColBERT"  # the architecture of Stanford's
# Inputs and outputs of modules: token vectors, and the text vector.
TOKENS, VECTOR = "token_embeddings", "sentence_embedding"
# The settings of the transformer module. Versions before 2 called the file after the architecture.
TRANSFORMER_NAMES = tuple(
    f"sentence_{architecture}_config.json"
    for architecture in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@short_repr
@dataclass(frozen=True)
class StoredModule:
    """One module of a sentence-transformers checkpoint, as described by its files.

    Attributes:
        kind: the class without its package, which has moved several times, e.g. `Pooling`; classes of other libraries
            keep their package, e.g. `custom_st.Transformer`.
        folder: its folder, relative to the checkpoint; empty for the checkpoint's own folder.
        settings: its config.json; empty if it has none.
        files: the checkpoint, for its weights.
    """

    kind: str
    folder: str
    settings: Mapping[str, Json]
    files: CheckpointFiles = field(compare=False, repr=False)

    def file(self, name: str) -> str:
        """Return the path of one of its files, relative to the checkpoint."""
        return f"{self.folder}/{name}" if self.folder else name


@short_repr
@dataclass(frozen=True)
class SentenceModules:
    """The sentence-transformers modules of a checkpoint; empty for checkpoints of other libraries.

    Attributes:
        modules: in their order.
        encoder: the settings of the class that loads the checkpoint: config_sentence_transformers.json.
        transformer: the settings of the transformer module.
        transformer_file: the file that holds them; empty if there is none.
        query: the module that encodes queries without a model, by token weights; None if queries are encoded like other
            texts. If set, `modules` applies to documents.
        prefixes: prefixes of texts that count as a single token if the vocabulary contains them, however the tokenizer
            would split them.
        routes: the route names of a Router among `modules`; empty if there is none.
        route_of: the route of a Router that reads texts of a task, `query`, `document` or empty for none, without
            routes that have no model. It does not depend on the chosen route.
    """

    modules: tuple[StoredModule, ...] = ()
    encoder: Mapping[str, Json] = field(default_factory=dict)
    transformer: Mapping[str, Json] = field(default_factory=dict)
    transformer_file: str = ""
    query: StoredModule | None = None
    prefixes: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    route_of: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, files: CheckpointFiles, route: str | None = None) -> SentenceModules:
        """Read them.

        Args:
            files: the checkpoint.
            route: the chosen route of a Router; None for a checkpoint without a Router, or one that looks up queries.

        Raises:
            OnnxtoolError: modules.json is not a list of modules, a module has no type or a path outside the checkpoint,
                a settings file is not a JSON object, or there is no such route.
        """
        modules, query, routes, route_of = _read_routes(files, route)
        folder = _transformer_folder(modules)
        # As in 6.2, the first file with content decides. An exported model has them at the top level.
        names = [*(f"{folder}/{name}" for name in TRANSFORMER_NAMES if folder), *TRANSFORMER_NAMES]
        transformer_file = next((name for name in names if files.read_object(name)), "")
        settings = files.read_object(transformer_file) if transformer_file else {}
        encoder = files.read_object(ENCODER_NAME)
        return cls(modules, encoder, settings, transformer_file, query, routes=routes, route_of=route_of)

    @property
    def encoder_class(self) -> str:
        """The class that loads the checkpoint, e.g. `SparseEncoder`; empty if no file states it."""
        stated = self.encoder.get("model_type")
        return stated if isinstance(stated, str) else ""

    @property
    def is_late_interaction(self) -> bool:
        """Whether the checkpoint returns a vector per token."""
        return self.encoder_class == MULTI_VECTOR

    def describes_late_interaction(self, files: CheckpointFiles) -> bool:
        """Whether any library wrote the checkpoint of a late-interaction encoder.

        Raises:
            OnnxtoolError: a file is malformed.
        """
        if not self.modules:
            return _STANFORD in as_list(files.read_object("config.json").get("architectures"))
        if self.encoder_class not in ("", "SentenceTransformer"):
            return self.encoder_class in (MULTI_VECTOR, PYLATE)
        # PyLate does not always name its class.
        types = [as_object(entry).get("type") for entry in as_list(files.read_json(MODULES_NAME))]
        return "query_prefix" in self.encoder or any(str(name).startswith("pylate.") for name in types)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the modules, in their order."""
        return tuple(module.kind for module in self.modules)

    @property
    def is_static(self) -> bool:
        """Whether the checkpoint begins with a table instead of a transformer."""
        return not set(STATIC_KINDS).isdisjoint(self.kinds[:1])

    def first_of(self, kind: str) -> StoredModule | None:
        """Return the first module of a kind; None if there is none."""
        return next((module for module in self.modules if module.kind == kind), None)

    def takes_messages(self, task: str) -> bool:
        """Whether a chat template reads texts of a task: stated, or possible for a reranker without modules."""
        if task not in _TASKS_OF_MESSAGES:
            return False
        return "message" in as_object(self.transformer.get("modality_config")) if self.modules else task == RANKING

    @property
    def encodes_pictures(self) -> bool:
        """Whether the transformer is a dual encoder, with one vector per text or image."""
        text = as_object(as_object(self.transformer.get("modality_config")).get("text"))
        return _DUAL in self.kinds or text.get("method") == "get_text_features"

    @property
    def _call_arguments(self) -> Mapping[str, Json]:
        """The arguments of the tokenizer's calls."""
        return as_object(as_object(self.transformer.get("processing_kwargs")).get("text"))

    @property
    def max_sequence_length(self) -> int | None:
        """sentence-transformers' truncation limit in tokens; None if no file states it.

        `max_length` in the tokenizer's call arguments precedes the tokenizer's own limit, as in version 6.2.
        """
        return positive(self._call_arguments.get("max_length")) or positive(self.transformer.get("max_seq_length"))

    def stated_length(self, task: str) -> int | None:
        """Return sentence-transformers' task-specific token limit, which overrides all others; None if not set.

        Args:
            task: `query` or `document`.
        """
        expansion = as_object(self.transformer.get("query_expansion")) if task == "query" else {}
        stated, least = positive(self.transformer.get(f"{task}_length")), positive(expansion.get("length"))
        if expansion.get("strategy") == "fixed":
            return least
        if positive(self._call_arguments.get("max_length")) is not None or stated is None:
            return None
        return stated if least is None else max(stated, least)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds special tokens around a text."""
        return self._call_arguments.get("add_special_tokens") is not False and not self.is_static

    @property
    def lower_cases(self) -> bool:
        """Whether sentence-transformers lower-cases texts before tokenization."""
        return self.transformer.get("do_lower_case") is True


def as_object(value: Json) -> Mapping[str, Json]:
    """Return a JSON object, or an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def as_list(value: Json) -> list[Json]:
    """Return a JSON list, or an empty one for any other value."""
    return value if isinstance(value, list) else []


def is_number(value: Json) -> TypeGuard[float]:
    """Whether a value is a finite number that fits a float; JSON integers may have any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_index(value: Json) -> TypeGuard[int]:
    """Whether a value is a number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def positive(value: Json) -> int | None:
    """Return a positive number; None for any other value."""
    return value if is_index(value) and value > 0 else None


def transformer_folder(files: CheckpointFiles, route: str | None = None) -> str:
    """Return the checkpoint's folder with its transformer, or the transformer of a route; empty for the top level."""
    return _transformer_folder(_read_routes(files, route)[0])


def _transformer_folder(modules: tuple[StoredModule, ...]) -> str:
    return modules[0].folder if modules and modules[0].kind in (*TRANSFORMERS, *STATIC_KINDS) else ""


def _read_routes(
    files: CheckpointFiles, chosen: str | None
) -> tuple[tuple[StoredModule, ...], StoredModule | None, tuple[str, ...], Mapping[str, str]]:
    """Read the modules of the chosen route, the module that encodes queries without a model, and all other routes.

    The last result maps tasks to routes.

    A Router that looks up queries has one route with a model, for documents. For other Routers one route has to be
    chosen; until then they stay a Router, which is not supported.
    """
    modules = _read_modules(files)
    place = next((index for index, module in enumerate(modules) if module.kind in _ROUTERS), None)
    if place is None:
        if chosen is not None:
            raise files.refuse(f"the route {chosen!r} was chosen, and {files.label} has no routes", "leave it out")
        return modules, None, (), {}
    before, router, after = modules[:place], modules[place], modules[place + 1 :]
    name = router.file(ROUTER_NAME)
    settings: Mapping[str, Json] = files.read_object(name)
    if not settings and router.folder:  # as Asym wrote it
        settings, name = router.settings, router.file("config.json")
    types = as_object(settings.get("types"))
    routes = {
        route: tuple(
            _stored(files, types.get(str(folder)), router.file(str(folder)) if folder else router.folder, name)
            for folder in as_list(folders)
        )
        for route, folders in as_object(settings.get("structure")).items()
    }
    if chosen is None or chosen == "document":
        document = _documents_of_lookup(routes, as_object(settings.get("parameters")))
        if document and not before:
            return (*document, *after), routes["query"][0], (), {}
    looked_up = {route for route, members in routes.items() if [module.kind for module in members] == [SPARSE_STATIC]}
    stated_routes = {task: _route_of(task, tuple(routes), as_object(settings.get("parameters"))) for task in _TASKS}
    route_of = {task: route for task, route in stated_routes.items() if route in routes and route not in looked_up}
    if chosen is None:
        return modules, None, tuple(routes), route_of
    if chosen not in routes or chosen in looked_up:
        available = ", ".join(route for route in routes if route not in looked_up)
        problem = "has no model: its texts are looked up" if chosen in looked_up else "is none of the checkpoint's"
        raise files.refuse(f"the route {chosen!r} of {files.label} {problem}", f"choose one of {available or 'none'}")
    return (*before, *routes[chosen], *after), None, (), route_of


def _route_of(task: str, routes: Sequence[str], parameters: Mapping[str, Json]) -> Json:
    """Return the route for texts of a task, like Router of sentence-transformers 6.2; None if there is none."""
    mappings = as_object(parameters.get("route_mappings"))
    stated = {"".join(key.split()).replace('"', "'"): route for key, route in mappings.items()}
    name = f"'{task}'" if task else "None"
    for key in (f"({name},'text')", f"({name},None)", "(None,'text')", "(None,None)"):
        if key in stated:
            return stated[key]
    direct = next((route for route in (task, "text") if route in routes), None)
    if direct is not None or task:
        return direct
    default = parameters.get("default_route")
    return routes[0] if default is None and routes and parameters.get("allow_empty_key") is not False else default


def _documents_of_lookup(
    routes: Mapping[str, tuple[StoredModule, ...]], parameters: Mapping[str, Json]
) -> tuple[StoredModule, ...]:
    """Return the document modules of a Router whose query route is only a lookup; empty for any other Router."""
    document = routes.get("document", ())
    is_lookup = [module.kind for module in routes.get("query", ())] == [SPARSE_STATIC]
    is_usual = parameters.get("default_route") == "document" and not parameters.get("route_mappings")
    is_model = bool(document) and document[0].kind in TRANSFORMERS
    return document if routes.keys() == {"query", "document"} and is_lookup and is_usual and is_model else ()


def _read_modules(files: CheckpointFiles) -> tuple[StoredModule, ...]:
    content = files.read_json(MODULES_NAME)
    if content is None:
        return ()
    if not isinstance(content, list):
        raise files.malformed(MODULES_NAME, "not a list of modules")
    entries = [entry if isinstance(entry, dict) else {} for entry in content]
    return tuple(_stored(files, entry.get("type"), entry.get("path"), MODULES_NAME) for entry in entries)


def _stored(files: CheckpointFiles, kind: Json, folder: Json, name: str) -> StoredModule:
    if not isinstance(kind, str) or not isinstance(folder, str) or not stays_inside(folder):
        entry = {"type": kind, "path": folder}
        raise files.malformed(name, f"a module without a type, or with a path outside the folder: {entry}")
    folder = "" if folder == "." else folder  # as model2vec writes the checkpoint's own
    package, _, class_name = kind.rpartition(".")
    is_known = package.partition(".")[0] in _PACKAGES
    # The transformer's folder is often the checkpoint's, where config.json belongs to the model.
    settings = files.read_object(f"{folder}/config.json") if folder else {}
    return StoredModule(class_name if is_known else kind, folder, settings, files)


def stays_inside(path: str) -> bool:
    """Whether a path named in a checkpoint, POSIX or hostile, stays inside the checkpoint's folder."""
    pure = PurePosixPath(path)
    hostile = "\\" in path or "\0" in path or PureWindowsPath(path).drive
    return not (pure.is_absolute() or ".." in pure.parts or hostile)
