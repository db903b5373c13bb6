"""Send signals at random moments to every command, and look at how it ends and what is there then.

`python scripts/check_signals.py` runs each command to its end, and then again and again over an older output, with
SIGINT, SIGTERM or SIGHUP to the process or to its group, once, twice or two different ones. It has to end as if nothing
had happened or with 128 and the number of the first signal (of two at once, of either), one line that says so, the
older or the newer output (of a corpus, one without a manifest, which the same command goes on with) and nothing hidden,
temporary or running.
Interpreters that a signal ends before they run onnxtool are counted apart. The table is Markdown. Exit code 1:
something ended otherwise. For Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from check_kills import emptied, hidden, judge, visible

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED = re.compile(r"error: interrupted( by SIG(TERM|HUP))?\n")
_AT_ONCE_S = 0.1  # the kernel keeps no order of signals that wait


@dataclass(frozen=True)
class Ending:
    """How a command has ended: its exit code, what it wrote to stderr, and the processes of its group that are left."""

    code: int
    stderr: str
    is_running: bool
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Which signals are sent, how many seconds after the start and after each other, and whether to the group."""

    numbers: tuple[signal.Signals, ...]
    after_s: float
    gap_s: float
    to_group: bool


def run(place: Path, arguments: Sequence[str], plan: Plan | None = None) -> Ending:
    """Run a command in `place`, whose folder `tmp` is for temporary files, and send what is planned."""
    temporary = emptied(place.parent / "tmp")
    variables = {**os.environ, "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "onnxtool", *arguments]
    start = time.monotonic()
    with open(place.parent / "stderr", "w+b") as said:  # noqa: PTH123
        process = subprocess.Popen(
            command, cwd=place, env=variables, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )
        if plan is not None:
            time.sleep(plan.after_s)
            for number in plan.numbers:
                with suppress(ProcessLookupError):
                    (os.killpg if plan.to_group and process.poll() is None else os.kill)(process.pid, number)
                time.sleep(plan.gap_s)
        code = process.wait(120)
        seconds = time.monotonic() - start
        deadline = time.monotonic() + 2
        while (running := is_running(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        said.seek(0)
        return Ending(code, said.read().decode(errors="replace"), running, seconds)


def is_running(group: int) -> bool:
    """Return whether a process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def fault(ending: Ending, plan: Plan, place: Path, old: dict[str, str], new: dict[str, str]) -> str:
    """Say what is wrong; `early` where the interpreter was ended before it ran onnxtool, "" where nothing is."""
    firsts = plan.numbers if plan.gap_s < _AT_ONCE_S else plan.numbers[:1]
    left = [*hidden(place), *map(str, (place.parent / "tmp").iterdir())]
    if left:
        return f"left {left}"
    if ending.is_running:
        return "a process runs on"
    state = judge(visible(place), old, new)
    if state == "mixed" and ((place / "v.manifest.json").is_file() or not (place / "v").is_dir()):
        return "mixed output"
    errors = [line for line in ending.stderr.splitlines() if line.startswith(("error", "hint"))]
    is_noisy = "Traceback" in ending.stderr or "Exception" in ending.stderr
    if ending.code == 0:
        return "errors, and 0" if errors or is_noisy else ""
    is_early = ending.code in (*(-one for one in firsts), 1) and "onnxtool/cli/__init__" not in ending.stderr
    if state == "old" and is_early and not errors:
        return "early" if ending.code < 0 or "KeyboardInterrupt" in ending.stderr else "1 without an error"
    if ending.code not in [128 + one for one in firsts]:
        return f"exit code {ending.code}"
    if len(errors) != 1 or is_noisy or not _ENDED.fullmatch(f"{ending.stderr.splitlines()[-1]}\n"):
        return "not one line"
    return ""


def make_cases(folder: Path) -> dict[str, tuple[str, ...]]:
    """Make what commands work on in `folder`, and return their arguments."""
    from consumer_models import build_model
    from make_collection import make_collection

    splade, encoder = (build_model(name, folder / "checkpoints") for name in ("splade", "distil"))
    (encoder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    data, release, m, e = (folder / name for name in ("data", "release.toml", "m.onnx", "e.onnx"))
    make_collection(data, num_documents=60, num_queries=8)
    release.write_text(f'checkpoint = "{encoder}"\noutput = "out"\nprecisions = ["fp32"]\n')
    export = f"export --model_name {splade} --head none --output"
    for command in (f"{export} {m}", f"export --model_name {encoder} --output {e}"):
        run(folder, command.split())
    corpus = f"--model_path {e} --input {data}/corpus.jsonl --output v/ --shard_size 8 --force"
    report = "--output r.json --format json --force"
    commands = {
        "export": f"{export} m.onnx --force",
        "optimize": f"optimize --model_path {m} --output m.onnx --force",
        "artifacts": f"artifacts --model_path {m} --output set --force --train bert.embeddings.LayerNorm.bias",
        "infer": f"infer {corpus}",
        "encode": f"encode run --processes 2 --workers 1 {corpus}",
        "evaluate": f"evaluate --model_path {e} --data {data} {report}",
        "stats": f"stats {m}",
        "verify": f"verify {m} {splade}",
        "benchmark": f"infer --benchmark --model_path {m} --duration 1 {report}",
        "release": f"release --config {release} --output out --force",
    }
    return {name: tuple(command.split()) for name, command in commands.items()}


def check(name: str, arguments: Sequence[str], scratch: Path, count: int, drawn: random.Random) -> int:
    """Print the row of a command, and return how many of `count` runs ended otherwise."""
    origin, place = (emptied(scratch / name) for name in ("old", "new"))
    before = run(origin, arguments)
    if before.code:
        raise SystemExit(f"{name} fails by itself: {before.stderr}")
    for path in origin.rglob("*.onnx"):  # another output than the new one, of the same names
        path.write_bytes(path.read_bytes() + b"\x7a\x00")  # field 15 of a model, empty
    old = visible(origin)
    shutil.copytree(origin, place, dirs_exist_ok=True)
    usual = run(place, arguments)
    new = visible(place)
    found, ends = Counter[str](), Counter[int]()
    slowest = 0.0
    for _ in range(count):
        shutil.copytree(origin, emptied(place), dirs_exist_ok=True)
        two, one = tuple(drawn.sample(SIGNALS, 2)), (drawn.choice(SIGNALS),) * drawn.choice((1, 1, 3))
        numbers = two if drawn.random() < 0.3 else one
        plan = Plan(numbers, drawn.uniform(0, usual.seconds), drawn.choice((0.0, 0.01, 0.2)), drawn.random() < 0.5)
        ending = run(place, arguments, plan)
        wrong = fault(ending, plan, place, old, new)
        ends[ending.code] += 1
        slowest = max(slowest, ending.seconds - plan.after_s)
        found["early" if wrong == "early" else "wrong" if wrong else "right"] += 1
        if wrong not in ("", "early"):
            print(f"{name}: {wrong}; exit {ending.code} after {plan}\n{ending.stderr}", file=sys.stderr, flush=True)
    codes = ", ".join(f"{code}: {times}" for code, times in sorted(ends.items()))
    row = (name, count, codes, found["early"], f"{slowest:.1f}", found["wrong"])
    print(f"| {' | '.join(map(str, row))} |", flush=True)
    return found["wrong"]


def main() -> int:
    """Print the table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=300, help="how many runs, over all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="names of commands")
    arguments = parser.parse_args()
    drawn = random.Random(arguments.seed)  # noqa: S311
    for number in SIGNALS:  # a shell may ignore them for what it starts in the background, and commands respect that
        signal.signal(number, signal.SIG_DFL)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        cases = make_cases(scratch)
        wanted = arguments.only or list(cases)
        print(
            "| command | runs | exit codes | before onnxtool | longest end s | wrong |\n|---|---:|---|---:|---:|---:|",
            flush=True,
        )
        for command in wanted:
            wrong += check(command, cases[command], scratch, -(-arguments.signals // len(wanted)), drawn)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
