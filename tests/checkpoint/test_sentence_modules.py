"""What sentence-transformers writes is read in every form of its versions, with the routes of a Router."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.base.modules import Router

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.module_settings import require_known_settings
from onnxtool.checkpoint.sentence_modules import SentenceModules, stays_inside, transformer_folder
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import CheckpointError, InputError
from onnxtool.export.sidecar_files import write_sidecar_files
from onnxtool.export.source import Source
from onnxtool.reports import Json
from tests.infer.tiny_models import write_checkpoint


def described(folder: Path, **files: Json) -> SentenceModules:
    """Write `files`, called by their names without suffix, and read what they describe."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return CheckpointFolder(folder).sentence_modules


def test_modules_are_known_by_their_class(tmp_path: Path) -> None:
    """Packages moved between versions."""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    transformer, pooling = described(
        tmp_path,
        modules=[
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling", "path": "1_Pooling"},
        ],
    ).modules
    assert (transformer.kind, transformer.folder, transformer.file("x")) == ("Transformer", "", "x")
    assert (pooling.kind, pooling.settings, pooling.file("x")) == ("Pooling", {"pooling_mode": "cls"}, "1_Pooling/x")


def test_a_checkpoint_of_another_library_has_no_modules(tmp_path: Path) -> None:
    """And says nothing of its encoder or the length of its texts; since version 5, the encoder names its class."""
    modules = described(tmp_path)
    assert modules == SentenceModules()
    assert modules.encoder_class == ""
    modules = described(tmp_path, config_sentence_transformers={"model_type": "SparseEncoder"})
    assert modules.encoder_class == "SparseEncoder"


@pytest.mark.parametrize(
    "content",
    [{}, [1], [{"type": "Pooling"}], [{"type": "a.Pooling", "path": "../x"}], [{"type": 3, "path": ""}],
     [{"type": "P", "path": "/x"}]],
)  # fmt: skip
def test_malformed_modules_are_refused(tmp_path: Path, content: Json) -> None:
    """The error names the file; a path in it must stay below the folder."""
    with pytest.raises(InputError, match=r"modules\.json is malformed"):
        described(tmp_path, modules=content)


def test_the_first_file_that_says_anything_of_the_transformer_decides(tmp_path: Path) -> None:
    """As in sentence-transformers 6.2: an empty one is passed over, and of the others the first counts alone."""
    old: Json = {"max_seq_length": 75, "do_lower_case": True}
    assert described(tmp_path).max_sequence_length is None
    read = described(tmp_path, sentence_bert_config={}, sentence_xlnet_config=old)
    assert (read.max_sequence_length, read.transformer_file) == (75, "sentence_xlnet_config.json")
    assert read.lower_cases
    read = described(tmp_path, sentence_bert_config={"do_lower_case": False}, sentence_xlnet_config=old)
    assert read.max_sequence_length is None
    assert not read.lower_cases


def test_texts_are_lower_cased_by_a_file_of_an_old_name(tmp_path: Path) -> None:
    """Where sentence-transformers reads it, too."""
    folder = write_checkpoint(tmp_path)
    texts = ["The CAT"]
    assert TextTokenizer(CheckpointFolder(folder)).encode(texts)[0].ids == (2, 1, 1, 3)
    (folder / "sentence_roberta_config.json").write_text('{"do_lower_case": true}')
    assert TextTokenizer(CheckpointFolder(folder)).encode(texts)[0].ids == (2, 10, 6, 3)


def test_each_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it, and however often."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    folder = CheckpointFolder(tmp_path)
    assert folder.read_object("config.json") == {"model_type": "bert"}
    monkeypatch.setattr(Path, "read_bytes", None)
    assert folder.read_object("config.json") == {"model_type": "bert"}


def test_paths_that_leave_the_checkpoint_are_not_taken() -> None:
    """In the notation of any system; its own folder is."""
    assert all(map(stays_inside, ("", "1_Pooling", "a/b", "a..b")))
    assert not any(map(stays_inside, ("..", "a/../..", "/etc", "a\\b", "C:x", "a\0b")))


MODELS = "sentence_transformers.models."
TYPES = {
    "query_0_Transformer": MODELS + "Transformer",
    "query_1_Pooling": MODELS + "Pooling",
    "document_0_Transformer": MODELS + "Transformer",
    "document_1_Pooling": MODELS + "Pooling",
    "table_0_SparseStaticEmbedding": MODELS + "SparseStaticEmbedding",
}
STRUCTURE: dict[str, Any] = {
    "query": ["query_0_Transformer", "query_1_Pooling"],
    "document": ["document_0_Transformer", "document_1_Pooling"],
    "table": ["table_0_SparseStaticEmbedding"],
}


def routed(folder: Path, *, before: tuple[str, ...] = (), name: str = "router_config.json", **change: Any) -> Path:
    """Write a checkpoint with a Router, behind other modules or alone, and a Normalize behind it."""
    router = {"types": TYPES, "structure": STRUCTURE, "parameters": {}, **change}
    place = f"{len(before)}_Router" if before else ""
    listed = [{"path": "" if kind == "Transformer" else f"1_{kind}", "type": MODELS + kind} for kind in before]
    listed += [{"path": place, "type": MODELS + ("Asym" if name == "config.json" else "Router")}]
    listed += [{"path": "9_Normalize", "type": MODELS + "Normalize"}]
    (folder / "modules.json").write_text(json.dumps(listed))
    for kind in TYPES:
        (folder / place / kind).mkdir(parents=True)
        (folder / place / kind / "config.json").write_text(json.dumps({"in": kind}))
    (folder / place / name).write_text(json.dumps(router))
    return folder


def read(folder: Path, route: str | None = None) -> SentenceModules:
    """Read the modules of a route."""
    return SentenceModules.of(CheckpointFolder(folder), route)


@pytest.mark.parametrize("route", ["query", "document"])
def test_the_modules_of_a_route_are_those_of_the_checkpoint(tmp_path: Path, route: str) -> None:
    """With what is computed behind the Router, and the transformer in its own folder."""
    modules = read(routed(tmp_path), route)
    assert modules.kinds == ("Transformer", "Pooling", "Normalize")
    assert [module.folder for module in modules.modules[:2]] == STRUCTURE[route]
    assert modules.routes == ()
    assert transformer_folder(CheckpointFolder(tmp_path), route) == f"{route}_0_Transformer"


def test_a_router_may_stand_behind_a_model(tmp_path: Path) -> None:
    """As Asym, which wrote its routes to config.json."""
    folder = routed(tmp_path, before=("Transformer", "Pooling"), name="config.json")
    modules = read(folder, "query")
    assert modules.kinds == ("Transformer", "Pooling", "Transformer", "Pooling", "Normalize")
    assert modules.modules[3].settings == {"in": "query_1_Pooling"}


def test_a_route_that_was_not_chosen_is_asked_for(tmp_path: Path) -> None:
    """By the names of all."""
    files = CheckpointFolder(routed(tmp_path))
    assert files.sentence_modules.routes == ("query", "document", "table")
    with pytest.raises(InputError, match=r"has the routes query, document, table \(Router\)") as caught:
        require_known_settings(files.sentence_modules, files)
    assert caught.value.hint.startswith("pass --route table")
    with pytest.raises(CheckpointError, match="has the routes query, document, table"):
        Source.find(str(tmp_path)).require_transformer()


@pytest.mark.parametrize(
    ("route", "change", "reason"),
    [
        ("passage", {}, "the route 'passage' of .* is none of the checkpoint's"),
        ("table", {}, "has no model: its texts are looked up"),
        ("query", {"structure": None}, "is none of the checkpoint's"),
        ("query", {"structure": ["query"]}, "is none of the checkpoint's"),
        ("query", {"structure": {"query": ["../x"]}, "types": {"../x": MODELS + "Pooling"}}, "outside the folder"),
        ("query", {"structure": {"query": ["/x"]}, "types": {"/x": MODELS + "Pooling"}}, "outside the folder"),
        ("query", {"structure": {"query": ["x"]}, "types": {}}, "a module without a type"),
        ("query", {"structure": {"query": [{}]}}, "a module without a type"),
        ("query", {"types": 3}, "a module without a type"),
    ],
)
def test_a_route_that_cannot_be_read_is_refused(
    tmp_path: Path, route: str, change: dict[str, Any], reason: str
) -> None:
    """Whatever router_config.json says."""
    with pytest.raises(InputError, match=reason):
        read(routed(tmp_path, **change), route)


BOTH = {"query": "query", "document": "document"}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"default_route": None, "allow_empty_key": False}, BOTH),
        ({"default_route": "table"}, BOTH),
        ({"default_route": 3}, BOTH),
        ({"route_mappings": {'( "document",None )': "query"}}, {"query": "query", "document": "query", "": "query"}),
        ({"route_mappings": {"('query', None)": "table"}}, {"document": "document", "": "query"}),
        ({"route_mappings": 3}, {**BOTH, "": "query"}),
    ],
)
def test_the_route_of_a_task_is_that_of_sentence_transformers(
    tmp_path: Path, parameters: dict[str, Any], expected: dict[str, str]
) -> None:
    """Where its own class is not asked: routes without a model are left out, and what makes no sense."""
    modules = read(routed(tmp_path, parameters=parameters))
    assert modules.route_of == expected
    assert read(tmp_path, "query").route_of == expected


@pytest.mark.parametrize("default", [None, "document"])
@pytest.mark.parametrize("names", [("query", "document"), ("document", "text"), ("a", "b"), ("text", "query")])
@pytest.mark.parametrize(
    "mappings",
    [
        {},
        {("query", "text"): 0, (None, None): 1},
        {("document", None): 0, (None, "text"): 1},
        {(None, "image"): 0, ("query", None): 1},
    ],
)
def test_tasks_are_resolved_as_by_router_itself(
    tmp_path: Path, default: str | None, names: tuple[str, str], mappings: dict[Any, int]
) -> None:
    """Whatever its routes are called; what it refuses has no route."""
    routes = {name: [torch.nn.Identity()] for name in names}
    stated = {key: names[place] for key, place in mappings.items()}
    router = Router(routes, default_route=default if default in names else None, route_mappings=stated)
    listed: dict[str, Any] = {"structure": {name: [f"{name}_0_Transformer"] for name in names}}
    listed["types"] = {f"{name}_0_Transformer": MODELS + "Transformer" for name in names}
    parameters = router.get_config_dict()
    parameters["route_mappings"] = {str(key): route for key, route in parameters["route_mappings"].items()}
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": MODELS + "Router"}]))
    (tmp_path / "router_config.json").write_text(json.dumps({**listed, "parameters": parameters}))
    expected = {}
    for task in ("query", "document", ""):
        with suppress(ValueError):
            expected[task] = router._resolve_route(task=task or None, modality="text")
    assert read(tmp_path).route_of == expected


def test_a_checkpoint_without_routes_has_none_to_choose(tmp_path: Path) -> None:
    """The option would do nothing."""
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": MODELS + "Transformer"}]))
    with pytest.raises(InputError, match="the route 'query' was chosen, and .* has no routes"):
        read(tmp_path, "query")


def test_beside_the_file_of_a_route_lie_its_modules_alone(tmp_path: Path) -> None:
    """So that all who read them read that route; the checkpoint's own list is not written over."""
    checkpoint, written = tmp_path / "checkpoint", tmp_path / "out"
    checkpoint.mkdir()
    routed(checkpoint)
    (checkpoint / "query_0_Transformer" / "tokenizer.json").write_text("{}")
    source = Source.find(str(checkpoint), route="query")
    write_sidecar_files(source, None, written, tmp_path / "elsewhere")
    assert (written / "tokenizer.json").is_file()
    assert not (written / "router_config.json").exists()
    modules = CheckpointFolder(written).sentence_modules
    assert modules.kinds == ("Transformer", "Pooling", "Normalize")
    assert [module.folder for module in modules.modules] == ["", "query_1_Pooling", "9_Normalize"]
    assert modules.modules[1].settings == {"in": "query_1_Pooling"}
    with pytest.raises(CheckpointError, match="modules.json would be written into the checkpoint"):
        write_sidecar_files(source, None, written, checkpoint)
