"""People call a checkpoint by its id, by the address of its page, or by a path of their system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from onnxtool.checkpoint.folder import Snapshot, hub_id, is_path, path_parts, require_cached_commit
from onnxtool.errors import CheckpointError


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
    with pytest.raises(CheckpointError, match=r"is no address of a model|is not the page of a model"):
        hub_id(name)


def test_a_page_of_another_revision_is_refused() -> None:
    """Which of the two is meant is not for us to say."""
    page = "https://huggingface.co/naver/splade-v3/tree/v1"
    assert hub_id(page, "v1") == ("naver/splade-v3", "v1")
    with pytest.raises(CheckpointError, match="is of the revision v1, and --revision is main"):
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
