"""Test collections on the hub, as the organizations BeIR and mteb publish theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onnxtool.checkpoint.folder import is_path, quiet_hub, require_cached_commit
from onnxtool.errors import InputError
from onnxtool.progress import tell

_NAME = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_PART = re.compile(r"(.+)-[0-9]+-of-[0-9]+\.parquet")
_TEXTS = tuple(f"{name}{suffix}" for name in ("corpus", "queries") for suffix in (".jsonl", ".jsonl.gz", "/*.parquet"))
_WAY_OUT = "pass a folder with corpus, queries and qrels to --data, or a dataset on the hub such as BeIR/scifact"


@dataclass(frozen=True)
class Fetched:
    """A collection on this machine.

    Attributes:
        name: what reports call it: the folder, or the datasets on the hub with their commits.
        folder: of documents, queries and, unless `qrels` is set, judgements.
        qrels: the folder of the judgements, one file for each split.
    """

    name: str
    folder: Path
    qrels: Path | None = None


def fetch_collection(data: Path, split: str) -> Fetched:
    """Fetch the dataset `ORG/NAME` or `ORG/NAME@REVISION` into the hub's cache, with the judgements of one split.

    BeIR's datasets have `corpus.jsonl.gz` and `queries.jsonl.gz`, and their judgements in the dataset `NAME-qrels`, as
    `SPLIT.tsv`. MTEB's have `qrels/SPLIT.jsonl` with JSON Lines, or parts of tables in `corpus`, `queries` and `qrels`.

    Raises:
        InputError: it has another name or layout, or cannot be fetched.
    """
    asked = _NAME.fullmatch(data.as_posix())
    if data.exists() or asked is None or is_path(asked["id"]):
        what = "is not a folder" if data.exists() else "does not exist"
        raise InputError(f"the collection {data} {what}", _WAY_OUT)
    own = (f"qrels/{split}.jsonl", f"qrels/{split}.tsv", f"qrels/{split}-*.parquet")
    folder = _fetch(asked["id"], asked["revision"], (*_TEXTS, *own))
    name = f"{asked['id']}@{folder.name}"
    splits = {found[1] for path in folder.glob("corpus/*") if (found := _PART.fullmatch(path.name))}
    if len(splits) > 1:
        raise InputError(
            f"{name} has other documents for each split: {', '.join(sorted(splits))}",
            "copy the files of one split into a folder, and pass that to --data",
        )
    if any(folder.glob(f"qrels/{split}[.-]*")):
        return Fetched(name, folder)
    try:
        qrels = _fetch(f"{asked['id']}-qrels", None, (f"{split}.tsv",))
    except InputError as error:
        raise InputError(
            f"{name} has no judgements of the split {split!r}, and {error.message}",
            "pass --split with a split of the dataset; its page on the hub lists its files",
        ) from error
    return Fetched(f"{name} with {asked['id']}-qrels@{qrels.name}", folder, qrels)


def _fetch(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Fetch the matching files of a dataset, or take them from the local cache where the hub is not asked."""
    from huggingface_hub import snapshot_download

    require_cached_commit(name, revision, "datasets")
    tell(f"fetching {name}")
    try:
        with quiet_hub():
            return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the roots of everything that huggingface_hub raises for its users
        reason = " ".join([*filter(None, str(error).splitlines())][:2]) or type(error).__name__
        raise InputError(
            f"{name!r} is neither a folder here nor a dataset that can be fetched from the hub: {reason}", _WAY_OUT
        ) from error
