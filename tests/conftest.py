"""Fixtures of the whole suite."""

from __future__ import annotations

import fnmatch
import functools
import gc
import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.packages import GROUP
from tests.workshop import Workshop, trained_model

if TYPE_CHECKING:
    from onnxtool.cli.render import Block

TESTS = Path(__file__).resolve().parent

os.environ["HF_HUB_OFFLINE"] = "1"  # no test, and no process that a test starts, may ask a hub
# The other test processes have the other cores, and PyTorch's threads spin while they wait for one: with two, an
# export of a tiny model takes 3 to 4 s of CPU time in place of 0.8 s. Tests that need more than one ask for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tracing a model makes millions of objects that stay; with Python's threshold of 700, looking through them again and
# again is a tenth of the CPU time of a test that compiles.
gc.set_threshold(20_000, 20, 50)


# Left out by --fast before anything of them is imported: they compile, export models of their own, or start processes,
# servers and stores. Folders and files below tests/, as patterns.
COSTLY = (
    *("torch_backend", "training/trainer", "training/web", "retrieval", "examples"),
    *("docs/test_commands.py", "docs/test_types.py", "export/test_decoding.py", "export/test_lengths.py"),
    *("export/test_pair.py", "export/test_runtime_adapters.py", "infer/test_pages.py", "infer/test_pictures.py"),
    *("encoding/test_stores*.py", "encoding/test_workers.py", "encoding/test_parts*.py", "encoding/test_ray*.py"),
    *("test_check_cuda.py", "test_guarded.py", "runtime/test_probation.py", "checkpoint/test_chat_templates.py"),
    *("model_file/test_wire_malformed.py", "optimize/quantization/test_written.py"),
    *("optimize/test_backend_suite.py", "optimize/test_other_providers.py"),
    *("cli/test_stats_formats.py", "cli/test_encode.py", "export/test_tokenizers_in_graph.py"),
    *("test_sentence_transformers.py", "test_interruption.py", "test_supply.py", "export/test_next_plaid.py"),
    *("model_file/test_wire_fuzz.py", "model_file/test_wire_hostile.py"),
    *("training/graphs/test_ignored_rows.py", "training/graphs/test_modes.py", "export/test_tokens.py"),
    *("export/test_modalities.py", "cli/test_infer_benchmark.py", "encoding/test_resume.py"),
    *("export/test_signature.py", "export/test_tracing.py", "training/artifacts/test_like_pytorch.py"),
)
FEW_OBJECTS = 2_000
_FOLDERS = itertools.count()
# The memory of Linux as a file system, and the bytes that it must have free.
MEMORY, LEAST_BYTES = Path("/dev/shm"), 10 * 2**30  # noqa: S108  files get a folder of their own there
# What is made for these takes seconds: exports of models that tests share.
COSTLY_FIXTURES = {"workshop", "minilm", "reader"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test_fast` and of CI."""
    parser.addoption("--fast", action="store_true", help="leave out what compiles, exports models or starts processes")
    parser.addoption("--complete", action="store_true", help=f"fail where packages of the group {GROUP} are missing")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse a costly file that has another name now, which would join the fast run unnoticed.

    Temporary files go into memory where there is enough: onnxtool syncs what it writes, tens of thousands of times in
    this suite, and no test asks for a disk. Pass `--basetemp` to keep them.
    """
    gone = [pattern for pattern in COSTLY if not any(TESTS.glob(pattern))]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py: COSTLY names no file: {', '.join(gone)}")
    _share_cores()
    in_processes = config.option.numprocesses and "PYTEST_XDIST_WORKER" not in os.environ
    if in_processes and not config.option.basetemp and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > LEAST_BYTES:
        config.option.basetemp = tempfile.mkdtemp(prefix="onnxtool-tests-", dir=MEMORY)
        config.add_cleanup(functools.partial(shutil.rmtree, config.option.basetemp, ignore_errors=True))


def _share_cores() -> None:
    """Leave the other test processes their cores: threads of onnxruntime's sessions spin on all that they may use.

    On two cores that was an eighth of the CPU time of what runs models.
    """
    number, count = os.environ.get("PYTEST_XDIST_WORKER", "gw")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if number and sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(number) :: int(count)] or {cores[int(number) % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a complete run that left out a test for want of packages."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter and session.config.getoption("complete") else []
    if any(f"group {GROUP}" in str(report.longrepr) for report in skipped):
        reporter.write_line(f"\n--complete: tests that need the group {GROUP} are skipped; `make setup` installs it")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the costly files out of a fast run."""
    if not config.getoption("fast") or TESTS not in collection_path.parents:
        return None
    path = collection_path.relative_to(TESTS).as_posix()
    return any(fnmatch.fnmatch(path, pattern) for pattern in COSTLY) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the folders that have slow tests, and end with what is quick: no process waits long for the other.

    A folder stays together, as its modules share fixtures. The last ones of the alphabet compile, and the first do not.
    """
    # PyTorch writes each graph as text for any handler here, and pytest gives one to loggers that do not propagate.
    logging.getLogger("torch.__trace").propagate = True
    slow = {item.path.parent for item in items if item.get_closest_marker("slow")}
    rank = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (item.path.parent not in slow, -rank[item.path]))
    if config.getoption("fast"):
        costly = [item for item in items if _is_costly(item)]
        config.hook.pytest_deselected(items=costly)
        items[:] = [item for item in items if not _is_costly(item)]


def _is_costly(item: pytest.Item) -> bool:
    names = set(getattr(item, "fixturenames", ()))
    return item.get_closest_marker("slow") is not None or bool(COSTLY_FIXTURES & names)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own, by a number: pytest's looks at all folders of the session for each, in up to 3 ms."""
    folder = tmp_path_factory.getbasetemp() / f"{next(_FOLDERS)}-{re.sub(r'[^0-9a-z]+', '_', request.node.name)[:30]}"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def frozen_heap() -> None:
    """Freeze existing objects, including torch's, so GC skips them.

    Exports, optimizations and trainers collect garbage themselves, and over the whole heap this was a fifth of their
    tests' CPU time. Most tests make too few objects to look for garbage among them.
    """
    young, *older = gc.get_count()
    if young > FEW_OBJECTS or any(older):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def untimed_guards() -> None:
    """Let TorchDynamo not time the guards of what it compiles, for its log only: it empties the caches, in 25 ms."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards:
        guards.profile_guard_manager = lambda *_guards: 0.0  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def narrow_terminals() -> Iterator[None]:
    """Draw the tables of every report for narrow terminals as well: none loses a figure."""
    from onnxtool.cli import render
    from tests.cli.screens import require_whole_tables

    as_text = render._text

    def text_of(blocks: Sequence[Block]) -> str:
        require_whole_tables(blocks)
        return as_text(blocks)

    with mock.patch.object(render, "_text", text_of):
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The models of this test session."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent / "workshop"
    folder.mkdir(exist_ok=True)
    # The parent of a worker's folder is that of the session; without workers it is that of all sessions.
    return Workshop(folder, folder if "PYTEST_XDIST_WORKER" in os.environ else base / "workshop")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of a sentence encoder with trained weights."""
    return trained_model()


@pytest.fixture
def brief_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each candidate of `--precision auto` for 10 ms a round instead of 200, where no latency is compared."""
    from onnxtool.optimize.quantization import candidates

    monkeypatch.setattr(candidates, "_SECONDS", 0.01)


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no processes that encode, each of which takes seconds, where a test is of something else."""
    from onnxtool.encoding import workers
    from tests.encoding.pool_here import start_here

    monkeypatch.setattr(workers, "start_process", start_here)
