"""Give hostile models, tokenizers and configurations to the commands: each ends with 0, 1 or 2, and with one error.

`python scripts/fuzz_models.py` damages sound models by their structure and runs `stats`, `optimize`, `infer
--benchmark` and `artifacts` on each within 20 s and 1 GB, and `infer` and `export` on checkpoints with damaged files.
Each case comes from --seed and its own number, so that one can be repeated: `--only 17`. What ends in another way is
kept in --work_dir/faults with its command. Prints the table of SECURITY.md, when it is interrupted as well. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parent
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from fuzzing.documents import damage_document  # noqa: E402
from fuzzing.mutations import damaged  # noqa: E402
from fuzzing.running import Ended, preload, run_command  # noqa: E402
from fuzzing.seeds import make_seeds  # noqa: E402

MODEL_COMMANDS = {
    "stats": ("stats", "model.onnx"),
    "optimize": ("optimize", "--model_path", "model.onnx", "--output", "optimized.onnx", "--force"),
    "optimize int8": (
        *("optimize", "--model_path", "model.onnx", "--output", "int8.onnx", "--force", "--precision", "int8"),
    ),
    "infer --benchmark": (
        *("infer", "--model_path", "model.onnx", "--benchmark", "--runs", "2", "--warmup", "1", "--threads", "1"),
        *("--batch_size", "1", "--sequence_length", "8"),
    ),
    "artifacts": (
        *("artifacts", "--model_path", "model.onnx", "--loss", "MSELoss", "--output", "training", "--force"),
    ),
}
_TEXT = ("--text", "Hello world, " + "a" * 45 + "!", "--text", "")


@dataclass(frozen=True)
class Tried:
    """One command on one case."""

    command: str
    damage: str
    ended: Ended
    kept: str = ""


def main() -> int:
    """Run the cases, print the table, and return 1 where a command ended as none may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=5_000, help="damaged models, each given to five commands")
    parser.add_argument("--documents", type=int, default=1_000, help="damaged tokenizers and configurations, for infer")
    parser.add_argument("--exports", type=int, default=200, help="damaged checkpoints, for export")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case of each kind")
    parser.add_argument("--only", type=int, metavar="N", help="the damaged model of this number alone")
    parser.add_argument(
        "--by_hand", action="store_true", help="damage graphs made by hand only, for which no export is needed"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work_dir", type=Path, default=_SCRIPTS.parent / "models" / "fuzz")
    arguments = parser.parse_args()
    seeds = make_seeds(arguments.work_dir / "seeds", by_hand_only=arguments.by_hand)
    faults = arguments.work_dir / "faults"
    shutil.rmtree(faults, ignore_errors=True)
    counts = {"model": arguments.models, "document": arguments.documents, "checkpoint": arguments.exports}
    if arguments.only is not None:
        arguments.first, counts = arguments.only, {"model": 1}
    cases = [
        (kind, number, arguments.seed, seeds, faults)
        for kind, count in counts.items()
        for number in range(arguments.first, arguments.first + count)
    ]
    tried: list[Tried] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs, initializer=_start) as pool, contextlib.suppress(KeyboardInterrupt):
        for done, results in enumerate(pool.imap_unordered(_try_case, cases, chunksize=4), 1):
            tried += results
            for result in results:
                if result.ended.fault:
                    print(f"{result.kept}: {result.command} {result.ended.fault}; {result.damage}", flush=True)
            if done % 200 == 0:
                print(f"{done} of {len(cases)} cases", file=sys.stderr, flush=True)
    print("\n".join(_table(tried)))
    return int(any(result.ended.fault for result in tried))


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the process that collects the results
    preload()


def _try_case(case: tuple[str, int, int, list[Path], Path]) -> list[Tried]:
    kind, number, seed, seeds, faults = case
    choices = random.Random(f"{seed} {kind} {number}")  # noqa: S311  a case, not a secret
    with tempfile.TemporaryDirectory(prefix="onnxtool-fuzz-") as name:
        folder = Path(name)
        results = list(_try(kind, choices, folder, seeds))
        kept = faults / f"{kind}-{number}"
        if any(ended.fault for _, _, ended in results):
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("sparse.bin", "training"))
            texts = [f"$ {command}: {ended.code} {ended.fault}\n{ended.stderr}" for command, _, ended in results]
            (kept / "stderr.txt").write_text("\n".join(texts), "utf-8")
        return [Tried(command, damage, ended, str(kept)) for command, damage, ended in results]


def _try(kind: str, choices: random.Random, folder: Path, seeds: list[Path]) -> Iterator[tuple[str, str, Ended]]:
    if kind == "model":
        damage, data = damaged(seeds, choices, folder)
        (folder / "model.onnx").write_bytes(data)
        for name, command in MODEL_COMMANDS.items():
            # Calibration takes its time: one in four models is quantized.
            if name == "optimize int8" and choices.random() < 0.75:
                continue
            ended = run_command(command, folder)
            yield name, damage, ended
            if "s to load and run" in ended.stderr:  # which takes its time, and is what each command begins with
                return
        return
    seed = choices.choice([path for path in seeds if (path.parent / "checkpoints" / path.stem).is_dir()])
    shutil.copytree(seed.parent / "checkpoints" / seed.stem, folder / "checkpoint")
    damage = damage_document(folder / "checkpoint", choices)
    if kind == "document":
        shutil.copy(seed, folder / "checkpoint" / "model.onnx")
        model = ("--model_path", "checkpoint/model.onnx")
        yield "infer", damage, run_command(("infer", *model, *_TEXT), folder)
        return
    yield "export", damage, run_command(("export", "--model_name", "checkpoint", "--output", "out.onnx"), folder)


def _table(tried: list[Tried]) -> list[str]:
    by_command: dict[str, list[Ended]] = defaultdict(list)
    for result in tried:
        by_command[result.command].append(result.ended)
    lines = [
        "| command | cases | exit code 0 | 1 | 2 | other, tracebacks, no limit | median s | longest s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for command, ended in by_command.items():
        codes = Counter(one.code for one in ended if not one.fault)
        seconds = [one.seconds for one in ended]
        faulty = sum(bool(one.fault) for one in ended)
        figures = f"{codes[0]} | {codes[1]} | {codes[2]} | {faulty} | {statistics.median(seconds):.2f}"
        lines.append(f"| `{command}` | {len(ended)} | {figures} | {max(seconds):.1f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
