"""Put an encoded corpus into a Faiss index: `python faiss_index.py VECTORS INDEX [flat|hnsw]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import faiss
import numpy as np

import onnxtool
from onnxtool.encoding import read_shards

_LINKS = 32  # links of each node in the HNSW graph


def main(folder: str, path: str, kind: str = "flat") -> None:
    """Write the index, and `PATH.ids.jsonl` with one id per line: the index's N is line N, counted from 0."""
    manifest = f"{folder.rstrip('/')}.manifest.json"
    vectors = json.loads(Path(manifest).read_bytes())["identity"]["vectors"]
    width, stored = vectors["dimensions"], vectors["as"]
    if vectors["of"] != "texts":
        sys.exit(f"Faiss has one vector for a text, and these are of {vectors['of']}")
    if is_bits := stored in ("binary", "ubinary"):  # compared by Hamming distance
        index = faiss.IndexBinaryHNSW(width, _LINKS) if kind == "hnsw" else faiss.IndexBinaryFlat(width)
    elif kind == "hnsw":  # compared by cosine: vectors are scaled to length 1
        index = faiss.IndexHNSWFlat(width, _LINKS, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexFlatIP(width)
    with Path(f"{path}.ids.jsonl").open("w", encoding="utf-8") as ids:
        for shard in read_shards(folder):  # one shard is in memory at a time
            if is_bits:
                rows = shard.vectors.view(np.uint8) ^ (128 if stored == "binary" else 0)
            else:
                ranges = manifest if stored in ("int8", "uint8") else None
                rows = onnxtool.restore_vectors(shard.vectors, stored, ranges=ranges)
                faiss.normalize_L2(rows)
            index.add(rows)
            ids.writelines(f"{json.dumps(name)}\n" for name in shard.ids)
    (faiss.write_index_binary if is_bits else faiss.write_index)(index, path)
    print(f"{index.ntotal} vectors of {width} numbers in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
