"""Upload an encoded corpus to Qdrant: `python qdrant_upload.py VECTORS COLLECTION URL`."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qdrant_client import QdrantClient, models

from onnxtool.encoding import read_shards

_TYPES = {"float32": models.Datatype.FLOAT32, "float16": models.Datatype.FLOAT16}


def upload(folder: str, collection: str, client: QdrantClient) -> None:
    """Create the collection, and upload the points one shard at a time."""
    vectors = json.loads(Path(f"{folder.rstrip('/')}.manifest.json").read_bytes())["identity"]["vectors"]
    if vectors["as"] not in _TYPES:
        sys.exit(f"these vectors are {vectors['as']}: upload floats, and let Qdrant quantize them")
    if vectors["of"] == "terms":
        client.create_collection(collection, sparse_vectors_config={"terms": models.SparseVectorParams()})
    else:
        by_token = vectors["of"] == "tokens"
        several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM) if by_token else None
        distance = models.Distance.DOT if by_token else models.Distance.COSINE
        params = models.VectorParams(
            size=vectors["dimensions"], distance=distance, multivector_config=several, datatype=_TYPES[vectors["as"]]
        )
        client.create_collection(collection, vectors_config=params)
    for shard in read_shards(folder):
        # Qdrant's ids are numbers or UUIDs; the corpus ids go into the payload.
        points = (
            models.PointStruct(id=str(uuid.uuid5(uuid.NAMESPACE_OID, name)), vector=vector, payload={"id": name})
            for name, vector in zip(shard.ids, _rows(shard.vectors, vectors["of"]), strict=True)
        )
        client.upload_points(collection, points, batch_size=256, max_retries=5, wait=True)


def _rows(vectors: Any, of: str) -> Iterator[Any]:
    for place in range(len(vectors)):
        if of == "terms":
            part = slice(vectors.indptr[place], vectors.indptr[place + 1])
            indices, values = vectors.indices[part].tolist(), vectors.weights[part].tolist()
            yield {"terms": models.SparseVector(indices=indices, values=values)}
        else:
            yield (vectors.row(place) if of == "tokens" else vectors[place]).tolist()


if __name__ == "__main__":
    upload(sys.argv[1], sys.argv[2], QdrantClient(sys.argv[3]))
