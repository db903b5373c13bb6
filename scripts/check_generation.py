"""Let every model type of transformers that writes do so, by `onnxtool.infer` and by `generate`, and compare tokens.

`python scripts/check_generation.py` makes a tiny checkpoint of each type (scripts/zoo), exports it with its cache, and
writes after texts of several lengths, in one batch and one by one, greedily and under a few settings. It prints a
table; a type whose tokens differ makes it return 1. `--types` and `--tasks` choose; `--work_dir` keeps what was made.
Each type runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parent
TASKS = ("text2text-generation-with-past", "text-generation-with-past")
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "a graph",
    "is this model of text at all: yes or no? 42!",
    "what a model writes depends on all of the words that stand before it, and on none that come after it",
)
_NEW_TOKENS = 10
# Beside what the checkpoint says; each of them moves what is written.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
}


def main() -> int:
    """Compare what the command line names; return 1 where a type writes other tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--types", nargs="+", help="model types; default: all of each task")
    parser.add_argument("--work_dir", type=Path, help="where checkpoints and exports are kept; default: nowhere")
    parser.add_argument("--time_limit", type=float, default=300, help="seconds for one type")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "TYPE", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        task, model_type, folder = arguments.one
        print(json.dumps(try_type(task, model_type, Path(folder))))
        return 0
    from zoo.tasks import find_task, model_classes

    rows = []
    with tempfile.TemporaryDirectory() as name:
        work_dir = arguments.work_dir or Path(name)
        for task in arguments.tasks:
            for model_type in model_classes(find_task(task)):
                if arguments.types is None or model_type in arguments.types:
                    rows.append(in_a_process(task, model_type, work_dir, arguments.time_limit))
                    print(*rows[-1], sep=": ", file=sys.stderr, flush=True)
    print("| task | type | verdict | why |\n|---|---|---|---|")
    for task, model_type, verdict, why in rows:
        print(f"| {task} | {model_type} | {verdict} | {why} |")
    for task in arguments.tasks:
        counts: dict[str, int] = {}
        for row in rows:
            if row[0] == task:
                counts[row[2]] = counts.get(row[2], 0) + 1
        print(f"\n{task}: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int(any(row[2] == "other tokens" for row in rows))


def in_a_process(task: str, model_type: str, work_dir: Path, time_limit: float) -> tuple[str, str, str, str]:
    """Return task, type, verdict and why."""
    command = [sys.executable, __file__, "--one", task, model_type, str(work_dir / task / model_type)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit, check=False)
    except subprocess.TimeoutExpired:
        return task, model_type, "out of time", f"not done after {time_limit:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return task, model_type, "crashed", last[:200]
    verdict, why = json.loads(lines[-1])
    return task, model_type, verdict, why.replace(str(work_dir), "").replace("|", "/")[:200]


def try_type(task: str, model_type: str, folder: Path) -> tuple[str, str]:
    """Return the verdict on one type, and why: `same tokens`, `other tokens`, `refused` or `not runnable`."""
    from zoo.checkpoint import NotRunnableError, make_checkpoint
    from zoo.tasks import find_task

    from onnxtool.errors import OnnxtoolError
    from onnxtool.export import ExportOptions, export_model

    checkpoint, output = folder / "checkpoint", folder / "model.onnx"
    if not (checkpoint / "zoo.json").exists():
        try:
            make_checkpoint(find_task(task), model_type, checkpoint)
        except NotRunnableError as error:
            return "not runnable", str(error)
    if not output.exists():
        try:
            export_model(ExportOptions(str(checkpoint), output=output, task=task))
        except OnnxtoolError as error:
            return "refused", str(error).splitlines()[0]
    for name, settings in SETTINGS.items():
        different = compare(checkpoint, output, {**settings, "max_new_tokens": _NEW_TOKENS})
        if different:
            return "other tokens", f"{name}: {different}"
    return "same tokens", ""


def compare(checkpoint: Path, output: Path, settings: dict[str, Any]) -> str:
    """Return how what is written differs, or an empty text."""
    from dataclasses import replace

    from onnxtool.checkpoint.folder import CheckpointFolder
    from onnxtool.infer import load
    from onnxtool.infer.generation.writing import Writer
    from onnxtool.model_file import ModelFile

    config = json.loads((checkpoint / "generation_config.json").read_text("utf-8"))
    config |= {"num_beams": 1, "do_sample": False}
    config.setdefault("decoder_start_token_id", 0)  # LongT5's own says none, and `generate` insists
    vocabulary = next(info.shape[-1] for info in ModelFile.open(output).structure.outputs if info.name == "logits")
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if isinstance(vocabulary, int) and any(end is not None and end >= vocabulary for end in ends):
        config["eos_token_id"] = 1  # some types' own lie outside of a tiny vocabulary, which `infer` refuses
    with tempfile.TemporaryDirectory() as name:
        Path(name, "generation_config.json").write_text(json.dumps({**config, **settings}), encoding="utf-8")
        model = load(output)
        writer = Writer(replace(model, folder=CheckpointFolder(Path(name))))
        together = [answer.token_ids for answer in writer.write(TEXTS).answers]
        alone = [writer.write([text]).answers[0].token_ids for text in TEXTS]
        # BigBird computes otherwise from a length on: a file that is fixed to one pads to it, and PyTorch does as well.
        width = model.batch_rules.sequence_length
        wanted = [generate(checkpoint, text.ids, {**config, **settings}, width) for text in model.tokenize(TEXTS)]
    for number, (one, other, right) in enumerate(zip(together, alone, wanted, strict=True), start=1):
        if other != right:
            return f"text {number}, {list(other)} in place of {list(right)}"
        if one != right:
            return f"text {number} among others, {list(one)} in place of {list(right)}"
    return ""


def generate(checkpoint: Path, ids: tuple[int, ...], settings: dict[str, Any], width: int | None) -> tuple[int, ...]:
    """Return what `generate` of transformers writes after one text, which is padded to `width` where there is one."""
    import torch
    from transformers import GenerationConfig
    from zoo.facts import Facts
    from zoo.running import load_model

    model = load_model(Facts.read(checkpoint), checkpoint)
    model.generation_config = GenerationConfig(**{**settings, "use_cache": True})
    padding = (width or len(ids)) - len(ids)
    inputs = torch.tensor([[*ids, *[settings.get("pad_token_id") or 0] * padding]])
    mask = torch.tensor([[1] * len(ids) + [0] * padding])
    with torch.inference_mode():
        (written,) = model.generate(input_ids=inputs, attention_mask=mask).tolist()
    return tuple(written[1:] if model.config.is_encoder_decoder else written[len(ids) :])


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    sys.exit(main())
