#!/usr/bin/env python3
"""Stand in for node with a page in Chromium: `--interpreter` of `onnxtool verify --consumer transformers.js`.

Called as node is, with the module, the job and the answers; see exchange.py of the runners. The page imports the
package of the current folder's node_modules, on wasm. A file that was opened by default is stated as `opened`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PACKAGE = Path("node_modules/@huggingface/transformers")
SECONDS = 1800
PAGE = """<script type="module">
import * as lib from "/node_modules/@huggingface/transformers/dist/transformers.js";
import { answer } from "/runner.mjs";
const post = (path, content) => fetch(path, { method: "POST", body: JSON.stringify(content) });
const env = { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/", useBrowserCache: false };
Object.assign(lib.env, env);
Object.assign(lib.env.backends.onnx.wasm, { wasmPaths: "/node_modules/onnxruntime-web/dist/" });
const job = await (await fetch("/job.json")).json();
await post("/answers", await answer(lib, job, "model").catch((error) => ({ failed: String(error) })));
</script>"""


def main(runner: str, job_path: str, answers_path: str) -> None:
    """Serve the job to a page, and write what it answers."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    folders = {"node_modules": Path("node_modules").resolve(), "models/model": Path(job["folder"])}
    asked: list[str] = []
    done, found = threading.Event(), list[Any]()

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}  # noqa: RUF012

        def end_headers(self) -> None:  # threads share memory in such pages alone
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
            super().end_headers()

        def translate_path(self, path: str) -> str:
            name = path.partition("?")[0].lstrip("/")
            if name.endswith(".onnx"):
                asked.append(name.removeprefix("models/model/"))
            for prefix, folder in folders.items():
                if name.startswith(f"{prefix}/") and ".." not in name:
                    return str(folder / name[len(prefix) + 1 :])
            return {"runner.mjs": runner, "job.json": job_path}.get(name, "missing")

        def do_GET(self) -> None:
            if self.path == "/":
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(PAGE.encode())
            else:
                super().do_GET()

        def do_POST(self) -> None:
            found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            done.set()

        def log_message(self, *_arguments: Any) -> None:
            pass

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}")
        address = f"http://127.0.0.1:{server.server_port}/"
        page = subprocess.Popen([browser, *options, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            done.wait(SECONDS)
        finally:
            page.terminate()
            page.wait(30)
            server.shutdown()
    (answers,) = found
    for call, answer in zip(job["calls"], answers, strict=True):
        if not call["file"]:
            answer["opened"] = asked[0]
    version = json.loads((PACKAGE / "package.json").read_text(encoding="utf-8"))["version"]
    result = {"version": f"@huggingface/transformers {version} in Chromium", "answers": answers}
    Path(answers_path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
