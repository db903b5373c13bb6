"""Builds checkpoints and exports that many tests work on, once for all test processes."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from filelock import FileLock

WORDS = 8_000  # of the 30,522 in the vocabulary that every recipe has, which took most of the time of int8
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load_script(name: str) -> Any:
    """Import a module of scripts/, which finds its neighbors while it is imported."""
    with mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
        return importlib.import_module(name)


def trained_model() -> Path:
    """Return the folder of MiniLM: real trained weights, tokenizer and pooling config."""
    folder: Path = load_script("make_models").trained_model()
    return folder


def make_shallow(source: Path, folder: Path, *, layers: int, words: int = 0) -> Path:
    """Write the checkpoint of a BERT with its first layers alone, and the first words of its vocabulary if given."""
    from transformers import BertModel

    shutil.copytree(source, folder, dirs_exist_ok=True)
    BertModel.from_pretrained(source, num_hidden_layers=layers).save_pretrained(folder)
    return keep_words(folder, words) if words else folder


def keep_words(folder: Path, words: int) -> Path:
    """Cut the vocabulary of a checkpoint to its first words: tables, and files of the tokenizer."""
    from safetensors.numpy import load_file, save_file

    rows = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    weights = folder / "model.safetensors"
    tensors = {name: array[:words] if len(array) == rows else array for name, array in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    cut_vocabulary(folder, words)
    return folder


def cut_vocabulary(folder: Path, words: int) -> None:
    """Cut the vocabulary in the files of a BERT's tokenizer, and its size in the configuration, to its first words."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": words}), encoding="utf-8")
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {word: place for place, word in enumerate(vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


class Workshop:
    """Builds checkpoints and exports on demand, in a folder that the test processes share."""

    def __init__(self, folder: Path, session: Path | None = None) -> None:
        self.folder = folder
        self.session = session or folder  # of this run of the tests alone: what onnxtool has made is made anew
        self._lock = FileLock(folder / ".lock")
        (folder / "checkpoints").mkdir(exist_ok=True)

    def checkpoint(self, name: str) -> Path:
        """Return the folder of the checkpoint called `name` in models/recipes.json, with the first words alone."""
        path = self.folder / "checkpoints" / name
        with self._lock:
            if not path.exists():
                made = load_script("make_models").make_model(name, self.folder / "whole")
                keep_words(made, WORDS).rename(path)
        return path

    def exported(self, name: str, *, exporter: str = "dynamo", head: str = "none") -> Path:
        """Return an export of that checkpoint, which must not be changed, with its tokenizer beside it."""
        from onnxtool import ExportOptions, export_model

        checkpoint = self.checkpoint(name)
        output = self.folder / f"{exporter}-{head}" / f"{name}.onnx"
        with self._lock:
            if not output.exists():
                export_model(ExportOptions(str(checkpoint), output=output, exporter=exporter, head=head))
        return output

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the file or folder of this name, made by `make` once for all test processes; it must not be changed.

        `make` gets a path that does not exist yet, in a folder that does.
        """
        path = self.session / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                partial = path.with_name(f"partial-{path.name}")
                make(partial)
                partial.rename(path)
        return path
