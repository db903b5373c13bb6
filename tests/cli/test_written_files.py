"""Every file that a command writes is in the table of SECURITY.md, and none is left elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluation.collections import random_texts, write_beir
from tests.workshop import Workshop

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
ROWS = re.findall(r"^\| `onnxtool (.+?)` \| (.+?) \|$", SECURITY.read_text(encoding="utf-8"), re.MULTILINE)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="homes of POSIX")


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def environment_of(root: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a user whose home and temporary folder are empty, and who has set nothing else."""
    for name in ("home", "tmp", "work"):
        (root / name).mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    places = {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}
    return kept | places | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"} | variables


@pytest.mark.slow
def test_commands_write_what_the_table_says(tmp_path: Path, workshop: Workshop) -> None:
    """The rows run in their order in one folder; each writes its files there, and nothing in home or TMPDIR."""
    environment = environment_of(tmp_path)
    work = tmp_path / "work"
    (work / "checkpoint").symlink_to(workshop.checkpoint("tiny-encoder"))
    write_beir(work / "data", random_texts(4, 2))
    (work / "texts.txt").write_text("a cat\na dog\n")
    assert len(ROWS) >= 12
    for words, documented in ROWS:
        before = {path: (tmp_path / path).lstat().st_mtime_ns for path in files_in(tmp_path)}
        command = [sys.executable, "-m", "onnxtool", *words.split()]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        changed = {path for path in files_in(tmp_path) if before.get(path) != (tmp_path / path).lstat().st_mtime_ns}
        if "list of fonts" in documented:
            changed = {path for path in changed if "matplotlib/fontlist-" not in path}
        names = [name for name in re.findall(r"`(.+?)`", documented) if not name.startswith("--")]
        for cache in (name.replace("~", "home") for name in names if name.startswith("~")):
            changed = {path for path in changed if not path.startswith(cache)}
        assert changed == {f"work/{name}" for name in names if not name.startswith("~")}, words
        assert not [*(tmp_path / "tmp").iterdir()], words


@pytest.mark.parametrize(("given", "kept"), [({}, "1 1 0"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0 1 0")])
def test_what_sends_is_off_unless_the_user_turns_it_on(tmp_path: Path, given: dict[str, str], kept: str) -> None:
    """Children see the same, and the queue of onnxruntime is not made."""
    names = "'ORT_DISABLE_TELEMETRY', 'HF_HUB_DISABLE_TELEMETRY', 'RAY_USAGE_STATS_ENABLED'"
    inner = f"import os; print(*(os.environ[name] for name in ({names})))"
    library = "" if given else "import onnxruntime; "
    script = f"import onnxtool; {library}import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment_of(tmp_path, **given), capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == kept
    assert not files_in(tmp_path / "home")
