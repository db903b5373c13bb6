"""Check the inputs of a release before its first step, and digest them, which tells whether a release is current."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from onnxtool.encoding.locations import Location
from onnxtool.encoding.manifest import file_sha256
from onnxtool.encoding.sources import find_sources
from onnxtool.errors import InputError
from onnxtool.evaluation import EvaluateOptions
from onnxtool.evaluation.run import check_evaluation
from onnxtool.export.run import stamped_date
from onnxtool.export.source import Source
from onnxtool.release.config import ReleaseConfig
from onnxtool.release.contents import all_options, files_in, versions
from onnxtool.release.facts import FACTS_NAME, read_facts
from onnxtool.release.signing import fingerprint
from onnxtool.reports import to_json
from onnxtool.runtime.machine import processor_name

# Fields of a configuration that are no options: places, secrets, and inputs whose contents count.
_NO_OPTIONS = {
    *("path", "output", "checkpoint", "revision", "last", "data"),
    *("key", "key_password", "identity_token"),
}


def checked_inputs(config: ReleaseConfig) -> dict[str, str]:
    """Return what a release depends on, by name, and refuse whatever a later step would refuse.

    Contents count, not paths and times.

    Raises:
        OnnxtoolError: an option, the checkpoint, the key, the last release, the collection, a measure or a gate is
            wrong.
    """
    all_options(config)
    options = {one.name: getattr(config, one.name) for one in fields(config) if one.name not in _NO_OPTIONS}
    inputs = {
        "checkpoint": _checkpoint(config),
        "options": _digest(_contents(options)),
        "versions": _digest(versions()),
        "date": stamped_date(),
    }
    if config.is_signed:
        inputs["signer"] = "identity" if config.key is None else fingerprint(config.key, signer(config)["password"])
    if config.last is not None:
        read_facts(config.last)
        inputs["last release"] = file_sha256(config.last / FACTS_NAME)
    if config.data is not None:
        base = config.precisions[0]  # for relative gates
        asked = EvaluateOptions(**{**config.evaluate, "against": base})
        _, _, collection = check_evaluation(None, config.data, asked)
        sources, _ = find_sources(collection.corpus)
        texts = (*collection.files, *(one.path for one in sources))
        inputs["collection"] = digest_of({str(place): one for place, one in enumerate(texts)})
    if config.benchmark is not None:
        inputs["processor"] = processor_name()
    return inputs


def signer(config: ReleaseConfig) -> dict[str, Any]:
    """Return the credentials for `sign`; secrets come from the environment variables named in the configuration.

    Raises:
        InputError: a variable is not set.
    """
    found: dict[str, Any] = {"key": config.key, "password": ""}
    for argument, variable in (("password", config.key_password), ("identity_token", config.identity_token)):
        if variable is not None:
            if not os.environ.get(variable):
                raise InputError(f"{config.path}: the environment variable {variable} is not set", f"set {variable}")
            found[argument] = os.environ[variable]
    return found


def _checkpoint(config: ReleaseConfig) -> str:
    """Return the commit on the hub, or a digest of the folder, and of the one that its adapter is for."""
    folder = Path(config.checkpoint)
    if folder.is_dir():
        base = str(Source.find(config.checkpoint).adapter.get("base_model_name_or_path") or "")
        of_base = files_in(Path(base)) if base and Path(base).is_dir() else {}
        return digest_of({**files_in(folder), **{f"base/{name}": path for name, path in of_base.items()}})
    if config.revision is None:
        raise InputError(
            f"{config.path} names {config.checkpoint}, and no commit of it",
            'add revision = "COMMIT" at its top: a release is made from one state of a checkpoint',
        )
    return f"{config.checkpoint}@{config.revision}"


def _contents(value: Any) -> Any:
    """Return a value with digests of the files and folders that it names."""
    if isinstance(value, Mapping):
        return {name: _contents(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_contents(one) for one in value]
    if isinstance(value, Path) and value.exists():
        return digest_of(files_in(value) if value.is_dir() else {"": value})
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(to_json(value), sort_keys=True).encode()).hexdigest()


def digest_of(paths: Mapping[str, Location]) -> str:
    """Return a hash of the names and contents of files."""
    running = hashlib.sha256()
    for name in sorted(paths):
        running.update(f"{len(name)} {name} {file_sha256(paths[name])}\n".encode())
    return running.hexdigest()
