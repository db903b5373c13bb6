"""Read the vectors of an encoded corpus back, a shard at a time.

Shape letters: N texts of a shard, H numbers of a vector, T terms or tokens of these texts together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding.files import on_this_machine
from onnxtool.encoding.locations import AnyLocation
from onnxtool.encoding.manifest import file_sha256, read_manifest
from onnxtool.encoding.output import OutputFolder
from onnxtool.encoding.parquet import require_pyarrow
from onnxtool.encoding.pipeline import document_of
from onnxtool.errors import InputError
from onnxtool.infer.vectors import AnyVectors, SparseVectors, TokenVectors
from onnxtool.options import checked
from onnxtool.reading import load_array, parse_json, written_lines
from onnxtool.reports import short_repr

_COLUMNS = ("vector", "vectors", "indices", "values")


@short_repr
class Shard(NamedTuple):
    """The ids of N texts or passages, and their vectors.

    Attributes:
        starts: for texts combined by `by_document`, int64 [N]: the first vector of each; otherwise None.
    """

    ids: list[str]
    vectors: AnyVectors
    starts: NDArray[np.int64] | None = None


@checked
def read_shards(folder: AnyLocation, vocabulary: Sequence[str] = ()) -> Iterator[Shard]:
    """Yield the shards of an encoded corpus in order, holding one in memory at a time.

    Args:
        folder: the output of `encode_corpus`, as npy or parquet.
        vocabulary: for a sparse encoder, its terms by id.

    Raises:
        InputError: the folder does not exist, its files are missing or damaged, or its format is a different one.
    """
    output = OutputFolder(folder)
    manifest = read_manifest(output.manifest_path)
    if manifest is None:
        raise InputError(f"{folder} is not an encoded corpus", "encode one: onnxtool infer --input FILE --output DIR/")
    for shard in manifest.shards:
        if not shard.files:  # none of its texts has a token
            continue
        with ExitStack() as stack:
            try:
                paths = [stack.enter_context(on_this_machine(output.path / file.name)) for file in shard.files]
                for path, file in zip(paths, shard.files, strict=True):
                    if file_sha256(path) != file.sha256:
                        raise InputError(
                            f"{output.path / file.name} has other contents than were written", "encode the corpus again"
                        )
                yield _read_files(paths, vocabulary)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(
                    f"{output.path / shard.files[0].name} cannot be read: {error}", "encode the corpus again"
                ) from error


def _read_files(paths: Sequence[Path], vocabulary: Sequence[str]) -> Shard:
    first, *_ = paths
    if first.suffix == ".parquet":
        return _read_table(first, vocabulary)
    if first.suffix != ".npy":
        raise ValueError(f"a shard is read from npy or parquet, and this one ends in {first.suffix}")
    *arrays, names = paths
    ids = [str(parse_json(line)["id"]) for line in written_lines(names)]
    loaded = [load_array(path) for path in arrays]
    if len(loaded) == 1:
        return Shard(ids, loaded[0])
    rows, indptr = loaded
    return Shard(ids, TokenVectors(indptr, rows))


@checked
def by_document(shard: Shard) -> Shard:
    """Combine adjacent passages of the same document; the ids become document ids."""
    documents = [document_of(name) for name in shard.ids]
    starts = [place for place, name in enumerate(documents) if place == 0 or name != documents[place - 1]]
    return Shard([documents[place] for place in starts], shard.vectors, np.array(starts, np.int64))


def _read_table(path: Path, vocabulary: Sequence[str]) -> Shard:
    _, parquet = require_pyarrow()
    with parquet.ParquetFile(path) as file:
        kinds = [name for name in _COLUMNS if name in file.schema_arrow.names]
        table = file.read(columns=["id", *kinds]).combine_chunks()
    columns = {name: table.column(name).combine_chunks() for name in kinds}
    ids = [str(name) for name in table.column("id").to_pylist()]
    vectors: AnyVectors
    if "vector" in columns:
        vectors = _rows(columns["vector"])
    elif "vectors" in columns:
        lists = columns["vectors"]
        vectors = TokenVectors(np.asarray(lists.offsets, np.int64), _rows(lists.values))
    else:
        indices, values = columns["indices"], columns["values"]
        width = int(np.asarray(indices.values, np.int32).max(initial=-1)) + 1  # the model's may exceed its tokenizer's
        vocabulary = (*vocabulary, *(f"[{number}]" for number in range(len(vocabulary), width)))
        vectors = SparseVectors(
            np.asarray(indices.offsets, np.int64),
            np.asarray(indices.values, np.int32),
            np.asarray(values.values, np.float32),
            vocabulary,
        )
    return Shard(ids, vectors)


def _rows(lists: Any) -> NDArray[Any]:
    """Return fixed-size lists as an array."""
    return np.asarray(lists.values).reshape(len(lists), lists.type.list_size)
