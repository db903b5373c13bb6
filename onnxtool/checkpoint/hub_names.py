"""The names by which people call a checkpoint: an id on the hub, its page there, or a folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from onnxtool.errors import CheckpointError

_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<rest>.*)", re.IGNORECASE)
_PAGE = re.compile(r"(?P<id>[^/]+/[^/]+)(?:/(?:tree|blob|resolve|commit)/(?P<revision>[^/]+)(?:/.*)?)?/?")
# Of Windows, where a drive or a backslash is in a path and in no id.
_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|.*\\")


@dataclass(frozen=True)
class Snapshot:
    """What a folder in the hub's cache is of: `models--ORG--NAME/snapshots/COMMIT`.

    Attributes:
        model_id: the id on the hub.
        commit: of its repository.
    """

    model_id: str
    commit: str

    @classmethod
    def of(cls, folder: Path) -> Snapshot | None:
        """Read it from an absolute path; None for a folder that is no snapshot."""
        repository, *names = folder.parent.parent.name.split("--")
        if folder.parent.name != "snapshots" or repository != "models" or not all(names) or not 1 <= len(names) <= 2:
            return None
        return cls("/".join(names), folder.name)


def path_parts(model_name: str) -> tuple[str, ...]:
    """Return the parts of an id, or of a folder's path; the last is the name. A snapshot has the parts of its id."""
    if not Path(model_name).is_dir():
        return tuple(model_name.split("/"))
    path = Path(os.path.abspath(model_name))  # noqa: PTH100  resolve() would follow links to other names
    snapshot = Snapshot.of(path)
    return path.parts if snapshot is None else tuple(snapshot.model_id.split("/"))


def hub_id(model_name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the id that the address of a page on the hub has, and its revision; other names as they are.

    Raises:
        CheckpointError: it is an address that leads to no model, or to another revision than `revision`.
    """
    found = _URL.fullmatch(model_name.strip())
    if found is None:
        if "://" in model_name:
            raise CheckpointError(
                f"{model_name} is no address of a model on huggingface.co", "pass a folder, or an id such as org/name"
            )
        return model_name, revision
    page = _PAGE.fullmatch(re.split("[?#]", found["rest"])[0])
    if page is None or page["id"].split("/")[0] in ("datasets", "spaces", "docs", "papers"):
        raise CheckpointError(f"{model_name} is not the page of a model", "pass an id such as org/name")
    if revision is not None and page["revision"] not in (None, revision):
        raise CheckpointError(
            f"{model_name} is of the revision {page['revision']}, and --revision is {revision}", "pass one of them"
        )
    return page["id"], revision or page["revision"]


def require_cached_commit(model_name: str, revision: str | None) -> None:
    """Refuse a cache of the hub in which no regular file names the commit: huggingface_hub would wait for a pipe.

    Raises:
        CheckpointError: there is a pipe, a socket, a device or a folder.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, "--".join(("models", *model_name.split("/"))), "refs")
    path = folder / (revision or constants.DEFAULT_REVISION)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file", "the hub's cache is damaged: remove it, and fetch again")


def is_path(model_name: str) -> bool:
    """Whether a name can only be a path: no id looks like that."""
    return (
        model_name.startswith(("/", "./", "../", "~", "."))
        or model_name.count("/") > 1
        or model_name.endswith("/")
        or _WINDOWS_PATH.match(model_name) is not None
    )
