"""The scripts that load an encoded corpus into an index find there what an exact search finds."""

from __future__ import annotations

import json
import runpy
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.infer import SparseVectors, TokenVectors, load
from tests.docs.documents import ROOT
from tests.encoding.corpora import V, make_texts, sparse_model, write_corpus
from tests.infer.test_late_interaction import encoder
from tests.infer.tiny_models import POOLED, model_for, table, write_model
from tests.packages import need

WIDTH, DEPTH = 16, 5
TEXTS = [*dict.fromkeys(make_texts(120))]
QUERIES = [*dict.fromkeys(make_texts(12, seed=5))]
IDS = [f"d{place}" for place in range(len(TEXTS))]


def _script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "load" / name))


def _dense(folder: Path) -> Path:
    values = table(V, WIDTH)
    return write_model(folder, model_for("sentence-similarity", values, "last_hidden_state"), modules=POOLED)


def _encode(folder: Path, model: Path, **options: Any) -> str:
    """Encode the texts in shards of 50, and return the folder."""
    corpus = write_corpus(folder / "corpus.jsonl", TEXTS)
    encode_corpus(model, corpus, folder / "v", CorpusOptions(provider="cpu", shard_size=50, **options))
    return str(folder / "v")


def _vectors(model: Path, texts: list[str], **options: Any) -> Any:
    return load(model, provider="cpu").encode(texts, **options)


def _require_best(found: list[str], scores: NDArray[Any], slack: float) -> None:
    """Check that what was found is, by its exact scores, as good as the best; equals may stand for each other."""
    assert len(set(found)) == DEPTH
    own = [float(scores[IDS.index(name)]) for name in found]
    assert own == pytest.approx(np.sort(scores)[::-1][:DEPTH].tolist(), abs=slack)


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("vectors_as", ["float32", "float16", "uint8", "binary", "ubinary"])
def test_faiss_finds_the_nearest(tmp_path: Path, kind: str, vectors_as: str) -> None:
    """Floats and codes by cosines, bits by Hamming distances; ids by the number of the line."""
    faiss = need("faiss")
    model = _dense(tmp_path / "m")
    more: dict[str, Any] = {"calibration": tmp_path / "corpus.jsonl"} if vectors_as == "uint8" else {}
    folder, path = _encode(tmp_path, model, vectors_as=vectors_as, **more), str(tmp_path / "index")
    _script("faiss_index.py")["main"](folder, path, kind)
    names = [json.loads(line) for line in Path(f"{path}.ids.jsonl").read_text().splitlines()]
    assert names == IDS
    is_bits = vectors_as.endswith("binary")
    stored = {"vectors_as": "ubinary"} if is_bits else {}
    queries, documents = (_vectors(model, texts, **stored) for texts in (QUERIES, TEXTS))
    index = (faiss.read_index_binary if is_bits else faiss.read_index)(path)
    _, found = index.search(queries, DEPTH)
    for query, places in zip(queries, found, strict=True):
        scores = -np.unpackbits(documents ^ query, axis=1).sum(axis=1).astype(float) if is_bits else documents @ query
        # Cosines of codes of 256 steps are off by a little.
        _require_best([names[place] for place in places], scores, 0.02 if vectors_as == "uint8" else 1e-3)


@pytest.mark.parametrize("of", ["texts", "terms", "tokens"])
def test_qdrant_finds_the_nearest(tmp_path: Path, of: str) -> None:
    """One vector for a text, weights of terms, and a vector for each token; the ids are in the payload."""
    qdrant = need("qdrant_client")
    makers = {"texts": _dense, "terms": sparse_model, "tokens": encoder}
    model = makers[of](tmp_path / "m")
    folder = _encode(tmp_path, model, output_format="parquet" if of == "terms" else "npy")
    client = qdrant.QdrantClient(":memory:")
    upload = _script("qdrant_upload.py")["upload"]
    upload(folder, "corpus", client)
    assert client.count("corpus").count == len(TEXTS)
    task = "document" if of == "tokens" else None
    documents = _vectors(model, TEXTS, task=task)
    for text in QUERIES:
        query = _vectors(model, [text], task=task)
        asked: Any = query[0] if of == "texts" else None
        if isinstance(query, SparseVectors):
            asked = qdrant.models.SparseVector(indices=query.indices.tolist(), values=query.weights.tolist())
            scores = _weights(documents) @ _weights(query)[0]
        elif isinstance(query, TokenVectors):
            asked = query.row(0).tolist()
            scores = query.max_similarities(documents)[0]
        else:
            scores = documents @ query[0]
        points = client.query_points("corpus", asked, limit=DEPTH, using="terms" if of == "terms" else None).points
        _require_best([point.payload["id"] for point in points], scores, 1e-4)
        assert points[0].id == str(uuid.uuid5(uuid.NAMESPACE_OID, points[0].payload["id"]))


def _weights(vectors: SparseVectors) -> NDArray[np.float64]:
    dense = np.zeros((len(vectors), V))
    for row in range(len(vectors)):
        part = slice(vectors.indptr[row], vectors.indptr[row + 1])
        dense[row, vectors.indices[part]] = vectors.weights[part]
    return dense


class _StandIn(BaseHTTPRequestHandler):
    """Answers as OpenSearch does to the making of an index and to bulk requests, and keeps what it got."""

    indices: dict[str, Any]
    documents: dict[str, Any]
    requests: list[int]

    def do_PUT(self) -> None:
        self.indices[self.path.strip("/")] = json.loads(self._body())
        self._answer({"acknowledged": True})

    def do_POST(self) -> None:
        assert self.path == "/_bulk"
        lines = [json.loads(line) for line in self._body().splitlines()]
        actions, sources = lines[::2], lines[1::2]
        for action, source in zip(actions, sources, strict=True):
            assert action["index"]["_index"] in self.indices
            self.documents[action["index"]["_id"]] = source
        self.requests.append(len(actions))
        items = [{"index": {"_id": action["index"]["_id"], "status": 201}} for action in actions]
        self._answer({"errors": False, "items": items})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def stand_in() -> Iterator[tuple[str, type[_StandIn]]]:
    """A server on this machine: its address, and what keeps what it got."""
    handler = type("Handler", (_StandIn,), {"indices": {}, "documents": {}, "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def test_opensearch_gets_terms_by_their_names(tmp_path: Path, stand_in: tuple[str, type[_StandIn]]) -> None:
    """As rank features, which neural_sparse queries; a passage says where it is."""
    opensearch = need("opensearchpy")
    url, got = stand_in
    folder = _encode(tmp_path, sparse_model(tmp_path / "m"), weights="float", long="window")
    with opensearch.OpenSearch(url) as client:
        assert _script("opensearch_bulk.py")["load"](folder, "corpus", client) == len(TEXTS)
    assert got.indices["corpus"]["mappings"]["properties"]["vector"] == {"type": "rank_features"}
    assert [*got.documents] == [f"{name}#0" for name in IDS]
    for name, text in zip(IDS, TEXTS, strict=True):
        source = got.documents[f"{name}#0"]
        assert (source["contents"], source["begin"], source["end"]) == (text, 0, len(text))
        assert all(isinstance(term, str) and weight > 0 for term, weight in source["vector"].items())


def test_opensearch_gets_vectors_of_texts(tmp_path: Path, stand_in: tuple[str, type[_StandIn]]) -> None:
    """As many numbers as the index is made for, in bulk requests of 500 at most."""
    opensearch = need("opensearchpy")
    url, got = stand_in
    model = _dense(tmp_path / "m")
    folder = _encode(tmp_path, model)
    with opensearch.OpenSearch(url) as client:
        assert _script("opensearch_bulk.py")["load"](folder, "corpus", client) == len(TEXTS)
    field = got.indices["corpus"]["mappings"]["properties"]["vector"]
    assert (field["type"], field["dimension"]) == ("knn_vector", WIDTH)
    assert sum(got.requests) == len(TEXTS)
    rows = np.array([got.documents[name]["vector"] for name in IDS])
    np.testing.assert_allclose(rows, _vectors(model, TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    ("module", "script", "options", "message"),
    [
        ("qdrant_client", "qdrant_upload.py", {"vectors_as": "ubinary"}, "these vectors are ubinary"),
        ("opensearchpy", "opensearch_bulk.py", {"vectors_as": "ubinary"}, "vectors of texts as ubinary"),
    ],
)
def test_what_an_index_does_not_take_is_said_before_it_is_made(
    tmp_path: Path, module: str, script: str, options: dict[str, Any], message: str
) -> None:
    """No request is sent."""
    need(module)
    folder = _encode(tmp_path, _dense(tmp_path / "m"), **options)
    names = _script(script)
    with pytest.raises(SystemExit, match=message):
        (names.get("upload") or names["load"])(folder, "corpus", None)


def test_lines_of_terms_are_what_anserini_reads(tmp_path: Path) -> None:
    """An id and contents that are strings, and whole positive weights; any other field is a value of its own."""
    folder = _encode(tmp_path, sparse_model(tmp_path / "m"), long="window")
    lines = [json.loads(line) for path in sorted(Path(folder).iterdir()) for line in path.read_text().splitlines()]
    assert len(lines) == len(TEXTS)
    for line in lines:
        assert {name: type(value) for name, value in line.items()} == {
            "id": str, "contents": str, "begin": int, "end": int, "vector": dict,
        }  # fmt: skip
        assert all(type(weight) is int and weight > 0 for weight in line["vector"].values())
