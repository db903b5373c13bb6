"""Folders for next-plaid give the vectors of sentence-transformers in a reader written from its Rust source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder

from onnxtool import ExportOptions
from onnxtool.errors import OnnxtoolError, TargetError
from onnxtool.export.sidecar_files import write_json
from onnxtool.export.targets import next_plaid
from onnxtool.release.variants import export_variants
from tests.retrieval.checkpoints import CASES, pylate_with_markers
from tests.workshop import load_script

encode = load_script("consumers.sourced_next_plaid").encode
MORE: dict[str, Callable[[Path, Path], None]] = {
    "ModernBERT": partial(pylate_with_markers, modern=True),
    "no expansion": partial(pylate_with_markers, do_query_expansion=False),
}
TEXTS = [
    "what is the capital of france?",
    "  Paris, (the) city; is lovely! ",
    "find [MASK] [MASK]",
    "",
    "the weather in the city is lovely today, and the city is the capital of its country: " * 5,
]


def checkpoint(name: str, folder: Path) -> Path:
    """Save a checkpoint of tests/retrieval."""
    target, base = folder / "checkpoint", folder / "base"
    target.mkdir()
    base.mkdir()
    make = MORE.get(name) or next(case.make for case in CASES if case.name == name)
    make(target, base)
    return target


def exported(saved: Path, folder: Path, **options: Any) -> Path:
    """Export a checkpoint for next-plaid and return the folder."""
    options = {"target": "next-plaid", "exporter": "torchscript", **options}
    export_variants(ExportOptions(str(saved), output=folder / "m", **options))
    return folder / "m"


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize(
    ("name", "precisions"),
    [("Stanford", "int8"), ("ModernBERT", ""), ("no expansion", "")],
)
def test_the_reader_gets_the_vectors_of_sentence_transformers(name: str, precisions: str, tmp_path: Path) -> None:
    """Queries and documents, alone and in a batch: the same tokens count, and their vectors are the same."""
    saved = checkpoint(name, tmp_path)
    folder = exported(saved, tmp_path, precisions=precisions)
    # Where a token of ModernBERT sees no other in its window, sdpa gives other vectors than eager, and so the graph.
    encoder = MultiVectorEncoder(str(saved), device="cpu", model_kwargs={"attn_implementation": "eager"})
    for role in ("query", "document"):
        wanted = getattr(encoder, f"encode_{role}")(TEXTS)
        alone = [encode(folder, [text], role)[0] for text in TEXTS]
        for text, own, *found in zip(TEXTS, wanted, encode(folder, TEXTS, role), alone, strict=True):
            for vectors in found:
                np.testing.assert_allclose(vectors, own, atol=2e-5, err_msg=f"{role}: {text}")
        if precisions:  # eight bits of weights that are random
            for own, vectors in zip(wanted, encode(folder, TEXTS, role, "model_int8.onnx"), strict=True):
                assert (own * vectors).sum(1).min() > 0.9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("PyLate", "a marker that is not one token between opening and closing token"),
        ("skip list of queries and documents", "a skip list of other texts than documents"),
        ("keep_only_token_ids", "a list of tokens that count"),
        ("without Normalize", "vectors that are not scaled to length 1"),
        ("query expansion, min, attend True", "expanded queries that are not cut"),
        ("unseen query expansion without a mask", "queries expanded by tokens that do not count"),
        ("decoder, padding left, fixed, attend True", "queries expanded before their text"),
    ],
)
def test_settings_that_it_lacks_are_refused_by_name(name: str, reason: str, tmp_path: Path) -> None:
    """Its reader would follow none of them, without a word."""
    with pytest.raises(TargetError, match=f"next-plaid has no setting for .*{reason}"):
        exported(checkpoint(name, tmp_path), tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "role"),
    [({"query_prefix_id": 7}, "query"), ({"query_length": 21}, "query"), ({"document_length": 49}, "document")],
)
def test_settings_by_which_texts_are_read_otherwise_are_found(
    change: dict[str, Any], role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is traced, by the tokens of texts of all lengths."""
    monkeypatch.setattr(next_plaid, "write_json", lambda path, content: write_json(path, {**content, **change}))
    with pytest.raises(TargetError, match=f"next-plaid would read the {role} "):
        exported(checkpoint("Stanford", tmp_path), tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_attends_to_the_tokens_of_expanded_queries_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By running it with the reader's mask: what the first test exports is refused."""
    monkeypatch.setattr(next_plaid, "_hide", lambda graph, token: None)
    with pytest.raises(OnnxtoolError):
        exported(checkpoint("Stanford", tmp_path), tmp_path, exporter="torchscript")
    assert not (tmp_path / "m").exists()
