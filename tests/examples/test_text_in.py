"""The program that reads texts with onnxruntime and onnxruntime-extensions alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from onnxtool.infer import load
from tests.docs.documents import ROOT
from tests.export.test_oracle import TEXTS, oracle_folder
from tests.workshop import Workshop

PROGRAM = ROOT / "examples" / "text_in" / "embed.py"
# A package that may not be imported.
ALONE = (
    "import runpy, sys; sys.modules.update(dict.fromkeys(('onnxtool', 'tokenizers', 'transformers'))); del sys.argv[0]"
)


def test_a_file_is_all_that_a_program_needs(workshop: Workshop, tmp_path: Path) -> None:
    """In a folder without tokenizer files, it prints the vectors of `onnxtool infer` and their cosines."""
    model = Path(shutil.copy(oracle_folder(workshop) / "m" / "checkpoint.onnx", tmp_path))
    command = [sys.executable, "-I", "-c", f"{ALONE}; runpy.run_path(sys.argv[0], run_name='__main__')"]
    printed = subprocess.run(
        [*command, PROGRAM, model, *TEXTS], cwd=tmp_path, capture_output=True, encoding="utf-8", check=True
    ).stdout
    numbers = [[float(one) for one in re.findall(r"-?\d+\.\d{4}", line)] for line in printed.splitlines()]
    vectors: Any = load(model, provider="cpu").encode(TEXTS)
    np.testing.assert_allclose(numbers[: len(TEXTS)], vectors[:, :5], atol=6e-5)
    np.testing.assert_allclose(numbers[len(TEXTS) :], vectors @ vectors.T, atol=6e-5)
    assert printed.startswith("a cat: ")
