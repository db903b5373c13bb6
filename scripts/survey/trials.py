"""Try one model type for one task: make it, export it, optimize the file, and judge what came out."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.isolation import BUG, Isolation, Outcome
from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.tasks import find_task

from survey.judging import judge, race

STEP_S, STEP_GB = 300.0, 8.0  # what one step may take
PRELOADED = (
    *("torch", "torch.export", "torch.onnx", "onnxruntime", "onnxscript", "transformers"),
    *("survey.judging", "zoo.checkpoint", "onnxtool.cli", "onnxtool.export"),
)


def make(task: str, model_type: str, folder: str, efforts: Sequence[str]) -> dict[str, Any]:
    """Make the checkpoint; return its facts, or `reason` where it cannot be made and run."""
    try:
        return vars(make_checkpoint(find_task(task), model_type, Path(folder), efforts=efforts))
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


def optimize(files: dict[str, str], outputs: dict[str, str], precision: str, provider: str) -> dict[str, Any]:
    """Optimize graphs; return fused attentions of all, and passes left out with the reason, or the `error`."""
    from onnxtool.errors import OnnxtoolError
    from onnxtool.optimize import OptimizeOptions, optimize_model

    found = expected = 0
    left_out: dict[str, str] = {}
    for role, path in files.items():
        output = Path(outputs[role])
        options = OptimizeOptions(
            Path(path), output=output, precision=precision, provider=provider, force=True, timing=False
        )
        try:
            report = optimize_model(options)
        except OnnxtoolError as error:
            return {"error": error.message}
        attention = next(count for count in report.fusions if count.kind == "attention")
        found, expected = found + attention.found, expected + (attention.expected or 0)
        left_out |= {result.name: result.note for result in report.passes if result.left_out}
    return {"attentions": [found, expected], "left_out": left_out}


@dataclass(frozen=True)
class Trial:
    """A model type, its task, the folder for its files, and what is tried.

    Attributes:
        efforts: how much of the default configuration may be cut, see EFFORTS.
        provider: what files are optimized for, and judged on.
    """

    task: str
    model_type: str
    folder: Path
    efforts: Sequence[str]
    precisions: Sequence[str]
    provider: str

    @property
    def key(self) -> str:
        """How results call it."""
        return f"{self.task}/{self.model_type}"

    def run(self, isolation: Isolation) -> dict[str, Any]:
        """Return `runnable` (facts, or the reason why not), and the verdicts `onnxtool` and `optimized`.

        The second is that on the export, the third has one for each precision, where the export is right.
        """
        checkpoint = str(self.folder / "checkpoint")
        made = self._step(isolation, make, "make", self.task, self.model_type, checkpoint, self.efforts)
        if made.exit_code is not None and made.exit_code > 0:
            raise RuntimeError(f"the maker itself failed on {self.key}: {made.stderr[-2000:]}")
        result: dict[str, Any] = {"runnable": made.value or {"reason": _why_ended(made)}}
        if not result["runnable"].get("reason"):
            result["onnxtool"] = self._try_export(isolation, checkpoint)
            if result["onnxtool"]["verdict"] == "right":
                tried = {name: self._try_precision(isolation, checkpoint, name) for name in self.precisions}
                result["optimized"] = tried
        shutil.rmtree(self.folder, ignore_errors=True)
        return result

    def _step(self, isolation: Isolation, step: Any, name: str, *arguments: Any) -> Outcome:
        return isolation.run(step, self.folder / name, STEP_S, *arguments)

    def _files(self, suffix: str = "") -> dict[str, str]:
        """Return the exported graphs by what they are for, or their names with a suffix after optimization."""
        # Optimized ones are beside them, as the tokenizer to calibrate with lies there.
        names = {"model": "model", "encoder": "model-encoder"}
        folder = self.folder / "exported"
        there = {role: name for role, name in names.items() if (folder / f"{name}.onnx").exists()}
        return {role: str(folder / f"{name}{suffix}.onnx") for role, name in there.items()}

    def _try_export(self, isolation: Isolation, checkpoint: str) -> dict[str, Any]:
        output = self.folder / "exported" / "model.onnx"
        output.parent.mkdir()
        outcome = self._step(isolation, export, "export", checkpoint, self.task, str(output))
        report = _report(outcome)
        tried = {
            "seconds": round(outcome.seconds, 1),
            "way": " ".join(str(report[name]) for name in ("exporter", "attention") if report.get(name)),
            "fixed_axes": report.get("fixed_axes") or {},
        }
        if files := self._files():
            return tried | self._judge(isolation, "judge", checkpoint, files)
        crashed = outcome.exit_code is None or outcome.exit_code < 0 or outcome.exit_code == BUG
        return tried | {"verdict": "crashed" if crashed else "refused", "reason": _why_ended(outcome)}

    def _try_precision(self, isolation: Isolation, checkpoint: str, precision: str) -> dict[str, Any]:
        files, outputs = self._files(), self._files(f"-{precision}")
        outcome = self._step(isolation, optimize, precision, files, outputs, precision, self.provider)
        if outcome.value is None:
            return {"verdict": "crashed", "reason": _why_ended(outcome)}
        if "error" in outcome.value:
            return {"verdict": "refused", "reason": outcome.value["error"]}
        judged = self._judge(isolation, f"{precision}-judge", checkpoint, files, outputs, precision, self.provider)
        raced = self._step(isolation, race, f"{precision}-race", checkpoint, files, outputs, self.provider)
        return {**outcome.value, **judged, "speeds": raced.value or []}

    def _judge(self, isolation: Isolation, name: str, *arguments: Any) -> dict[str, Any]:
        judged = self._step(isolation, judge, name, *arguments)
        verdict = judged.value or {"right": False, "reason": f"the judge: {_why_ended(judged)}"}
        return {"verdict": "right" if verdict["right"] else "wrong", "reason": verdict["reason"], "judge": verdict}


def _report(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON document on stdout; libraries may have printed something before it."""
    lines = itertools.dropwhile(lambda line: line != "{", outcome.stdout.splitlines())
    try:
        report = json.loads("\n".join(lines))
    except json.JSONDecodeError:
        return {}
    return report if isinstance(report, dict) else {}


def _why_ended(outcome: Outcome) -> str:
    if outcome.exit_code is None:
        return f"not done after {STEP_S:.0f} s"
    if outcome.exit_code < 0:
        return f"ended by signal {-outcome.exit_code}"
    lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    if not starts:
        return (lines or ["no message"])[-1][:400]
    message = itertools.takewhile(lambda line: not line.startswith("hint:"), lines[starts[0] :])
    return " ".join(message).removeprefix("error:").strip()[:600]
