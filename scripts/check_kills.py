"""Kill commands at every call that changes a name, and look at what is there then and after the next run.

`python scripts/check_kills.py` compiles a stand-in for rename, link, unlink, symlink, mkdir and their kin with gcc,
runs each command that writes several files over an older set, and ends the process by SIGKILL at the first, the
second, … of these calls below the folder of the output. The same is done with a disk that is full, or read-only, from
that call on. Then the same command runs again, with a clock that has been set back by a year. The table is printed as
Markdown for docs/concepts/files.md. Exit code 1: files of two sets were mixed, or something hidden was left. For Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.isolation import Isolation, Outcome

HERE = Path(__file__).resolve().parent
YEAR_S = 365 * 24 * 3600
FAULTS = {"killed": 0, "disk full": errno.ENOSPC, "read-only": errno.EROFS}
_MOST_CALLS, _RACES = 200, 3
_SLOW_TO_IMPORT = (
    "onnxtool.export.run",
    "onnxtool.optimize.run",
    "onnxtool.training.artifacts.generation",
    "onnxtool.encoding",
    "onnxtool.benchmarking",
    "onnxruntime",
    "torch.onnx._internal.exporter._core",
    "transformers.models.distilbert.modeling_distilbert",
    "transformers.models.bert.modeling_bert",
)
_ISOLATION = Isolation(_SLOW_TO_IMPORT)  # starts its first process once the stand-in is made
_LONGEST_S = 600
Files = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A command that writes a set, and how to run it on the older and on the newer input.

    Attributes:
        old: its arguments for the set that is there; new: for the one that replaces it.
        output: the file that names the set, in the folder of the case; a folder for a corpus.
    """

    name: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    output: str
    is_corpus: bool = False


def run(folder: Path, arguments: Sequence[str], *, number: int = -1, fault: int = 0, late: bool = False) -> Outcome:
    """Run a command in a process of its own, in which the names below `folder` are watched."""
    with tempfile.TemporaryDirectory() as logs:
        return _ISOLATION.run(_command, Path(logs, "log"), _LONGEST_S, str(folder), [*arguments], number, fault, late)


def _command(folder: str, arguments: list[str], number: int, fault: int, late: bool) -> None:
    from onnxtool.cli import run_arguments

    os.chdir(folder)
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.names_set_clock_back(ctypes.c_long(YEAR_S if late else 0))
    library.names_arm(os.fsencode(folder), ctypes.c_long(number), fault, -1)
    code = run_arguments(arguments)
    library.names_arm(b"", ctypes.c_long(-1), 0, -1)
    sys.exit(code)


def emptied(folder: Path) -> Path:
    """Make a folder that is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def visible(folder: Path) -> Files:
    """Return the digest of each file that is not hidden."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def hidden(folder: Path) -> list[str]:
    """Return what is hidden."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".*")]


def judge(found: Files, old: Files, new: Files) -> str:
    """Return `old`, `new` or `mixed`. Times in files differ from run to run: what is not old is new."""
    if found == old:
        return "old"
    changed = [name for name in new if new[name] != old.get(name)]
    return "new" if set(found) == set(new) and all(found[name] != old.get(name) for name in changed) else "mixed"


def state_of(case: Case, place: Path, old: Files, new: Files) -> str:
    """Return what is there: also `journal` for a mixed set of which a journal tells."""
    from onnxtool.model_file.commits import unfinished_set_of

    state = judge(visible(place), old, new)
    if state != "mixed":
        return state
    if case.is_corpus:  # a folder without a manifest is not whole
        records, manifest = place / f"{case.output}.parts" / "run.json", place / f"{case.output}.manifest.json"
        return "manifest" if records.is_file() or not manifest.is_file() else "mixed"
    names = [name for name in {**old, **new} if unfinished_set_of(place / name) is not None]
    return "journal" if names else "mixed"


def check(case: Case, scratch: Path) -> int:
    """Print the rows of a case, one for each fault, and return how many of its runs went wrong."""
    start, place = time.monotonic(), scratch / "new"
    origin = emptied(scratch / "old")
    if (ended := run(origin, case.old)).exit_code:
        raise SystemExit(f"{case.name}: the first run failed: {' '.join(case.old)}\n{ended.stderr}")
    old = visible(origin)
    forced = [*case.new, "--force"]

    def prepare() -> None:
        shutil.copytree(origin, emptied(place), dirs_exist_ok=True)

    prepare()
    if (ended := run(place, forced)).exit_code:
        raise SystemExit(f"{case.name}: the second run failed: {' '.join(case.new)}\n{ended.stderr}")
    new = visible(place)
    wrong = 0
    for title, fault in FAULTS.items():
        states, after, left, runs = Counter[str](), Counter[str](), 0, 0
        for number in range(_MOST_CALLS):
            prepare()
            code = run(place, forced, number=number, fault=fault).exit_code
            if code == 0:
                break
            runs += 1
            states[state_of(case, place, old, new)] += 1
            # A corpus goes on by the same command; the others need --force, and say so once they have cleaned up.
            again = run(place, case.new, late=bool(number % 2)).exit_code
            end = judge(visible(place), old, new)
            after[end] += 1
            bad = bool(hidden(place)) or end == "mixed" or again not in (0, 1) or code not in (-9, 1)
            left += bool(hidden(place))
            wrong += bad
            if bad:
                print(f"{case.name}, {title} at call {number}: {end}, exit {code} then {again}", file=sys.stderr)
                print(*hidden(place), sep="\n", file=sys.stderr)
        wrong += states["mixed"]
        told = states["journal"] + states["manifest"]
        counts = (runs, states["old"], states["new"], told, states["mixed"], f"{after['old']} / {after['new']}", left)
        print(f"| {' | '.join((case.name, title, *map(str, counts)))} |", flush=True)
    print(f"{case.name}: {time.monotonic() - start:.0f} s, {wrong} wrong", file=sys.stderr)
    return wrong


def race(case: Case, scratch: Path) -> int:
    """Run both commands at once, and return how often files of both were there in the end, or something hidden."""
    wrong = 0
    sets = []
    for arguments in (case.old, case.new):
        run(emptied(scratch / "alone"), arguments)
        sets.append(visible(scratch / "alone"))
    place = scratch / "race"
    for _ in range(_RACES):
        emptied(place)
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(run, place, [*arguments, "--force"]) for arguments in (case.old, case.new)]
            codes = [one.result().exit_code for one in both]
        end = judge(visible(place), *sets)
        if end == "mixed" or hidden(place) or not {*codes} <= {0, 1} or 0 not in codes:
            print(f"{case.name}, two at once: {end}, exits {codes}", *hidden(place), file=sys.stderr)
            wrong += 1
    return wrong


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


def make_cases(folder: Path, wanted: Sequence[str]) -> list[Case]:
    """Make what commands work on in `folder`, and return the commands that are `wanted`; () is all."""
    from consumer_models import build_model

    from onnxtool.export.targets import TARGET_NAMES

    cases, models = [], {}
    checkpoints = {}
    for kind in ("distil", "splade"):
        old = build_model(kind, folder / "checkpoints")
        checkpoints[kind] = (old, changed_copy(old, folder / "changed" / kind))
    for age, place in zip(("old", "new"), checkpoints["distil"], strict=True):
        models[age] = folder / "models" / age / "distil.onnx"
        run(
            emptied(folder / "trial"), f"export --model_name {place} --output {models[age]} --no_verify --force".split()
        )

    def both(name: str, output: str, command: str, **words: Sequence[object]) -> None:
        """Add a command for two inputs: each of `words` is what stands in it, for the older and for the newer."""
        old, new = (command.format(**{key: one[age] for key, one in words.items()}).split() for age in (0, 1))
        cases.append(Case(name, tuple(old), tuple(new), output, is_corpus=name == "corpus"))

    for target in ("", *TARGET_NAMES):
        output = "folder" if target else "model.onnx"
        title = f"export --target {target}" if target else "export"
        if target == "plain" or (wanted and title not in wanted):
            continue
        for pair in checkpoints.values():
            command = f"{title} --model_name {{place}} --output {output} --no_verify"
            if run(emptied(folder / "trial"), command.format(place=pair[0]).split()).exit_code == 0:
                both(title, output, command, place=pair)
                break
        else:
            print(f"no checkpoint here fits --target {target}", file=sys.stderr)
    files = [models[age] for age in ("old", "new")]
    optimize = "optimize --model_path {file} --output model.onnx"
    both("optimize", "model.onnx", optimize, file=files)
    both("optimize int8", "model.onnx", f"{optimize} --precision int8 --max_error 0.5", file=files)
    both("artifacts", "set/training_model.onnx", "artifacts --model_path {file} --output set", file=files)
    timing = "infer --benchmark --model_path {file} --runs 1 --warmup 0 --batch_size 1 --sequence_length 8"
    both("benchmark report", "report.json", f"{timing} --format json --output report.json", file=files)
    texts = [folder / f"{age}.jsonl" for age in ("old", "new")]
    for path in texts:
        lines = (json.dumps({"id": str(number), "contents": f"{path.stem} text {number}"}) for number in range(12))
        path.write_text("\n".join(lines) + "\n")
    shards = f"infer --model_path {models['old']} --input {{text}} --output vectors/ --shard_size 4"
    both("corpus", "vectors", shards, text=texts)
    return [case for case in cases if not wanted or case.name in wanted]


def main() -> int:
    """Print the table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, with commas between them")
    arguments = parser.parse_args()
    columns = "old set | new set | new, to finish | mixed | then old / new | left"
    print(f"| command | at each call | runs | {columns} |\n|---|---|{'---:|' * 7}", flush=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        library = folder / "names.so"
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "kills" / "names.c"), "-ldl"]
        subprocess.run(command, check=True)
        os.environ |= {"LD_PRELOAD": str(library), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        for case in make_cases(folder, [name for name in arguments.only.split(",") if name]):
            wrong += check(case, folder)
            mixed = race(case, folder)
            print(f"{case.name}, two runs at once: {mixed} of {_RACES} wrong", file=sys.stderr)
            wrong += mixed
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
