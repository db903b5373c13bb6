"""The Python code of README and docs/ holds under mypy's strict rules, as a user's own code would."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

from tests.docs.documents import ROOT, blocks, guides, name_of

# Fragments around a model of the reader's own in PyTorch, which has no types.
_FRAGMENTS = ("artifacts", "torch_backend", "trainer", "train_splade", "onnxruntime_training")


@pytest.mark.slow
def test_code_blocks_hold_under_strict_types(tmp_path: Path) -> None:
    """All of them in one run, by the settings of this project for libraries without types."""
    for document in guides():
        code = "\n".join(block.text for block in blocks(document, "python"))
        if code and document.stem not in _FRAGMENTS:
            (tmp_path / f"{name_of(document).replace('/', '_').removesuffix('.md')}.py").write_text(code)
    files = sorted(str(path) for path in tmp_path.glob("*.py"))
    assert str(tmp_path / "README.py") in files
    printed, _, exit_code = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--strict", *files])
    assert exit_code == 0, printed
