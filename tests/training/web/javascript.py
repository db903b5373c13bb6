"""Runtimes of JavaScript for the tests: node, and a page in a browser without a window."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "train_in_a_browser"
MODULE = EXAMPLE / "onnxtool-training.mjs"
NODE = shutil.which("node")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BUNDLE = "ort.wasm.min.mjs"
_SECONDS = 60


def has_package(name: str, packages: Path = HERE) -> bool:
    """Say whether npm has installed a package; `npm ci` in this folder does."""
    return (packages / "node_modules" / name / "package.json").is_file()


def workplace(folder: Path, packages: Path = HERE) -> Path:
    """Make a folder from which node and pages find the module, the tests' own files and the packages."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (MODULE, *HERE.glob("*.mjs"), *HERE.glob("*.html")):
        shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(packages / "node_modules", target_is_directory=True)
    return folder


def run_node(place: Path, script: str, *arguments: object) -> str:
    """Run a script of a workplace, and return what it prints."""
    done = subprocess.run(
        [str(NODE), script, *map(str, arguments)],
        capture_output=True, text=True, timeout=_SECONDS, cwd=place, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_in_node(place: Path, runtime: str, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Train in each of the folders, and return what training.mjs gives."""
    return [json.loads(line) for line in run_node(place, "node.mjs", runtime, *folders).splitlines()]


def train_in_browser(place: Path, folders: Sequence[Path], bundle: str = BUNDLE) -> list[dict[str, Any]]:
    """Train in each of the folders in a page, and return what training.mjs gives."""
    query = urlencode([("bundle", bundle), *(("folder", folder.name) for folder in folders)])
    (place / "artifacts").symlink_to(folders[0].parent, target_is_directory=True)
    results: queue.Queue[Any] = queue.Queue()
    found: list[Any] = []
    with served(place, results) as address, opened(f"{address}/browser.html?{query}"):
        while len(found) < len(folders):
            found.append(results.get(timeout=_SECONDS))
            assert "error" not in found[-1], found[-1]["error"]
    return found


def show(folder: Path, packages: Path, *options: str) -> str:
    """Open index.html of artifacts with the runtime of this machine, and return what the page is in the end."""
    use_local_runtime(folder / "index.html", packages)
    with served(folder) as address, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [*_browser(profile), "--virtual-time-budget=600000", *options, f"{address}/index.html"],
            capture_output=True, encoding="utf-8", timeout=_SECONDS, check=True,
        )  # fmt: skip
    return done.stdout


def use_local_runtime(page: Path, packages: Path = HERE) -> None:
    """Let a page take onnxruntime-web from `node_modules` beside it, and put that there."""
    text = page.read_text(encoding="utf-8")
    (page.parent / "node_modules").symlink_to(packages / "node_modules", target_is_directory=True)
    local = re.sub(r"https://cdn\.jsdelivr\.net/npm/onnxruntime-web@[\d.]+", "./node_modules/onnxruntime-web", text)
    page.write_text(local, encoding="utf-8")


@contextmanager
def opened(address: str) -> Iterator[None]:
    """Have an address open in a browser."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen([*_browser(profile), address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            browser.terminate()
            browser.wait(30)


def _browser(profile: str) -> list[str]:
    return [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]


@contextmanager
def served(
    place: Path, results: queue.Queue[Any] | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Serve a folder with these headers at the address; what a page posts goes to the queue."""

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}  # noqa: RUF012

        def end_headers(self) -> None:
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            super().end_headers()

        def do_POST(self) -> None:
            posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if results is not None:
                results.put(posted)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(place))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
