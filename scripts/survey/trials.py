"""Try one model type for one task: make it, export it, optimize the file, and judge what came out."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.isolation import BUG, Isolation, Outcome
from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.tasks import find_task

from survey.judging import judge, race, race_peers

STEP_S, STEP_GB = 300.0, 8.0  # what one step may take
PRELOADED = (
    *("torch", "torch.export", "torch.onnx", "onnxruntime", "onnxscript", "transformers"),
    *("survey.judging", "zoo.checkpoint", "onnxtool.cli", "onnxtool.export"),
)


def make(task: str, model_type: str, folder: str, effort: str) -> str:
    """Make the checkpoint; return the reason where it cannot be made and run."""
    try:
        make_checkpoint(find_task(task), model_type, Path(folder), effort=effort)
    except NotRunnableError as error:
        return str(error)
    return ""


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
    from onnxtool import OptimizeOptions, optimize_model
    from onnxtool.errors import OnnxtoolError

    num_found = num_expected = 0
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
        num_found, num_expected = num_found + attention.found, num_expected + (attention.expected or 0)
        left_out |= {result.name: result.note for result in report.passes if result.left_out}
    return {"attentions": [num_found, num_expected], "left_out": left_out}


def optimize_with_onnxruntime(source: str, output: str, model_type: str) -> None:
    """Run the optimizer that onnxruntime brings, for its own kind of the model type, and BERT's for others."""
    from onnxruntime.transformers.optimizer import MODEL_TYPES, optimize_model

    kind = {"dinov2": "vit", "deit": "vit"}.get(model_type, model_type)
    model = optimize_model(source, model_type=kind if kind in MODEL_TYPES else "bert")
    model.save_model_to_file(output)


def optimize_with_onnxslim(source: str, output: str, program: str) -> None:
    """Run onnxslim's program, which lives in an environment of its own."""
    subprocess.run([program, source, output], check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True)
class Trial:
    """A model type, its task, the folder for its files, what runs its steps, and what is tried.

    Attributes:
        effort: how much of the default configuration is cut, see EFFORTS.
        provider: what files are optimized for, and judged on.
        onnxslim: its program, to time float32 next to it and onnxruntime's optimizer; empty for no peers.
    """

    task: str
    model_type: str
    folder: Path
    isolation: Isolation
    effort: str
    precisions: Sequence[str]
    provider: str
    onnxslim: str = ""

    @property
    def key(self) -> str:
        """How results call it."""
        return f"{self.task}/{self.model_type}"

    def run(self) -> dict[str, Any]:
        """Return why it is not runnable, or the verdicts `onnxtool`, on the export, and `optimized`.

        The latter has one for each precision, where the export is right.
        """
        making = self._step("make", make, self.task, self.model_type, str(self.folder / "checkpoint"), self.effort)
        if making.exit_code is not None and making.exit_code > 0:
            raise RuntimeError(f"the maker itself failed on {self.key}: {making.stderr[-2000:]}")
        result: dict[str, Any] = {"not_runnable": _why_ended(making) if making.value is None else making.value}
        if not result["not_runnable"]:
            result["onnxtool"] = self._try_export()
            if result["onnxtool"]["verdict"] == "right":
                result["optimized"] = {precision: self._try_precision(precision) for precision in self.precisions}
        shutil.rmtree(self.folder, ignore_errors=True)
        return result

    def _step(self, name: str, step: Callable[..., Any], *arguments: Any) -> Outcome:
        return self.isolation.run(step, self.folder / name, STEP_S, *arguments)

    def _files(self, suffix: str = "") -> dict[str, str]:
        """Return the exported graphs by what they are for, or their names with a suffix after optimization."""
        # Optimized files are next to them, because calibration needs the tokenizer there.
        names = {"model": "model", "encoder": "model-encoder"}
        folder = self.folder / "exported"
        there = {role: name for role, name in names.items() if (folder / f"{name}.onnx").exists()}
        return {role: str(folder / f"{name}{suffix}.onnx") for role, name in there.items()}

    def _try_export(self) -> dict[str, Any]:
        output = self.folder / "exported" / "model.onnx"
        output.parent.mkdir()
        outcome = self._step("export", export, str(self.folder / "checkpoint"), self.task, str(output))
        # Libraries may have printed something before the JSON document.
        document = f"\n{outcome.stdout}".partition("\n{\n")[2]
        report = json.loads("{" + document) if document else {}
        tried = {
            "seconds": round(outcome.seconds, 1),
            "way": " ".join(str(report[name]) for name in ("exporter", "attention") if report.get(name)),
            "fixed_axes": report.get("fixed_axes") or {},
        }
        if files := self._files():
            return tried | self._judge("judge", files)
        crashed = outcome.exit_code is None or outcome.exit_code < 0 or outcome.exit_code == BUG
        return tried | {"verdict": "crashed" if crashed else "refused", "reason": _why_ended(outcome)}

    def _try_precision(self, precision: str) -> dict[str, Any]:
        files, outputs = self._files(), self._files(f"-{precision}")
        outcome = self._step(precision, optimize, files, outputs, precision, self.provider)
        if outcome.value is None:
            return {"verdict": "crashed", "reason": _why_ended(outcome)}
        if "error" in outcome.value:
            return {"verdict": "refused", "reason": outcome.value["error"]}
        judged = self._judge(f"{precision}-judge", files, outputs, precision, self.provider)
        checkpoint = str(self.folder / "checkpoint")
        raced = self._step(f"{precision}-race", race, self.task, checkpoint, files, outputs, self.provider)
        result = {**outcome.value, **judged, "speeds": raced.value or []}
        if self.onnxslim and precision == "fp32" and not find_task(self.task).has_cache:
            result["peers"] = self._race_peers(files["model"], outputs["model"], checkpoint)
        return result

    def _race_peers(self, plain: str, ours: str, checkpoint: str) -> dict[str, Any]:
        """Return nodes and times of our file, the export and each peer's file, or the reason why there is none."""
        files, failed = {"onnxtool": ours, "plain": plain}, {}
        for name, step, argument in (
            ("onnxruntime", optimize_with_onnxruntime, self.model_type),
            ("onnxslim", optimize_with_onnxslim, self.onnxslim),
        ):
            output = str(Path(plain).with_name(f"{name}.onnx"))
            optimization = self._step(name, step, plain, output, argument)
            if optimization.exit_code:
                failed[name] = _why_ended(optimization)
            else:
                files[name] = output
        raced = self._step("peers", race_peers, self.task, checkpoint, files)
        return {**(raced.value or {"onnxtool": _why_ended(raced)}), **failed}

    def _judge(self, name: str, *files: Any) -> dict[str, Any]:
        judged = self._step(name, judge, self.task, str(self.folder / "checkpoint"), *files)
        return dict(judged.value or {"verdict": "wrong", "reason": f"the judge: {_why_ended(judged)}"})


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
