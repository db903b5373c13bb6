"""Mutate good checkpoints in every way that was thought of: each is exported right, or refused, and never wrong.

`python scripts/check_checkpoints.py` saves four small checkpoints with their own libraries (a masked language model, a
SPLADE, a sentence encoder with Dense, a decoder), changes each as scripts/checkpoints/mutations.py says, exports it,
and compares tokens and answers of the file with those that transformers or sentence-transformers compute from the same
folder. It prints a table and fails where a file is silently different, or where damage was exported. With
`--without_peft`, PEFT cannot be imported by the export; adapters are then refused.

Equal: the same ids for every text; vectors and logits within 1e-3 of the largest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

import numpy as np
import torch
import transformers
from checkpoints.bases import SENTENCE, SPLADE, TEXTS, make_bases
from checkpoints.mutations import MUTATIONS, Mutation
from sentence_transformers import SentenceTransformer, SparseEncoder
from tokenizers import Tokenizer

from onnxtool.errors import OnnxtoolError
from onnxtool.export import ExportOptions, export_model
from onnxtool.infer import load
from onnxtool.infer.vectors import SparseVectors
from onnxtool.runtime.session import open_session

_TOLERANCE = 1e-3
EQUAL, REFUSED, DIFFERENT, DAMAGED, CRASHED = "equal", "refused", "DIFFERENT", "DAMAGE EXPORTED", "CRASHED"
_BAD = (DIFFERENT, DAMAGED, CRASHED)


def main() -> int:
    """Print the table; return 1 where something is silently different."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--without_peft", action="store_true", help="let PEFT look as if it were not installed")
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--base", default="", help="the one checkpoint to mutate")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    print("| mutation | checkpoint | result | |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        bases = make_bases(Path(work) / "bases")
        for mutation in MUTATIONS:
            for base in mutation.bases:
                if arguments.only in mutation.name and arguments.base in ("", base):
                    with _without_peft(arguments.without_peft):
                        result, reason = _try(mutation, base, bases[base], Path(work))
                    counts[result] += 1
                    row = " ".join(reason.replace(work, "").replace("|", "/").split())[:150]
                    print(f"| {mutation.name} | {base} | {result} | {row} |", flush=True)
    total = ", ".join(f"{count} {result}" for result, count in counts.items())
    print(f"\n{sum(counts.values())} mutations: {total}" + (" (without PEFT)" if arguments.without_peft else ""))
    return int(any(counts[result] for result in _BAD))


@contextmanager
def _without_peft(hidden: bool) -> Iterator[None]:
    """Hide PEFT from whoever imports it now; what loaded it before keeps it."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if hidden and name.split(".")[0] == "peft"}
    if hidden:
        sys.modules["peft"] = None  # type: ignore[assignment]  # which makes an import fail
    try:
        yield
    finally:
        if hidden:
            del sys.modules["peft"]
            sys.modules.update(before)


def _try(mutation: Mutation, base: str, source: Path, work: Path) -> tuple[str, str]:
    """Return what came of a mutation, and why."""
    for leftover in ("checkpoint", "base", "out"):
        shutil.rmtree(work / leftover, ignore_errors=True)
    folder = Path(shutil.copytree(source, work / "checkpoint"))
    mutation.apply(folder, base)
    try:
        report = export_model(ExportOptions(model_name=str(folder), output=work / "out" / "model.onnx"))
    except OnnxtoolError as error:
        return REFUSED, error.message
    except Exception as error:  # noqa: BLE001  a row of the table, and the worst of all
        traceback.print_exc()
        return CRASHED, f"{type(error).__name__}: {error}"
    if mutation.is_damage:
        return DAMAGED, "; ".join(report.notes)
    try:
        oracle = source if mutation.keeps_meaning else folder
        differences = list(_differences(base, oracle, Path(report.output)))
    except OnnxtoolError as error:  # of the file's user, by name
        return REFUSED, f"in use: {error.message}"
    return (DIFFERENT, "; ".join(differences)) if differences else (EQUAL, "; ".join(report.notes))


def _differences(base: str, folder: Path, file: Path) -> Iterator[str]:
    """Compare the file with what the checkpoint's own library computes from the folder."""
    if base in (SPLADE, SENTENCE):
        model = load(file)
        library: Any = (SparseEncoder if base == SPLADE else SentenceTransformer)(str(folder), device="cpu")
        expected = library.encode(list(TEXTS), convert_to_tensor=True)
        wanted = (expected.to_dense() if expected.is_sparse else expected).float().numpy()
        vectors = model.encode(list(TEXTS), keep_special=base == SPLADE)
        found = vectors.to_dense() if isinstance(vectors, SparseVectors) else np.asarray(vectors)
        yield from _compare("vectors", wanted, found)
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    written = Tokenizer.from_file(str(file.with_suffix("") / "tokenizer.json"))
    written.no_truncation()
    written.no_padding()
    for text in TEXTS:
        wanted_ids = tokenizer(text).input_ids
        if (ids := written.encode(text).ids) != wanted_ids:
            yield f"tokens of {text!r}: {ids} in place of {wanted_ids}"
    architecture = transformers.AutoConfig.from_pretrained(_model_folder(folder)).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(_model_folder(folder), key_mapping=None)
    if (folder / "adapter_config.json").exists():
        model = _adapted(getattr(transformers, architecture), folder)
    session = open_session(file)
    names = {value.name for value in session.model.structure.inputs}
    for text in TEXTS[:-1]:
        feeds = {name: value for name, value in tokenizer(text, return_tensors="pt").items() if name in names}
        with torch.no_grad():
            output = model.eval()(**feeds)
        first = output[0].numpy()
        answers = session.run({name: value.numpy() for name, value in feeds.items()})
        yield from _compare("outputs", first, next(iter(answers.values())))


def _model_folder(folder: Path) -> Path:
    return folder if (folder / "config.json").exists() else folder.with_name("base")


def _adapted(architecture: Any, folder: Path) -> Any:
    import peft

    base = architecture.from_pretrained(_model_folder(folder), adapter_kwargs={"subfolder": "none"})
    return peft.PeftModel.from_pretrained(base, folder).merge_and_unload()


def _compare(what: str, wanted: Any, found: Any) -> Iterator[str]:
    if wanted.shape != found.shape:
        yield f"{what} of shape {found.shape} in place of {wanted.shape}"
    elif not np.allclose(wanted, found, atol=_TOLERANCE * max(1.0, float(np.abs(wanted).max()))):
        yield f"{what} differ by {np.abs(wanted - found).max():.3g}"


if __name__ == "__main__":
    sys.exit(main())
