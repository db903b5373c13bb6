"""Give every option of every command values that it may not take: each call ends with 0, 1 or 2, and with one error.

`python scripts/check_options.py --count 2000` forks a call at a time from a process that has the libraries loaded. A
value is empty, huge, negative, NaN, of another type, no text, a folder, a device, a path with a detour, or one of the
command's own inputs by several names, for outputs with --force. Faults are tracebacks, other exit codes, inputs that
changed, and files that a failed call left; each is printed with its command. Every call comes from --seed and its
number, so that one can be repeated: `--only 17`. Prints the figures, and returns 1 if there is a fault. Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click

from onnxtool.cli import run_arguments
from onnxtool.cli.choices import PathType
from onnxtool.cli.commands import RUNNABLE
from onnxtool.cli.entry import find_command
from tests.encoding.corpora import dense_model, make_texts, write_corpus
from tests.evaluation.collections import random_texts, write_beir

# What a call has besides the options that it tries.
BASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "export": (("model", "--dry_run"),),
    "optimize": (("model.onnx", "--no_timing"), ("model.onnx", "--dry_run")),
    "infer": (
        ("model.onnx", "--text", "a cat", "--text", "a dog"),
        ("model.onnx", "--benchmark", "--runs", "2", "--warmup", "0", "--batch_size", "1", "--sequence_length", "4"),
        ("model.onnx", "--input", "corpus.jsonl", "--output", "out/"),
    ),
    "encode run": (("model.onnx", "--input", "corpus.jsonl", "--output", "out"),),
    "encode part": (("model.onnx", "--input", "corpus.jsonl", "--output", "out"),),
    "encode merge": (("--output", "out"),),
    "encode status": (("--output", "out"),),
    "verify": (("model.onnx", "copy.onnx"),),
    "stats": (("model.onnx",), ("model.onnx", "copy.onnx")),
    "evaluate": (("model.onnx", "--data", "data", "--workers", "1"),),
    "artifacts": (("model.onnx", "--loss", "none"), ("model.onnx", "--loss", "MSELoss", "--dry_run")),
    "release": (("--config", "release.toml", "--dry_run"), ("--check", "data")),
    "env": ((),),
    "completion": (("bash",),),
}
INPUTS = ("model.onnx", "copy.onnx", "corpus.jsonl", "data/corpus.jsonl", "data/qrels/test.tsv", "release.toml", "data")
SPELLINGS = ("{}", "./{}", "gone/../{}", "data/../{}", "link-{}", "hard-{}")
VALUES = (
    *("", " ", "0", "-1", "-0", "1", "3.5", "1e308", "1e999", "nan", "-inf", "infinity", "0x10", "٣", "9" * 30),
    *("true", "None", "[]", "{}", "a,b", "1,8", ",", "=", "a=b", ":", "x:1,-2", "*", "(", "9" * 5000, "a" * 100_000),
    *("a\0b", "\ud800", "é\u202e\n\x1b[31m", "-", "--force", ".", "..", "/", "/dev/null", "/dev/zero", "data"),
    *("missing/x", "a/../b/x", "a/../b/x.json", "x.npy", "x.npz", "x.parquet", "x.faiss", "s3://b/x", "nope://x"),
    *("https://x/y", "BeIR/nothing", "bm25", "cpu", "auto", "openvino?x", "P@0", "ndcg@10<0", "num_nodes>1", "2/7"),
)
MODULES = (
    *("transformers", "onnxtool.export.run", "onnxtool.optimize.run", "onnxtool.infer.run", "onnxtool.encoding.run"),
    *("onnxtool.agreement", "onnxtool.evaluation.run", "onnxtool.release.run", "onnxtool.benchmarking.measurement"),
    "onnxtool.training.artifacts.preparation",
)
MEMORY_BYTES = 3 << 30


class Call(NamedTuple):
    """A call, with what it tries for the figures."""

    words: list[str]
    tried: str


def make_call(choices: random.Random) -> Call:
    """Choose a command, one or two of its options, and their values."""
    name = choices.choice(list(RUNNABLE))
    options = [one for one in find_command(name).params if isinstance(one, click.Option)]
    words = [*name.split(), *choices.choice(BASES[name])]
    tried = []
    for option in choices.sample(options, k=min(len(options), choices.choice((1, 1, 2)))):
        spelling = choices.choice([*option.opts, *option.secondary_opts])
        tried.append(f"{name} {spelling}")
        words.append(spelling)
        if option.is_flag or option.count:
            continue
        choices_of_type = list(getattr(option.type, "choices", ()))
        value = choices.choice([*VALUES, *choices_of_type])
        if isinstance(option.type, PathType) and choices.random() < 0.6:
            value = choices.choice(SPELLINGS).format(choices.choice(INPUTS))
        words.append(value)
        if getattr(option.type, "writes", "") and any("--force" in one.opts for one in options):
            words.append("--force")
    return Call(words, ", ".join(tried))


def make_template(folder: Path) -> None:
    """Write the inputs of all calls."""
    folder.mkdir()
    dense_model(folder)
    shutil.copy(folder / "model.onnx", folder / "copy.onnx")
    write_corpus(folder / "corpus.jsonl", make_texts(20))
    write_beir(folder / "data", random_texts(20, 4))
    (folder / "release.toml").write_text('checkpoint = "model"\noutput = "released"\n')


def run_call(call: Call, folder: Path, seconds: float) -> tuple[int | None, str]:
    """Run a call in a forked process; return its exit code, None if it took too long, and its stderr."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            _become(folder, errors.fileno())
            code = 70
            try:
                code = run_arguments(call.words)
            except BaseException:  # noqa: BLE001  what Python would print
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        end = time.monotonic() + seconds
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.002)
        if ended == (0, 0):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    return (None if ended == (0, 0) else os.waitstatus_to_exitcode(ended[1])), text


def _become(folder: Path, errors: int) -> None:
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(errors, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    places = {name: str(folder.with_name(name)) for name in ("home", "tmp")}
    os.environ |= {"HOME": places["home"], "TMPDIR": places["tmp"], "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    tempfile.tempdir = places["tmp"]


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file, and an entry for each folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def _name_of(call: Call) -> str:
    return next(name for name in RUNNABLE if call.words[: len(name.split())] == name.split())


def fault_of(call: Call, code: int | None, text: str, before: dict[str, str], after: dict[str, str]) -> str:
    """Say what a user could not accept; empty if the call ended as it should."""
    read = {Path(word).parts[0] for words in BASES[_name_of(call)] for word in words if word in call.words}
    changed = [name for name, digest in before.items() if after.get(name) != digest and Path(name).parts[0] in read]
    if changed:
        return f"changed {changed}"
    made = [name for name in after if name not in before]
    if code is None:
        return ""
    if code not in (0, 1, 2) or "Traceback" in text:
        return f"ended with {code}"
    is_report = "gate failed" in text or "verification failed" in text or "splits to do" in text  # which is written
    if code and "error: " not in text and not is_report:
        return f"ended with {code} without an error"
    after_word = dict(itertools.pairwise(call.words))
    kept = [after_word.get(word) for word in ("--progress_log", "--metrics")]  # which say that a run failed
    is_resumed = call.words[0] == "encode" or "out/" in call.words  # what was encoded is kept for the next run
    left = [
        name for name in made if ".partial" in name or (code and not is_report and not is_resumed and name not in kept)
    ]
    return f"left {left} with {code}" if left else ""


def main() -> int:
    """Run the calls, print the figures, and return 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="the call of this number alone, with its stderr")
    parser.add_argument("--seconds", type=float, default=20, help="the time of a call")
    given = parser.parse_args()
    for module in MODULES:  # so that a forked call need not
        importlib.import_module(module)
    codes: Counter[str] = Counter()
    tried: set[str] = set()
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        template = Path(name, "template")
        make_template(template)
        for number in range(given.count) if given.only is None else (given.only,):
            call = make_call(random.Random(f"{given.seed} {number}"))  # noqa: S311  a case, not a secret
            root = Path(name, "case")
            shutil.copytree(template, root / "work")
            for place in ("home", "tmp"):
                (root / place).mkdir()
            for one in ("model.onnx", "copy.onnx", "corpus.jsonl", "release.toml"):
                (root / "work" / f"link-{one}").symlink_to(one)
                os.link(root / "work" / one, root / "work" / f"hard-{one}")
            before = contents(root / "work")
            code, text = run_call(call, root / "work", given.seconds)
            fault = fault_of(call, code, text, before, contents(root / "work"))
            if code is not None and (left := contents(root / "tmp")):
                fault = fault or f"left {list(left)} in TMPDIR"
            if fault:
                faults += 1
                print(f"{number}: {[word[:80] for word in call.words]}: {fault}\n{text[-600:]}", flush=True)
            elif given.only is not None:
                print(call.words, code, text)
            codes[str(code)] += 1
            tried |= set(call.tried.split(", "))
            shutil.rmtree(root)
    ended = ", ".join(f"{count} with {code}" for code, count in sorted(codes.items()))
    print(f"{sum(codes.values())} calls of {len(tried)} options: {ended}; {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
