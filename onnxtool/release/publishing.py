"""Upload a release to the hub with huggingface_hub, in one commit, all or nothing."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.folder import hub_id, quiet_hub
from onnxtool.errors import InputError, PublishingError
from onnxtool.interruption import temporary_folder
from onnxtool.options import StrPath, checked
from onnxtool.reading import read_text
from onnxtool.release.facts import FACTS_NAME, ReleaseFacts, parse_facts, read_facts
from onnxtool.release.signing import SIGNATURE_NAME

_TOKEN = re.compile(r"hf_\w+|Bearer\s+\S+")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, to a token that may write"
_HINTS = {
    401: _LOG_IN,
    403: "the token may not write there: take one that may, or another name",
    404: "check the name, as in org/name, and that the token may see it",
    409: "somebody else changed the repository at the same time: run it again",
    429: "the hub asks to wait: run it again later",
}
_NETWORK = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and run it again: what was uploaded is not sent twice"


@checked
def push(folder: StrPath, repo_id: str, *, private: bool = False) -> str:
    """Upload the release in `folder`, which the caller has checked, as one commit on the main branch.

    The repository is created if it does not exist. Files of an earlier release that are not in this one are removed;
    other files stay.

    Args:
        folder: the folder of the release.
        repo_id: the repository on the hub, e.g. `org/name`, or the URL of its page.
        private: whether a new repository is private.

    Returns:
        The URL of the commit.

    Raises:
        PublishingError: there is no token, the hub refuses it or cannot be reached, or the repository exists and is
            public although a private one is requested.
        InputError: the folder is not a release.
        CheckpointError: `repo_id` is not the URL of a model.
    """
    from huggingface_hub import HfApi, get_token

    folder = Path(folder)
    facts = read_facts(folder)
    repo_id, _ = hub_id(repo_id)
    token = get_token()
    if token is None:
        raise PublishingError(f"cannot upload to {repo_id}: there is no token of the hub", _LOG_IN)
    api = HfApi(token=token)
    with _refusals(repo_id, token), quiet_hub():
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise PublishingError(
                f"{repo_id} already exists and is public", "make it private in its settings, or leave out --private"
            )
        obsolete = _obsolete(api, repo_id, folder, facts)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=f"Release {facts.name}",
            delete_patterns=[glob.escape(path) for path in obsolete] or None,
        )
    return str(commit.commit_url)


def _obsolete(api: Any, repo_id: str, folder: Path, facts: ReleaseFacts) -> list[str]:
    """Return the files of the earlier release in the repository that this release lacks."""
    from huggingface_hub.errors import EntryNotFoundError

    with temporary_folder() as temporary:
        try:
            text = read_text(Path(api.hf_hub_download(repo_id, FACTS_NAME, local_dir=temporary)))
            earlier = parse_facts(text)
        except (EntryNotFoundError, InputError, ValueError):
            return []  # not a release, or from another version of onnxtool
    gone = {file.path for file in earlier.files} - {file.path for file in facts.files}
    # The signature of the earlier release does not fit this one.
    return sorted(gone | (set() if (folder / SIGNATURE_NAME).exists() else {SIGNATURE_NAME}))


@contextmanager
def _refusals(repo_id: str, token: str) -> Iterator[None]:
    """Convert failures of the hub, the network and huggingface_hub to one error without the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # Refusals by the large-file storage are wrapped in a RuntimeError.
        reason = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
        if isinstance(reason, HfHubHTTPError):
            status = reason.response.status_code if reason.response is not None else 0
            said = f"the hub answered {status}: {reason.server_message or reason}"
            raise _failure(repo_id, said, token, _HINTS.get(status, _NETWORK)) from None
        hint = _NETWORK if isinstance(reason, (HTTPError, OSError)) else "check the name, as in org/name"
        raise _failure(repo_id, f"{reason or type(reason).__name__}", token, hint) from None


def _failure(repo_id: str, reason: str, token: str, hint: str) -> PublishingError:
    line = " ".join(_TOKEN.sub("…", reason.replace(token, "…")).split())
    return PublishingError(f"cannot upload to {repo_id}: {line[:300]}", hint)
