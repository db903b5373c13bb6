"""Try every model type of transformers: make a tiny checkpoint, export it, and judge the file independently.

`python scripts/coverage.py` tries all tasks and types and writes build/coverage.md. Each step of each type runs in a
process of its own with limits; what was found is kept in build/coverage.json, and --resume goes on from there.
`--optimize fp32 int8` optimizes every file that was right instead, and judges what comes out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parent
# For the processes of the steps, which start before any of them could set it: one thread each, and no hub. The modules
# below must find all this set.
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
# Steps end without the goodbye in which tqdm would give its lock back.
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_SCRIPTS), os.environ.get("PYTHONPATH"))))

from survey.optimizing import PRECISIONS  # noqa: E402
from survey.processes import Limits, Workers  # noqa: E402
from survey.tables import render  # noqa: E402
from survey.trials import Trial, try_precisions, try_type, without_folders  # noqa: E402
from zoo.tasks import TASK_NAMES, find_task, model_classes  # noqa: E402


def main() -> int:
    """Try what the command line names, and write the tables; return 1 where a file is wrong."""
    arguments = _parse()
    results = arguments.results
    known: dict[str, Any] = {}
    if (arguments.resume or arguments.optimize) and results.exists():
        known = json.loads(results.read_text("utf-8"))
    results.parent.mkdir(parents=True, exist_ok=True)
    trials = [
        Trial(task, model_type)
        for task in arguments.tasks
        for model_type in model_classes(find_task(task))
        if arguments.types is None or model_type in arguments.types
    ]
    workers = Workers(Limits(arguments.time_limit, arguments.memory_limit))
    if arguments.optimize:
        trials = _to_optimize(trials, known)

    def work(trial: Trial) -> dict[str, Any]:
        result = known.get(trial.key, {})
        if arguments.optimize:
            result = try_precisions(trial, arguments.optimize, result, workers, arguments.work_dir)
        else:
            result = try_type(trial, result, workers, arguments.work_dir)
        return without_folders(result, arguments.work_dir, _SCRIPTS.parent)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        under_way = {pool.submit(work, trial): trial for trial in trials}
        for number, done in enumerate(as_completed(under_way), 1):
            trial, result = under_way[done], done.result()
            known[trial.key] = result
            _save(known, results)
            tried = result.get("optimized", {}) if arguments.optimize else result
            names = arguments.optimize or ("onnxtool",)
            verdicts = ", ".join(f"{name} {tried[name]['verdict']}" for name in names if name in tried)
            print(f"{number}/{len(trials)} {trial.key}: {verdicts or 'not runnable'}", file=sys.stderr, flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(render(known), encoding="utf-8")
        print(arguments.output)
    found = {result.get("onnxtool", {}).get("verdict") for result in known.values()}
    found |= {tried["verdict"] for result in known.values() for tried in result.get("optimized", {}).values()}
    return int("wrong" in found)


def _to_optimize(trials: list[Trial], known: dict[str, Any]) -> list[Trial]:
    """Return the right exports among `trials`, the quickest to export first."""
    right = [trial for trial in trials if known.get(trial.key, {}).get("onnxtool", {}).get("verdict") == "right"]
    return sorted(right, key=lambda trial: known[trial.key]["onnxtool"]["seconds"])


def _save(known: dict[str, Any], results: Path) -> None:
    """Write what is known, a line for each type."""
    lines = [f"{json.dumps(key)}: {json.dumps(known[key], sort_keys=True)}" for key in sorted(known)]
    partial = results.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    partial.replace(results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASK_NAMES, default=TASK_NAMES, metavar="TASK")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types; default: all of each task")
    parser.add_argument("--jobs", type=int, default=2, help="how many types at a time")
    parser.add_argument("--optimize", nargs="+", choices=PRECISIONS, metavar="PRECISION", help="optimize right exports")
    parser.add_argument("--output", type=Path, default=_SCRIPTS.parent / "build" / "coverage.md")
    parser.add_argument("--work_dir", type=Path, default=_SCRIPTS.parent / "models" / "coverage")
    parser.add_argument("--results", type=Path, default=_SCRIPTS.parent / "build" / "coverage.json")
    parser.add_argument("--resume", action="store_true", help="keep what the results have already")
    parser.add_argument("--time_limit", type=float, default=300, help="seconds that one step may take")
    parser.add_argument("--memory_limit", type=float, default=8, help="GB that one step may take")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
