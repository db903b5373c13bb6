"""Answer texts in a consumer: `python exchange.py RUNNER JOB ANSWERS`, in the environment that has the consumer.

RUNNER is a module such as those next to this one. Its `open_model(job, file)` opens the folder as a user does, by its
default for an empty `file`, and returns a function of texts, batch size and role; None if the consumer cannot be told
the file.

JOB is a JSON object: `consumer`, `folder`, `graph` (its path in there), `kind` (of models, as in export/targets),
`pooling` (`none` for a graph that pools), `normalize`, `question` (which pairs begin with; null for single texts),
`texts` by role (`query`, `document`, or empty where all texts are read alike), and `calls`, each with `file`,
`batch_size` and `role`.

ANSWERS is written: `version` of the consumer, and `answers` to the calls, each with `rows` and `seconds`, or `error`;
empty for a file that the consumer cannot be told, and with `opened` where another file than `graph` is the default. A
row is a list of numbers, a list of rows for tokens, or an object of term ids and weights. `missing` names a package
that is lacking.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

Row = list[float] | list[list[float]] | dict[int, float]
Model = Callable[[Sequence[str], int, str], list[Row]]


def nonzero(weights: Any) -> dict[int, float]:
    """Return the entries other than 0 of a vector of term weights."""
    return {int(term): float(weights[term]) for term in weights.nonzero()[0]}


def pairs(job: dict[str, Any], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return each text behind the question."""
    return [(job["question"], text) for text in texts]


def _answer(runner: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    models: dict[str, Model | None] = {}
    answers: list[dict[str, Any]] = []
    for call in job["calls"]:
        try:
            if call["file"] not in models:
                models[call["file"]] = runner.open_model(job, call["file"])
            model = models[call["file"]]
            start = perf_counter()
            rows = None if model is None else model(job["texts"][call["role"]], call["batch_size"], call["role"])
            answers.append({} if rows is None else {"rows": rows, "seconds": perf_counter() - start})
        except Exception as error:  # noqa: BLE001  whatever the consumer says is its answer
            answers.append({"error": f"{type(error).__name__}: {error}"})
    return answers


def main(name: str, job: str, answers: str) -> None:
    """Run the job, and write its answers."""
    sys.path.append(str(Path(name).parent))
    try:
        runner = importlib.import_module(Path(name).stem)
    except ModuleNotFoundError as error:
        reply: dict[str, Any] = {"missing": error.name}
    else:
        request = json.loads(Path(job).read_text(encoding="utf-8"))
        reply = {"version": f"{runner.PACKAGE} {version(runner.PACKAGE)}", "answers": _answer(runner, request)}
    Path(answers).write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
