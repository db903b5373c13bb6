"""`--prune` in the graph of a sparse encoder, by export and by optimize, against what it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool import ExportOptions, OptimizeOptions, VerifyOptions, export_model, load, optimize_model, verify
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import ExportError, InputError, OptionError, PassError, TargetError
from onnxtool.infer.vectors import SparseVectors
from onnxtool.model_file import ModelFile
from onnxtool.optimize.quantization import candidates
from onnxtool.optimize.quantization.candidates import CANDIDATES, Judgement
from onnxtool.runtime.session import open_session
from tests.infer.test_late_interaction import encoder
from tests.infer.tiny_models import model_for, splade_terms, table, write_model
from tests.workshop import Workshop

TEXTS = ["the cat sat on the mat", "a dog in a red house", "trains to Berlin", "x"]


def terms_of(path: Path, checkpoint: Path | None = None, **options: Any) -> Any:
    found: Any = load(path, provider="cpu", model_name=checkpoint).encode(TEXTS, keep_special=True, **options)
    return found.to_dense()


@pytest.fixture(scope="module")
def plain(workshop: Workshop) -> Path:
    return workshop.exported("tiny-splade", exporter="torchscript", head="splade")


@pytest.mark.parametrize(("rule", "precision"), [("top_k:9", "fp32"), ("max_ratio:0.6", "int8")])
def test_an_optimized_graph_prunes_what_it_computes(plain: Path, tmp_path: Path, rule: str, precision: str) -> None:
    """Bit by bit, these are the weights of the file that was optimized without the rule."""
    checkpoint = plain.with_suffix("")
    whole, pruned = tmp_path / "whole.onnx", tmp_path / "pruned.onnx"
    for output, prune in ((whole, None), (pruned, rule)):
        options = OptimizeOptions(plain, output=output, precision=precision, prune=prune, timing=False, max_error=0.5)
        report = optimize_model(options)
        assert report.verification is not None
        assert report.verification.passed
    assert np.array_equal(terms_of(pruned, checkpoint), terms_of(whole, checkpoint, prune=rule))
    assert 0 < np.count_nonzero(terms_of(pruned, checkpoint)) < np.count_nonzero(terms_of(whole, checkpoint))
    assert verify(pruned, plain, VerifyOptions(min_cosine=0.5, rtol=2.0)).passed


def test_a_pruned_graph_is_optimized_again_on_all_its_weights(plain: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first.onnx", tmp_path / "again.onnx"
    optimize_model(OptimizeOptions(plain, output=first, prune="top_k:9", timing=False))
    report = optimize_model(OptimizeOptions(first, output=again, timing=False))
    assert report.verification is not None
    assert report.verification.max_abs_error < 1e-5
    assert np.array_equal(terms_of(again, plain.with_suffix("")) > 0, terms_of(first, plain.with_suffix("")) > 0)
    assert verify(again, first).passed
    with pytest.raises(PassError, match="pruned by top_k:9 already"):
        optimize_model(OptimizeOptions(first, output=tmp_path / "x.onnx", prune="top_k:3"))
    with pytest.raises(InputError, match="the graph itself is pruned by top_k:9"):
        terms_of(first, plain.with_suffix(""), prune="top_k:3")


def test_candidates_are_judged_as_they_would_be_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setitem(CANDIDATES, "cpu", CANDIDATES["cpu"][:1])  # float32: others take a second each
    monkeypatch.setattr(candidates, "_latencies_ms", lambda *_, **__: [1.0])

    def judge(path: Path) -> Judgement:
        counts.append(int(np.count_nonzero(terms_of(path, plain.with_suffix("")), axis=1).max()))
        return Judgement({})

    options = OptimizeOptions(plain, output=tmp_path / "m.onnx", precision="auto", prune="top_k:9", verify=False)
    optimize_model(options, judge=judge)
    assert counts == [9]


def test_a_damaged_threshold_is_found(plain: Path, tmp_path: Path) -> None:
    """A graph that keeps fewer terms than its metadata says is not the one that it was made of."""
    pruned = tmp_path / "pruned.onnx"
    optimize_model(OptimizeOptions(plain, output=pruned, prune="max_ratio:0.9", timing=False))
    content = pruned.read_bytes()
    pruned.write_bytes(content.replace(b"max_ratio:0.9", b"max_ratio:0.2"))
    assert not verify(pruned, plain).passed


@pytest.mark.parametrize(("rule", "dtype"), [("top_k:9", "float32"), ("max_ratio:0.6", "float16")])
def test_an_export_prunes_and_is_compared_with_pytorch(
    workshop: Workshop, tmp_path: Path, rule: str, dtype: str
) -> None:
    checkpoint, output = workshop.checkpoint("tiny-splade"), tmp_path / "m.onnx"
    export_model(ExportOptions(str(checkpoint), output=output, head="splade", prune=rule, dtype=dtype))
    assert ModelFile.open(output).metadata["onnxtool.prune"] == rule
    if dtype == "float32":
        assert verify(output, checkpoint).passed
        assert np.count_nonzero(terms_of(output), axis=1).max() == 9


def test_what_prunes_elsewhere_is_told_or_refused(workshop: Workshop, tmp_path: Path) -> None:
    """Anserini and OpenSearch get a graph that prunes, sentence-transformers its own setting, and fastembed nothing."""
    checkpoint = str(workshop.checkpoint("tiny-splade"))

    def export(target: str, rule: str = "top_k:9") -> Path:
        quick: Any = {"exporter": "torchscript", "verify": False}
        export_model(
            ExportOptions(checkpoint, output=tmp_path / target, target=target, prune=rule, force=True, **quick)
        )
        return tmp_path / target

    folder = export("sentence-transformers")
    assert json.loads((folder / "config_sentence_transformers.json").read_text())["max_active_dims"] == 9
    settings = Path(checkpoint) / "config_sentence_transformers.json"
    assert not settings.exists()
    settings.write_text('{"max_active_dims": 4}')
    kept = json.loads((export("sentence-transformers") / settings.name).read_text())["max_active_dims"]
    settings.unlink()
    assert kept == 4
    with pytest.raises(TargetError, match="keeps a number of terms"):
        export("sentence-transformers", "max_ratio:0.5")
    with pytest.raises(TargetError, match="a graph for fastembed gives no term weights"):
        export("fastembed")
    (request,) = export("opensearch").glob("*model_config.json")
    assert "its terms pruned by top_k:9" in request.read_text()
    (graph,) = export("anserini").glob("*-optimized.onnx")
    session = open_session(ModelFile.open(graph), provider="cpu")
    ids = np.array([[2, 40, 50, 60, 3]], np.int64)
    feeds = {name: {"input_ids": ids, "token_type_ids": 0 * ids}.get(name, ids > 0) for name in session.input_names}
    feeds = {name: array.astype(np.int64) for name, array in feeds.items()}
    assert len(session.run(feeds)["output_idx"]) <= 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "logits", "prune": "top_k:9"}, "this graph computes no term weights"),
        ({"head": "splade", "prune": "alpha_mass:0.5"}, "no graph computes alpha_mass"),
        ({"head": "splade", "prune": "top_k"}, "takes a whole number"),
    ],
)
def test_an_export_refuses_a_rule_that_has_no_effect(
    workshop: Workshop, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ExportError, OptionError), match=message):
        export_model(ExportOptions(str(workshop.checkpoint("tiny-splade")), output=tmp_path / "m.onnx", **options))
    assert not (tmp_path / "m.onnx").exists()


def test_a_model_without_terms_has_none_to_prune(tmp_path: Path) -> None:
    path = write_model(tmp_path, model_for("sentence-similarity", table(15, 4), "last_hidden_state"))
    with pytest.raises(PassError, match="is for the term weights of a sparse encoder, and the graph gives last_hidden"):
        optimize_model(OptimizeOptions(path, prune="top_k:2"))


def test_ranges_are_those_of_merged_vectors(tmp_path: Path) -> None:
    """Which have length 1; those of the table's rows are longer."""
    path, corpus = encoder(tmp_path), tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat\na red dog\n")
    options = CorpusOptions(prune="pool_factor:2", vectors_as="int8", calibration=corpus)
    encode_corpus(path, corpus, tmp_path / "vectors", options)
    manifest = json.loads((tmp_path / "vectors.manifest.json").read_text())
    merged: Any = load(path).encode(corpus.read_text().splitlines(), prune="pool_factor:2")
    ranges = manifest["identity"]["vectors"]["ranges"]
    np.testing.assert_allclose(ranges, [merged.vectors.min(axis=0), merged.vectors.max(axis=0)], rtol=1e-6)


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_corpus_is_pruned_and_texts_without_terms_are_counted(tmp_path: Path, output_format: str) -> None:
    """The rule is part of what a run is resumed by."""
    values = np.where(table(15, 15) > 0.6, table(15, 15), -1).astype(np.float32)
    path = write_model(tmp_path, model_for("sparse-encoding", values, "logits"))
    corpus = tmp_path / "corpus.jsonl"
    texts = ["a cat", "the dog sat", "red"]
    corpus.write_text("".join(json.dumps({"id": text, "contents": text}) + "\n" for text in texts))
    options = CorpusOptions(output_format=output_format, prune="abs_value:1.05", weights="float")
    report = encode_corpus(path, corpus, tmp_path / "vectors", options)
    weights = [splade_terms(values, text) for text in texts]
    left = [{term: weight for term, weight in one.items() if weight >= np.float32(1.05)} for one in weights]
    assert report.num_empty == sum(not one for one in left)
    assert any("no query finds them" in note for note in report.notes) == (report.num_empty > 0)
    if output_format == "jsonl":
        (written,) = (tmp_path / "vectors").glob("*.jsonl")
        lines = [json.loads(line) for line in written.read_text().splitlines()]
        assert [line["vector"] for line in lines] == [pytest.approx(one) for one in left]
    manifest = json.loads((tmp_path / "vectors.manifest.json").read_text())
    assert manifest["identity"]["options"]["prune"] == "abs_value:1.05"
    loaded: Any = load(path).encode(texts, prune="abs_value:1.05")
    assert isinstance(loaded, SparseVectors)
    assert [loaded[place].terms() for place in range(3)] == [pytest.approx(one) for one in left]
