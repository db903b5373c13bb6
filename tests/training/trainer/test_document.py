"""What docs/trainer.md shows runs, and its table is what its script finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_of_the_documentation_runs(tmp_path: Path) -> None:
    """All blocks in their order, as one program; the classifier learns its task."""
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    code = "\n".join([*blocks, "assert accuracy > 0.9, accuracy", "assert logits[0].argmax() == 0"])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "accuracy on texts it has not seen: " in done.stdout
    assert "backward: " in done.stdout
