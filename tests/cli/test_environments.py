"""Closed streams, full and read-only disks, few handles, little memory: each is one error, or does no harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.encoding.corpora import dense_model, make_texts, write_corpus
from tests.workshop import Workshop

if sys.platform != "linux":
    pytest.skip("limits and mounts are those of Linux", allow_module_level=True)

CORPUS = ("--model_path", "model.onnx", "--input", "corpus.jsonl", "--force", "--output")
COMMANDS = {
    "stats": ("stats", "model.onnx", "--format", "json"),
    "optimize": ("optimize", "--model_path", "model.onnx", "--output", "out/m.onnx", "--force"),
    "infer": ("infer", *CORPUS, "out/m.txt"),
    "encode": ("encode", "run", "--processes", "2", "--workers", "1", "--shard_size", "8", *CORPUS, "out/v/"),
    "artifacts": ("artifacts", "--model_path", "layer.onnx", "--output", "out/set", "--force"),
    "export": ("export", "--model_name", "checkpoint", "--head", "none", "--output", "out/m.onnx", "--force"),
}
# How a shell runs the command, which is "$@".
ENVIRONMENTS = {
    "no reader": 'set -o pipefail; { sleep 0.2; exec "$@"; } | :',
    "closed streams": 'exec "$@" <&- >&- 2>&-',
    "no bytes": 'ulimit -f 0; exec "$@"',
    "16 handles": 'ulimit -n 16; exec "$@"',
    "100 MB": 'ulimit -v 100000; exec "$@"',
    "100 MB of data": 'ulimit -d 100000; exec "$@"',
    "400 MB": 'ulimit -v 400000; exec "$@"',
    "no working directory": 'mkdir tmp/gone && cd tmp/gone && rmdir ../gone && exec "$@"',
    "no semaphores": 'exec "$@"',
    "full": 'exec "$@"',
    "read-only": 'exec "$@"',
}
# What is done to the folder of the output before, in a namespace of mounts that ends with the shell.
MOUNT = "mount -t tmpfs -o size=64k none out && cp -r old/. out && "
MOUNTS = {
    "full": f"{MOUNT} {{ dd if=/dev/zero of=out/big bs=4k status=none 2>/dev/null; true; }} &&",
    "no semaphores": "mount -t tmpfs -o ro none /dev/shm &&",
    "read-only": f"{MOUNT} mount -o remount,ro out &&",
}
LIST = 'find out tmp -type f -exec sha256sum {} + | grep -vE "out/v(/|[.]parts/)[^.]" | sort'
LITTLE = "error: a process may have 102 MB of memory here, and the libraries need 256 MB alone"
CASES = [
    ("stats", "16 handles", 0, ""),
    ("stats", "100 MB", 1, LITTLE),
    ("optimize", "no reader", 141, ""),
    ("infer", "no bytes", 1, "error: no space to write out/m.txt: File too large ("),
    ("infer", "full", 1, "error: no space to write out/m.txt: No space left on device (0 MB free)"),
    ("infer", "100 MB of data", 1, LITTLE),
    ("encode", "closed streams", 0, ""),
    ("encode", "16 handles", 0, ""),
    ("encode", "no working directory", 1, "error: the working directory was removed, or cannot be read: No such file"),
    ("encode", "no semaphores", 0, ""),
    ("encode", "full", 1, "error: cannot write @/out/v: No space left on device"),
    ("artifacts", "full", 1, "error: no space to write out/set/training_model.onnx: No space left on device (0 MB"),
    ("artifacts", "read-only", 1, "error: cannot write out/set/training_model.onnx: Read-only file system"),
    ("export", "400 MB", 1, "error: there is not enough memory"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, workshop: Workshop) -> Path:
    """What the commands read, and older outputs."""
    folder = tmp_path_factory.mktemp("inputs")
    dense_model(folder)
    write_corpus(folder / "corpus.jsonl", make_texts(60))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy")
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "layer", [x], [y], [weight])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "layer.onnx"
    )
    (folder / "checkpoint").symlink_to(workshop.checkpoint("tiny-splade"))
    for name in ("m.onnx", "m.txt", "set/training_model.onnx"):
        (folder / "old" / name).parent.mkdir(exist_ok=True)
        (folder / "old" / name).write_text("old")
    return folder


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder outside of /dev/shm, which one of the environments hides."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "place"


@pytest.mark.parametrize(("command", "environment", "code", "said"), CASES, ids=lambda value: str(value)[:16])
def test_an_environment_gives_an_error_or_does_no_harm(
    place: Path, inputs: Path, command: str, environment: str, code: int, said: str
) -> None:
    """With the exit code, the older output where the command failed, and nothing hidden or temporary."""
    shutil.copytree(inputs, place, symlinks=True)
    shutil.copytree(place / "old", place / "out")
    (place / "tmp").mkdir()
    mount = MOUNTS.get(environment, "")
    isolated = ["unshare", "--user", "--map-root-user", "--mount"] if mount else []
    if mount and subprocess.run([*isolated, "mount", "-t", "tmpfs", "none", place / "tmp"], check=False).returncode:
        pytest.skip("this user may mount nothing")
    script = f"{mount} {LIST} >before; ({ENVIRONMENTS[environment]}); code=$?; {LIST} >after; exit $code"
    words = [*isolated, "bash", "-c", script, "bash", sys.executable, "-m", "onnxtool", *COMMANDS[command]]
    variables = {**os.environ, "TMPDIR": str(place / "tmp"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=place, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert [error.startswith(said.replace("@", str(place))) for error in errors] == [True] * bool(said)
    assert "Traceback" not in done.stderr
    before, after = ((place / name).read_text() for name in ("before", "after"))
    assert not [line for line in after.splitlines() if "/." in line or " tmp/" in line]
    if said:
        assert after == before
