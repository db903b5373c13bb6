"""Print vectors of texts, and their similarities: `python embed.py MODEL TEXT [TEXT ...]`.

MODEL is a file that reads texts (`onnxtool export --tokenizer in_graph`); nothing else is read, and no onnxtool needed.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
from onnxruntime_extensions import get_library_path


def main(model: str, *texts: str) -> None:
    """Print the first numbers of each vector, and the cosines of all pairs."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    vectors = session.run(None, {session.get_inputs()[0].name: np.array(texts, dtype=object)})[0]  # float32 [texts, D]
    for text, vector in zip(texts, vectors, strict=True):
        print(f"{text}: {' '.join(f'{number:.4f}' for number in vector[:5])} … of {len(vector)}")
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    print(np.array2string(unit @ unit.T, precision=4, floatmode="fixed"))


if __name__ == "__main__":
    main(*sys.argv[1:])
