"""The folder of a checkpoint is found beside a model, by the name that people call it, or on the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from onnxtool.checkpoint.folder import (
    SMALL_FILES,
    CheckpointFolder,
    Snapshot,
    find_checkpoint_folder,
    hub_id,
    is_path,
    path_parts,
    require_cached_commit,
)
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import CheckpointError, InputError, ModelFileError
from onnxtool.export.source import Source
from onnxtool.model_file import ModelFile
from tests.infer.tiny_models import VOCABULARY, TinyModel, table, write_checkpoint


def _model(path: Path, files: str | None = None) -> ModelFile:
    metadata = {} if files is None else {"onnxtool.files": files}
    return ModelFile.open(TinyModel(table(4, 2), "last_hidden_state", metadata=metadata).write(path))


@pytest.mark.parametrize(
    ("model", "stamp", "folders"),
    [
        ("model.onnx", "stamped", ("stamped", "model")),
        ("renamed.onnx", "old-name", ("renamed",)),  # with its folder
        ("models/bert.onnx", None, ("models/bert",)),
        ("models/bert-optimized.onnx", None, ("models/bert",)),
        ("models/bert-int8.onnx", None, ("models/bert",)),
        ("models/bert-optimized.onnx", None, ("models/bert-optimized", "models/bert")),
        ("bert/model.onnx", None, ("bert",)),
        ("bert/onnx/model.onnx", None, ("bert",)),
    ],
)
def test_the_first_folder_that_exists_is_taken(
    tmp_path: Path, model: str, stamp: str | None, folders: tuple[str, ...]
) -> None:
    """The one in the metadata, the model's name, without `-optimized` too, and the two layouts of the hub."""
    first, *_ = (write_checkpoint(tmp_path / folder) for folder in folders)
    assert find_checkpoint_folder(_model(tmp_path / model, stamp)).path == first


def test_of_a_link_the_places_beside_its_target_are_tried_last(tmp_path: Path) -> None:
    """A store of models has their files beside them, and links to them anywhere."""
    beside = write_checkpoint(tmp_path / "store" / "bert")
    target = _model(tmp_path / "store" / "bert.onnx").path
    link = tmp_path / "current.onnx"
    link.symlink_to(target)
    assert find_checkpoint_folder(ModelFile.open(link)).path == beside
    own = write_checkpoint(tmp_path / "current")
    assert find_checkpoint_folder(ModelFile.open(link)).path == own


def test_where_there_is_none_the_error_lists_the_places(tmp_path: Path) -> None:
    """A folder without tokenizer.json is no checkpoint."""
    (tmp_path / "bert").mkdir()
    with pytest.raises(InputError, match=r"no tokenizer\.json") as caught:
        find_checkpoint_folder(_model(tmp_path / "bert-optimized.onnx", "stamped"))
    for name in ("stamped", "bert-optimized", "bert"):
        assert str(tmp_path / name) in caught.value.message
    assert "--model_name" in caught.value.hint


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../up", "/etc", "a\\b", "C:x", "a\0b"])
def test_metadata_that_names_another_place_is_refused(tmp_path: Path, name: str) -> None:
    """The metadata is untrusted; a plain name is all that it may give."""
    with pytest.raises(ModelFileError, match="not the name of a folder beside it"):
        find_checkpoint_folder(_model(tmp_path / "bert.onnx", name))


def test_model_name_decides_where_it_is_given(tmp_path: Path) -> None:
    """It wins over folders next to the model, which are not read either if it has no tokenizer."""
    write_checkpoint(tmp_path / "bert")
    wanted = write_checkpoint(tmp_path / "elsewhere")
    assert find_checkpoint_folder(_model(tmp_path / "bert.onnx"), str(wanted)).path == wanted
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        find_checkpoint_folder(_model(tmp_path / "bert.onnx"), str(tmp_path / "empty"))


def _modules(folder: Path, *modules: tuple[str, str], router: dict[str, Any] | None = None) -> None:
    """Write modules.json with the kinds and the folders of modules, and what a Router chooses between."""
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    if router is not None:
        types = {name: f"sentence_transformers.models.{name[-11:]}" for names in router.values() for name in names}
        (folder / "router_config.json").write_text(json.dumps({"types": types, "structure": router, "parameters": {}}))


@pytest.mark.parametrize("inside", ["0_Transformer", "transformer/text"])
def test_the_tokenizer_may_lie_in_the_folder_of_a_module(tmp_path: Path, inside: str) -> None:
    """As for an export: the transformer's files come from its own folder, all others from the top."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder / inside, config={"model_type": "of the module"})
    (folder / "config.json").write_text('{"model_type": "of the top"}')
    _modules(folder, ("Transformer", inside))
    found = find_checkpoint_folder(_model(tmp_path / "bert.onnx"), str(folder))
    assert found.path == folder
    assert found.read_object("config.json")["model_type"] == "of the module"
    assert TextTokenizer(found).vocabulary_size == len(VOCABULARY)
    assert Source.find(str(folder)).locate("tokenizer.json") == found.locate("tokenizer.json")


@pytest.mark.parametrize("route", ["query", "document"])
def test_of_a_router_the_folder_of_the_models_route_is_read(tmp_path: Path, route: str) -> None:
    """Which one it is, the file says; one that does not say it is refused by the names of all."""
    folder = tmp_path / "checkpoint"
    routes = {name: [f"{name}_0_Transformer"] for name in ("query", "document")}
    for name, (inside,) in routes.items():
        write_checkpoint(folder / inside, config={"model_type": name})
    _modules(folder, ("Router", ""), router=routes)
    written = TinyModel(table(4, 2), "last_hidden_state", metadata={"onnxtool.route": route}).write(tmp_path / "r.onnx")
    found = find_checkpoint_folder(ModelFile.open(written), str(folder))
    assert found.read_object("config.json")["model_type"] == route
    assert found.sentence_modules.modules[0].folder == f"{route}_0_Transformer"
    with pytest.raises(InputError, match="has the routes query, document .* does not name its route"):
        find_checkpoint_folder(_model(tmp_path / "bert.onnx"), str(folder))
    (folder / f"{route}_0_Transformer" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=rf"{route}_0_Transformer has no tokenizer\.json"):
        find_checkpoint_folder(ModelFile.open(written), str(folder))


def test_a_route_alone_needs_no_router(tmp_path: Path) -> None:
    """Beside the file of a route lie the modules of that route, and any folder of one model will do."""
    metadata = {"onnxtool.route": "query"}
    written = TinyModel(table(4, 2), "last_hidden_state", metadata=metadata).write(tmp_path / "bert.onnx")
    beside = write_checkpoint(tmp_path / "bert")
    assert find_checkpoint_folder(ModelFile.open(written)).path == beside
    assert find_checkpoint_folder(ModelFile.open(written), str(beside)).path == beside


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *((name, True) for name in ("tokenizer.json", "0_Transformer/tokenizer.json", "0_Transformer/config.json")),
        *((name, True) for name in ("router_config.json", "query_0_Transformer/tokenizer_config.json")),
        *((name, True) for name in ("1_Router/query_0_MLMTransformer/tokenizer.json", "1_Router/router_config.json")),
        *(
            (name, True)
            for name in ("query_0_SparseStaticEmbedding/model.safetensors", "document_1_Pooling/config.json")
        ),
        *((name, False) for name in ("model.safetensors", "0_Transformer/model.safetensors", "onnx/model.onnx")),
        *((name, False) for name in ("0_StaticEmbedding/model.safetensors", "runs_1/trainer_state.json")),
    ],
)
def test_of_an_id_the_files_of_modules_are_fetched_too(name: str, wanted: bool) -> None:
    """By the hub's own filter of names; no weights of a transformer."""
    assert list(filter_repo_objects([name], allow_patterns=SMALL_FILES)) == [name] * wanted


def test_a_hub_id_fetches_the_small_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are never asked for, but those of the small layers behind a pooling."""
    wanted = write_checkpoint(tmp_path / "cache")
    asked: list[str] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: tuple[str, ...]) -> str:
        assert revision is None
        asked.extend((name, *allow_patterns))
        return str(wanted)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_checkpoint_folder(_model(tmp_path / "bert.onnx"), "owner/name").path == wanted
    assert asked[0] == "owner/name"
    weights = [pattern for pattern in asked[1:] if not pattern.endswith((".json", ".jinja", ".metadata"))]
    assert weights == [f"*_{kind}/model.safetensors" for kind in ("Dense", "LayerNorm", "SparseStaticEmbedding")]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no network\nmore"), ValueError("no network")])
def test_a_hub_that_cannot_be_reached_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The message says that there is no such folder either; the hint says how to do without a network."""

    def fail(*_args: object, **_options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        InputError, match=r"'owner/name' is neither a folder here nor .*: no network(\nhint|$)"
    ) as caught:
        find_checkpoint_folder(_model(tmp_path / "bert.onnx"), "owner/name")
    assert "without a network" in caught.value.hint


def test_a_file_that_is_not_there_reads_as_empty(tmp_path: Path) -> None:
    """Only tokenizer.json is required."""
    folder = CheckpointFolder(tmp_path)
    assert folder.read_object("config.json") == {}
    assert folder.sentence_modules.modules == ()


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_malformed_file_is_named(tmp_path: Path, content: str) -> None:
    """The path and what is wrong are in the message."""
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"config\.json is malformed"):
        CheckpointFolder(tmp_path).read_object("config.json")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("naver/splade-v3", ("naver/splade-v3", None)),
        ("bert-base-uncased", ("bert-base-uncased", None)),
        ("https://huggingface.co/naver/splade-v3", ("naver/splade-v3", None)),
        ("https://huggingface.co/naver/splade-v3/", ("naver/splade-v3", None)),
        ("http://www.huggingface.co/naver/splade-v3?library=transformers", ("naver/splade-v3", None)),
        ("huggingface.co/naver/splade-v3#use", ("naver/splade-v3", None)),
        ("hf.co/naver/splade-v3/tree/refs", ("naver/splade-v3", "refs")),
        ("https://huggingface.co/naver/splade-v3/blob/main/config.json", ("naver/splade-v3", "main")),
    ],
)
def test_the_address_of_a_page_is_an_id(name: str, expected: tuple[str, str | None]) -> None:
    """With the revision that the page shows."""
    assert hub_id(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/naver",
        "https://huggingface.co/datasets/mteb/nq",
        "https://huggingface.co/a/b/discussions/3",
        "https://example.org/naver/splade-v3",
        "s3://bucket/model",
    ],
)
def test_an_address_without_a_model_is_refused(name: str) -> None:
    """By what it is, and not as a hub that cannot be reached."""
    with pytest.raises(CheckpointError, match=r"is not a model's address|is not the page of a model"):
        hub_id(name)


def test_a_page_of_another_revision_is_refused() -> None:
    """Which of the two is meant is not for us to say."""
    page = "https://huggingface.co/naver/splade-v3/tree/v1"
    assert hub_id(page, "v1") == ("naver/splade-v3", "v1")
    with pytest.raises(CheckpointError, match="names the revision v1, and --revision is main"):
        hub_id(page, "main")


@pytest.mark.parametrize("name", ["/a", "./a", "../a", "~/a", "a/b/c", "a/b/", r"C:\models\x", "C:/models/x", r"a\b"])
def test_a_path_is_known_as_one(name: str) -> None:
    """So that a wrong one is no id that the hub does not have."""
    assert is_path(name)
    assert not is_path("naver/splade-v3")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
@pytest.mark.parametrize("revision", [None, "pr/1"])
def test_a_pipe_in_the_cache_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """The library would open it, and no writer comes."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    path = tmp_path / "models--org--name" / "refs" / (revision or "main")
    path.parent.mkdir(parents=True)
    require_cached_commit("org/name", revision)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        require_cached_commit("org/name", revision)
    path.unlink()
    path.write_text("0" * 40, "utf-8")
    require_cached_commit("org/name", revision)


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("/hub/models--naver--splade-v3/snapshots/ab12", Snapshot("naver/splade-v3", "ab12")),
        ("/hub/models--bert-base-uncased/snapshots/ab12", Snapshot("bert-base-uncased", "ab12")),
        ("/hub/datasets--mteb--nq/snapshots/ab12", None),
        ("/hub/models--a--b--c/snapshots/ab12", None),
        ("/hub/models--/snapshots/ab12", None),
        ("/hub/models/snapshots/ab12", None),
        ("/hub/models--naver--splade-v3/refs/main", None),
        ("/hub/models--naver--splade-v3/snapshots/ab12/onnx", None),
        ("/", None),
    ],
)
def test_a_snapshot_is_known_by_its_place_in_the_cache(folder: str, found: Snapshot | None) -> None:
    """The id and the commit stand in the path."""
    assert Snapshot.of(Path(folder)) == found


def test_the_name_of_a_checkpoint_is_the_last_part_of_its_id_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from inside of the folder, and of a snapshot that of the id."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "ab12"
    snapshot.mkdir(parents=True)
    assert path_parts("org/name") == path_parts(str(snapshot)) == ("org", "name")
    assert path_parts(str(tmp_path))[-1] == tmp_path.name
    monkeypatch.chdir(snapshot)
    assert path_parts(".")[-1] == "name"
