"""Try one model type for one task: make it, export it with each tool, judge what came out."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoo.tasks import find_task

from survey.decoding import judge_decoding
from survey.exports import export_with_onnxtool, export_with_transformers, make
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


def try_type(
    trial: Trial, tools: list[str], known: dict[str, Any], workers: Workers, work_dir: Path, optimum: Path | None
) -> dict[str, Any]:
    """Return `runnable` (facts, or the reason why not) and one verdict for each tool, those in `known` as they are.

    A type that is known to be runnable stays so: where it cannot be made again, for want of time, memory or a package,
    its missing tools stay missing.
    """
    folder = work_dir / trial.task / trial.model_type
    checkpoint = folder / "checkpoint"
    result = dict(known)
    missing = [tool for tool in tools if tool not in result]
    if "runnable" not in result or (missing and not result["runnable"].get("reason") and not checkpoint.exists()):
        made = _make(trial, checkpoint, workers, folder)
        result.setdefault("runnable", made)
        if made.get("reason"):
            return result
    if result["runnable"].get("reason"):
        return result
    for tool in missing:
        result[tool] = _try_tool(tool, trial, checkpoint, folder, workers, optimum)
    shutil.rmtree(checkpoint, ignore_errors=True)
    return result


def try_precisions(
    trial: Trial, precisions: list[str], known: dict[str, Any], workers: Workers, work_dir: Path, *, keep: bool = False
) -> dict[str, Any]:
    """Return `known` with a verdict on the optimized file of each precision; those in `known` stay as they are.

    Without a right export there is nothing to optimize. The checkpoint is made and exported once more, unless an
    earlier call has kept the files.
    """
    optimized = dict(known.get("optimized", {}))
    missing = [precision for precision in precisions if precision not in optimized]
    if not missing or known.get("onnxtool", {}).get("verdict") != "right":
        return known
    folder = work_dir / trial.task / trial.model_type
    exported, cases = folder / "exported" / "model.onnx", folder / "exported" / "cases"
    reason = "" if cases.exists() else _export_again(trial, folder, exported, cases, workers)
    for precision in missing:
        verdict = {"verdict": "not exported", "reason": reason}
        optimized[precision] = verdict if reason else _try_precision(precision, folder, exported, cases, workers)
    if not keep:
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
    outcome = workers.run(export_with_onnxtool, folder, "export", str(checkpoint), trial.task, str(exported))
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


def _try_tool(
    tool: str, trial: Trial, checkpoint: Path, folder: Path, workers: Workers, optimum: Path | None
) -> dict[str, Any]:
    output = folder / tool / "model.onnx"
    shutil.rmtree(output.parent, ignore_errors=True)
    output.parent.mkdir(parents=True)
    if tool == "optimum" and optimum is not None:
        outcome = _run_optimum(optimum, checkpoint, trial.task, output.parent, workers)
    else:
        step = export_with_onnxtool if tool == "onnxtool" else export_with_transformers
        outcome = workers.run(step, folder, tool, str(checkpoint), trial.task, str(output))
    report = _report(outcome)
    tried = {
        "seconds": round(outcome.seconds, 1),
        "exit_code": outcome.exit_code,
        "way": " ".join(str(report[name]) for name in ("exporter", "attention") if report.get(name)),
        "fixed_axes": report.get("fixed_axes") or {},
        "notes": list(report.get("notes") or ()),
    }
    files = _files(output)
    if files:
        judged = _judge(tool, trial, checkpoint, files, folder, workers, optimum)
        verdict = judged.value or {"right": None, "reason": f"the judge: {_why_ended(judged, workers)}"}
        tried |= {"verdict": _name_verdict(tool, verdict["right"]), "reason": verdict["reason"], "judge": verdict}
    elif outcome.exit_code is None or outcome.exit_code < 0 or (tool == "onnxtool" and outcome.exit_code == BUG):
        tried |= {"verdict": "crashed", "reason": _why_ended(outcome, workers)}
    else:
        tried |= {"verdict": "refused", "reason": _why_ended(outcome, workers)}
    shutil.rmtree(output.parent, ignore_errors=True)
    return tried


def _name_verdict(tool: str, right: bool | None) -> str:
    """Return what the table calls a judgement; where there is none, a peer is not blamed for it, and onnxtool is."""
    if right is None and tool != "onnxtool":
        return "unjudged"
    return "right" if right else "wrong"


def _files(output: Path) -> dict[str, str]:
    """Return the graphs that a tool wrote, by what they are for.

    One `model`, and `encoder` where it goes before it; or `prefill` and `decode`, which hand on a cache; or optimum's
    `encoder` and `decoder`.
    """
    candidates = {"model": output} | {
        role: output.with_name(f"{output.stem}-{role}{output.suffix}") for role in ("prefill", "decode")
    }
    candidates |= {role: output.with_name(f"{role}_model.onnx") for role in ("encoder", "decoder")}
    beside = output.with_name(f"{output.stem}-encoder{output.suffix}")
    if beside.exists():  # the encoder of a decoder with its cache
        candidates["encoder"] = beside
    return {role: str(path) for role, path in candidates.items() if path.exists()}


def _judge(
    tool: str,
    trial: Trial,
    checkpoint: Path,
    files: dict[str, str],
    folder: Path,
    workers: Workers,
    optimum: Path | None,
) -> Outcome:
    judges = judge_decoding if find_task(trial.task).has_cache else judge
    if tool == "optimum" and optimum is not None:
        # By the transformers that exported it: another version may read the same configuration otherwise.
        return _run_judge_of(optimum / "bin" / "python", judges, checkpoint, files, workers)
    return workers.run(judges, folder, f"{tool}-judge", str(checkpoint), files)


def _run_optimum(optimum: Path, checkpoint: Path, task: str, output: Path, workers: Workers) -> Outcome:
    return _run_command(
        [
            *(str(optimum / "bin" / "optimum-cli"), "export", "onnx"),
            *("--model", str(checkpoint), "--task", task, str(output)),
        ],
        workers,
    )


def _run_judge_of(
    python: Path, judges: Callable[..., Any], checkpoint: Path, files: dict[str, str], workers: Workers
) -> Outcome:
    program = (
        f"import json, sys; from {judges.__module__} import {judges.__name__} as judge; "
        "print(json.dumps(judge(sys.argv[1], json.loads(sys.argv[2]))))"
    )
    outcome = _run_command([str(python), "-c", program, str(checkpoint), json.dumps(files)], workers)
    lines = outcome.stdout.strip().splitlines()
    return replace(outcome, value=json.loads(lines[-1]) if outcome.exit_code == 0 and lines else None)


def _run_command(command: list[str], workers: Workers) -> Outcome:
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=workers.limits.time_s, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, None, "", "", time.perf_counter() - start)
    return Outcome(done.returncode, None, done.stdout, done.stderr, time.perf_counter() - start)


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
