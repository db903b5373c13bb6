"""Duplicate bytes are those of equal tensors that are stored more than once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.summary import duplicates
from onnxtool.summary.duplicates import find_duplicates, hash_weights, reader
from tests.graphs import external_tensor, identity, make_model


def count_duplicate_bytes(model: ModelFile) -> int:
    return sum(duplicate.size_bytes for duplicate in find_duplicates(model))


def save(folder: Path, arrays: list[Any], **options: Any) -> ModelFile:
    initializers = [
        array if isinstance(array, onnx.TensorProto) else numpy_helper.from_array(array, f"w{index}")
        for index, array in enumerate(arrays)
    ]
    onnx.save(make_model([identity("n")], initializers), folder / "model.onnx", **options)
    return ModelFile.open(folder / "model.onnx")


def random_array(seed: int, num_elements: int = 100_000) -> Any:
    return np.random.default_rng(seed).standard_normal(num_elements).astype(np.float32)


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize("num_elements", [1, 16, 50, 100_000])
def test_equal_tensors_count_but_for_the_first(tmp_path: Path, num_elements: int, external: bool) -> None:
    """Of two sets of equal tensors, each repetition counts, whatever the size and wherever the data lies."""
    first, second = random_array(1, num_elements), random_array(2, num_elements)
    arrays = [first, second, first.copy(), random_array(3, num_elements), second.copy(), first.copy()]
    model = save(tmp_path, arrays, save_as_external_data=external, location="data", size_threshold=0)
    assert count_duplicate_bytes(model) == 3 * num_elements * 4


@pytest.mark.parametrize("position", [40, 20_000, 32_768, 50_000, 99_000])
def test_one_different_element_is_no_duplicate(tmp_path: Path, position: int) -> None:
    """Tensors whose samples agree are compared to the last byte, in every piece."""
    array = random_array(1)
    changed = array.copy()
    changed[position] += 1
    assert count_duplicate_bytes(save(tmp_path, [array, changed])) == 0
    assert count_duplicate_bytes(save(tmp_path, [array, changed, array])) == array.nbytes


def test_equal_bytes_of_other_dtype_or_dims_are_no_duplicates(tmp_path: Path) -> None:
    """A tensor can stand in for another only if dtype and dims agree as well."""
    array = np.zeros((4, 4), np.float32)
    assert count_duplicate_bytes(save(tmp_path, [array, array.view(np.int32), array.reshape(16)])) == 0


def test_tensors_that_share_their_bytes_are_stored_once(tmp_path: Path) -> None:
    """Two initializers at the same place of an external file are no duplicates; a copy at another place is one."""
    (tmp_path / "data").write_bytes(bytes(range(24)) * 2)
    places = [("a", "data", 0), ("b", "./data", 0), ("c", "data", 24)]
    tensors = [external_tensor(name, {"location": file, "offset": str(offset)}) for name, file, offset in places]
    assert count_duplicate_bytes(save(tmp_path, tensors[:2])) == 0
    assert count_duplicate_bytes(save(tmp_path, tensors)) == 24


def test_a_file_is_read_once_however_many_refer_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that overlap are no copies of each other, and reading each of a hundred thousand would never end."""
    (tmp_path / "data").write_bytes(bytes(10_000))
    places = [{"location": "data", "offset": str(offset), "length": "4000"} for offset in range(200)]
    model = save(tmp_path, [external_tensor(str(index), place, (10, 100)) for index, place in enumerate(places)])
    num_bytes = 0

    @contextmanager
    def counting(model: ModelFile) -> Iterator[Any]:
        with reader(model) as read:

            def count(place: Any, start: int, size_bytes: int) -> bytes:
                nonlocal num_bytes
                num_bytes += size_bytes
                return read(place, start, size_bytes)

            yield count

    monkeypatch.setattr(duplicates, "reader", counting)
    assert count_duplicate_bytes(model) == 0
    hash_weights(model)
    assert num_bytes <= 10_000


def test_typed_strings_and_empty_tensors_are_left_out(tmp_path: Path) -> None:
    """What is not stored as one run of bytes is not compared."""
    typed = [onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [2], [1, 2]) for name in "ab"]
    strings = [onnx.helper.make_tensor(name, onnx.TensorProto.STRING, [1], ["text"]) for name in "cd"]
    empty = [np.zeros((0, 3), np.float32)] * 2
    assert count_duplicate_bytes(save(tmp_path, [*typed, *strings, *empty])) == 0


def test_data_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """Where reading fails after the model was opened, the error names the model."""
    model = save(tmp_path, [random_array(1)] * 2, save_as_external_data=True, location="data", size_threshold=0)
    (tmp_path / "data").unlink()
    (tmp_path / "data").mkdir()
    with pytest.raises(ModelFileError, match=r"cannot read the weights of .*model\.onnx"):
        count_duplicate_bytes(model)


def test_only_samples_of_different_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model without duplicates no piece of a tensor is read beyond its samples."""

    def refuse(*_: object) -> None:
        raise AssertionError("a whole piece was read")

    monkeypatch.setattr(duplicates, "_split", refuse)
    assert count_duplicate_bytes(save(tmp_path, [random_array(seed) for seed in range(10)])) == 0
