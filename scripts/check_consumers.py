"""Export models for every target, run each folder by `onnxtool verify --consumer`, and print what came out as a table.

Each consumer runs in an environment of its own, installed below --work_dir from the pins in scripts/consumers (PyPI,
npm; node must be there); one without pins runs in this environment. Anserini, next-plaid, OpenSearch, Oracle AI
Database, text-embeddings-inference and Vespa cannot be called from here: what their sources or documentation say is
done in onnxruntime, and the table says so. Exit code 1 where an answer differs.

Run `python scripts/check_consumers.py --work_dir models/consumers`, with --target for some consumers only, and with
`--write docs/consumers/measured.md` for the page of the documentation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from consumer_models import build_model
from harness.machine import describe_machine
from harness.pages import markdown_row, replace_rows
from harness.pages import replace as replace_line

from onnxtool import ExportOptions, OnnxtoolError, VerifyOptions, export_variants, verify_in_consumer
from onnxtool.consumers import ConsumerReport
from onnxtool.export.targets import TARGETS

SCRIPTS = Path(__file__).resolve().parent
CONSUMERS = SCRIPTS / "consumers"
ALL = "fp32,fp16,int8,uint8,int4,int4_fp16"
CHROMIUM = "transformers.js in Chromium"
HEAD = ("consumer", "model", "file", "MB", "opened as", "ms a text", "error alone", "in batches", "bound", "passed")
# By target: models of consumer_models, and the precisions to write for those after the semicolon; random weights hold
# no error of 0.01 in int4.
CHECKS = {
    "anserini": "splade splade-distil",
    "chroma": "minilm distil",
    "fastembed": "minilm;fp32,fp16,int8 cls lasttoken mean-dense splade inference-free colbert "
    "reranker;fp16,int8 modernbert;fp16,int8 deberta;fp16,int8",
    "infinity": "minilm;int8 cls distil modernbert;int8 deberta;int8",
    "milvus": "minilm distil",
    "next-plaid": "colbert;int8",
    "opensearch": "minilm cls mean-dense distil splade splade-distil inference-free reranker",
    "optimum": "minilm;fp32,fp16,int8 mean-dense lasttoken splade reranker;fp32,fp16,int8 modernbert;fp16,int8 "
    "deberta;fp16,int8",
    "oracle": "minilm cls mean-dense distil modernbert deberta",
    "sentence-transformers": "minilm;fp32,fp16,int8 mean-dense lasttoken splade;fp32,fp16,int8 inference-free "
    "decoder-reranker reranker;fp32,fp16,int8 modernbert;fp16,int8 deberta;fp16,int8",
    "tei": "minilm lasttoken mean-dense distil modernbert deberta",
    "transformers.js": f"minilm;{ALL} cls lasttoken mean-dense splade;fp16,int8 reranker;fp16,int8 tagger;fp16 "
    f"modernbert;fp16,int8 deberta;{ALL}",
    "vespa": "minilm;fp32,fp16,int8 mean-dense splade;fp32,fp16,int8 splade-distil modernbert deberta",
}


def main() -> int:
    """Run the chosen checks and print their table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--work_dir", type=Path, required=True, help="where environments, models and exports are put")
    parser.add_argument("--target", action="append", choices=CHECKS, help="check this one; may be given several times")
    parser.add_argument("--write", type=Path, help="the page whose table is written anew")
    arguments = parser.parse_args()
    work_dir: Path = arguments.work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    page: Path | None = arguments.write and arguments.write.resolve()
    CHECKS[CHROMIUM] = CHECKS["transformers.js"]
    for target in TARGETS.values():
        if (path := CONSUMERS / f"sourced_{target.name.replace('-', '_')}.py").is_file():
            TARGETS[target.name] = replace(target, runner=str(path))
    rows: list[tuple[str, ...]] = []
    for name in arguments.target or CHECKS:
        for check in CHECKS[name].split():
            model, _, precisions = check.partition(";")
            print(f"checking {model} in {name}", file=sys.stderr, flush=True)
            try:
                rows += _rows(run(name, model, precisions, work_dir), name, model)
            except OnnxtoolError as error:
                rows.append((name, model, " ".join(str(error).split()), *[""] * 6, "NO"))
    print("\n".join(map(markdown_row, (HEAD, *rows))))
    if page is not None:
        written = replace_rows(page.read_text(encoding="utf-8"), HEAD, rows)
        written = replace_line(written, r"^Measured on .*$", f"Measured on {describe_machine()}.")
        page.write_text(written, encoding="utf-8")
    return 0 if all(row[-1] == "yes" for row in rows) else 1


def run(name: str, model: str, precisions: str, work_dir: Path) -> ConsumerReport:
    """Export a model, and run its folder in the consumer."""
    target = "transformers.js" if name == CHROMIUM else name
    checkpoint = build_model(model, work_dir / "checkpoints")
    folder = work_dir / "exports" / target / model
    if not folder.is_dir():
        export_variants(ExportOptions(checkpoint, target=target, output=folder, precisions=precisions))
    interpreter, place = _environment(target, work_dir)
    interpreter = str(CONSUMERS / "chromium.py") if name == CHROMIUM else interpreter
    os.environ["PYTHONPATH"] = str(SCRIPTS.parent)
    os.chdir(place)  # where node looks for packages
    return verify_in_consumer(folder, checkpoint, VerifyOptions(consumer=target, interpreter=interpreter))


def _rows(report: ConsumerReport, target: str, model: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each file and role."""
    sourced = target != CHROMIUM and TARGETS[target].runner.startswith(str(SCRIPTS))
    title = f"{target} (reproduced)" if sourced else report.consumer.removeprefix("@huggingface/")
    alone = [single for single in report.results if single.batch_size == 1]
    for single, batched in zip(alone, [single for single in report.results if single.batch_size > 1], strict=True):
        path = Path(report.folder) / single.file
        size = f"{path.stat().st_size / 1e6:.1f}" if single.file else ""
        errors = ["none" if error is None else f"{error:.1e}" for error in (single.error, batched.error)]
        time = "" if single.ms_per_text is None else f"{single.ms_per_text:.1f}"
        opened = " ".join(filter(None, (single.precision, single.role)))
        held = "yes" if single.passed and batched.passed else f"NO {single.reason or batched.reason}"
        yield (
            title,
            model,
            path.name if single.file else "(default)",
            size,
            opened,
            time,
            *errors,
            f"{single.bound:g}",
            held,
        )


def _environment(target: str, work_dir: Path) -> tuple[str | None, Path]:
    """Install what a consumer needs; return its interpreter, and the folder to be in."""
    if TARGETS[target].runner.endswith(".mjs"):
        home = work_dir / "node"
        home.mkdir(exist_ok=True)
        shutil.copyfile(CONSUMERS / "package.json", home / "package.json")
        _call(["npm", "install", "--no-audit", "--no-fund"], cwd=home)
        return None, home
    pins, home = CONSUMERS / f"{target}.txt", work_dir / "environments" / target
    if not pins.is_file():
        return None, work_dir
    python = home / "bin" / "python"
    if not home.is_dir():
        print(f"installing {pins.name}", file=sys.stderr, flush=True)
        _call([sys.executable, "-m", "venv", str(home)])
    _call([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(pins)])
    return str(python), work_dir


def _call(command: Sequence[str], cwd: Path | None = None) -> None:
    subprocess.run(
        command, check=True, cwd=cwd, stdout=sys.stderr, env={**os.environ, "ONNXRUNTIME_NODE_INSTALL": "skip"}
    )


if __name__ == "__main__":
    sys.exit(main())
