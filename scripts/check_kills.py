"""Interrupt commands at random, and check how they end, what they leave, and what another run writes.

`python scripts/check_kills.py` runs each command that writes several files over an older set, and ends it by SIGKILL:
every other time at a random moment, else at a random one of the calls that change a name (rename, link, unlink, mkdir
and the like, counted by a library that gcc compiles). Then the set has to be the old one, the new one, or incomplete,
without the file that names it and without files of both; and the same command has to write the new one and leave
nothing hidden. The table is in docs/concepts/files.md.

With `--signals`, commands get SIGINT, SIGTERM or SIGHUP, in the process or in its group, once, twice or two different
ones. A command has to end as if nothing had happened, or with 128 and the number of the first signal (of two at once,
of either) and one line that says so; with the old or the new set (or a corpus without a manifest), and with nothing
hidden, temporary or running. Interpreters that a signal ends before they run onnxtool are counted apart.

Exit code 1: something was otherwise. For Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from consumer_models import build_model
from harness.pages import print_head, print_row
from make_collection import make_collection

HERE = Path(__file__).resolve().parent
_LONGEST_S = 600
_MANIFEST = "vectors.manifest.json"
_CORPUS = "--model_path {model} --input {texts} --output vectors/ --force"
_REPORT = "--output report.json --format json --force"
# Name: the file by which its set is read, the last one to be there (empty for one that states all digests); arguments.
COMMANDS = {
    "export": ("model.onnx", "export --model_name {checkpoint} --output model.onnx --force"),
    "export --target sentence-transformers": (
        "folder/onnx/model.onnx",
        "export --target sentence-transformers --model_name {checkpoint} --output folder --force",
    ),
    "optimize": (
        "model.onnx",
        "optimize --model_path {model} --output model.onnx --precision int8 --max_error 0.5 --force",
    ),
    "artifacts": (
        "set/training_model.onnx",
        "artifacts --model_path {model} --output set --train embeddings.LayerNorm.bias --force",
    ),
    "encode": (_MANIFEST, f"encode run {_CORPUS} --shard_size 4 --processes 1 --workers 1"),
    "release": ("", "release --config {release} --output out --force"),
}
# More for signals: workers, and commands that write one file or nothing.
OTHER_COMMANDS = {
    "encode": (_MANIFEST, f"encode run {_CORPUS} --shard_size 1 --processes 2 --workers 1"),
    "infer": (_MANIFEST, f"infer {_CORPUS} --shard_size 1"),
    "evaluate": ("", f"evaluate --model_path {{model}} --data {{data}} {_REPORT}"),
    "stats": ("", "stats {model}"),
    "verify": ("", "verify {model} {checkpoint}"),
    "benchmark": ("", f"infer --benchmark --model_path {{model}} --duration 1 {_REPORT}"),
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED = re.compile(r"error: interrupted( by SIG(TERM|HUP))?\n")
_AT_ONCE_S = 0.1  # the kernel keeps no order of pending signals
Files = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        key: the file by which its set is read; see COMMANDS.
        old: its arguments for the existing set.
        new: its arguments for the set that replaces it.
    """

    name: str
    key: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Signals to send, the seconds after the start and after each other, and whether they go to the process group."""

    numbers: tuple[signal.Signals, ...]
    after_s: float
    gap_s: float = 0.0
    to_group: bool = True


@dataclass(frozen=True)
class Ending:
    """Exit code and stderr of a command, and the temporary files and processes that it left."""

    code: int
    stderr: str
    seconds: float
    temporary: tuple[str, ...]
    is_running: bool


def run(
    place: Path, arguments: Sequence[str], plan: Plan | None = None, extra: Mapping[str, str] | None = None
) -> Ending:
    """Run a command in the folder `place`, with extra variables, and send the planned signals."""
    command = [sys.executable, "-m", "onnxtool", *arguments]
    start = time.monotonic()
    with tempfile.TemporaryFile() as stderr, tempfile.TemporaryDirectory() as temporary:
        variables = {**os.environ, "TMPDIR": temporary, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(extra or {})}
        process = subprocess.Popen(
            command, cwd=place, env=variables, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        if plan is not None:
            time.sleep(plan.after_s)
            for number in plan.numbers:
                with suppress(ProcessLookupError):
                    (os.killpg if plan.to_group and process.poll() is None else os.kill)(process.pid, number)
                time.sleep(plan.gap_s)
        code = process.wait(_LONGEST_S)
        seconds = time.monotonic() - start
        while (running := is_running(process.pid)) and time.monotonic() < start + seconds + 2:
            time.sleep(0.02)
        stderr.seek(0)
        text = stderr.read().decode(errors="replace")
        return Ending(code, text, seconds, tuple(path.name for path in Path(temporary).iterdir()), running)


def is_running(group: int) -> bool:
    """Return whether a process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def emptied(folder: Path) -> Path:
    """Make a folder that is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def visible(folder: Path) -> Files:
    """Return the digest of each file that is not hidden."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            digests[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def hidden(folder: Path) -> list[str]:
    """Return the names of staged files and folders."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".*.partial")]


def judge(files: Files, old: Files, new: Files, key: str | None = None) -> str:
    """Return `old`, `new`, `incomplete` (a set without its `key`) or `mixed`.

    Times in files differ from run to run: what is not old is new. Records of an encoding run may be next to a set.
    """
    if key is not None:
        files = {name: digest for name, digest in files.items() if ".parts/" not in name}
    if files == old:
        return "old"
    differs = [name for name in files if old.get(name) != new.get(name)]
    is_old = any(files[name] == old.get(name) for name in differs)
    is_new = any(files[name] != old.get(name) for name in differs)
    if set(files) == set(new) and not is_old:
        return "new"
    if key is None or key in files:
        return "mixed"
    # The records of a corpus without a manifest say which of its files are current.
    return "incomplete" if key == _MANIFEST or not (is_old and is_new) else "mixed"


def run_both(case: Case, origin: Path, place: Path, extra: Mapping[str, str]) -> tuple[Files, Files, Ending]:
    """Write the old set into `origin` and the new one over a copy in `place`; return them, and how the latter ended."""
    for folder, arguments in ((emptied(origin), case.old), (place, case.new)):
        shutil.copytree(origin, emptied(place), dirs_exist_ok=True)
        if (ending := run(folder, arguments, extra=extra)).code:
            raise SystemExit(f"{case.name} fails by itself: {' '.join(arguments)}\n{ending.stderr}")
    return visible(origin), visible(place), ending


def check_kills(case: Case, scratch: Path, count: int, draw: random.Random) -> int:
    """Print the row of a case, and return how many of `count` kills went wrong."""
    origin, place, library, calls = (scratch / name for name in ("old", "new", "names.so", "calls"))
    variables = {"LD_PRELOAD": str(library), "NAMES_FOLDER": str(place), "NAMES_COUNT": str(calls), "NAMES_CALL": "-1"}
    old, new, whole = run_both(case, origin, place, variables)
    num_calls, states, wrong, left = calls.stat().st_size, Counter[str](), 0, 0
    for number in range(count):
        shutil.copytree(origin, emptied(place), dirs_exist_ok=True)
        plan, call = (
            (Plan((signal.SIGKILL,), draw.uniform(0, whole.seconds)), -1)
            if number % 2
            else (None, draw.randrange(num_calls))
        )
        run(place, case.new, plan, {**variables, "NAMES_CALL": str(call)})
        states[state := judge(visible(place), old, new, case.key)] += 1
        left += bool(hidden(place))
        again = run(place, case.new)
        end = judge(visible(place), old, new)
        if state == "mixed" or again.code or end != "new" or hidden(place):
            wrong += 1
            moment = f"{plan.after_s:.2f} of {whole.seconds:.2f} s" if plan else f"call {call} of {num_calls}"
            print(f"{case.name}, killed at {moment}: {state}, then {again.code}, {end}", file=sys.stderr)
            print(*hidden(place), again.stderr, sep="\n", file=sys.stderr)
    counts = (states[state] for state in ("old", "new", "incomplete", "mixed"))
    print_row(case.name, count, num_calls, *counts, left, wrong)
    return wrong + race(case, scratch)


def race(case: Case, scratch: Path) -> int:
    """Run both commands at once; return whether files of both were there in the end, or something hidden."""
    sets = []
    for arguments in (case.old, case.new):
        run(emptied(scratch / "alone"), arguments)
        sets.append(visible(scratch / "alone"))
    place = emptied(scratch / "race")
    with ThreadPoolExecutor() as pool:
        codes = [ending.code for ending in pool.map(run, (place, place), (case.old, case.new))]
    end = judge(visible(place), sets[0], sets[1])
    is_wrong = end == "mixed" or bool(hidden(place)) or not {*codes} <= {0, 1} or 0 not in codes
    if is_wrong:
        print(f"{case.name}, two at once: {end}, exits {codes}", *hidden(place), file=sys.stderr)
    return int(is_wrong)


def draw_plan(draw: random.Random, seconds: float) -> Plan:
    """Return a plan for a command that takes so many seconds."""
    pair, repeated = tuple(draw.sample(SIGNALS, 2)), (draw.choice(SIGNALS),) * draw.choice((1, 1, 3))
    numbers = pair if draw.random() < 0.3 else repeated
    return Plan(numbers, draw.uniform(0, seconds), draw.choice((0.0, 0.01, 0.2)), draw.random() < 0.5)


def fault(ending: Ending, plan: Plan, state: str, staged: Sequence[str]) -> str:
    """Return what is wrong; `early` if the interpreter was ended before it ran onnxtool, "" if nothing is."""
    firsts = plan.numbers if plan.gap_s < _AT_ONCE_S else plan.numbers[:1]
    if left := [*staged, *ending.temporary]:
        return f"left {left}"
    if ending.is_running:
        return "a process runs on"
    if state == "mixed":
        return "mixed output"
    errors = [line for line in ending.stderr.splitlines() if line.startswith(("error", "hint"))]
    is_noisy = "Traceback" in ending.stderr or "Exception" in ending.stderr
    if ending.code == 0:
        return "errors, and 0" if errors or is_noisy else ""
    is_early = ending.code in (*(-number for number in firsts), 1) and "onnxtool/cli/__init__" not in ending.stderr
    if state == "old" and is_early and not errors:
        return "early" if ending.code < 0 or "KeyboardInterrupt" in ending.stderr else "1 without an error"
    if ending.code not in [128 + number for number in firsts]:
        return f"exit code {ending.code}"
    if len(errors) != 1 or is_noisy or not _ENDED.fullmatch(f"{ending.stderr.splitlines()[-1]}\n"):
        return "not one line"
    return ""


def check_signals(case: Case, scratch: Path, count: int, draw: random.Random) -> int:
    """Print the row of a case, and return how many of `count` runs ended otherwise."""
    origin, place = scratch / "old", scratch / "new"
    old, new, whole = run_both(case, origin, place, {})
    results, codes, slowest_s = Counter[str](), Counter[int](), 0.0
    for _ in range(count):
        shutil.copytree(origin, emptied(place), dirs_exist_ok=True)
        plan = draw_plan(draw, whole.seconds)
        ending = run(place, case.new, plan)
        state = judge(visible(place), old, new, case.key if case.key == _MANIFEST else None)
        problem = fault(ending, plan, state, hidden(place))
        codes[ending.code] += 1
        slowest_s = max(slowest_s, ending.seconds - plan.after_s)
        results["early" if problem == "early" else "wrong" if problem else "right"] += 1
        if problem not in ("", "early"):
            print(
                f"{case.name}: {problem}; exit {ending.code} after {plan}\n{ending.stderr}", file=sys.stderr, flush=True
            )
    exits = ", ".join(f"{code}: {times}" for code, times in sorted(codes.items()))
    print_row(case.name, count, exits, results["early"], f"{slowest_s:.1f}", results["wrong"])
    return results["wrong"]


def changed_copy(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint with other weights, and another line in its configurations."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    for path in folder.rglob("*.safetensors"):
        save_file({name: array * 1.01 for name, array in load_file(path).items()}, path, {"format": "pt"})
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**content, "remark": "new"}))
    return folder


def make_inputs(folder: Path, checkpoint: Path) -> dict[str, Path]:
    """Make in `folder` what commands work on, and return the paths by their names in COMMANDS."""
    names = {"model": "distil.onnx", "texts": "texts.jsonl", "release": "release.toml"}
    inputs = {"checkpoint": checkpoint, **{kind: folder / name for kind, name in names.items()}}
    run(folder, ("export", "--model_name", str(checkpoint), "--output", str(inputs["model"])))
    rows = ({"id": str(number), "contents": f"{folder.name} text {number}"} for number in range(12))
    inputs["texts"].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    inputs["release"].write_text(f'checkpoint = "{checkpoint}"\noutput = "out"\nprecisions = ["fp32"]\n')
    return inputs


def make_cases(folder: Path, commands: Mapping[str, tuple[str, str]], names: Iterable[str]) -> list[Case]:
    """Make older and newer inputs in `folder`, and return the commands of these names with them."""
    checkpoint = build_model("distil", folder / "checkpoints")
    (checkpoint / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    data = folder / "data"
    if "evaluate" in names:
        make_collection(data, num_documents=60, num_queries=8)
    old = make_inputs(emptied(folder / "one"), checkpoint)
    new = make_inputs(emptied(folder / "two"), changed_copy(checkpoint, folder / "changed" / "distil"))
    return [
        Case(name, key, *(tuple(text.format(**inputs, data=data).split()) for inputs in (old, new)))
        for name, (key, text) in commands.items()
        if name in names
    ]


def main() -> int:
    """Print the table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", action="store_true", help="send signals that a command handles, to more commands")
    parser.add_argument("--count", type=int, default=60, help="how often, over all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="names of commands")
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311
    for number in SIGNALS:  # a shell may ignore them for what it starts in the background, and commands respect that
        signal.signal(number, signal.SIG_DFL)
    commands = {**COMMANDS, **(OTHER_COMMANDS if options.signals else {})}
    columns = "kills | calls | old set | new set | incomplete | mixed | staged files left"
    if options.signals:
        columns = "runs | exit codes | before onnxtool | longest end s"
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        library = [
            "gcc",
            "-shared",
            "-fPIC",
            "-O2",
            "-o",
            str(folder / "names.so"),
            str(HERE / "kills" / "names.c"),
            "-ldl",
        ]
        subprocess.run(library, check=True)
        cases = make_cases(folder, commands, options.only or commands)
        print_head(["command", *columns.split(" | "), "wrong"])
        for case in cases:
            check = check_signals if options.signals else check_kills
            wrong += check(case, folder, -(-options.count // len(cases)), draw)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
