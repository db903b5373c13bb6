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
import contextlib
import copy
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))
_VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
_VARIABLES["OMP_WAIT_POLICY"] = "PASSIVE"

import onnx  # noqa: E402
from google.protobuf.message import Message  # noqa: E402
from zoo.checkpoint import make_checkpoint  # noqa: E402
from zoo.tasks import find_task  # noqa: E402

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model  # noqa: E402
from tests.hostile.documents import ABSURD, damage_document  # noqa: E402
from tests.hostile.gadgets import GADGETS, splice  # noqa: E402
from tests.hostile.seeds import by_hand  # noqa: E402
from tests.hostile.surroundings import KINDS, Case  # noqa: E402

MAX_SECONDS, MAX_EXPORT_SECONDS = 20, 90  # of processor time; an export runs PyTorch on all cases as well
_PATIENCE = 3  # times as much of wall time
_COUNTS = {"model": 5_000, "document": 1_000, "checkpoint": 200, **dict.fromkeys(KINDS, 500)}
# What may stand ahead of an error.
_LOG = re.compile(r"\d{4}-\d\d-\d\d .*|note: .*|hint: .*|warning: .*|.* …( [\d:]+ left)?|")
MAX_BYTES = 1 << 30  # of memory that a process may have for itself
MAX_STDERR = 100_000
EXPORTED = (
    ("fill-mask", "bert"),
    ("text-generation-with-past", "llama"),
    ("image-classification", "mobilenet_v1"),
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
_NAMES = ("", "x", "y", "a" * 5_000, "\x1b[31mred", "../../up", "\u202eright", "a\nb", "💥", "input_ids", "%s%n{0}")
_OPERATORS = ("Add", "MatMul", "Reshape", "Loop", "If", "Attention", "SequenceAt", "Shape", "Nonsense", "ai.onnx")
_PATTERNS = (b"\xff", b"\x00\x00\x00\x80", b"\x00" * 7 + b"\x80", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (below 0 the signal that ended it), seconds, and what it wrote to stderr."""

    code: int
    seconds: float
    stderr: str
    is_late: bool = False
    changed: str = ""  # a file that the command had no business with
    is_mute: bool = False  # without stderr

    @property
    def fault(self) -> str:
        """Say what a user could not accept; empty where the command ended as it should."""
        if self.is_late:
            return f"took more than its time: {self.seconds:.0f} s of the processor, or waited"
        if self.code not in (0, 1, 2):
            return f"ended with {self.code}"
        if "Traceback" in self.stderr:
            return "printed a traceback"
        lines = self.stderr.splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error:")]
        if len(errors) != (self.code != 0) and not self.is_mute:
            return f"ended with {self.code} and {len(errors)} errors"
        if ahead := [line for line in lines[: sum(errors)] if not _LOG.fullmatch(line)]:
            return f"printed {ahead[0][:80]!r} ahead of its error"
        return f"wrote or removed {self.changed}" if self.changed else ""


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


def damaged(seeds: Sequence[Path], choices: random.Random) -> tuple[str, bytes]:
    """Return what was done to a seed, and the bytes of the model."""
    seed = choices.choice(seeds)
    model = onnx.load(seed)
    done = []
    for _ in range(choices.choice((1, 1, 2, 4))):
        if choices.random() < 0.25:
            name = choices.choice(list(GADGETS))
            values = [value.name for value in model.graph.input]
            values += [name for node in model.graph.node for name in node.output if name]
            splice(model, name, choices.choice(values or ["x"]), f"h{choices.randrange(10**6)}_")
            done.append(name)
        else:
            done.append(_change_field(model, choices))
    data = bytearray(model.SerializeToString())
    if choices.random() < 0.05:
        done.append("bytes")
        for _ in range(choices.choice((1, 4, 30))):
            data[choices.randrange(len(data))] = choices.randrange(256)
    return f"{seed.stem}: {', '.join(done)}", bytes(data)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type:
            for inner in value if descriptor.is_repeated else [value]:
                yield from _messages(inner)


def _change_field(model: onnx.ModelProto, choices: random.Random) -> str:
    """Change one field of one message anywhere in a model, and return where."""
    by_type = defaultdict(list)
    for message in _messages(model):
        by_type[message.DESCRIPTOR.name].append(message)
    message = choices.choice(by_type[choices.choice(list(by_type))])
    descriptor = choices.choice(message.DESCRIPTOR.fields)
    name, kind = descriptor.name, descriptor.message_type
    same = by_type.get(kind.name) if kind else None

    def another(old: Any = None) -> Any:
        if kind is None:
            return _value(descriptor, model, choices, old)
        return copy.deepcopy(choices.choice(same)) if same else None

    if descriptor.is_repeated:
        held = [copy.deepcopy(one) for one in getattr(message, name)]
        action = choices.choice(("drop", "shuffle", "double", "add", "clear"))
        if action == "shuffle":
            choices.shuffle(held)
        elif action == "clear":
            held = []
        elif action == "drop" and held:
            held.pop(choices.randrange(len(held)))
        elif action == "double" and held:
            held.append(copy.deepcopy(choices.choice(held)))
        elif (new := another()) is not None:
            held.insert(choices.randrange(len(held) + 1), new)
        message.ClearField(name)
        with contextlib.suppress(ValueError):  # a number that the field cannot hold
            getattr(message, name).extend(held)
    elif choices.random() < 0.25 or (new := another(getattr(message, name))) is None:
        message.ClearField(name)
    elif kind:
        getattr(message, name).CopyFrom(new)
    else:
        with contextlib.suppress(ValueError):
            setattr(message, name, new)
    return f"{message.DESCRIPTOR.name}.{name}"


def _value(descriptor: Any, model: onnx.ModelProto, choices: random.Random, old: Any = None) -> Any:
    """Return a value of the field's type that it should not have at most places."""
    kinds = type(descriptor)
    if descriptor.type == kinds.TYPE_STRING:
        values = [name for node in model.graph.node for name in (*node.input, *node.output)]
        return choices.choice([*_NAMES, *_OPERATORS, choices.choice(values or ["x"])])
    if descriptor.type == kinds.TYPE_BYTES:
        size = len(old or b"") or 8
        pattern = choices.choice(_PATTERNS)
        return choices.choice([(pattern * size)[:size], (old or b"")[: size // 2], b"", b"\xff\xfe", b"a" * 10_000])
    if descriptor.type in (kinds.TYPE_FLOAT, kinds.TYPE_DOUBLE):
        return choices.choice([0.0, -1.0, float("nan"), float("inf"), 1e38])
    return choices.choice([*ABSURD, *range(24), 99])


def run_command(case: Case, folder: Path) -> Ended:
    """Run the command of a case in `folder`, within limits of time and memory."""
    most = MAX_EXPORT_SECONDS if case.command[0] == "export" else MAX_SECONDS
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_DATA: MAX_BYTES, resource.RLIMIT_CPU: most, **case.limits}

    def limit() -> None:
        for number in case.closed:
            os.close(number)
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))

    home, temporary = folder / ".home", folder / ".tmp"
    home.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    given = {
        **os.environ,
        **_VARIABLES,
        "PYTHONPATH": str(_ROOT),
        "HOME": str(home),
        "TMPDIR": str(temporary),
        **case.variables,
    }
    before, start = _contents(folder), time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "onnxtool", *case.command], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, preexec_fn=limit,
            env={name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
        while True:
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - start > _PATIENCE * most:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.01)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError):  # what it left running
            os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        text = errors.read(MAX_STDERR).decode(errors="replace")
    wall, busy = time.monotonic() - start, used.ru_utime + used.ru_stime
    is_late = wall > _PATIENCE * most or busy > most
    is_mute = 2 in case.closed or resource.RLIMIT_FSIZE in case.limits  # stderr is a file here
    return Ended(code, busy, text, is_late, _unasked(case, code, before, _contents(folder)), is_mute)


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file in a folder."""
    found = {str(path.relative_to(folder)): (path.is_dir(), path.lstat()) for path in folder.rglob("*")}
    return {
        name: (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
        for name, (is_folder, status) in found.items()
    }


def _unasked(case: Case, code: int, before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return a file that a command changed, and should not have; its output is its own where it succeeds."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or name.startswith((".home/.cache/onnxtool", "out-cache", "out.parts")):
            continue
        is_its_own = name.startswith("out") and (code == 0 or case.command[:2] == ("encode", "run"))
        is_left_by_a_run = ".partial" in name and name in before and name not in after
        if not (is_its_own or is_left_by_a_run):
            return name
    return ""


def try_case(kind: str, number: int, seeds: list[Path], given: argparse.Namespace) -> list[tuple[str, Ended]]:
    """Make a case, run its commands, and keep it, and tell, where one of them ends as none may."""
    choices = random.Random(f"{given.seed} {kind} {number}")  # noqa: S311  a case, not a secret
    with tempfile.TemporaryDirectory(prefix="case-", dir=given.work_dir) as name:
        folder = Path(name, "case")
        folder.mkdir()
        results = list(_try(kind, choices, folder, seeds))
        kept = given.work_dir / "faults" / f"{kind}-{number}"
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
        damage, data = damaged(seeds, choices)
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
    for command, one in tried:
        by_command[command].append(one)
    print("| command | cases | exit code 0 | 1 | 2 | other, tracebacks, no limit | median s | longest s |")
    print("|---|---|---|---|---|---|---|---|")
    for command, ended in by_command.items():
        codes = Counter(one.code for one in ended if not one.fault)
        seconds = [one.seconds for one in ended]
        faulty = sum(bool(one.fault) for one in ended)
        figures = f"{codes[0]} | {codes[1]} | {codes[2]} | {faulty} | {statistics.median(seconds):.2f}"
        print(f"| `{command}` | {len(ended)} | {figures} | {max(seconds):.1f} |")


def main() -> int:
    """Run the cases, print the table, and return 1 where a command ended as none may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=list(_COUNTS), default=list(_COUNTS), help="what is damaged")
    parser.add_argument("--count", type=int, help="cases of each kind; else 5,000 models, 1,000 documents, and so on")
    parser.add_argument("--only", type=int, metavar="N", help="the case of this number alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work_dir", type=Path, default=_ROOT / "models" / "fuzz")
    given = parser.parse_args()
    os.environ |= _VARIABLES
    seeds = make_seeds(given.work_dir / "seeds")
    shutil.rmtree(given.work_dir / "faults", ignore_errors=True)
    counts = {kind: _COUNTS[kind] if given.count is None else given.count for kind in given.kinds}
    cases = [
        (kind, number) for kind, count in counts.items() for number in range(count) if given.only in (None, number)
    ]
    tried: list[tuple[str, Ended]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ThreadPoolExecutor(given.jobs)
    try:
        running = [pool.submit(partial(try_case, *case, seeds, given)) for case in cases]
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
