"""Checkpoints that onnxruntime-training 1.19.2 wrote are read."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from onnxtool.errors import CheckpointError
from onnxtool.training.checkpoints.checkpoint import load_checkpoint

# Of a network 5 -> 7 -> 3 after three steps of AdamW, its first bias frozen, with three properties.
TRAINED = (
    "FAAAAE9EVEMMABQAEAAMAAgABAAMAAAAJAAAAAwAAACUBAAAAgAAAAEAAACcAAAAAAAKABAADAAIAAQACgAAAAwAAAAQAAAAFAAAAAEAAAAUAAAA"
    "AQAAACgAAAABAAAAPAAAALj7//8IAAAADAAAAAIAAABoaQAAAQAAAHMAAADU+///AACAPgQAAAABAAAAZgAAAAgAFAAQAAQACAAAAAMAAAAAAAAA"
    "AAAAAAQAAAAFAAAAZXBvY2gAAAAMABwAGAAIABQABAAMAAAAGAAAAAMAAAAAAAAAAAAAAG8SgzoUAAAAAwAAAAgCAABgAQAAEAAAAAYAAABncm91"
    "cDAAAFT8//8IAAAAEAAAAAIAAACoAAAAFAAAAAgAAAAyLndlaWdodAAAAAAu+///EAAAAAEAAABgAAAAcAAAAFQAAAAMlbc2+ORvNIJGLTiYOmw2"
    "q5DWN4+k8zY3vQw3iIfKNpi25DWVHqA4l54CN8KjXjhsmvI3Q/GiN39A8jV57Do1Lpw1OD951TaqOYE4gnbiN+Km6zYCAAAAAwAAAAAAAAAHAAAA"
    "AAAAAAkAAABtb21lbnR1bTEAAAC++///EAAAAAEAAABgAAAAdAAAAFQAAAAvwd276LSDuvuosbzDFtg7YoWrPB5OY7snnSO8OoQvPFoiSzvi3io9"
    "Er8wuwKYLDyeLdg8cpabPEJHgbvnRwm7yxSkvHVuf7uy6AC928O7vL2PE7wCAAAAAwAAAAAAAAAHAAAAAAAAAAAAAAAJAAAAbW9tZW50dW0wAAAA"
    "oP3//wgAAAAQAAAAAgAAAFQAAAAQAAAABgAAADIuYmlhcwAAdvz//xAAAAABAAAAGAAAACAAAAAMAAAAqj4qNxguSDlxPho5AQAAAAMAAAAAAAAA"
    "CQAAAG1vbWVudHVtMQAAALb8//8QAAAAAQAAABgAAAAgAAAADAAAAE/zeDtLtyk9gEY5vQEAAAADAAAAAAAAAAkAAABtb21lbnR1bTAAAABE/v//"
    "CAAAABAAAAACAAAA4AAAABQAAAAIAAAAMC53ZWlnaHQAAAAAHv3//xAAAAABAAAAmAAAAKgAAACMAAAAHR7pNEABajLKkc803yGONJBD9TP3Nds1"
    "GPA7NsO4Fze4BSc3gwOUNrCobTiduf00xAsWOPi27DddUCU3tOt5N73zpTUvRmU3S/IYN5xfVzau7Bs25qGeNEDOSzb2upY2KQRQNb3zLDX8nYQ0"
    "siKWNE9uiTNYLu4zYQIoNeKOiDPMuWs0t15rNDoivjMCAAAABwAAAAAAAAAFAAAAAAAAAAkAAABtb21lbnR1bTEAAADm/f//EAAAAAEAAACYAAAA"
    "rAAAAIwAAAD2jqM6fl3wuRW7NDu/ifY6+WUHOj6sB7s0TNW7MJKWO3SYmjvkCLk7FZavvPYt5bpnZe+8InupO8gj4bup4ma88kNeuy7tBrzUSge7"
    "MKkYOgiSiDst9gI7xcG/O5iSpbruxC87nAWzOtRxFztR0h+7puoROmkz5zkJUD87jFOWOr515DpoKtU6/vVwuQIAAAAHAAAAAAAAAAUAAAAAAAAA"
    "AAAAAAkAAABtb21lbnR1bTAAAAAIAAwACAAEAAgAAAAIAAAADAAAAAEAAAAUAAAAAwAAADwBAADoAAAAVAAAAN7+//8QAAAAAQAAACgAAAA0AAAA"
    "HAAAAJBy1r44qYW+NtPEPiBYTD5H9F0+TqzAPB/Iar4BAAAABwAAAAAAAAAAAAAABgAAADAuYmlhcwAALv///xAAAAABAAAAYAAAAHAAAABUAAAA"
    "VdmvPdCwrr7vLYG+xlVhvlN9Vz4yeHA+VdoUviNKJb3AAms+61exPl1gJD5+x/Y8SeBkPgcHgL7RQoo9BaOPvkBAhb4zSDK+1LtKPv9mNz6aCGW+"
    "AgAAAAMAAAAAAAAABwAAAAAAAAAIAAAAMi53ZWlnaHQAAAAAvv///xAAAAABAAAAGAAAACQAAAAMAAAA4v3UPb6GUT6vW7m8AQAAAAMAAAAAAAAA"
    "AAAAAAYAAAAyLmJpYXMAAAAADgAUABAAAAAMAAgABAAOAAAAEAAAAAEAAACYAAAAqAAAAIwAAAAqKE68WNSHPqtMyr4/T7a+kbBHvnYW7T2lWNI7"
    "fimwPuJlTb2jAdg9nPn5vZlIs72Wjcu+vmWivioKPL7wGDA9VIxKPqbZjT6pWqS+19BNvpOFGT5v+7s+WajovaP5qT4+DcS9+h1CPUC8wD4XhsW+"
    "jD+ZvrPRBL4LiU2+krO3PnGmoL6Sr22+4AakvgIAAAAHAAAAAAAAAAUAAAAAAAAACAAAADAud2VpZ2h0AAAAAA=="
)
# Of the same network before, without values.
NOMINAL = (
    "EAAAAE9EVEMIAA4ACAAEAAgAAAAUAAAAAgAAAAAACgAQAAwACAAHAAoAAAAAAAABCAAAAAwAAAABAAAAFAAAAAMAAACUAAAAWAAAACwAAACG////"
    "EAAAAAEAAAAMAAAADAAAAAAAAAAAAAAABgAAADAuYmlhcwAArv///xAAAAABAAAADAAAAAwAAAAAAAAAAAAAAAYAAAAyLmJpYXMAANb///8QAAAA"
    "AQAAAAwAAAAMAAAAAAAAAAAAAAAIAAAAMi53ZWlnaHQAAA4AFAAQAAAADAAIAAQADgAAABAAAAABAAAADAAAAAwAAAAAAAAAAAAAAAgAAAAwLndl"
    "aWdodAAAAAA="
)
# Of three parameters, 1.9 GB together, of which only names and places are in this file.
LARGE = (
    "EAAAAE9EVEMIAAwACAAEAAgAAAAUAAAAAgAAAAwAEAAMAAgAAAAHAAwAAAAAAAABCAAAAAwAAAABAAAAEAAAAAIAAACYAAAARAAAAIL///9AfHFy"
    "AAAAAAEAAAAIAAAAHAAAAAIAAAAFAAAAAAAAAOgDAAAAAAAAAAAAAAgAAABmcm96ZW4udwAAAADC////AOBwcgAAAAABAAAACAAAABwAAAACAAAA"
    "CgAAAAAAAADoAwAAAAAAAAAAAAAHAAAAc21hbGwudwAAABIAGAAUAAAAEAAMAAAAAAAEABIAAAAAAAAAAAAAAAEAAAAIAAAAHAAAAAIAAAAAUwcA"
    "AAAAAOgDAAAAAAAAAAAAAAUAAABiaWcudwAAAA=="
)


def large_checkpoint(folder: Path) -> Path:
    """Put the file of parameters beside it, of holes but for the first five numbers of each."""
    path = folder / "checkpoint"
    path.write_bytes(base64.b64decode(LARGE))
    with (folder / "checkpoint.data").open("wb") as file:
        for place in (0, 1_920_000_000, 1_920_040_000):
            file.seek(place)
            file.write(np.arange(1, 6, dtype=np.float32).tobytes())
        file.truncate(1_920_060_000)
    return path


def test_a_checkpoint_of_two_files_is_read(tmp_path: Path) -> None:
    """Without reading the gigabytes before somebody asks for them."""
    found = load_checkpoint(large_checkpoint(tmp_path))
    arrays = {**found.trainable, **found.frozen}
    shapes = {"big.w": (480_000, 1000), "small.w": (10, 1000), "frozen.w": (5, 1000)}
    assert {name: array.shape for name, array in arrays.items()} == shapes
    for array in arrays.values():
        assert array[0, :6].tolist() == [1, 2, 3, 4, 5, 0]
        assert array[-1, -1] == 0


def test_a_checkpoint_of_two_files_needs_both(tmp_path: Path) -> None:
    """One that was copied alone, and one of which the second part is cut off, or empty."""
    path = large_checkpoint(tmp_path)
    data = tmp_path / "checkpoint.data"
    for size in (1_920_059_999, 0):
        with data.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(CheckpointError, match="of the data file"):
            load_checkpoint(path)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"in checkpoint\.data, which cannot be read") as caught:
        load_checkpoint(path)
    assert "copy checkpoint.data to the same folder" in caught.value.hint


@pytest.mark.parametrize("source", [TRAINED, NOMINAL, LARGE])
def test_wild_offsets_do_no_harm(tmp_path: Path, source: str) -> None:
    """Whichever four bytes are an offset or a length: far beyond the file, before it, or onto itself."""
    whole = base64.b64decode(source)
    path = tmp_path / "checkpoint"
    (tmp_path / "checkpoint.data").write_bytes(bytes(64))
    for place in [0, *range(8, min(len(whole), 400), 2)]:
        for wild in (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0):
            damaged = bytearray(whole)
            damaged[place : place + 4] = wild.to_bytes(4, "little")
            path.write_bytes(damaged)
            try:
                found = load_checkpoint(path)
            except CheckpointError:
                continue
            arrays = [*found.trainable.values(), *found.frozen.values()]
            assert all(found.is_nominal or array.nbytes <= len(whole) for array in arrays)


def test_a_trained_checkpoint_is_read(tmp_path: Path) -> None:
    """All of it; the sums are those that onnxruntime-training gives for its own file."""
    path = tmp_path / "checkpoint"
    path.write_bytes(base64.b64decode(TRAINED))
    found = load_checkpoint(path)
    assert {name: array.shape for name, array in found.trainable.items()} == {
        "0.weight": (7, 5),
        "2.bias": (3,),
        "2.weight": (3, 7),
    }
    assert {name: array.shape for name, array in found.frozen.items()} == {"0.bias": (7,)}
    assert found.properties == {"epoch": 3, "f": 0.25, "s": "hi"}
    assert found.step == 3
    assert found.learning_rate == pytest.approx(1e-3)
    assert {name: set(arrays) for name, arrays in found.moments.items()} == {
        "momentum0": set(found.trainable),
        "momentum1": set(found.trainable),
    }
    sums = {name: float(np.abs(array).sum()) for name, array in {**found.trainable, **found.frozen}.items()}
    assert sums == pytest.approx(SUMS, rel=1e-6)


SUMS = {
    "0.bias": 1.733429193496704,
    "0.weight": 7.716547966003418,
    "2.bias": 0.331242173910141,
    "2.weight": 4.153656482696533,
}


def test_a_nominal_checkpoint_is_read(tmp_path: Path) -> None:
    """The reference keeps names alone."""
    path = tmp_path / "checkpoint"
    path.write_bytes(base64.b64decode(NOMINAL))
    found = load_checkpoint(path)
    assert found.is_nominal
    assert set(found.trainable) == {"0.weight", "2.bias", "2.weight"}


def test_another_version_is_refused(tmp_path: Path) -> None:
    """Its fields may mean something else."""
    data = bytearray(base64.b64decode(TRAINED))
    root = int.from_bytes(data[:4], "little")
    vtable = root - int.from_bytes(data[root : root + 4], "little", signed=True)
    place = root + int.from_bytes(data[vtable + 4 : vtable + 6], "little")
    assert int.from_bytes(data[place : place + 4], "little") == 2
    data[place] = 9
    path = tmp_path / "checkpoint"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="of version 9"):
        load_checkpoint(path)
