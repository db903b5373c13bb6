"""Try one model type for one task: make it, export it, judge what came out."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.tasks import find_task

from survey.decoding import judge_decoding
from survey.judging import judge
from survey.optimizing import judge_optimized, optimize, record_cases, together
from survey.processes import BUG, Outcome, Workers


@dataclass(frozen=True)
class Trial:
    """A model type and what it is to do."""

    task: str
    model_type: str

    @property
    def key(self) -> str:
        """How results call it."""
        return f"{self.task}/{self.model_type}"


def make(task: str, model_type: str, folder: str) -> dict[str, Any]:
    """Make the checkpoint; return its facts, or `reason` where it cannot be made and run."""
    try:
        return vars(make_checkpoint(find_task(task), model_type, Path(folder)))
    except NotRunnableError as error:
        return {"reason": str(error)}


def export(folder: str, task: str, output: str) -> None:
    """Run `onnxtool export` as its entry point does.

    Raises:
        SystemExit: always, with the exit code of the command.
    """
    import onnxtool.cli

    sys.argv = [
        *("onnxtool", "export", "--model_name", folder, "--task", task, "--output", output),
        *("--format", "json", "--quiet", "--force"),
    ]
    onnxtool.cli.run()
    sys.exit(0)


def try_type(trial: Trial, known: dict[str, Any], workers: Workers, work_dir: Path) -> dict[str, Any]:
    """Return `runnable` (facts, or the reason why not) and the verdict `onnxtool`, where `known` has none.

    A type that is known to be runnable stays so where it cannot be made again, for want of time, memory or a package.
    """
    folder = work_dir / trial.task / trial.model_type
    checkpoint = folder / "checkpoint"
    result = dict(known)
    if "onnxtool" in result or result.get("runnable", {}).get("reason"):
        return result
    made = _make(trial, checkpoint, workers, folder)
    result.setdefault("runnable", made)
    if not made.get("reason"):
        result["onnxtool"] = _try_export(trial, checkpoint, folder, workers)
        shutil.rmtree(checkpoint, ignore_errors=True)
    return result


def try_precisions(
    trial: Trial, precisions: list[str], known: dict[str, Any], workers: Workers, work_dir: Path
) -> dict[str, Any]:
    """Return `known` with a verdict on the optimized file of each precision; those in `known` stay as they are.

    Without a right export there is nothing to optimize. The checkpoint is made and exported once more.
    """
    optimized = dict(known.get("optimized", {}))
    missing = [precision for precision in precisions if precision not in optimized]
    if not missing or known.get("onnxtool", {}).get("verdict") != "right":
        return known
    folder = work_dir / trial.task / trial.model_type
    exported, cases = folder / "exported" / "model.onnx", folder / "exported" / "cases"
    reason = _export_again(trial, folder, exported, cases, workers)
    for precision in missing:
        verdict = {"verdict": "not exported", "reason": reason}
        optimized[precision] = verdict if reason else _try_precision(precision, folder, exported, cases, workers)
    shutil.rmtree(folder, ignore_errors=True)
    return {**known, "optimized": optimized}


def _export_again(trial: Trial, folder: Path, exported: Path, cases: Path, workers: Workers) -> str:
    """Export a type, and record what its optimized file will be asked; return why not, empty where it is done."""
    checkpoint = folder / "checkpoint"
    made = _make(trial, checkpoint, workers, folder)
    if made.get("reason"):
        return f"made again: {made['reason']}"
    shutil.rmtree(exported.parent, ignore_errors=True)
    exported.parent.mkdir(parents=True)
    outcome = workers.run(export, folder, "export", str(checkpoint), trial.task, str(exported))
    if not exported.exists():
        return f"exported again: {_why_ended(outcome, workers)}"
    recorded = workers.run(record_cases, folder, "record", str(checkpoint), _files(exported), str(cases))
    if recorded.value is None:
        shutil.rmtree(cases, ignore_errors=True)
        return f"asked again: {_why_ended(recorded, workers)}"
    return ""


def _try_precision(precision: str, folder: Path, exported: Path, cases: Path, workers: Workers) -> dict[str, Any]:
    """Optimize every graph of an export, and judge them together."""
    # Beside the exported graph, as the tokenizer to calibrate with lies there.
    outputs = {role: str(exported.with_name(f"{role}-{precision}.onnx")) for role in _files(exported)}
    seconds, reports = 0.0, []
    for role, file in _files(exported).items():
        outcome = workers.run(optimize, folder, f"{precision}-{role}", file, outputs[role], precision)
        seconds += outcome.seconds
        if outcome.value is None:
            return {"verdict": "crashed", "reason": _why_ended(outcome, workers), "seconds": round(seconds, 1)}
        if "error" in outcome.value:
            return {"verdict": "refused", "reason": outcome.value["error"], "seconds": round(seconds, 1)}
        reports.append(outcome.value)
    tried = together(reports) | {"seconds": round(seconds, 1)}
    judged = workers.run(judge_optimized, folder, f"{precision}-judge", outputs, str(cases), precision)
    verdict = judged.value or {"right": False, "reason": f"the judge: {_why_ended(judged, workers)}"}
    for output in outputs.values():
        for written in Path(output).parent.glob(f"{Path(output).name}*"):
            written.unlink()
    name = "right" if verdict["right"] else "wrong"
    return {**tried, "verdict": name, "reason": verdict["reason"], "judge": verdict}


def without_folders(result: dict[str, Any], *folders: Path) -> dict[str, Any]:
    """Return a result whose messages name files without these folders, which are of no meaning elsewhere."""
    text = json.dumps(result)
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    stripped: dict[str, Any] = json.loads(text)
    return stripped


def _make(trial: Trial, checkpoint: Path, workers: Workers, folder: Path) -> dict[str, Any]:
    outcome = workers.run(make, folder, "make", trial.task, trial.model_type, str(checkpoint))
    if outcome.value is not None:
        made: dict[str, Any] = outcome.value
        return made
    if outcome.exit_code is not None and outcome.exit_code > 0:
        raise RuntimeError(f"the maker itself failed on {trial.key}: {outcome.stderr[-2000:]}")
    return {"reason": _why_ended(outcome, workers)}


def _try_export(trial: Trial, checkpoint: Path, folder: Path, workers: Workers) -> dict[str, Any]:
    output = folder / "onnxtool" / "model.onnx"
    shutil.rmtree(output.parent, ignore_errors=True)
    output.parent.mkdir(parents=True)
    outcome = workers.run(export, folder, "onnxtool", str(checkpoint), trial.task, str(output))
    report = _report(outcome)
    tried = {
        "seconds": round(outcome.seconds, 1),
        "exit_code": outcome.exit_code,
        "way": " ".join(str(report[name]) for name in ("exporter", "attention") if report.get(name)),
        "fixed_axes": report.get("fixed_axes") or {},
    }
    if files := _files(output):
        judges = judge_decoding if find_task(trial.task).has_cache else judge
        judged = workers.run(judges, folder, "onnxtool-judge", str(checkpoint), files)
        verdict = judged.value or {"right": False, "reason": f"the judge: {_why_ended(judged, workers)}"}
        tried |= {"verdict": "right" if verdict["right"] else "wrong", "reason": verdict["reason"], "judge": verdict}
    else:
        crashed = outcome.exit_code is None or outcome.exit_code < 0 or outcome.exit_code == BUG
        tried |= {"verdict": "crashed" if crashed else "refused", "reason": _why_ended(outcome, workers)}
    shutil.rmtree(output.parent, ignore_errors=True)
    return tried


def _files(output: Path) -> dict[str, str]:
    """Return the graphs that were written, by what they are for: `model`, and `encoder` where one goes before it."""
    candidates = {"model": output, "encoder": output.with_name(f"{output.stem}-encoder{output.suffix}")}
    return {role: str(path) for role, path in candidates.items() if path.exists()}


def _report(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON document on stdout; libraries may have printed something before it."""
    lines = outcome.stdout.splitlines()
    start = next((number for number, line in enumerate(lines) if line == "{"), len(lines))
    try:
        report = json.loads("\n".join(lines[start:]))
    except json.JSONDecodeError:
        return {}
    return report if isinstance(report, dict) else {}


def _why_ended(outcome: Outcome, workers: Workers) -> str:
    if outcome.exit_code is None:
        return f"not done after {workers.limits.time_s:.0f} s"
    if outcome.exit_code < 0:
        return f"ended by signal {-outcome.exit_code}"
    lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    if not starts:
        return (lines or ["no message"])[-1][:400]
    message = itertools.takewhile(lambda line: not line.startswith("hint:"), lines[starts[0] :])
    return " ".join(message).removeprefix("error:").strip()[:600]
