"""Copy a model and its companion files from an object store to this machine until the process ends."""

from __future__ import annotations

import atexit
import re
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path

from onnxtool.encoding import filesystems
from onnxtool.encoding.files import scratch_folder
from onnxtool.encoding.locations import Location, Uri
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import PARTNER_KEY, READS_KEY
from onnxtool.model_file.wire import read_structure

# Files of tokenizers, configurations and pooling modules; weights in other formats are not needed.
_FOLDERS = r"([^/]+/)?([^/]+_)?[0-9]+_[A-Za-z]+/"
_BESIDE = re.compile(rf"([^/]+/|{_FOLDERS})?[^/]+\.(json|txt|model|jinja)|{_FOLDERS}model\.safetensors")
_MOST_BYTES = 1 << 28  # of a file next to the model


def model_on_this_machine(location: Location, task: str | None = None) -> Path:
    """Return the path of a model; from a store, it is fetched with its external data and its checkpoint's files.

    Its partner is fetched too if that encodes texts of the task, `query` or `document`.

    Raises:
        InputError: there is none.
        ModelFileError: it is malformed, or its external data is missing or lies elsewhere.
        StoreError: the store does not answer.
    """
    return location if isinstance(location, Path) else _fetch(location, task)


@lru_cache(maxsize=1)
def _fetch(model: Uri, task: str | None) -> Path:
    # Folders for other tools have the graph in `onnx/`, and the checkpoint's files above it.
    base = model.parent.parent if model.parent.name == "onnx" else model.parent
    place = _UNTIL_THE_END.enter_context(scratch_folder("model"))
    path = place / model.key.removeprefix(f"{base.key}/")
    path.parent.mkdir(exist_ok=True)
    try:
        filesystems.download(model, path)
    except FileNotFoundError:
        raise InputError(f"no such model: {model}", "check --model_path") from None
    structures = [read_structure(path)]
    partner = ModelFile(path, structures[0]).plain_name(PARTNER_KEY)
    if partner is not None and task not in (None, *structures[0].metadata.get(READS_KEY, "").split(", ")):
        with suppress(FileNotFoundError):  # reported by the reader that needs it
            filesystems.download(model.parent / partner, path.with_name(partner))
            structures.append(read_structure(path.with_name(partner)))
    external = {(path.parent / data.location).resolve() for one in structures for data in one.external}
    for name, size in filesystems.below(base):
        target = (place / name).resolve()
        is_wanted = target in external or (_BESIDE.fullmatch(name) is not None and size <= _MOST_BYTES)
        if is_wanted and place.resolve() in target.parents:
            target.parent.mkdir(parents=True, exist_ok=True)
            filesystems.download(base / name, target)
    ModelFile.open(path)
    return path


_UNTIL_THE_END = ExitStack()
atexit.register(_UNTIL_THE_END.close)
