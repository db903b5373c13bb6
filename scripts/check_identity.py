"""Show that two checkouts of onnxtool write the same bytes: exports, optimized files and artifacts of ten models.

Run `python scripts/check_identity.py --before ../checkout-of-the-commit-before`. Each checkout works in a process of
its own on the same checkpoints. The version that files are stamped with is left out of the comparison; both versions
have to be equally long. Exits 1 and names each file that differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from make_models import ROOT, make_model, trained_model

MODELS = (
    *("tiny-splade", "tiny-mlm", "tiny-encoder", "tiny-classifier", "tiny-tagger", "tiny-ner", "tiny-reranker"),
    *("tiny-reader", "tiny-decoder", "minilm"),
)
PRECISIONS = ("fp32", "fp16", "int8", "int4")
# One exporter and one precision for each model, and all of them for these; artifacts of one with a loss of its own.
EXPORTERS = {"tiny-splade": ("dynamo", "torchscript"), "tiny-encoder": ("dynamo", "torchscript")}
ALL_PRECISIONS = ("tiny-splade", "tiny-decoder", "minilm")
TRAINED = ("tiny-mlm", "tiny-classifier")
_VERSION = re.compile(rb"onnxtool [0-9][0-9A-Za-z.+]*")


def make_files(checkpoints: str, output: str, models: list[str]) -> None:
    """Write all files of these models with the onnxtool that this process imports."""
    from onnxtool import ExportOptions, OnnxtoolError, OptimizeOptions, export_model, optimize_model

    for name in models:
        source = trained_model() if name == "minilm" else Path(checkpoints, name)
        for exporter in EXPORTERS.get(name, ("dynamo",)):
            exported = Path(output) / exporter / f"{name}.onnx"
            export_model(ExportOptions(str(source), output=exported, exporter=exporter))
            for precision in PRECISIONS if name in ALL_PRECISIONS else ("fp32",):
                provider = "cuda" if precision == "fp16" else "cpu"
                file = exported.with_name(f"{name}-{precision}.onnx")
                try:
                    optimize_model(OptimizeOptions(exported, output=file, provider=provider, precision=precision))
                except OnnxtoolError as error:  # a refusal is a result; its words may change
                    file.with_suffix(".refused").write_text(type(error).__name__, encoding="utf-8")
        if name in TRAINED:
            arguments = ["artifacts", "--model_name", str(source), "--output", str(Path(output, "artifacts", name))]
            subprocess.run([sys.executable, "-m", "onnxtool", *arguments], check=True, capture_output=True)
        print(f"  {name}", flush=True)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below `folder`, the version of onnxtool left out."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(_VERSION.sub(b"onnxtool", path.read_bytes())).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _run(checkout: Path, checkpoints: Path, folder: Path, models: list[str]) -> dict[str, str]:
    print(checkout, flush=True)
    scripts = ROOT / "scripts"  # the same for both: what differs is the package
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(scripts)]), "HF_HUB_OFFLINE": "1"}
    code = "import sys; from check_identity import make_files; make_files(*sys.argv[1:3], sys.argv[3:])"
    subprocess.run(
        [sys.executable, "-c", code, str(checkpoints), str(folder), *models], check=True, env=environment, cwd=checkout
    )
    return digests(folder)


def main() -> int:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        checkpoints = Path(work, "checkpoints")
        for name in arguments.models:
            if name != "minilm":
                make_model(name, checkpoints)
        # One after the other in the same folder: the paths in reports and files are the same then.
        files = []
        for checkout in (arguments.before, ROOT):
            folder = Path(work, "files")
            files.append(_run(checkout.resolve(), checkpoints, folder, arguments.models))
            folder.rename(Path(work, f"files-{len(files)}"))
    before, after = files
    different = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    for name in different:
        state = "differs" if name in before and name in after else "new" if name in after else "missing"
        print(f"{state}: {name}")
    print(f"{len(before)} files of {len(arguments.models)} models, {len(different)} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
