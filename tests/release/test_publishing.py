"""A release is uploaded as a whole, against a stand-in of the hub; what is refused is one error without the token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from onnxtool.errors import InputError, PublishingError
from onnxtool.release.card import CARD_NAME, card_text
from onnxtool.release.facts import FACTS_NAME, ReleaseFacts, facts_text
from onnxtool.release.publishing import push
from onnxtool.release.signing import SIGNATURE_NAME
from tests.release.hub import TOKEN, Hub
from tests.release.samples import FACTS


def write_release(folder: Path, facts: ReleaseFacts = FACTS) -> Path:
    folder.mkdir(exist_ok=True)
    for file in facts.files:
        (folder / file.path).write_bytes(file.sha256.encode())
    (folder / FACTS_NAME).write_text(facts_text(facts), encoding="utf-8")
    (folder / CARD_NAME).write_text(card_text(facts), encoding="utf-8")
    (folder / SIGNATURE_NAME).write_text("{}")
    return folder


def test_a_release_becomes_one_commit(hub: Hub, tmp_path: Path) -> None:
    """Models as large files, all others as they are, in a repository that is made."""
    folder = write_release(tmp_path / "release")
    assert push(folder, "org/name", private=True) == f"{hub.url}/org/name/commit/{'1' * 40}"
    assert hub.private is True
    assert {path: content for path, content in hub.files.items() if path != ".gitattributes"} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert len(hub.stored) == 2
    assert hub.messages == ["Release all-MiniLM-L6-v2"]
    assert all(authorization in ("", f"Bearer {TOKEN}") for _, authorization in hub.requests)


def test_the_next_release_leaves_nothing_of_the_last(hub: Hub, tmp_path: Path) -> None:
    """What the hub and others put there stays; a signature of the last release would be wrong."""
    push(write_release(tmp_path / "first"), "org/name")
    hub.files["NOTES.md"] = b"of somebody else"
    second = write_release(tmp_path / "second", replace(FACTS, files=FACTS.files[::2], models=FACTS.models[:1]))
    (second / SIGNATURE_NAME).unlink()
    push(second, "https://huggingface.co/org/name")
    assert set(hub.files) == {".gitattributes", "NOTES.md", *(path.name for path in second.iterdir())}


def test_a_repository_that_is_public_gets_nothing_private(hub: Hub, tmp_path: Path) -> None:
    """It would be read by everybody before anybody notices."""
    hub.private = False
    with pytest.raises(PublishingError, match="org/name already exists and is public"):
        push(write_release(tmp_path / "release"), "org/name", private=True)
    assert set(hub.files) == {".gitattributes"}


@pytest.mark.parametrize(
    ("path", "status", "hint"),
    [
        ("repos/create", 401, "hf auth login"),
        ("repos/create", 400, "run it again"),
        ("preupload", 403, "may not write there"),
        ("lfs/objects", 404, "check the name"),
        ("commit", 409, "run it again"),
        ("storage", 403, "may not write there"),
    ],
)
def test_what_the_hub_refuses_is_one_error(hub: Hub, tmp_path: Path, path: str, status: int, hint: str) -> None:
    """With the way out, and without the token, even where the hub says it."""
    hub.private = False if path != "repos/create" else None
    hub.refusals = {path: status, **({"/api/models/org/name": status} if path == "repos/create" else {})}
    with pytest.raises(PublishingError, match=f"cannot upload to org/name: the hub answered {status}: ") as raised:
        push(write_release(tmp_path / "release"), "org/name")
    assert hint in raised.value.hint
    assert TOKEN not in f"{raised.value} {raised.value.__cause__}"
    assert set(hub.files) == {".gitattributes"}


def test_without_a_token_nothing_is_sent(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out is to log in."""
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PublishingError, match="there is no token") as raised:
        push(write_release(tmp_path / "release"), "org/name")
    assert "hf auth login" in raised.value.hint
    assert hub.requests == []


def test_without_a_network_it_is_said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on that port."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PublishingError, match="cannot upload to org/name") as raised:
        push(write_release(tmp_path / "release"), "org/name")
    assert "check the network" in raised.value.hint


def test_names_and_folders_that_are_none_are_refused(hub: Hub, tmp_path: Path) -> None:
    """Before anything is sent."""
    with pytest.raises(PublishingError, match="cannot upload to a b") as raised:
        push(write_release(tmp_path / "release"), "a b/c")
    assert "org/name" in raised.value.hint
    with pytest.raises(InputError, match="is not a release"):
        push(tmp_path, "org/name")
    assert hub.requests == []
