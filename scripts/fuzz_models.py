"""Give hostile models, tokenizers and configurations to the commands: each ends with 0, 1 or 2, and with one error.

`python scripts/fuzz_models.py` damages sound models field by field, splices pieces into them that ask for too much, and
runs `stats`, `optimize`, `infer --benchmark` and `artifacts` on each within 1 GB and 20 s of processor time (wall time
has three times that, as other programs may run). Checkpoints get damaged files (`document`, `checkpoint`), and what is
around a model is hostile as well (`tests/hostile/surroundings.py`). A command that fails leaves the folder as it was,
the home folder and the one for temporary files among it. Each case comes from --seed, its kind and its number, so that
one can be repeated: `--kinds template --only 17`. What ends in another way is kept in --work_dir/faults with its
command. Prints a table, when it is interrupted as well. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import onnx
from harness.pages import print_head, print_row
from zoo.checkpoint import make_checkpoint
from zoo.tasks import find_task

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model
from tests.hostile.documents import damage_document
from tests.hostile.fields import damage_model
from tests.hostile.long_texts import ALL_KINDS as KINDS
from tests.hostile.running import ROOT, VARIABLES, Ended, run_command
from tests.hostile.seeds import by_hand
from tests.hostile.surroundings import Case

_COUNTS = {"model": 5_000, "document": 1_000, "checkpoint": 200, **dict.fromkeys(KINDS, 500)}
EXPORTED = (
    ("fill-mask", "bert"),
    ("text-generation-with-past", "llama"),
    ("image-classification", "mobilenet_v2"),
    ("feature-extraction", "bert"),
)
_FILE = ("--model_path", "model.onnx")
MODEL_COMMANDS: dict[str, tuple[str, ...]] = {
    "stats": ("stats", "model.onnx"),
    "optimize": ("optimize", *_FILE, "--output", "out.onnx", "--force"),
    "optimize int8": ("optimize", *_FILE, "--output", "out-int8.onnx", "--force", "--precision", "int8"),
    "infer --benchmark": (
        *("infer", *_FILE, "--benchmark", "--runs", "2", "--warmup", "1", "--threads", "1"),
        *("--batch_size", "1", "--sequence_length", "8"),
    ),
    "artifacts": ("artifacts", *_FILE, "--loss", "MSELoss", "--output", "out-training", "--force"),
}
_TEXT = ("--text", "Hello world, " + "a" * 45 + "!", "--text", "")


def make_seeds(folder: Path) -> list[Path]:
    """Make all seeds in `folder`, unless they are there, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in by_hand().items():
        onnx.save(model, folder / f"{name}.onnx")
    for task, model_type in EXPORTED:
        path = folder / f"{model_type}-{task}.onnx"
        if path.exists():
            continue
        checkpoint = folder / "checkpoints" / path.stem
        make_checkpoint(find_task(task), model_type, checkpoint)
        export_model(ExportOptions(model_name=str(checkpoint), task=task, output=path))
        for precision in ("fp32", "int8") if model_type == "bert" else ("fp32",):
            output = path.with_name(f"{path.stem}-{precision}.onnx")
            optimize_model(OptimizeOptions(path, output=output, precision=precision, force=True, verify=False))
    return sorted(folder.glob("*.onnx"))


def try_case(kind: str, number: int, seeds: list[Path], options: argparse.Namespace) -> list[tuple[str, Ended]]:
    """Make a case, run its commands, and keep and print it if one of them ends as none may."""
    choices = random.Random(f"{options.seed} {kind} {number}")  # noqa: S311  a case, not a secret
    with tempfile.TemporaryDirectory(prefix="case-", dir=options.work_dir) as name:
        folder = Path(name, "case")
        folder.mkdir()
        results = list(_try(kind, choices, folder, seeds))
        kept = options.work_dir / "faults" / f"{kind}-{number}"
        if any(ended.fault for _, _, ended in results):
            kept.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(kept)
            texts = [f"$ {command}: {ended.code} {ended.fault}\n{ended.stderr}" for command, _, ended in results]
            (kept / "stderr.txt").write_text("\n".join(texts), "utf-8")
        for command, damage, ended in results:
            if ended.fault:
                print(f"{kept}: {command} {ended.fault}; {damage}", flush=True)
        return [(command, ended) for command, _, ended in results]


def _try(kind: str, choices: random.Random, folder: Path, seeds: list[Path]) -> Iterator[tuple[str, str, Ended]]:
    if kind == "model":
        damage, data = damage_model(seeds, choices)
        (folder / "model.onnx").write_bytes(data)
        for name, command in MODEL_COMMANDS.items():
            # Calibration takes its time: one in four models is quantized.
            if name == "optimize int8" and choices.random() < 0.75:
                continue
            ended = run_command(Case(damage, command), folder)
            yield name, damage, ended
            if "s to load and run" in ended.stderr:  # which takes its time, and is what each command begins with
                return
        return
    make, names = KINDS.get(kind, (None, ()))
    whole = [path for path in seeds if (path.parent / "checkpoints" / path.stem).is_dir()]
    seed = choices.choice([path for path in whole if not names or path.stem in names])
    shutil.copytree(seed.parent / "checkpoints" / seed.stem, folder / "checkpoint")
    if make is not None or kind == "document":
        shutil.copy(seed, folder / "checkpoint" / "model.onnx")
    if make is not None:
        case = make(folder, choices)
        if case.command[0] == "export":
            (folder / "checkpoint" / "model.onnx").unlink(missing_ok=True)
    else:
        infer = ("infer", "--model_path", "checkpoint/model.onnx", *_TEXT)
        export = ("export", "--model_name", "checkpoint", "--output", "out.onnx")
        case = Case(damage_document(folder / "checkpoint", choices), infer if kind == "document" else export)
    yield f"{kind}: {case.command[0]}", case.damage, run_command(case, folder)


def print_table(tried: Sequence[tuple[str, Ended]]) -> None:
    """Print a row for each command, as Markdown."""
    by_command: dict[str, list[Ended]] = defaultdict(list)
    for command, ended in tried:
        by_command[command].append(ended)
    columns = "command | cases | exit code 0 | 1 | 2 | other, tracebacks, no limit | median s | longest s"
    print_head(columns.split(" | "))
    for command, runs in by_command.items():
        codes = Counter(None if ended.fault else ended.code for ended in runs)
        seconds = [ended.seconds for ended in runs]
        times = f"{statistics.median(seconds):.2f}", f"{max(seconds):.1f}"
        print_row(f"`{command}`", len(runs), *(codes[code] for code in (0, 1, 2, None)), *times)


def main() -> int:
    """Run the cases, print the table, and return 1 where a command ended as none may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=list(_COUNTS), default=list(_COUNTS), help="what is damaged")
    parser.add_argument("--count", type=int, help="cases of each kind; else 5,000 models, 1,000 documents, and so on")
    parser.add_argument("--only", type=int, metavar="N", help="the case of this number alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work_dir", type=Path, default=ROOT / "models" / "fuzz")
    options = parser.parse_args()
    os.environ |= VARIABLES
    seeds = make_seeds(options.work_dir / "seeds")
    shutil.rmtree(options.work_dir / "faults", ignore_errors=True)
    counts = {kind: _COUNTS[kind] if options.count is None else options.count for kind in options.kinds}
    cases = [
        (kind, number) for kind, count in counts.items() for number in range(count) if options.only in (None, number)
    ]
    tried: list[tuple[str, Ended]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ThreadPoolExecutor(options.jobs)
    try:
        running = [pool.submit(partial(try_case, *case, seeds, options)) for case in cases]
        for done, future in enumerate(as_completed(running), 1):
            tried += future.result()
            if done % 200 == 0:
                print(f"{done} of {len(cases)} cases", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        pool.shutdown(cancel_futures=True)
    print_table(tried)
    return int(any(ended.fault for _, ended in tried))


if __name__ == "__main__":
    sys.exit(main())
