"""Find initializers that are stored more than once.

Weights of the same dtype and dims hardly ever agree in a few bytes at their start, middle and end unless they are
equal. So these samples are compared first, and whole tensors are read only where they agree: in a model without
duplicates, a few hundred small reads. Pieces of a candidate are compared rather than hashed, as comparing is ten
times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Tensor
from onnxtool.summary.figures import Duplicate

_SAMPLE_BYTES = 64
_PIECE_BYTES = 1 << 17  # two pieces fit into one core's cache
_HASHED_BYTES = 1 << 20

# The file, and the byte offset at which an initializer's data starts.
_Place = tuple[Path, int]
# A place, and the number of bytes there.
_Run = tuple[_Place, int]
_Read = Callable[[_Place, int, int], bytes]


def find_duplicates(model: ModelFile) -> tuple[Duplicate, ...]:
    """Return groups of initializers with equal dtype, dims and data, the most wasteful first.

    Initializers that refer to the same bytes of an external file, or to a part of them, are stored once already.
    Initializers whose data is not one contiguous run of bytes are left out: data in typed fields such as `float_data`
    (small constants of some exporters), strings, and the values of sparse initializers. Empty ones are left out too.

    Raises:
        ModelFileError: the data is there, but cannot be read.
    """
    groups: dict[tuple[str, tuple[int, ...], int], dict[_Place, str]] = {}
    apart = _apart(model)
    for tensor in model.structure.initializers:
        place = _place(model, tensor)
        if place is not None and (place, tensor.size_bytes) in apart:
            groups.setdefault((tensor.dtype, tensor.dims, tensor.size_bytes), {}).setdefault(place, tensor.name)
    duplicates: list[Duplicate] = []
    with reader(model) as read:
        for (_, _, size_bytes), names in groups.items():
            for places in _equal(list(names), size_bytes, read) if len(names) > 1 else ():
                equal = tuple(names[place] for place in places)
                duplicates.append(Duplicate(equal, size_bytes * (len(equal) - 1)))
    return tuple(sorted(duplicates, key=lambda duplicate: (-duplicate.size_bytes, duplicate.names)))


def hash_weights(model: ModelFile) -> dict[str, str]:
    """Return the SHA-256 of each initializer's bytes, by name.

    Initializers that are empty, not one contiguous run of bytes, or part of the data of another one are left out.

    Raises:
        ModelFileError: the data is there, but cannot be read.
    """
    import hashlib

    hashes: dict[str, str] = {}
    known: dict[_Run, str] = {}
    apart = _apart(model)
    with reader(model) as read:
        for tensor in model.structure.initializers:
            place = _place(model, tensor)
            if place is None or (place, tensor.size_bytes) not in apart:
                continue
            if (place, tensor.size_bytes) not in known:
                digest = hashlib.sha256()
                for start in range(0, tensor.size_bytes, _HASHED_BYTES):
                    digest.update(read(place, start, min(_HASHED_BYTES, tensor.size_bytes - start)))
                known[place, tensor.size_bytes] = digest.hexdigest()
            hashes[tensor.name] = known[place, tensor.size_bytes]
    return hashes


def _apart(model: ModelFile) -> set[_Run]:
    """Return the byte ranges of the initializers, without ranges that overlap an earlier one.

    This limits reads to the size of the files: in a hostile model, a hundred thousand initializers may refer to nearly
    the same bytes, and reading each of them would take forever.
    """
    placed = ((_place(model, tensor), tensor.size_bytes) for tensor in model.structure.initializers)
    runs = {(place, size_bytes) for place, size_bytes in placed if place is not None and size_bytes}
    apart: set[_Run] = set()
    last, end = Path(), 0
    for (path, start), size_bytes in sorted(runs, key=lambda run: (*run[0], -run[1])):
        if path != last or start >= end:
            apart.add(((path, start), size_bytes))
            last, end = path, start + size_bytes
    return apart


def _place(model: ModelFile, tensor: Tensor) -> _Place | None:
    if tensor.external is not None:
        return model.path.parent / tensor.external.location, tensor.external.offset
    return None if tensor.payload is None else (model.path, tensor.payload[0])


@contextmanager
def reader(model: ModelFile) -> Iterator[_Read]:
    """Yield a function that reads bytes at a place of a model's files, which stay open during the block.

    Raises:
        ModelFileError: one of them cannot be read.
    """
    files: dict[Path, BinaryIO] = {}

    def read(place: _Place, start: int, size_bytes: int) -> bytes:
        path, offset = place
        if path not in files:
            files[path] = stack.enter_context(path.open("rb", buffering=0))
        files[path].seek(offset + start)
        return files[path].read(size_bytes)

    try:
        with ExitStack() as stack:
            yield read
    except OSError as error:
        raise ModelFileError(
            f"cannot read the weights of {model.path}: {error.strerror}", "check the permissions of its external data"
        ) from error


def _equal(places: list[_Place], size_bytes: int, read: _Read) -> list[list[_Place]]:
    """Return the groups of `places`, of two or more, that hold the same `size_bytes` bytes."""
    by_sample: dict[bytes, list[_Place]] = {}
    length = min(_SAMPLE_BYTES, size_bytes)
    starts = sorted({0, (size_bytes - length) // 2, size_bytes - length})
    for place in places:
        sample = b"".join(read(place, start, length) for start in starts)
        by_sample.setdefault(sample, []).append(place)
    groups = [group for group in by_sample.values() if len(group) > 1]
    for start in range(0, size_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, size_bytes - start)
        groups = [part for group in groups for part in _split(group, start, length, read) if len(part) > 1]
        if not groups:
            break
    return groups


def _split(group: list[_Place], start: int, length: int, read: _Read) -> Iterator[list[_Place]]:
    """Split `group` into places that agree in the `length` bytes from `start` on."""
    parts: list[tuple[bytes, list[_Place]]] = []
    for place in group:
        piece = read(place, start, length)
        for known, part in parts:
            if known == piece:
                part.append(place)
                break
        else:
            parts.append((piece, [place]))
    return (part for _, part in parts)
