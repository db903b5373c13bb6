"""Load an encoded corpus into OpenSearch: `python opensearch_bulk.py VECTORS INDEX URL`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opensearchpy import OpenSearch, helpers

from onnxtool.encoding import read_shards


def load(folder: str, index: str, client: OpenSearch) -> int:
    """Create the index, send its documents in bulk requests, and return the number accepted."""
    manifest = json.loads(Path(f"{folder.rstrip('/')}.manifest.json").read_bytes())
    vectors, kind = manifest["identity"]["vectors"], manifest["identity"]["options"]["kind"]
    if vectors["of"] == "tokens" or not vectors["as"].startswith("float"):
        sys.exit(f"these are vectors of {vectors['of']} as {vectors['as']}: encode floats of texts, or terms")
    if vectors["of"] == "terms" and kind != "jsonl":
        sys.exit(f"OpenSearch has terms by their names, and these are {kind}: encode with --output_format jsonl")
    field: dict[str, Any] = {"type": "rank_features"}
    if vectors["of"] == "texts":
        method = {"name": "hnsw", "engine": "lucene", "space_type": "cosinesimil"}
        field = {"type": "knn_vector", "dimension": vectors["dimensions"], "method": method}
    settings = {"index.knn": vectors["of"] == "texts"}
    client.indices.create(index=index, body={"settings": settings, "mappings": {"properties": {"vector": field}}})
    files = [Path(folder, file["name"]) for shard in manifest["shards"] for file in shard["files"]]
    rows = _lines(files) if kind == "jsonl" else _arrays(folder)
    actions = ({"_index": index, "_id": row["id"], "_source": row} for row in rows)
    return sum(ok for ok, _ in helpers.streaming_bulk(client, actions, chunk_size=500, max_retries=5))


def _lines(files: list[Path]) -> Iterator[dict[str, Any]]:
    for path in files:
        with path.open("rb") as file:
            yield from map(json.loads, file)


def _arrays(folder: str) -> Iterator[dict[str, Any]]:
    for shard in read_shards(folder):
        yield from ({"id": name, "vector": row.tolist()} for name, row in zip(shard.ids, shard.vectors, strict=True))


if __name__ == "__main__":
    print(load(sys.argv[1], sys.argv[2], OpenSearch(sys.argv[3])), "documents")
