"""What sentence-transformers writes beside a checkpoint: which modules follow the transformer, and how they are set.

The one reader of modules.json, of the modules' config.json and of sentence_bert_config.json, for checkpoints that are
exported and for the folders of exported models. Where the files come from, and which error a damaged one is, is the
caller's: `read` gives the parsed content of a JSON file, None where there is no such file, and `malformed` makes the
error to raise of a file's name and what is wrong with it. Tested with the files of sentence-transformers 2 to 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import NamedTuple

from onnxtool.errors import OnnxtoolError
from onnxtool.reports import Json

Read = Callable[[str], Json]
Malformed = Callable[[str, str], OnnxtoolError]

MODULES_NAME = "modules.json"
ENCODER_NAME = "config_sentence_transformers.json"
# The settings of the transformer module. Versions before 2 called the file after the architecture.
TRANSFORMER_NAMES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

# Modes of Pooling, and the flag for each in files from before 5.4. Several flags concatenate in this order.
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


class Module(NamedTuple):
    """One module of a sentence-transformers checkpoint.

    Attributes:
        kind: the class without its package, which was moved more than once, e.g. `Pooling`.
        folder: where its files are, relative to the checkpoint; empty for the checkpoint's own folder.
    """

    kind: str
    folder: str

    def file(self, name: str) -> str:
        """Return the path of one of its files, relative to the checkpoint."""
        return f"{self.folder}/{name}" if self.folder else name


def read_modules(read: Read, malformed: Malformed) -> tuple[Module, ...]:
    """Return the modules in their order; empty for a checkpoint that is not of sentence-transformers.

    Raises:
        OnnxtoolError: modules.json is not a list of modules, or one has no type or a path outside the checkpoint.
    """
    content = read(MODULES_NAME)
    if content is None:
        return ()
    if not isinstance(content, list):
        raise malformed(MODULES_NAME, "not a list of modules")
    modules = []
    for entry in content:
        kind, folder = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or not stays_inside(folder):
            raise malformed(MODULES_NAME, f"a module without a type, or with a path outside the folder: {entry}")
        modules.append(Module(kind.rpartition(".")[2], folder))
    return tuple(modules)


def read_settings(module: Module, read: Read, malformed: Malformed) -> dict[str, Json]:
    """Return the settings of a module that is not the transformer; empty where it has no file.

    Raises:
        OnnxtoolError: the file is not a JSON object.
    """
    return _read_object(module.file("config.json"), read, malformed)


def pooling_modes(settings: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the modes of a Pooling, which are concatenated; the mean where its settings name none.

    Modes are returned as they are written: one that is not in POOLING_FLAGS is unknown.
    """
    stated = settings.get("pooling_mode")
    if stated is None:
        known = [mode for mode, flag in POOLING_FLAGS.items() if settings.get(flag) is True]
        flags = {key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True}
        modes: list[Json] = [*known, *sorted(flags - set(POOLING_FLAGS.values()))]
    else:
        modes = stated if isinstance(stated, list) else [stated]
    return tuple(map(str, modes)) or ("mean",)


def max_sequence_length(read: Read, malformed: Malformed) -> tuple[int, str] | None:
    """Return how many tokens sentence-transformers cuts a text to, and the file that says so; None where none does.

    Raises:
        OnnxtoolError: the file is not a JSON object.
    """
    for name in TRANSFORMER_NAMES:
        tokens = _read_object(name, read, malformed).get("max_seq_length")
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
            return tokens, name
    return None


def encoder_type(read: Read, malformed: Malformed) -> str:
    """Return the class that loads the checkpoint, e.g. `SparseEncoder`; empty where no file says it.

    Raises:
        OnnxtoolError: the file is not a JSON object.
    """
    stated = _read_object(ENCODER_NAME, read, malformed).get("model_type")
    return stated if isinstance(stated, str) else ""


def stays_inside(path: str) -> bool:
    """Whether a path that a checkpoint names, POSIX or hostile, stays below the checkpoint's folder."""
    pure = PurePosixPath(path)
    hostile = "\\" in path or "\0" in path or PureWindowsPath(path).drive
    return not (pure.is_absolute() or ".." in pure.parts or hostile)


def _read_object(name: str, read: Read, malformed: Malformed) -> dict[str, Json]:
    content = read(name)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise malformed(name, "not a JSON object")
    return content
