"""The steps that are tried on a checkpoint: make it, and export it with onnxtool and with its peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.facts import Facts
from zoo.running import load_model, sample
from zoo.tasks import find_task


def make(task: str, model_type: str, folder: str) -> dict[str, Any]:
    """Make the checkpoint; return its facts, or `reason` where it cannot be made and run."""
    try:
        return vars(make_checkpoint(find_task(task), model_type, Path(folder)))
    except NotRunnableError as error:
        return {"reason": str(error)}


def export_with_onnxtool(folder: str, task: str, output: str) -> None:
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


def export_with_transformers(folder: str, task: str, output: str) -> None:
    """Export as transformers' documentation does: a sample from the processor, and all axes dynamic.

    With a cache, that is one file for each component, `NAME-prefill.onnx` and `NAME-decode.onnx`.

    Raises:
        Exception: whatever the exporter raises.
    """
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    facts = Facts.read(Path(folder))
    model = load_model(facts, Path(folder))
    exporter, config, inputs = OnnxExporter(), OnnxConfig(dynamic=True), _plain_sample(facts, model, folder)
    if find_task(task).has_cache:
        exported = exporter.export_for_generation(model, inputs, config=config)
        for role, component in exported.components.items():
            path = Path(output)
            exporter.save_program(component.program, path.with_name(f"{path.stem}-{role}{path.suffix}"))
        return
    if task == "text-generation":
        model.config.use_cache = False
    exporter.save_program(exporter.export(model, inputs, config=config).program, output)


def _plain_sample(facts: Facts, model: Any, folder: str) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer

    if find_task(facts.task).modality != "text":
        return {name: torch.from_numpy(value) for name, value in sample(facts, model).items()}
    texts = ["the model of a text is a graph", "a query and a document"]
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    accepted = sample(facts, model)
    inputs = {name: value for name, value in tokens.items() if name in accepted}
    return inputs | {name: torch.from_numpy(value) for name, value in accepted.items() if name.startswith("decoder")}
