"""Count the modules that a real run walks through, and how often it opens its models and reads their structure.

`python scripts/count_modules.py` runs the table of runs on the models of `make demo`, and returns 1 above a bar. With
the arguments of a command, it prints the modules of that run.

A module counts when one of its functions is called during the run; that it is imported, or that an import reads a table
of it, is not enough.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
_SPLADE, _CHECKPOINT = "models/splade.onnx", "models/checkpoints/splade"
_TRAINED = "bert.embeddings.word_embeddings.weight"
_TEXT = "--text=The train to Berlin leaves at noon."
# Runs, with the most modules, opens and reads: what they use now, so that a change that needs more of them shows.
RUNS = {
    ("infer", _SPLADE, _TEXT): (42, 1, 1),
    ("export", _CHECKPOINT, "--head=splade", "--output={folder}/e.onnx"): (74, 1, 1),
    ("optimize", _SPLADE, "--output={folder}/o.onnx"): (73, 2, 2),
    ("infer", _SPLADE, "--input={texts}", "--output={folder}/vectors/"): (58, 1, 1),
    ("artifacts", _SPLADE, "--loss=MSELoss", f"--train={_TRAINED}", "--output={folder}/a"): (61, 1, 1),
    ("stats", _SPLADE): (20, 1, 1),
}


def walk(arguments: list[str]) -> Counter[tuple[str, str]]:
    """Run a command in this process and count the calls of onnxtool's functions, by module and qualified name.

    Args:
        arguments: the command line after `onnxtool`.
    """
    import onnxtool
    from onnxtool.cli import run_arguments

    root = Path(onnxtool.__file__).parent
    for package in pkgutil.walk_packages([str(root)], "onnxtool."):  # now: what an import calls is no step of the walk
        if not package.name.endswith("__main__"):
            importlib.import_module(package.name)
    calls: Counter[tuple[str, str]] = Counter()

    def record(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{root}/"):
            calls[frame.f_globals["__name__"], code.co_qualname] += 1

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        if code := run_arguments(arguments):
            sys.exit(code)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def figures_of(calls: Counter[tuple[str, str]]) -> tuple[int, int, int]:
    """Return the modules of a run, and how often it opened a model and read a structure."""
    opens, reads = (
        sum(count for (_, name), count in calls.items() if name == counted)
        for counted in ("ModelFile._read", "read_structure")
    )
    return len({module for module, _ in calls}), opens, reads


def main() -> int:
    """Print the modules of a run, or the table of runs."""
    if sys.argv[1:]:
        calls = walk(sys.argv[1:])
        for module, count in sorted(Counter(module for module, _ in calls).items()):
            print(f"{module:<48} {count}", file=sys.stderr)
        print(*figures_of(calls), file=sys.stderr)
        return 0
    above = 0
    print(f"{'run':<70} {'modules':>12} {'opens':>8} {'reads':>8}")
    with tempfile.TemporaryDirectory() as name:
        texts = Path(name, "texts.jsonl")
        texts.write_text('{"_id": "1", "text": "The train to Berlin leaves at noon."}\n', encoding="utf-8")
        for number, (words, bars) in enumerate(RUNS.items()):
            folder = Path(name, str(number))
            folder.mkdir()
            command = [word.format(folder=folder, texts=texts) for word in words]
            done = subprocess.run(
                [sys.executable, __file__, *command], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return done.returncode
            figures = [int(figure) for figure in done.stderr.splitlines()[-1].split()]
            cells = [f"{figure} ({bar})" for figure, bar in zip(figures, bars, strict=True)]
            print(f"{' '.join(words)[:70]:<70} {cells[0]:>12} {cells[1]:>8} {cells[2]:>8}")
            above += any(figure > bar for figure, bar in zip(figures, bars, strict=True))
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
