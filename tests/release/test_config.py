"""release.toml is read strictly: what is not known is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxtool.errors import InputError
from onnxtool.release.config import read_config
from onnxtool.release.run import file_name

WHOLE = """
name = "mini"
checkpoint = "checkpoint"
output = "dist"
precisions = ["fp32", "int8"]
targets = ["sentence-transformers"]
allowed_licenses = ["apache-2.0"]
data = "collection"
[optimize]
max_error = 1
calibration = "texts.txt"
sample_inputs = ["a.npz"]
[evaluate]
measures = ["nDCG@10"]
fail_if = ["ndcg@10<-0.5%"]
[benchmark]
batch_sizes = [1, 8]
"""


def write(folder: Path, content: str) -> Path:
    path = folder / "release.toml"
    path.write_text(content)
    return path


def test_everything_is_read_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    """Whatever the working directory is."""
    (tmp_path / "checkpoint").mkdir()
    config = read_config(write(tmp_path, WHOLE))
    assert (config.name, config.precisions, config.targets) == ("mini", ("fp32", "int8"), ("sentence-transformers",))
    assert config.checkpoint == str(tmp_path / "checkpoint")
    assert (config.output, config.data) == (tmp_path / "dist", tmp_path / "collection")
    samples = (tmp_path / "a.npz",)
    assert config.optimize == {"max_error": 1.0, "calibration": tmp_path / "texts.txt", "sample_inputs": samples}
    assert config.evaluate == {"measures": ("nDCG@10",), "fail_if": ("ndcg@10<-0.5%",)}
    assert config.benchmark == {"batch_sizes": (1, 8)}


def test_the_first_precision_has_the_plain_name(tmp_path: Path) -> None:
    """Whichever it is."""
    config = read_config(write(tmp_path, 'checkpoint = "org/mini"\nprecisions = ["int8", "fp32"]\n'))
    assert [file_name(config, one) for one in config.precisions] == ["mini.onnx", "mini-fp32.onnx"]


def test_an_id_on_the_hub_stays_one(tmp_path: Path) -> None:
    """And gives the release its name."""
    config = read_config(write(tmp_path, 'checkpoint = "naver/splade"\nrevision = "abc"\n'))
    assert (config.checkpoint, config.name, config.output) == ("naver/splade", "splade", tmp_path / "splade-release")


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ('checkpoint = "a"\nkey = "k"\nidentity_token = "T"', "has a key and an identity", "leave out key"),
        ('checkpoint = "a"\nkey_password = "P"', "has a key_password and no key", "add key"),
        ("", "names no checkpoint", 'add checkpoint = "ID_OR_DIR"'),
        ("checkpoint = 3", "checkpoint: 3 is not an id or a folder", ""),
        ('checkpoint = "a"\nprecision = ["int8"]', "'precision' is not one of", "correct the name"),
        ('checkpoint = "a"\nprecisions = "int8"', "precisions: 'int8' is not a list of strings", ""),
        ('checkpoint = "a"\nprecisions = ["int9"]', "precisions[0]: 'int9' is not one of", ""),
        ('checkpoint = "a"\nprecisions = ["auto"]', "precisions[0]: 'auto' is not one of 'fp32'", ""),
        ('checkpoint = "a"\ntargets = ["tie"]', "targets[0]: 'tie' is not one of", ""),
        ('checkpoint = "a"\nname = "tei"\ntargets = ["tei"]', "'tei' is the name of a target's folder", "another name"),
        ('checkpoint = "a"\nname = "../a"', "'../a' is no name for files", ""),
        ('checkpoint = "a"\n[export]\nopst = 17', "[export] 'opst' is not one of", "correct the name"),
        ('checkpoint = "a"\n[export]\nopset = "17"', "[export] opset: '17' is not an integer", ""),
        ('checkpoint = "a"\n[export]\noutput = "x"', "[export] has output, which the release decides", ""),
        ('checkpoint = "a"\n[optimize]\nprecision = "int8"', "[optimize] has precision, which the release decides", ""),
        ('checkpoint = "a"\ndata = "d"\n[evaluate]\nagainst = "bm25"', "has against, which the release decides", ""),
        ('checkpoint = "a"\ndata = "d"\n[evaluate]\nprune = ["top_k:1"]', "has prune, which the release decides", ""),
        ('checkpoint = "a"\n[evaluate]\nsplit = "dev"', "has [evaluate] and no data", "add data"),
        ('checkpoint = "a"\nexport = 3', "export is not a table", "write [export]"),
        ("checkpoint = ", "is not valid TOML", ""),
        ("a = " + "[" * 5000, "is not valid TOML", ""),
    ],
)
def test_what_is_wrong_is_one_error(tmp_path: Path, content: str, message: str, hint: str) -> None:
    """With its place and the way out."""
    with pytest.raises(InputError) as caught:
        read_config(write(tmp_path, content))
    assert message in caught.value.message
    assert hint in caught.value.hint
