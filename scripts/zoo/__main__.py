"""Make tiny checkpoints: `python scripts/zoo --task fill-mask --type bert --output DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.tasks import TASK_NAMES, find_task, model_classes


def main() -> int:
    """Make what the command line names; return 1 where a model cannot be made."""
    parser = argparse.ArgumentParser(description="Make tiny random checkpoints.")
    parser.add_argument("--task", required=True, choices=TASK_NAMES)
    parser.add_argument("--type", nargs="*", help="model types; default: all of the task")
    parser.add_argument("--output", type=Path, required=True, help="a folder; checkpoints are OUTPUT/TASK/TYPE")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    task = find_task(arguments.task)
    failed = 0
    for model_type in arguments.type or model_classes(task):
        folder = arguments.output / task.name / model_type
        try:
            facts = make_checkpoint(task, model_type, folder, seed=arguments.seed)
        except NotRunnableError as error:
            failed += 1
            print(f"{model_type}: not runnable: {error}", flush=True)
        else:
            size = f"{facts.parameters / 1e6:.2f} M"
            print(f"{model_type}: {folder} ({facts.architecture}, {size}, cut: {facts.effort})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
