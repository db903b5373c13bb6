"""Worker processes that fail at texts whose ids begin with `poison`."""

from __future__ import annotations

import os
from pathlib import Path


def poisoned(folder: Path, code: str) -> dict[str, str]:
    """Return variables by which workers run `code` first."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def code_of(act: str) -> str:
    """Return code that does something with a batch that has the text `poison`, once the worker loads the pipeline."""
    return f"""
import importlib.abc, importlib.machinery, os, signal, sys, time

def after(module):
    tokenize = module._tokenize
    run = module._encode
    bad = set()

    def watched(model, documents, plan):
        found, rejects = tokenize(model, documents, plan)
        for document, texts in found:
            if document.id.startswith("poison"):
                bad.update(map(id, texts))
                kept.extend(texts)
        return found, rejects

    kept = []

    def encode(model, texts, plan, told):
        if any(id(text) in bad for text in texts):
            with told():
                {act}
        return run(model, texts, plan, told)

    module._tokenize, module._encode = watched, encode

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "onnxtool.encoding.pipeline":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            after(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
