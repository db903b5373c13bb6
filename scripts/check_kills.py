"""Kill commands at random, and look at what is there then and after the same command has run again.

`python scripts/check_kills.py` runs each command that writes several files over an older set, and ends the process by
SIGKILL: every other time at a random moment, else at a random one of the calls that change a name (rename, link,
unlink, mkdir and their kin, counted by a stand-in that gcc compiles). Then the set has to be the old one, the new one,
or incomplete, without the file that names it and without files of both; and the same command has to write the new one
and leave nothing hidden. The table is printed as Markdown for docs/concepts/files.md. Exit code 1: something was
otherwise. For Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.isolation import Isolation, Outcome

HERE = Path(__file__).resolve().parent
_SLOW_TO_IMPORT = (
    "onnxtool.export.run",
    "onnxtool.optimize.run",
    "onnxtool.training.artifacts.generation",
    "onnxtool.encoding",
    "onnxruntime",
    "torch.onnx._internal.exporter._core",
    "transformers.models.distilbert.modeling_distilbert",
    "transformers.models.bert.modeling_bert",
)
_ISOLATION = Isolation(_SLOW_TO_IMPORT)  # starts its first process once the stand-in is made
_LONGEST_S = 600.0
Files = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A command that writes a set, and how to run it on the older and on the newer input.

    Attributes:
        old: its arguments for the set that is there; new: for the one that replaces it.
        key: the file by which the set is read, the last one to be there; empty for one that states all digests.
    """

    name: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    key: str


def run(folder: Path, arguments: Sequence[str], *, number: int = -1, time_s: float = _LONGEST_S) -> Outcome:
    """Run a command in a process of its own, and kill it at a call that changes a name below `folder`, or at a time."""
    with tempfile.TemporaryDirectory() as logs:
        return _ISOLATION.run(_command, Path(logs, "log"), time_s, str(folder), [*arguments], number)


def _command(folder: str, arguments: list[str], number: int) -> int:
    from onnxtool.cli import run_arguments

    os.chdir(folder)
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.names_counted.restype = ctypes.c_long
    library.names_arm(os.fsencode(folder), ctypes.c_long(number))
    if code := run_arguments(arguments):
        sys.exit(code)
    return int(library.names_counted())


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
    """Return what was staged."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".*.partial")]


def judge(found: Files, old: Files, new: Files, key: str | None = None) -> str:
    """Return `old`, `new`, `incomplete` (one without its `key`) or `mixed`.

    Times in files differ from run to run: what is not old is new. Records of an encoding run may be next to a set.
    """
    if key is not None:
        found = {name: digest for name, digest in found.items() if ".parts/" not in name}
    if found == old:
        return "old"
    differs = [name for name in found if old.get(name) != new.get(name)]
    is_old = any(found[name] == old.get(name) for name in differs)
    is_new = any(found[name] != old.get(name) for name in differs)
    if set(found) == set(new) and not is_old:
        return "new"
    if key is None or key in found:
        return "mixed"
    # What belongs to a corpus without a manifest is in its records.
    return "incomplete" if key.endswith(".manifest.json") or not (is_old and is_new) else "mixed"


def check(case: Case, scratch: Path, count: int, drawn: random.Random) -> int:
    """Print the row of a case, and return how many of `count` kills went wrong."""
    place, forced = scratch / "new", [*case.new, "--force"]
    origin = emptied(scratch / "old")
    if (ended := run(origin, case.old)).exit_code:
        raise SystemExit(f"{case.name}: the first run failed: {' '.join(case.old)}\n{ended.stderr}")
    shutil.copytree(origin, emptied(place), dirs_exist_ok=True)
    if (ended := run(place, forced)).exit_code:
        raise SystemExit(f"{case.name}: the second run failed: {' '.join(case.new)}\n{ended.stderr}")
    old, new, seconds, calls = visible(origin), visible(place), ended.seconds, int(ended.value)
    states, wrong, left = Counter[str](), 0, 0
    for number in range(count):
        shutil.copytree(origin, emptied(place), dirs_exist_ok=True)
        at_call, time_s = (-1, drawn.uniform(0, seconds)) if number % 2 else (drawn.randrange(calls), _LONGEST_S)
        run(place, forced, number=at_call, time_s=time_s)
        states[state := judge(visible(place), old, new, case.key)] += 1
        left += bool(hidden(place))
        again = run(place, forced)
        end = judge(visible(place), old, new)
        if state == "mixed" or again.exit_code or end != "new" or hidden(place):
            wrong += 1
            where = f"call {at_call} of {calls}" if at_call >= 0 else f"{time_s:.2f} of {seconds:.2f} s"
            print(f"{case.name}, killed at {where}: {state}, then {again.exit_code}, {end}", file=sys.stderr)
            print(*hidden(place), again.stderr, sep="\n", file=sys.stderr)
    counts = (count, calls, *(states[state] for state in ("old", "new", "incomplete", "mixed")), left, wrong)
    print(f"| {' | '.join((case.name, *map(str, counts)))} |", flush=True)
    return wrong + race(case, scratch)


def race(case: Case, scratch: Path) -> int:
    """Run both commands at once; return whether files of both were there in the end, or something hidden."""
    sets = []
    for arguments in (case.old, case.new):
        run(emptied(scratch / "alone"), arguments)
        sets.append(visible(scratch / "alone"))
    place = emptied(scratch / "race")
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(run, place, [*arguments, "--force"]) for arguments in (case.old, case.new)]
        codes = [one.result().exit_code for one in both]
    end = judge(visible(place), sets[0], sets[1])
    is_wrong = end == "mixed" or bool(hidden(place)) or not {*codes} <= {0, 1} or 0 not in codes
    if is_wrong:
        print(f"{case.name}, two at once: {end}, exits {codes}", *hidden(place), file=sys.stderr)
    return int(is_wrong)


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


def make_cases(folder: Path) -> list[Case]:
    """Make what commands work on in `folder`, and return the commands."""
    from consumer_models import build_model

    old = build_model("distil", folder / "checkpoints")
    (old / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    given: dict[str, tuple[Path, ...]] = {"place": (old, changed_copy(old, folder / "changed" / "distil"))}
    given |= {name: tuple(folder / age / file for age in ("one", "two")) for name, file in (
        ("model", "distil.onnx"), ("texts", "texts.jsonl"), ("release", "release.toml")
    )}  # fmt: skip
    for age, place in enumerate(given["place"]):
        emptied(given["model"][age].parent)
        run(folder, f"export --model_name {place} --output {given['model'][age]} --no_verify".split())
        lines = [json.dumps({"id": str(number), "contents": f"{age} text {number}"}) for number in range(12)]
        given["texts"][age].write_text("\n".join(lines) + "\n")
        given["release"][age].write_text(f'checkpoint = "{place}"\noutput = "out"\nprecisions = ["fp32"]\n')
    corpus = f"--model_path {given['model'][0]} --input {{texts}} --output vectors --shard_size 4"
    commands = {
        "export": ("model.onnx", "export --model_name {place} --output model.onnx --no_verify"),
        "export --target sentence-transformers": (
            "folder/onnx/model.onnx",
            "export --target sentence-transformers --model_name {place} --output folder --no_verify",
        ),
        "optimize": (
            "model.onnx",
            "optimize --model_path {model} --output model.onnx --precision int8 --max_error 0.5",
        ),
        "artifacts": ("set/training_model.onnx", "artifacts --model_path {model} --output set"),
        "encode": ("vectors.manifest.json", f"encode run {corpus} --processes 1 --workers 1"),
        "release": ("", "release --config {release} --output out"),
    }
    ages = [{name: both[age] for name, both in given.items()} for age in (0, 1)]
    return [
        Case(name, tuple(text.format(**ages[0]).split()), tuple(text.format(**ages[1]).split()), key)
        for name, (key, text) in commands.items()
    ]


def main() -> int:
    """Print the table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="how many, over all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="names of commands")
    arguments = parser.parse_args()
    drawn = random.Random(arguments.seed)  # noqa: S311
    print(
        "| command | kills | calls | old set | new set | incomplete | mixed | staged files left | wrong |", flush=True
    )
    print(f"|---|{'---:|' * 8}", flush=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        library = folder / "names.so"
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "kills" / "names.c"), "-ldl"]
        subprocess.run(command, check=True)
        os.environ |= {"LD_PRELOAD": str(library), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        cases = [case for case in make_cases(folder) if not arguments.only or case.name in arguments.only]
        for case in cases:
            wrong += check(case, folder, -(-arguments.kills // len(cases)), drawn)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
