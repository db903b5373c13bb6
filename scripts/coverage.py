"""Try every model type of transformers: make a tiny checkpoint, export it, optimize the file, and judge both.

`python scripts/coverage.py` tries all tasks and types, and writes build/coverage.md after each. Each step of each type
runs in a process of its own with limits. What was found is kept in build/coverage.json; --resume goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parent
# For the processes of the steps, which start before any of them could set it: one thread each, and no hub. The modules
# below must find all this set.
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_SCRIPTS), os.environ.get("PYTHONPATH"))))

from harness.isolation import Isolation  # noqa: E402
from survey.judging import PRECISIONS  # noqa: E402
from survey.tables import render  # noqa: E402
from survey.trials import PRELOADED, STEP_GB, Trial  # noqa: E402
from zoo.shrinking import EFFORTS  # noqa: E402
from zoo.tasks import TASK_NAMES, find_task, model_classes  # noqa: E402


def main() -> int:
    """Try what the command line names, and write the tables; return 1 where a file is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASK_NAMES, default=TASK_NAMES, metavar="TASK")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types; default: all of each task")
    parser.add_argument("--effort", choices=EFFORTS, default=EFFORTS[0], help="how much is cut; depth: no widths")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS[:2])
    parser.add_argument("--provider", default="cpu", help="what files are optimized for, and judged on")
    parser.add_argument("--onnxslim", default="", help="its program: time fp32 next to it and onnxruntime's optimizer")
    parser.add_argument("--jobs", type=int, default=2, help="how many types at a time")
    parser.add_argument("--output", type=Path, default=_SCRIPTS.parent / "build" / "coverage.md")
    parser.add_argument("--resume", action="store_true", help="keep what the results have already")
    arguments = parser.parse_args()
    results = arguments.output.with_suffix(".json")
    results.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {}
    if arguments.resume and results.exists():
        known = json.loads(results.read_text("utf-8"))
    isolation = Isolation(PRELOADED, STEP_GB)
    options = (arguments.effort, arguments.precisions, arguments.provider, arguments.onnxslim)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.jobs) as pool:
        trials = [
            Trial(task, model_type, Path(name, task, model_type), isolation, *options)
            for task in arguments.tasks
            for model_type in model_classes(find_task(task))
            if arguments.types is None or model_type in arguments.types
        ]
        under_way = {pool.submit(trial.run): trial for trial in trials if trial.key not in known}
        for number, done in enumerate(as_completed(under_way), 1):
            key, result = under_way[done].key, done.result()
            known[key] = result
            lines = (f"{json.dumps(key)}: {json.dumps(known[key], sort_keys=True)}" for key in sorted(known))
            partial = results.with_suffix(".partial")
            partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            partial.replace(results)
            arguments.output.write_text(render(known), encoding="utf-8")
            verdicts = ", ".join(_verdicts(result)) or "not runnable"
            print(f"{number}/{len(under_way)} {key}: {verdicts}", file=sys.stderr, flush=True)
    print(arguments.output)
    return int(any("wrong" in _verdicts(result) for result in known.values()))


def _verdicts(result: dict[str, Any]) -> list[str]:
    """Return the verdicts on the export and on each optimized file, as far as there are any."""
    tried = [result.get("onnxtool"), *result.get("optimized", {}).values()]
    return [judged["verdict"] for judged in tried if judged]


if __name__ == "__main__":
    sys.exit(main())
