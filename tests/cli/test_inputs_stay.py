"""No command writes over what it reads, and a path that it does not write is refused before the work."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from scipy import sparse

from onnxtool import EvaluateOptions, OptimizeOptions, evaluate_model, optimize_model
from onnxtool.cli.choices import CheckpointType, PathType
from onnxtool.cli.commands import RUNNABLE
from onnxtool.cli.entry import find_command
from onnxtool.errors import OutputWriteError
from onnxtool.infer import SparseVectors, encode
from tests.cli.entry_point import run_onnxtool
from tests.encoding.corpora import dense_model, sparse_model
from tests.evaluation.collections import random_texts, write_beir
from tests.graphs import save_external, save_operators, save_text
from tests.infer.tiny_models import TEXTS

SPELLINGS = ("input", "./gone/../input", "folder/../input", "link", "hard")


def paths_of(command: click.Command, *, written: bool) -> list[click.Parameter]:
    """Return the options and arguments of a command that name what it writes, or what it reads."""
    paths = [one for one in command.params if isinstance(one.type, PathType | CheckpointType)]
    return [one for one in paths if bool(one.type.writes) is written]  # type: ignore[attr-defined]


def pairs() -> Iterator[tuple[str, click.Parameter, click.Parameter]]:
    """Yield each output of each command with each of its inputs, and with each other output."""
    for name in RUNNABLE:
        outputs = paths_of(find_command(name), written=True)
        for output in outputs:
            others = [*paths_of(find_command(name), written=False), *outputs]
            yield from ((name, output, one) for one in others if one is not output and one.name != "config")


def words_for(parameter: click.Parameter, value: str) -> list[str]:
    return [parameter.opts[0], value] if isinstance(parameter, click.Option) else [value]


def make_inputs(folder: Path) -> None:
    (folder / "folder").mkdir()
    (folder / "input").write_text("what must stay")
    (folder / "link").symlink_to("input")
    os.link(folder / "input", folder / "hard")
    shutil.copy(folder / "input", folder / "other")


def test_no_output_is_an_input_or_another_output(tmp_path: Path) -> None:
    """Of any command, by any name of the file, with --force as well."""
    make_inputs(tmp_path)
    refused: dict[tuple[str, str], int] = {}
    for spelling, (name, output, other) in zip(itertools.cycle(SPELLINGS), pairs(), strict=False):
        command = find_command(name)
        words = [*words_for(output, spelling), *words_for(other, "input")]
        for needed in command.params:
            if needed.required and needed not in (output, other):
                words += words_for(needed, "other")
        words += ["--force"] if any("--force" in one.opts for one in command.params) else []
        done = run_onnxtool(tmp_path, *name.split(), *words, "--quiet")
        assert (tmp_path / "input").read_text() == "what must stay", words
        assert done.returncode in (1, 2), words
        key = (name, output.opts[0])
        is_refused = "an input of this command" in done.stderr or "are both" in done.stderr
        refused[key] = refused.get(key, 0) + is_refused
    assert min(refused.values()) > 0, refused
    assert sum(refused.values()) > 55  # of the pairs that the options of today make


def test_a_missing_input_is_named_before_an_output_that_exists(tmp_path: Path) -> None:
    """Of any command: the path of the input is the first thing to repair."""
    make_inputs(tmp_path)
    others = ("--model_path", "--data", "--config", "--check", "--public_key", "--model")  # looked for by the library
    named: list[str] = []
    for name in RUNNABLE:
        command = find_command(name)
        needed = [word for one in command.params if one.required for word in words_for(one, "other")]
        needed += ["--output", "input"] if any("--output" in one.opts for one in command.params) else []
        for option in paths_of(command, written=False):
            if isinstance(option.type, PathType) and option.opts[0].startswith("--") and option.opts[0] not in others:
                done = run_onnxtool(tmp_path, *name.split(), *needed, *words_for(option, "missing"), "--quiet")
                assert "exists already" not in done.stderr, (name, option.opts)
                named += [option.opts[0]] if f"missing\nhint: check {option.opts[0]}" in done.stderr else []
    assert {*named} >= {"--calibration", "--partner", "--sample_inputs", "--ranges", "--texts", "--input"}


def test_what_an_input_consists_of_stays(tmp_path: Path) -> None:
    """The weights of a graph beside it, the files of a folder, and the folder around an input."""
    save_external(tmp_path / "m.onnx", 2.0, "m.onnx.data")
    weights = (tmp_path / "m.onnx.data").read_bytes()
    done = run_onnxtool(tmp_path, "stats", "m.onnx", "--output", "m.onnx.data", "--format", "json", "--force")
    assert (done.returncode, (tmp_path / "m.onnx.data").read_bytes()) == (1, weights)
    (tmp_path / "c.toml").write_text("[stats]\n")
    done = run_onnxtool(tmp_path, "stats", "m.onnx", "--config", "c.toml", "--output", "c.toml", "--force")
    assert (done.returncode, (tmp_path / "c.toml").read_text()) == (1, "[stats]\n")
    shutil.copy(tmp_path / "m.onnx", tmp_path / "copy.onnx")
    report = optimize_model(OptimizeOptions(tmp_path / "copy.onnx", output=tmp_path / "m.onnx", force=True))
    assert report.verification is not None
    assert (tmp_path / "m.onnx.data").read_bytes() == weights
    data = write_beir(tmp_path / "data", random_texts(3, 2))
    with pytest.raises(OutputWriteError, match="lies in an input"):
        evaluate_model(tmp_path / "copy.onnx", data, EvaluateOptions(), run_path=data / "corpus.jsonl", force=True)
    (tmp_path / "data" / "part-00000.jsonl").write_text('{"id": "1", "contents": "a cat"}\n')
    words = ("--model_path", "m.onnx", "--input", "data/part-00000.jsonl", "--output", "data", "--force")
    done = run_onnxtool(tmp_path, "encode", "run", *words)
    assert done.returncode == 1
    assert (tmp_path / "data" / "part-00000.jsonl").exists()


def test_artifacts_do_not_replace_their_model(tmp_path: Path) -> None:
    """A model that is called as the training model is."""
    save_operators(tmp_path / "training_model.onnx", ["Relu"])
    before = (tmp_path / "training_model.onnx").read_bytes()
    words = ("training_model.onnx", "--loss", "none", "--output", ".", "--force")
    done = run_onnxtool(tmp_path, "artifacts", *words)
    assert "training_model.onnx is an input of this command" in done.stderr
    assert (tmp_path / "training_model.onnx").read_bytes() == before


@pytest.mark.parametrize(("precision", "code"), [("fp32", 0), ("bf16", 2)])
def test_a_detour_through_a_missing_folder_leaves_nothing_beside(tmp_path: Path, precision: str, code: int) -> None:
    """The file where its path leads, or nothing; the folder of the detour in no case."""
    save_text(tmp_path / "m.onnx", "agraph (float[N, 2] x) => (float[N, 2] y) { y = Relu(x) }")
    words = ("m.onnx", "--output", "a/../b/o.onnx", "--no_timing", "--precision", precision)
    assert run_onnxtool(tmp_path, "optimize", *words).returncode == code
    assert {path.name for path in tmp_path.rglob("*")} == {"m.onnx", *(() if code else ("b", "o.onnx"))}


@pytest.mark.parametrize(
    "words",
    [
        ("stats", "m.onnx", "--output", "v.npy"),
        ("infer", "m.onnx", "--text", "a", "--output", "v.faiss"),
        ("infer", "m.onnx", "--benchmark", "--output", "v.parquet"),
        ("encode", "run", "m.onnx", "--input", "c.txt", "--output", "v.npy"),
        ("artifacts", "m.onnx", "--output", "v.onnx"),
        ("release", "--config", "c.toml", "--output", "v.zip"),
    ],
)
def test_a_suffix_that_a_command_does_not_write_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """As usage, with what to write instead, before anything is read."""
    done = run_onnxtool(tmp_path, *words)
    assert done.returncode == 2
    assert f"{words[-1]} is named " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_vectors_are_what_the_suffix_says(tmp_path: Path) -> None:
    """An array of dense vectors; ids with them in .npz and .parquet; terms as scipy reads them."""
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, make in (("dense", dense_model), ("sparse", sparse_model)):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))

    def write(model: str, output: str) -> Any:
        words = (f"{model}/model.onnx", "--input", "texts.txt", "--output", output, "--quiet", "--force")
        done = run_onnxtool(tmp_path, "infer", *words)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        return tmp_path / output

    dense = np.load(write("dense", "v.npy"))
    with np.load(write("dense", "v.npz")) as found:
        np.testing.assert_array_equal(found["vectors"], dense)
        assert found["ids"].tolist() == ["1", "2", "3", "4", "5"]
    stored = parquet.read_table(write("dense", "v.parquet")).to_pydict()
    np.testing.assert_array_equal(np.array(stored["vector"], np.float32), dense)
    expected = encode(tmp_path / "sparse/model.onnx", TEXTS)
    assert isinstance(expected, SparseVectors)
    terms = sparse.load_npz(write("sparse", "terms.npz"))
    np.testing.assert_array_equal(terms.toarray(), expected.to_dense())
    tokenizer = tmp_path / "dense" / "model" / "tokenizer.json"
    before = tokenizer.read_bytes()
    words = ("dense/model.onnx", "--text", "a", "--output", str(tokenizer), "--force")
    assert run_onnxtool(tmp_path, "infer", *words).returncode == 1
    assert tokenizer.read_bytes() == before
    done = run_onnxtool(tmp_path, "infer", "sparse/model.onnx", "--text", "a", "--output", "terms.npy")
    assert (done.returncode, (tmp_path / "terms.npy").exists()) == (1, False)
