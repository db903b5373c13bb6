"""Run graphs that others wrote through `stats` and `optimize`, and count what is right, wrong, refused and why.

`python scripts/check_backend_suite.py` takes the onnx package's backend cases (`--only node`, `--only larger`) and
graphs in the shapes of public fusion tests (`--only fusions`, also through onnxruntime's own optimizers). Right means
that onnxruntime gives the same outputs for the result as for the file as it is, on the case's own inputs and on their
elements in reversed order, and those that the case expects. A case that onnxruntime does not run counts apart. Each
case has a process of its own, whose death or delay is counted. `--keep FILE` goes on where an interrupted run ended.
Exit code 1: a result is wrong, an error is no error of onnxtool's, or a process died.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}

import onnxscript.rewriter  # noqa: F401  loaded once, for all cases
from backend_suite.cases import Case, backend_cases
from backend_suite.fusions import fusion_cases
from backend_suite.judging import MODES, PEERS, Judgement, judge

KINDS = ("node", "larger", "fusions")
VERDICTS = ("right", "wrong", "refused", "raw error", "died", "not run")
BAD = ("wrong", "raw error", "died")
_TITLES = {
    "stats": "`stats`",
    "no_verify": "`optimize --no_verify`",
    "verified": "`optimize`",
    "samples": "`optimize --sample_inputs`",
}
_EXAMPLES = 3


@dataclass
class _Child:
    """A process that judges a case in some modes, and the file that it writes to."""

    case: Case
    modes: list[str]
    pid: int
    started: float
    record: Path
    folder: tempfile.TemporaryDirectory[str]


def main() -> int:
    """Judge the cases that the command line asks for, print the tables, and return 1 where one is bad."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--match", default="", metavar="TEXT", help="cases whose names hold this text")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=MODES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=60, help="the most that a case may take in one mode")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="the judgements as JSON Lines; those in it are done")
    parser.add_argument("--bad_only", action="store_true", help="list no case that is refused or not run")
    arguments = parser.parse_args()
    kept = arguments.keep.read_text(encoding="utf-8").splitlines() if arguments.keep and arguments.keep.exists() else []
    judgements = [Judgement(**json.loads(line)) for line in kept]
    done = {(one.case, one.kind, one.mode) for one in judgements}
    waiting = []
    for kind in arguments.only:
        peers = PEERS if kind == "fusions" else ()
        for case in fusion_cases() if kind == "fusions" else backend_cases(kind):
            modes = [mode for mode in (*arguments.modes, *peers) if (case.name, kind, mode) not in done]
            if modes and arguments.match in case.name:
                waiting.append((case, modes))
    gc.freeze()  # what all children share stays shared
    start = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for judgement in _judged(waiting, arguments.jobs, arguments.seconds):
            judgements.append(judgement)
            if arguments.keep:
                with arguments.keep.open("a", encoding="utf-8") as file:
                    print(json.dumps(judgement.to_json()), file=file)
            if judgement.verdict in BAD and judgement.mode in MODES:
                print(f"{judgement.verdict}: {judgement.case} ({judgement.mode}): {judgement.reason}", file=sys.stderr)
    print(f"{len(waiting)} cases in {time.monotonic() - start:.0f} s", file=sys.stderr)
    _print_tables(judgements, bad_only=arguments.bad_only)
    return int(any(one.verdict in BAD for one in judgements if one.mode in MODES))


def _judged(waiting: list[tuple[Case, list[str]]], jobs: int, seconds: float) -> Iterator[Judgement]:
    """Judge each case in a fork of this process, `jobs` at a time; one that dies goes on behind the mode it died in."""
    todo, running = waiting[::-1], list[_Child]()
    try:
        while todo or running:
            while todo and len(running) < jobs:
                running.append(_start(*todo.pop()))
            time.sleep(0.005)
            for child in list(running):
                ended, status = os.waitpid(child.pid, os.WNOHANG)
                reason = f"ended by {_ending(status)}" if ended and status else ""
                if not ended and time.monotonic() - child.started > seconds * (1 + len(child.modes)):
                    os.killpg(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
                    ended, reason = child.pid, f"took more than {seconds:.0f} s"
                if not ended:
                    continue
                running.remove(child)
                lines = [json.loads(line) for line in child.record.read_text(encoding="utf-8").splitlines()]
                child.folder.cleanup()
                yield from (Judgement(**line["judgement"]) for line in lines if line["judgement"])
                if reason:
                    last = lines[-1]["mode"] if lines else "reference"
                    if last == "reference":  # what onnxruntime does with the file as it is
                        yield from _all(child, "not run", f"onnxruntime {reason}")
                    else:
                        yield Judgement(child.case.name, child.case.kind, last, "died", reason)
                        if rest := child.modes[child.modes.index(last) + 1 :]:
                            todo.append((child.case, rest))
    finally:
        for child in running:
            os.killpg(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.folder.cleanup()


def _all(child: _Child, verdict: str, reason: str) -> Iterator[Judgement]:
    for mode in child.modes:
        yield Judgement(child.case.name, child.case.kind, mode, verdict, reason)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _start(case: Case, modes: list[str]) -> _Child:
    folder = tempfile.TemporaryDirectory(prefix="backend-suite-")
    record = Path(folder.name, "record.jsonl")
    record.touch()
    sys.stdout.flush()
    if pid := os.fork():
        return _Child(case, modes, pid, time.monotonic(), record, folder)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    try:
        with record.open("a", encoding="utf-8", buffering=1) as file:
            for mode, judgement in judge(case, modes, Path(folder.name)):
                print(json.dumps({"mode": mode, "judgement": judgement and judgement.to_json()}), file=file)
    except BaseException:  # noqa: BLE001  an exit code is all that the parent can be told
        os._exit(70)
    os._exit(0)


def _print_tables(judgements: Sequence[Judgement], *, bad_only: bool) -> None:
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in judgements)]
    print("| cases | command | " + " | ".join(VERDICTS) + " |")
    print("|---|---|" + "---:|" * len(VERDICTS))
    for kind in kinds:
        for mode in (*MODES, *PEERS):
            counts = Counter(one.verdict for one in judgements if (one.kind, one.mode) == (kind, mode))
            if counts:
                cells = " | ".join(f"{counts[verdict]:,}" for verdict in VERDICTS)
                print(f"| {kind} | {_TITLES.get(mode, mode)} | {cells} |")
    attentions = (
        {case.name: case.attentions for case in fusion_cases() if case.attentions} if "fusions" in kinds else {}
    )
    for mode in (*MODES[1:], *PEERS):
        found = [one for one in judgements if one.kind == "fusions" and one.mode == mode and one.case in attentions]
        if found:
            fused = sum(one.verdict == "right" and one.attentions >= attentions[one.case] for one in found)
            left = [one.case for one in found if one.attentions < attentions[one.case]]
            print(f"\n{_TITLES.get(mode, mode)}: attention fused, and right, in {fused} of {len(found)} graphs", end="")
            print(f"; not in {', '.join(left)}" if left and mode in MODES else "")
    reasons: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in judgements:
        if one.reason and (one.verdict in BAD or not bad_only):
            reasons[one.mode, one.verdict, one.reason].append(f"{one.case}")
    if reasons:
        print("\n| command | verdict | cases | reason | such as |\n|---|---|---:|---|---|")
    for (mode, verdict, reason), names in sorted(reasons.items(), key=lambda item: (item[0][:2], -len(item[1]))):
        shown = names if verdict in BAD else names[:_EXAMPLES]
        print(f"| {_TITLES.get(mode, mode)} | {verdict} | {len(names)} | {reason} | {', '.join(shown)} |")


if __name__ == "__main__":
    sys.exit(main())
