"""Every file that a command writes is in the table of SECURITY.md, and none is left elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from onnxtool.cli.commands import COMMANDS
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


# Python loads it at the start of every process.
WATCHER = """
import os, sys
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def watch(event, given):
    if event in ("os.mkdir", "os.rename", "os.link", "os.symlink") or (event == "open" and (given[2] or 0) & WRITES):
        for path in given[:2]:
            if isinstance(path, (str, bytes, os.PathLike)) and (event != "open" or path is given[0]):
                os.write(log, os.fsencode(os.path.abspath(os.fsdecode(path))) + b"\\n")
sys.addaudithook(watch)
"""

# Runs each line that it reads as a command, in a process that has the libraries already, and prints its exit code.
RUNNER = """
import gc, os, sys
gc.disable()
import onnxtool
import onnxruntime, onnxscript, torch.onnx
from onnxtool.cli import run
from onnxtool.export import run as _
from onnxtool.optimize import run as _
from onnxtool.release import run as _
from transformers import AutoTokenizer, BertModel, LlamaForCausalLM
gc.freeze()  # a child that collects garbage among the libraries' objects copies their memory
gc.enable()
for line in sys.stdin:
    child = os.fork()
    if not child:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        os.dup2(2, 1)
        sys.argv = ["onnxtool", *line.split()]
        run()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_commands_write_what_the_table_says(tmp_path: Path, workshop: Workshop) -> None:
    """The rows run in their order in one folder: each writes its files there, and none in home, TMPDIR or beyond."""
    log, watcher, root = tmp_path / "log", tmp_path / "watcher", tmp_path / "root"
    watcher.mkdir()
    (watcher / "sitecustomize.py").write_text(WATCHER.format(log=str(log)))
    root.mkdir()
    inductor = str(
        root / "inductor"
    )  # PyTorch makes it when a model of transformers is imported; a command has its own
    environment = environment_of(root, PYTHONPATH=str(watcher), OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=inductor)
    work = root / "work"
    (work / "checkpoint").symlink_to(workshop.checkpoint("tiny-encoder"))
    decoder = Path(shutil.copytree(workshop.checkpoint("tiny-decoder"), work / "writer"))
    LlamaForCausalLM.from_pretrained(decoder, num_hidden_layers=1).save_pretrained(decoder)
    (work / "writer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_beir(work / "data", random_texts(4, 2))
    (work / "texts.txt").write_text("a cat\na dog\n")
    (work / "release.toml").write_text('name = "mini"\ncheckpoint = "checkpoint"\noutput = "released"\n')
    assert {words.split()[0] for words, _ in ROWS} == set(COMMANDS)
    command, pipe = [sys.executable, "-c", RUNNER], subprocess.PIPE
    with (
        (tmp_path / "printed").open("w") as printed,
        subprocess.Popen(command, cwd=work, env=environment, stdin=pipe, stdout=pipe, stderr=printed, text=True) as run,
    ):
        assert run.stdin
        assert run.stdout
        for words, documented in ROWS:
            before = {path: (root / path).lstat().st_mtime_ns for path in files_in(root)}
            run.stdin.write(f"{words}\n")
            run.stdin.flush()
            assert run.stdout.readline() == "0\n", (tmp_path / "printed").read_text()
            changed = {path for path in files_in(root) if before.get(path) != (root / path).lstat().st_mtime_ns}
            names = [
                name.replace("~", "home") for name in re.findall(r"`(.+?)`", documented) if not name.startswith("--")
            ]
            files = {name if name.startswith("home/") else f"work/{name}" for name in names if name != "work"}
            folders = tuple(name for name in files if name.endswith("/"))
            assert {path for path in changed if not path.startswith(folders)} == files - {*folders}, words
            assert not [*(root / "tmp").iterdir()], words
        run.stdin.close()
    written = log.read_text().splitlines()
    assert f"{work}/released" in written
    elsewhere = [path for path in written if not path.startswith((str(root), "/dev/", "/proc/"))]
    assert not elsewhere


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
