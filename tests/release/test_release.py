"""A release is made as a whole, left alone where nothing changed, and every change of it is found."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool.errors import GateError, InputError, OnnxtoolError, OutputExistsError
from onnxtool.model_file.commits import hidden_folder
from onnxtool.release.check import check_release
from onnxtool.release.config import ReleaseConfig, read_config
from onnxtool.release.facts import FACTS_NAME, WEIGHTS, facts_text, read_facts
from onnxtool.release.run import checked_inputs, files_in, make_release
from tests.cli.entry_point import run_onnxtool
from tests.evaluation.collections import Texts, write_beir
from tests.release.keys import write_keys
from tests.workshop import Workshop

pytestmark = pytest.mark.slow  # exports and quantizes

TEXTS = Texts(
    {"d1": "a red cat", "d2": "the blue house", "d3": "on the mat"},
    {"q1": "cat", "q2": "house"},
    {"q1": {"d1": 1}, "q2": {"d2": 1}},
)
CONFIG = """
name = "mini"
checkpoint = "checkpoint"
output = "out"
precisions = ["fp32", "int8"]
targets = ["anserini"]
data = "collection"
[export]
exporter = "torchscript"
[optimize]
max_error = 0.5
[evaluate]
measures = ["nDCG@10", "MRR@10", "MAP"]
fail_if = ["ndcg@10<0", "overlap@10<0"]
"""
SMALL = CONFIG.replace(', "int8"', "").replace('targets = ["anserini"]', "")
SIZED = SMALL.replace("[optimize]", '[optimize]\nsizes = ["1x8", "2x16"]')
SIGNED = f'last = "before"\nkey = "release.key"\nkey_password = "RELEASE_PASSWORD"\n{SIZED}'


def prepare(folder: Path, workshop: Workshop) -> ReleaseConfig:
    """Write a configuration, its checkpoint and its collection."""
    folder.mkdir()
    shutil.copytree(workshop.checkpoint("tiny-splade"), folder / "checkpoint")
    write_beir(folder / "collection", TEXTS)
    (folder / "release.toml").write_text(CONFIG)
    return read_config(folder / "release.toml")


@pytest.fixture(scope="module")
def made(workshop: Workshop) -> Path:
    """A folder with a release, which must not be changed."""
    return workshop.made("release", lambda folder: make_release(prepare(folder, workshop)))


@pytest.fixture(scope="module")
def replaced(made: Path, workshop: Workshop) -> Path:
    """That release replaced by a smaller one that is compared with it and signed; it must not be changed."""

    def make(folder: Path) -> None:
        shutil.copytree(made, folder)
        shutil.copytree(folder / "out", folder / "before")
        write_keys(folder, "secret")
        (folder / "release.toml").write_text(SIGNED)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("RELEASE_PASSWORD", "secret")
            make_release(read_config(folder / "release.toml"), force=True)

    return workshop.made("replaced release", make)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "release"))


def test_the_folder_is_complete_and_passes_its_check(made: Path) -> None:
    """Models, what reads texts for them, targets, record, card and bill of materials."""
    names = set(files_in(made / "out"))
    assert {"mini.onnx", "mini-int8.onnx", "mini/tokenizer.json", FACTS_NAME, "README.md"} <= names
    assert any(name.startswith("anserini/") and name.endswith(".onnx") for name in names)
    facts = read_facts(made / "out")
    assert {file.path for file in facts.files} < names
    assert [model.path for model in facts.models][:2] == ["mini.onnx", "mini-int8.onnx"]
    assert not facts.provenance.is_on_hub
    int8 = facts.models[1]
    assert [step.step for step in int8.verification] == ["export", "optimize"]
    assert int8.evaluations[0].base == "mini.onnx"
    assert int8.evaluations[0].num_queries == 2
    report = check_release(made / "out")
    assert report.problems == ()
    assert set(report.verified) == {"mini-int8.onnx"}
    assert report.alone
    assert all(path.startswith("anserini/") for path in report.alone)


def test_files_of_fixed_sizes_belong_to_their_model(replaced: Path) -> None:
    """They are no models of their own, and are digested and signed like its weights."""
    facts = read_facts(replaced / "out")
    weights = [file.path for file in facts.files if file.role == WEIGHTS and file.precision == "fp32"]
    assert weights == ["mini-1x8.onnx", "mini-2x16.onnx", "mini.onnx.data"]
    assert [model.path for model in facts.models] == ["mini.onnx"]


def test_a_model_of_a_release_finds_its_tokenizer(made: Path) -> None:
    """Wherever the folder is moved to."""
    done = run_onnxtool(made / "out", "infer", "--model_path", "mini-int8.onnx", "--text", "cat", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"][0]["candidates"]


def test_the_programs_of_the_card_give_the_same_vector(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With onnxtool, and with only numpy, onnxruntime and tokenizers."""
    monkeypatch.chdir(made / "out")
    card = Path("README.md").read_text()
    ours, plain = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(plain, names)  # noqa: S102  our own card
    assert "onnxtool" not in plain
    exec(ours, names)  # noqa: S102
    texts = ["A model is exported, optimized and verified."]
    assert "special tokens such as [CLS]" in card
    (expected,) = names["model"].encode(texts, keep_special=True)
    (weights,) = names["session"].run(None, names["inputs"])[0]
    np.testing.assert_array_equal(np.flatnonzero(weights), expected.indices)
    np.testing.assert_allclose(weights[expected.indices], expected.weights, rtol=1e-5)


def test_a_gate_leaves_the_old_release(folder: Path) -> None:
    """Of quality, and of the license."""
    before = (folder / "out" / FACTS_NAME).read_bytes()
    path = folder / "release.toml"
    path.write_text(SMALL.replace("ndcg@10<0", "ndcg@10<2"))
    with pytest.raises(GateError, match="fp32 is not good enough: nDCG@10 is .*, fails if ndcg@10<2"):
        make_release(read_config(path), force=True)
    path.write_text(f'allowed_licenses = ["mit"]\n{CONFIG}')
    with pytest.raises(GateError, match="the license is unknown, and .* allows mit") as raised:
        make_release(read_config(path), force=True)
    assert "state it in the checkpoint's card" in raised.value.hint
    assert (folder / "out" / FACTS_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('data = "collection"', "nowhere"),
        ("[export]", "is not a release"),
        ('"ndcg@10<0"', "p@50"),
        ("targets", "int8 is not for cuda"),
        ("[optimize]", "is not the shape of an input"),
        ('name = "mini"', "no private key"),
    ],
    ids=["a collection", "the last release", "a gate", "a precision", "an option", "a key"],
)
def test_what_a_later_step_would_refuse_is_refused_at_once(
    folder: Path, change: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is not exported for minutes before that."""
    replaced = {
        'data = "collection"': 'data = "nowhere"',
        "[export]": 'last = "collection"\n[export]',
        '"ndcg@10<0"': '"p@50<0.1"',
        "targets": 'provider = "cuda"\ntargets',
        "[optimize]": '[optimize]\ninput_shapes = ["x"]',
        'name = "mini"': 'name = "mini"\nkey = "release.toml"',
    }
    monkeypatch.setattr("onnxtool.release.run.export_model", None)
    path = folder / "release.toml"
    path.write_text(CONFIG.replace(change, replaced[change]))
    with pytest.raises(OnnxtoolError, match=message):
        make_release(read_config(path), force=True)


def test_the_same_release_again_is_unchanged(folder: Path) -> None:
    """As in Make: nothing is written, and the dry run says so; the number of files is that of the folder."""
    before = {name: path.stat().st_mtime_ns for name, path in files_in(folder / "out").items()}
    done = run_onnxtool(folder, "release", "--config", "release.toml", "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["unchanged"], report["num_files"]) == (True, len(before))
    assert {name: path.stat().st_mtime_ns for name, path in files_in(folder / "out").items()} == before
    assert check_release(folder / "out").num_files == len(before)
    (note,) = make_release(read_config(folder / "release.toml"), dry_run=True).notes
    assert note.endswith("out holds this release already")


def test_every_input_counts_and_no_path(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes the digest of its own; another place and another time of the files change none."""

    def changed(text: str = CONFIG) -> set[str]:
        (folder / "release.toml").write_text(text)
        now = checked_inputs(read_config(folder / "release.toml"))
        return {name for name in {**now, **before} if now.get(name) != before.get(name)}

    before = read_facts(folder / "out").inputs
    os.utime(folder / "checkpoint" / "config.json", (1, 1))
    assert changed() == set()
    (folder / "texts.txt").write_text("a cat\n")
    before = checked_inputs(read_config(folder / "release.toml"))
    calibrated = CONFIG.replace("[optimize]", '[optimize]\ncalibration = "texts.txt"')
    assert changed(calibrated) == {"options"}
    before = checked_inputs(read_config(folder / "release.toml"))
    (folder / "texts.txt").write_text("a dog\n")
    assert changed(calibrated) == {"options"}
    before = checked_inputs(read_config(folder / "release.toml"))
    for name, path in (("checkpoint", "checkpoint/config.json"), ("collection", "collection/qrels/test.tsv")):
        content = (folder / path).read_text()
        (folder / path).write_text(f"{content}\n")
        assert changed(calibrated) == {name}
        (folder / path).write_text(content)
    assert changed(f'last = "out"\n{calibrated}') == {"last release"}
    assert changed(f"{calibrated}[benchmark]\nruns = 3\n") == {"options", "processor"}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert changed(calibrated) == {"date"}
    monkeypatch.setattr("onnxtool.version.installed", lambda _: "0.1")
    assert changed(calibrated) == {"date", "versions"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "release.toml").write_text(CONFIG.replace("0.5", "0.6")), "options changed"),
        (lambda folder: (folder / "out" / FACTS_NAME).write_text("{}"), "is malformed"),
        (lambda folder: (folder / "out" / "mini.onnx").write_bytes(b"x"), "mini.onnx is not the file"),
        (lambda folder: (folder / "out" / "README.md").unlink(), "README.md is missing"),
    ],
)
def test_another_release_is_not_replaced_unasked(folder: Path, change: Callable[[Path], object], reason: str) -> None:
    """The error says what differs, the dry run as well, and nothing runs."""
    change(folder)
    config, before = read_config(folder / "release.toml"), files_in(folder / "out").keys()
    with pytest.raises(OutputExistsError, match=f"holds another release: .*{reason}"):
        make_release(config)
    (note,) = make_release(config, dry_run=True).notes
    assert reason in note
    assert files_in(folder / "out").keys() == before


def test_a_folder_that_is_no_release_is_not_replaced(folder: Path) -> None:
    """Not even with --force."""
    config = read_config(folder / "release.toml")
    (folder / "out" / FACTS_NAME).unlink()
    with pytest.raises(OutputExistsError, match="is not a release"):
        make_release(config, force=True)


def test_a_folder_that_another_run_makes_a_release_in_is_named_as_such(folder: Path) -> None:
    """Not as a folder with something else."""
    config = read_config(folder / "release.toml")
    shutil.rmtree(folder / "out")
    with hidden_folder(folder / "out", FACTS_NAME) as stage:
        (stage / "files" / "model.onnx").write_bytes(b"")
        with pytest.raises(OutputExistsError, match="another run is making a release"):
            make_release(config)


def test_files_of_the_older_release_go(made: Path, replaced: Path) -> None:
    """Those that the new one lacks, and what only its steps needed; all others have the bytes that they had."""
    before, after = (
        {name: path.read_bytes() for name, path in files_in(one / "out").items()} for one in (made, replaced)
    )
    assert [name for name in before.keys() - after.keys() if not name.startswith(("anserini/", "mini-int8"))] == []
    same = {name for name in after if after[name] == before.get(name)}
    models = {"mini.onnx", "mini.onnx.data", "mini-1x8.onnx", "mini-2x16.onnx"}  # of fixed sizes now
    assert after.keys() - same == {FACTS_NAME, "README.md", "bom.cdx.json", "model.sig", *models}
    assert "mini/tokenizer.json" in same
    assert not list((replaced / "out").rglob(".*"))


def test_a_new_release_is_compared_with_the_last(replaced: Path) -> None:
    """The first precision with that of the last release."""
    found = read_facts(replaced / "out").models[0].evaluations[0]
    assert found.base == "before/mini.onnx"
    assert found.differences["nDCG@10"].change == 0


def test_a_release_is_signed_and_the_signature_is_verified(
    replaced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key whose password is in the environment; another key makes another release, and is a problem."""
    folder = Path(shutil.copytree(replaced, tmp_path / "release"))
    (folder / "other").mkdir()
    key, other = write_keys(folder / "other")
    config = read_config(folder / "release.toml")
    with pytest.raises(InputError, match="variable RELEASE_PASSWORD is not set"):
        make_release(config)
    monkeypatch.setenv("RELEASE_PASSWORD", "secret")
    assert make_release(config).unchanged
    done = run_onnxtool(folder, "release", "--check", "out", "--public_key", "release.pub", "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["signature"]) == (0, "verified")
    assert check_release(folder / "out").signature == "not verified"
    assert check_release(folder / "out", public_key=other).signature == "refused"
    shutil.copyfile(key, folder / "release.key")
    (folder / "release.toml").write_text(SIGNED.replace('key_password = "RELEASE_PASSWORD"\n', ""))
    with pytest.raises(OutputExistsError, match="holds another release: signer changed"):
        make_release(read_config(folder / "release.toml"))


def test_every_byte_counts(folder: Path) -> None:
    """One byte of any file, the figures of the card included."""
    random = np.random.default_rng(0)
    paths = list(files_in(folder / "out").values())
    for number in range(24):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        place = int(random.integers(len(content)))
        changed = (content[place] + int(random.integers(1, 256))) % 256
        path.write_bytes(content[:place] + bytes([changed]) + content[place + 1 :])
        assert not check_release(folder / "out").passed, f"{path.name}, byte {place}"
        path.write_bytes(content)
    assert check_release(folder / "out").passed


def test_files_that_are_missing_or_too_many_are_found(folder: Path) -> None:
    """And links, which lead elsewhere tomorrow."""
    out = folder / "out"
    (out / "mini" / "evil.py").write_text("")
    (out / "mini" / "config.json").unlink()
    (out / "mini" / "config.json").symlink_to(folder / "checkpoint" / "config.json")
    (out / "README.md").unlink()
    (out / "model.sig").write_text("{}")  # this release is not signed
    problems = check_release(out).problems
    stray = ("mini/evil.py is not in the record", "model.sig is not in the record")
    assert {*stray, "mini/config.json is a symbolic link", "README.md is missing"} <= {*problems}


def test_a_record_that_was_rewritten_is_found_by_the_models(folder: Path) -> None:
    """Whoever edits record and card alike meets the stamps and the outputs."""
    from dataclasses import replace

    from onnxtool.release.bom import BOM_NAME, bom_text
    from onnxtool.release.card import CARD_NAME, card_text

    out = folder / "out"
    facts = read_facts(out)
    first = facts.models[0]
    better = replace(first, verification=(replace(first.verification[0], max_abs_error=0.0), *first.verification[1:]))
    facts = replace(facts, models=(better, *facts.models[1:]))
    for name, text in ((FACTS_NAME, facts_text(facts)), (CARD_NAME, card_text(facts)), (BOM_NAME, bom_text(facts))):
        (out / name).write_text(text, encoding="utf-8")
    assert check_release(out).problems == ("mini.onnx was verified otherwise than the record says",)
    (out / FACTS_NAME).write_text(facts_text(replace(facts, signed=True)), encoding="utf-8")
    assert "model.sig is missing: the record says that the release is signed" in check_release(out).problems


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "pass either --config, to make a release, or --check"),
        (("--check", "nowhere"), 1, "nowhere is not a folder"),
        (("--check", "."), 1, "is not a release: it has no release.json"),
        (("--config", "nowhere.toml"), 1, "no such file: nowhere.toml"),
        (("--config", "a.toml", "--public_key", "k"), 2, "--public_key is for --check"),
        (("--check", ".", "--identity", "me@example.org"), 2, "pass either --public_key, or --identity and --issuer"),
        (("--check", ".", "--force"), 2, "--check writes nothing; leave out --force"),
        (("--check", ".", "--dry_run"), 2, "--dry_run writes nothing; leave out --check"),
    ],
)
def test_a_mistake_is_one_error(tmp_path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    """With its way out."""
    done = run_onnxtool(tmp_path, "release", "--quiet", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_says_what_is_wrong(folder: Path) -> None:
    """And exits with 1."""
    assert run_onnxtool(folder, "release", "--check", "out", "--quiet").returncode == 0
    (folder / "out" / "mini.onnx").write_bytes(b"another")
    done = run_onnxtool(folder, "release", "--check", "out", "--quiet")
    assert done.returncode == 1
    assert "problem: mini.onnx is not the file that was released" in done.stderr


def test_a_checkpoint_on_the_hub_needs_its_commit(tmp_path: Path) -> None:
    """A branch is another state tomorrow."""
    (tmp_path / "release.toml").write_text('checkpoint = "naver/splade"\n')
    with pytest.raises(InputError, match="names naver/splade, and no commit of it"):
        make_release(read_config(tmp_path / "release.toml"))
    (tmp_path / "release.toml").write_text('checkpoint = "checkpoints/of/splade"\n')
    with pytest.raises(InputError, match="no such folder: .*splade"):
        make_release(read_config(tmp_path / "release.toml"))


def test_what_a_killed_run_left_is_no_other_release(tmp_path: Path) -> None:
    """The folder is empty once that is removed."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "release.toml").write_text('checkpoint = "checkpoint"\noutput = "out"\n')
    killed = (
        "import os\nfrom pathlib import Path\nfrom onnxtool.model_file import staged\n"
        "with staged(Path('out/release.json'), force=True, root=Path('out')) as staging:\n"
        "    (staging.folder / 'mini.onnx').write_text('half')\n    os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", killed], cwd=tmp_path, check=False)
    assert list((tmp_path / "out").iterdir())
    (note,) = make_release(read_config(tmp_path / "release.toml"), dry_run=True).notes
    assert note.endswith("out is not there")
