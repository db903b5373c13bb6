#!/usr/bin/env python3
"""Stand in for node with a page in Chromium: `--interpreter` of `onnxtool verify --consumer transformers.js`.

Called as node is, with the module, the job and the answers; see exchange.py of the runners. The page imports the
package of the current folder's node_modules, on wasm. A file that was opened by default is stated as `opened`.
"""

from __future__ import annotations

import json
import queue
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.training.web.javascript import opened, served

PACKAGE = "@huggingface/transformers"
SECONDS = 1800
HEADERS = {  # threads share memory in such pages alone
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
}
PAGE = """<script type="module">
import * as lib from "/node_modules/@huggingface/transformers/dist/transformers.js";
import { answer } from "/runner.mjs";
const env = { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/", useBrowserCache: false };
Object.assign(lib.env, env);
Object.assign(lib.env.backends.onnx.wasm, { wasmPaths: "/node_modules/onnxruntime-web/dist/" });
const job = await (await fetch("/job.json")).json();
const answers = await answer(lib, job, "model").catch((error) => ({ failed: String(error) }));
const names = performance.getEntriesByType("resource").map(({ name }) => new URL(name).pathname);
const files = names.filter((name) => name.endsWith(".onnx")).map((name) => name.replace("/models/model/", ""));
await fetch("/answers", { method: "POST", body: JSON.stringify({ answers, files }) });
</script>"""


def main(runner: str, job_path: str, answers_path: str) -> None:
    """Serve the job to a page, and write its answers."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    packages = Path("node_modules").resolve()
    results: queue.Queue[Any] = queue.Queue()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "index.html").write_text(PAGE, encoding="utf-8")
        (place / "models").mkdir()
        links = {"node_modules": packages, "models/model": job["folder"], "runner.mjs": runner, "job.json": job_path}
        for link, target in links.items():
            (place / link).symlink_to(Path(target).resolve())
        with served(place, results, HEADERS) as address, opened(f"{address}/index.html"):
            result = results.get(timeout=SECONDS)
    for call, answer in zip(job["calls"], result["answers"], strict=True):
        if not call["file"]:
            answer["opened"] = result["files"][0]
    version = json.loads((packages / PACKAGE / "package.json").read_text(encoding="utf-8"))["version"]
    content = {"version": f"{PACKAGE} {version} in Chromium", "answers": result["answers"]}
    Path(answers_path).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
