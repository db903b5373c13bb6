"""The page of mistakes has what the commands say; those that need a checkpoint are run where the page is made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from mistakes import MISTAKES, render

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "mistakes.md").read_text("utf-8")


def test_the_page_has_every_mistake() -> None:
    """Forty and more, each with an exit code that is not 0 and with one error."""
    assert len(MISTAKES) >= 40
    for mistake in MISTAKES:
        assert f"$ onnxtool {mistake.command}\nerror: " in PAGE, mistake.what
    assert "(exit code 0)" not in PAGE


def test_the_quick_ones_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, `python scripts/mistakes.py --output docs/guide/mistakes.md` makes the page anew."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    quick = [block for block in render(quick=True).split("```") if block.startswith("text\n$")]
    assert len(quick) == sum(mistake.is_quick for mistake in MISTAKES)
    assert [block for block in quick if block not in PAGE] == []
