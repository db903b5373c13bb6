"""Open files of ours in the releases of onnxruntime that `onnxtool stats` names for them, and in the ones before.

`python scripts/check_releases.py --releases DIR` exports and optimizes checkpoints with random weights, and MiniLM,
installs releases from PyPI into DIR, and prints two tables as Markdown. In the first, each file gives the same answers
in the first version of the least release that stats names, and does not load, or does not run, in the version before.
In the second, int8 files keep their promise in several releases with and without the session option that makes products
exact. Releases before 1.15 have no wheels for Python 3.11: `--pythons python3.8` has them run by
that. Exit code 1: a claim is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from harness.machine import cpu_class
from make_models import make_model, trained_model
from releases.installed import Releases
from zoo.checkpoint import make_checkpoint
from zoo.tasks import find_task

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.optimize.options import ACTIVATIONS
from onnxtool.optimize.quantization.calibration import text_feeds_of
from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.quantization.ranking import held_out_texts
from onnxtool.runtime.difference import spreads_of
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.providers import EXACT_PRODUCTS_OPTION
from onnxtool.runtime.session import open_session
from onnxtool.summary import summarize_model

NUM_TEXTS = 24
LONGEST = 32  # of made-up inputs
FP32 = {"": 1e-6, "fp32": 1e-6, "fp16": 1e-3}
PROMISE = 0.01  # of MiniLM in int8 and int4
RANDOM_PROMISE = 0.1  # of random weights, which no rounding spares
WITH_OPTION = ("1.23", "1.26", "1.29", "1.31")


@dataclass(frozen=True)
class File:
    """A file to open.

    Attributes:
        checkpoint: a recipe of models/recipes.json, `minilm`, or TASK/TYPE of the zoo.
        precision: as for `optimize`; empty for the plain export.
        export: options of the export beside its defaults; so `optimize`.
    """

    checkpoint: str
    precision: str = ""
    export: Mapping[str, Any] = field(default_factory=dict)
    optimize: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the tables call it."""
        given = [str(value) for value in (*self.optimize.values(), *self.export.values())]
        numbers = ["opset " + one if one.isdecimal() else one for one in given if not one.startswith("0.")]
        return ", ".join((self.checkpoint, self.precision or "plain export", *numbers))

    @property
    def bound(self) -> float:
        """The most that 1 - cosine of a row of an output may be, to the plain export in the onnxruntime of here."""
        return FP32.get(self.precision) or float(self.optimize.get("max_error", PROMISE))


_LOOSE = {"max_error": RANDOM_PROMISE}
FILES = (
    File("minilm"),
    *(File("minilm", precision) for precision in ("fp32", "fp16", "int4")),
    *(File("minilm", "int8", optimize={"activations": one}) for one in ACTIVATIONS),
    File("tiny-splade", "fp32"),
    File("tiny-splade", "int8", optimize=_LOOSE),
    File("tiny-encoder", "fp32", {"exporter": "torchscript", "opset": 14}),
    File("tiny-encoder", "fp32", {"opset": 23}),
    File("tiny-encoder", "int8", {"opset": 21}, _LOOSE),
    File("tiny-decoder"),
    File("tiny-decoder", "fp32"),
    File("tiny-decoder", "int4", optimize=_LOOSE),
    File("text-generation/gpt_oss", "fp32"),
    File("feature-extraction/deberta", "fp32"),
    File("image-classification/vit", "fp32"),
)


@dataclass(frozen=True)
class Made:
    """A file that was made, with its inputs, also as files in a folder, and what the plain export gives for them."""

    file: File
    path: Path
    folder: Path
    feeds: list[Mapping[str, Any]]
    expected: list[Mapping[str, Any]]

    @cached_property
    def least(self) -> str:
        """The release that stats names."""
        return summarize_model(self.path).min_onnxruntime

    def error(self, outputs: Path) -> float:
        """Return the largest error of outputs as the worker writes them."""
        errors = []
        spreads = spreads_of(self.expected, [padding_mask(given) for given in self.feeds])
        for place, (wanted, given) in enumerate(zip(self.expected, self.feeds, strict=True)):
            with np.load(outputs / f"{place}.npz") as found:
                errors.append(float(output_errors(dict(found), wanted, padding_mask(given), spreads).max()))
        return max(errors)


def make_files(folder: Path) -> list[Made]:
    """Export and optimize all files, each export and its inputs once."""
    exports: dict[str, Made] = {}
    found = []
    for file in FILES:
        key = f"{file.checkpoint} {sorted(file.export.items())}"
        if key not in exports:
            exports[key] = _export(file, folder / f"export{len(exports)}" / "model.onnx")
        source = path = exports[key].path
        if file.precision:
            path = source.with_name("-".join((file.precision, *map(str, file.optimize.values()))) + ".onnx")
            optimize_model(OptimizeOptions(source, path, precision=file.precision, **file.optimize))
        found.append(replace(exports[key], file=file, path=path))
    return found


def _export(file: File, path: Path) -> Made:
    checkpoint = path.parent / "checkpoint"
    if file.checkpoint == "minilm":
        checkpoint = trained_model()
    elif "/" in file.checkpoint:
        task, model_type = file.checkpoint.split("/")
        make_checkpoint(find_task(task), model_type, checkpoint)
    else:
        checkpoint = make_model(file.checkpoint, path.parent)
    export_model(ExportOptions(model_name=str(checkpoint), output=path, **file.export))
    model = ModelFile.open(path)
    try:
        feeds: list[Mapping[str, Any]] = list(text_feeds_of(model, held_out_texts(NUM_TEXTS)))
    except InputError:  # takes more than texts
        feeds = [case.feeds for case in input_cases(model, longest=LONGEST)]
    folder = path.with_name("feeds")
    folder.mkdir()
    for place, given in enumerate(feeds):
        np.savez(folder / f"{place}.npz", **dict(given))
    session = open_session(path, provider="cpu", threads=1)
    return Made(file, path, folder, feeds, [session.run(given) for given in feeds])


def run(releases: Releases, version: str, made: Made, *options: str) -> tuple[bool, str]:
    """Return whether a version gives the answers that a file promises, and what it did."""
    with tempfile.TemporaryDirectory() as outputs:
        code, text = releases.ask(version, str(made.path), str(made.folder), outputs, *options)
        if code < 0 or code > 1:
            return False, f"ends the process ({code})"
        if code:
            return False, _reason(text)
        error = made.error(Path(outputs))
    if error <= made.file.bound:
        return True, f"{error:.1e}"
    return False, f"runs, error {error:.1g}"


def _reason(text: str) -> str:
    """Return what onnxruntime says, without what it says every time."""
    line = next((line for line in reversed(text.splitlines()) if "ONNXRuntimeError" in line), text.strip()[-200:])
    return f"refuses: {line.split(' : ')[-1][:140].replace('|', '/')}"


def check_least(releases: Releases, files: Sequence[Made]) -> bool:
    """Print each file in the least release that stats names, and in the version before."""
    print("| file | lowest onnxruntime | result there, 1 - cosine | the version before |\n|---|---|---|---|")
    right = True
    for made in files:
        named = releases.first_of(made.least) if made.least else None
        if named is None:
            print(f"| {made.file.name} | {made.least or 'none'} | no such version for these Pythons | |")
            right = False
            continue
        works, there = run(releases, named, made)
        before = releases.before(named)
        works_before, earlier = (False, "none for these Pythons") if before is None else run(releases, before, made)
        right &= works and not works_before
        print(f"| {made.file.name} | {made.least} | {named}: {there} | {before}: {earlier} |", flush=True)
    return right


def check_option(releases: Releases, files: Sequence[Made]) -> bool:
    """Print the error of each file in releases with and without exact products."""
    versions = [releases.last_of(release) for release in WITH_OPTION]
    heads = " | ".join(f"{version}, {setting}" for version in versions for setting in ("plain", "exact"))
    print(f"\n1 - cosine on {NUM_TEXTS} texts; {cpu_class()}\n\n| file | {heads} |")
    print("|---|" + "---|" * (2 * len(versions)))
    right = True
    for made in files:
        results = [
            run(releases, version, made, f"{EXACT_PRODUCTS_OPTION}={value}") for version in versions for value in (0, 1)
        ]
        right &= all(works for works, _ in results)
        print(f"| {made.file.name} | {' | '.join(text for _, text in results)} |", flush=True)
    return right


def main() -> int:
    """Make the files, ask PyPI, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--releases", type=Path, required=True, help="where releases are, or will be, installed")
    parser.add_argument("--pythons", nargs="*", default=[], help="further interpreters, for releases without a wheel")
    arguments = parser.parse_args()
    releases = Releases.find(arguments.releases, (sys.executable, *arguments.pythons))
    with tempfile.TemporaryDirectory() as name:
        files = make_files(Path(name))
        least = check_least(releases, files)
        option = check_option(releases, [made for made in files if made.file.precision == "int8"])
    return 0 if least and option else 1


if __name__ == "__main__":
    sys.exit(main())
