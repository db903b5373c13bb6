"""Train small models in JavaScript, and compare the losses with Python's.

`python scripts/check_web_training.py DIR …` makes artifacts of a perceptron, a convolutional network with a batch
normalization, a BERT classifier and a masked language model, trains a hundred steps of each in Python, in node with
onnxruntime-node and onnxruntime-web, and in a browser, and prints a table. Each DIR has a `node_modules` with both
packages, of one version; tests/training/web is one after `npm ci`. `--screenshot FILE` also takes a picture of the
page that `onnxtool artifacts --target web` writes. Exit code 1: a runtime fails, or a loss differs from Python's by
more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

TOLERANCE = 1e-5


def main() -> int:
    """Train everywhere and print the table."""
    from tests.training.web.cases import CASES, make_case
    from tests.training.web.javascript import show, train_in_browser, train_in_node, workplace

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--screenshot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [make_case(case, folder / "artifacts" / case) for case in CASES]
        if arguments.screenshot:
            shutil.copytree(cases[2].folder, folder / "page")
            picture = f"--screenshot={arguments.screenshot.absolute()}"
            show(folder / "page", arguments.packages[0].absolute(), picture, "--window-size=760,480")
        print("| runtime | model | steps | largest difference from Python | ms a step |")
        print("|---|---|---:|---:|---:|")
        for number, packages in enumerate(path.absolute() for path in arguments.packages):
            ways: dict[str, Callable[..., list[dict[str, Any]]]] = {
                "onnxruntime-node": partial(train_in_node, runtime="onnxruntime-node"),
                "onnxruntime-web in node": partial(train_in_node, runtime="onnxruntime-web"),
                "onnxruntime-web in Chromium": partial(train_in_browser, bundle=_bundle(packages)),
            }
            for way, train in ways.items():
                place = workplace(folder / f"{number} {way}", packages)
                for case in cases:
                    label = f"| {way} {_version(packages, way.split()[0])} | {case.folder.name} |"
                    try:
                        (result,) = train(place, folders=[case.folder])
                    except Exception as error:  # noqa: BLE001  a runtime dies in many ways, and the table says so
                        failures += 1
                        print(f"{label} fails: {str(error).strip().splitlines()[:5]} | | |", flush=True)
                        continue
                    finally:
                        (place / "artifacts").unlink(missing_ok=True)
                    losses = [*zip(result["losses"], case.losses, strict=True), (result["loss"], case.loss)]
                    difference = max(abs(one - other) for one, other in losses)
                    failures += difference > TOLERANCE or not result["isStable"]
                    print(f"{label} {len(case.losses)} | {difference:.1e} | {result['stepMs']:.2f} |", flush=True)
    return int(failures > 0)


def _version(packages: Path, name: str) -> str:
    document = json.loads((packages / "node_modules" / name / "package.json").read_text(encoding="utf-8"))
    return str(document["version"])


def _bundle(packages: Path) -> str:
    """Return the module for browsers: up to 1.18 it lay in a folder of its own."""
    old = "esm/ort.wasm.min.js"
    return old if (packages / "node_modules/onnxruntime-web/dist" / old).is_file() else "ort.wasm.min.mjs"


if __name__ == "__main__":
    sys.exit(main())
