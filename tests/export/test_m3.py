"""M3 embedders: three outputs from one pass, equal to FlagEmbedding's formulas; damaged layers are one error."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onnxtool
from onnxtool.checkpoint.files import M3_FILES
from onnxtool.checkpoint.pooling_module import PoolingModule
from onnxtool.checkpoint.pooling_modules import Dense, Normalize
from onnxtool.checkpoint.token_modules import LexicalWeights, ZeroPadding
from onnxtool.errors import CheckpointError, InputError
from onnxtool.export.heads.head import Head
from onnxtool.export.heads.m3 import is_m3, read_m3
from onnxtool.export.source import Source
from onnxtool.infer import SparseVectors, TokenVectors, load
from tests.checkpoint.test_pooling_modules import MASK, run_head
from tests.retrieval.checkpoints import m3

LINEAR = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
TEXTS = (
    "the weather in the city",
    "paris 東京",
    "a much longer text about the capital of france, and its largest city",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An M3 embedder."""
    folder = tmp_path_factory.mktemp("m3")
    (folder / "base").mkdir()
    m3(folder / "checkpoint", folder / "base")
    path = folder / "model.onnx"
    report = onnxtool.export_model(onnxtool.ExportOptions(model_name=str(folder / "checkpoint"), output=path))
    assert report.head == "m3"
    assert {info.name: info.shape for info in report.outputs} == {
        "sentence_embedding": ("batch_size", 32),
        "token_weights": ("batch_size", "sequence"),
        "token_embeddings": ("batch_size", "sequence", 32),
    }
    return path


def test_each_representation_is_chosen_by_its_name(exported: Path) -> None:
    """Dense where nothing is said; terms are in one vocabulary, tokens without the first."""
    sparse = onnxtool.encode(exported, TEXTS, representation="sparse")
    tokens = onnxtool.encode(exported, TEXTS, representation="colbert")
    dense = onnxtool.encode(exported, TEXTS)
    np.testing.assert_array_equal(np.asarray(onnxtool.encode(exported, TEXTS, representation="dense")), dense)
    assert isinstance(sparse, SparseVectors)
    assert isinstance(tokens, TokenVectors)
    model = load(exported, provider="cpu")
    read = model.tokenize(TEXTS)
    assert np.diff(tokens.indptr).tolist() == [len(text) - 1 for text in read]
    np.testing.assert_allclose(np.linalg.norm(tokens.vectors, axis=1), 1.0, rtol=1e-5)
    outputs = model.run(read).outputs
    for place, text in enumerate(read):
        expected: dict[int, float] = {}
        own = outputs["token_weights"][place].tolist()
        for token, weight, added in zip(text.ids, own, text.is_special, strict=False):
            if weight > 0 and not added and model.tokenizer.token(token) != "<unk>":
                expected[token] = max(weight, expected.get(token, 0.0))
        ids, weights = sparse.row(place)
        assert dict(zip(ids.tolist(), weights.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)


def test_windows_of_a_long_text_make_its_terms(exported: Path) -> None:
    """The largest weight of each; vectors of tokens do not go with windows."""
    text = " ".join(TEXTS) * 4
    sparse = load(exported, provider="cpu", representation="sparse")
    vectors = sparse.encode([text, "paris"], long="window")
    assert isinstance(vectors, SparseVectors)
    parts = sparse.encode_windows([[window] for window in sparse.windows([text], long="window")[0]])
    assert isinstance(parts, SparseVectors)
    assert len(parts) > 1
    np.testing.assert_allclose(vectors.to_dense()[0], parts.to_dense().max(axis=0), rtol=1e-5)
    with pytest.raises(InputError, match="windows of a text"):
        load(exported, provider="cpu", representation="colbert").encode([text], long="window")


def test_texts_are_ranked_by_the_mean_over_tokens(exported: Path) -> None:
    """As colbert_score of FlagEmbedding."""
    model = load(exported, provider="cpu", representation="colbert")
    report = model.answer(TEXTS, query="the city")
    vectors, query = model.encode(TEXTS), model.encode(["the city"])
    assert isinstance(vectors, TokenVectors)
    assert isinstance(query, TokenVectors)
    expected = [(query.vectors @ vectors.row(place).T).max(axis=1).mean() for place in range(len(TEXTS))]
    assert [answer.candidates[0].score for answer in report.answers] == pytest.approx(expected, rel=1e-5)


def test_other_models_have_one_representation(tmp_path: Path, exported: Path) -> None:
    """And there is no fourth one."""
    with pytest.raises(InputError, match="'lexical' is not one of"):
        load(exported, representation="lexical")
    path = tmp_path / "dense.onnx"
    folder = exported.parent / "checkpoint"
    onnxtool.export_model(onnxtool.ExportOptions(model_name=str(folder), output=path, head="embedding"))
    with pytest.raises(InputError, match="gives no token_weights and no token_embeddings"):
        load(path, representation="sparse")


def test_the_heads_are_equal_in_all_forms() -> None:
    """In the graph and in PyTorch; padding is 0."""
    draw = np.random.default_rng(5)
    values = draw.standard_normal((4, 5, 7)).astype(np.float32)
    weight, bias = draw.standard_normal((1, 7)).astype(np.float32), np.array([0.1], np.float32)
    matrix = draw.standard_normal((3, 7)).astype(np.float32)
    projection = Dense("c", matrix, np.ones(3, np.float32), "Identity", on_tokens=True)
    chains: tuple[tuple[PoolingModule, ...], ...] = (
        (LexicalWeights(weight, bias),),
        (projection, ZeroPadding(), Normalize(on_tokens=True)),
    )
    heads = [Head("m3", "raw", f"output{place}", "", chain, keeps_tokens=True) for place, chain in enumerate(chains)]
    _, built = run_head(Head("m3", "raw", "first", "", chains[1], keeps_tokens=True, beside=tuple(heads)), values)
    for chain, head, found in zip(chains, heads, built[1:], strict=True):
        expected = head.reference(torch.from_numpy(values), torch.from_numpy(MASK)).numpy()
        applied: Any = values
        for module in chain:
            applied = module.apply(applied, MASK.astype(bool))
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(applied, expected, atol=1e-6)
        assert not found[MASK == 0].any()


class Runs:
    """What a pickle may hold: a call of a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("a pickle ran code",))


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _packed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return buffer.getvalue()


_DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated": (lambda: _saved(LINEAR)[:300], "no zip as torch.save writes it"),
    "cut inside": (lambda: _saved(LINEAR).replace(b"data.pkl", b"data.pkx"), "is no state of a linear layer"),
    "empty": (lambda: b"", "no zip"),
    "a pickle": (lambda: pickle.dumps(Runs()), "no zip"),
    "code": (lambda: _saved(Runs()), "is no state of a linear layer"),
    "code beside tensors": (lambda: _saved({**LINEAR, "bias": Runs()}), "is no state of a linear layer"),
    "a module": (lambda: _saved(torch.nn.Linear(4, 1)), "is no state of a linear layer"),
    "compressed": (lambda: _packed(_saved(LINEAR)), "its entries are compressed"),
    "a list": (lambda: _saved([1, 2]), "it holds list"),
    "other names": (lambda: _saved({"weight": torch.ones(1, 4)}), r"it holds \['weight'\]"),
    "numbers": (lambda: _saved({"weight": 1.0, "bias": 2.0}), "weight is no plain tensor"),
    "integers": (lambda: _saved({**LINEAR, "weight": torch.ones(1, 4, dtype=torch.int64)}), "weight is no plain"),
    "a huge view": (lambda: _saved({**LINEAR, "weight": torch.ones(1).expand(1 << 40, 4)}), "weight is no plain"),
    "rows": (lambda: _saved({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}), "gives 2 numbers for a token"),
    "shapes": (lambda: _saved({"weight": torch.ones(4), "bias": torch.zeros(1)}), r"weight is \[4\]"),
    "bias": (lambda: _saved({"weight": torch.ones(1, 4), "bias": torch.zeros(3)}), r"its bias \[3\]"),
}


@pytest.mark.parametrize("name", _DAMAGED)
def test_a_damaged_layer_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """No code of it runs, and nothing of it is taken."""
    make, message = _DAMAGED[name]
    (tmp_path / M3_FILES[0]).write_bytes(make())
    (tmp_path / M3_FILES[1]).write_bytes(_saved(OrderedDict(LINEAR)))
    source = Source.find(str(tmp_path))
    assert is_m3(source)
    with pytest.raises(CheckpointError, match=message):
        read_m3(source)
    assert "ran code" not in capsys.readouterr().out


def test_a_layer_of_another_model_is_refused(tmp_path: Path) -> None:
    """By its width; one layer alone is none of M3."""
    for name in M3_FILES:
        assert not is_m3(Source.find(str(tmp_path)))
        (tmp_path / name).write_bytes(_saved(LINEAR))
    head = read_m3(Source.find(str(tmp_path)))
    for one in head.beside:
        with pytest.raises(CheckpointError, match="takes vectors of 4 numbers, and is given 7"):
            one.width(7)
