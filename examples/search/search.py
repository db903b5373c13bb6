"""Search a corpus that `onnxtool infer` encoded: `python search.py MODEL CORPUS VECTORS QUERY`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import onnxtool


def main(model_path: str, corpus: str, folder: str, query: str) -> None:
    """Print the three texts of `corpus` that are closest to `query`."""
    texts = [json.loads(line) for line in Path(corpus).read_text(encoding="utf-8").splitlines()]
    vectors = np.concatenate([np.load(path) for path in sorted(Path(folder).glob("*.npy"))])  # float32 [texts, 384]
    scores = vectors @ onnxtool.load(model_path).encode([query])[0]  # cosines: the vectors have length 1
    for place in np.argsort(-scores)[:3]:
        print(f"{scores[place]:.3f}  {texts[place]['id']:8}  {texts[place]['contents']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
