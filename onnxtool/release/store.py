"""The results of a release's steps, kept with their inputs: a step with unchanged inputs is skipped."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtool.encoding.locations import Location
from onnxtool.encoding.manifest import file_sha256
from onnxtool.interruption import check_interrupted
from onnxtool.model_file.commits import folder_lock
from onnxtool.reading import read_json
from onnxtool.reports import Json, to_json

_RECORD = "record.json"
_FILES = "files"
_PARTIAL = "partial"


@dataclass(frozen=True)
class Task:
    """A task whose result depends only on its inputs.

    Attributes:
        inputs: inputs of the result by name: digests, options, versions.
        make: writes files into a folder, and returns a JSON description of them.
    """

    inputs: Mapping[str, Json]
    make: Callable[[Path], Json]


@dataclass(frozen=True)
class Made:
    """The result of a step.

    Attributes:
        folder: the folder of its files.
        files: digests by name.
        result: the JSON description of the files.
        reason: why it ran; otherwise empty.
    """

    folder: Path
    files: Mapping[str, str]
    result: Any
    reason: str = ""


class Store:
    """The folder that keeps the results of steps, one folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reason(self, name: str, task: Task) -> str:
        """Return why the task of the step `name` has to run; empty if it is done."""
        try:
            record = read_json(self._of(name) / _RECORD)
            inputs, files = record["inputs"], record["files"]
        except FileNotFoundError:
            return "it never ran"
        except (OSError, ValueError, KeyError, TypeError):
            return "its record cannot be read"
        wanted = _plain(task.inputs)
        if changed := [name for name in {**wanted, **inputs} if inputs.get(name) != wanted.get(name)]:
            return f"{', '.join(changed)} changed"
        if _digests(self._of(name) / _FILES) != files:
            return "its files were changed"
        return ""

    def run(self, name: str, task: Task) -> Made:
        """Make missing results, and return them. A step that is stopped or fails leaves the previous result."""
        place = self._of(name)
        reason = self.reason(name, task)
        if reason:
            check_interrupted()
            place.mkdir(parents=True, exist_ok=True)
            with folder_lock(place):
                partial = place / _PARTIAL
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                result = task.make(partial)
                (place / _RECORD).unlink(missing_ok=True)
                shutil.rmtree(place / _FILES, ignore_errors=True)
                partial.rename(place / _FILES)
                record = {
                    "inputs": _plain(task.inputs),
                    "files": _digests(place / _FILES),
                    "result": to_json(result),
                }
                written = place / f".{_RECORD}"
                written.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                written.replace(place / _RECORD)
        record = read_json(place / _RECORD)
        return Made(place / _FILES, record["files"], record["result"], reason)

    def _of(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")


def digest_of(paths: Mapping[str, Location]) -> str:
    """Return a hash of the names and contents of files."""
    running = hashlib.sha256()
    for name in sorted(paths):
        running.update(f"{len(name)} {name} {file_sha256(paths[name])}\n".encode())
    return running.hexdigest()


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files below a folder, by their path in it; hidden files, such as git's or the hub's, are left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            found[inside.as_posix()] = path
    return found


def _digests(folder: Path) -> dict[str, str]:
    return {name: file_sha256(path) for name, path in files_in(folder).items()}


def _plain(inputs: Mapping[str, Json]) -> dict[str, Any]:
    """Return the inputs as they are after being written and read again."""
    plain: dict[str, Any] = json.loads(json.dumps(to_json(inputs)))
    return plain
