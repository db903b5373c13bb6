"""A release is made as a whole, made again where something changed, and every change of it is found."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool.errors import GateError, InputError, OnnxtoolError, OutputExistsError
from onnxtool.release import ReleaseReport
from onnxtool.release.check import check_release
from onnxtool.release.config import ReleaseConfig, read_config
from onnxtool.release.facts import FACTS_NAME, facts_text, read_facts
from onnxtool.release.run import make_release
from onnxtool.release.store import files_in
from tests.cli.entry_point import run_onnxtool
from tests.evaluation.collections import Texts, write_beir
from tests.release.hub import Hub
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
fail_if = ["ndcg@10<0"]
"""


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


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "release"))


def states(report: ReleaseReport) -> dict[str, str]:
    return {step.name: step.state for step in report.steps}


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


def test_a_model_of_a_release_finds_its_tokenizer(made: Path) -> None:
    """Wherever the folder is moved to."""
    done = run_onnxtool(made / "out", "infer", "--model_path", "mini-int8.onnx", "--text", "cat", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"][0]["candidates"]


def test_the_programs_of_the_card_give_the_same_vector(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With onnxtool, and with only numpy, onnxruntime and tokenizers."""
    monkeypatch.chdir(made / "out")
    ours, plain = re.findall(r"^```python\n(.*?)^```$", Path("README.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(plain, names)  # noqa: S102  our own card
    assert "onnxtool" not in plain
    exec(ours, names)  # noqa: S102
    (expected,) = names["model"].encode(["A model is exported, optimized and verified."])
    (weights,) = names["session"].run(None, names["inputs"])[0]
    np.testing.assert_array_equal(np.flatnonzero(weights), expected.indices)
    np.testing.assert_allclose(weights[expected.indices], expected.weights, rtol=1e-5)


def test_the_same_inputs_run_no_step_and_give_the_same_bytes(folder: Path) -> None:
    """Also in another place, and where the output was removed."""
    before = {name: path.read_bytes() for name, path in files_in(folder / "out").items()}
    shutil.rmtree(folder / "out")
    report = make_release(read_config(folder / "release.toml"))
    assert set(states(report).values()) == {"unchanged"}
    assert {name: path.read_bytes() for name, path in files_in(folder / "out").items()} == before


def test_what_changed_runs_with_what_depends_on_it(folder: Path) -> None:
    """Another judgement evaluates again, and exports nothing; the dry run says so, and runs nothing."""
    path = folder / "collection" / "qrels" / "test.tsv"
    path.write_text(path.read_text() + "q2\td3\t1\n")
    config = read_config(folder / "release.toml")
    planned = make_release(config, dry_run=True)
    assert [step.reason for step in planned.steps if step.state == "to run"] == ["collection changed"] * 2
    report = make_release(config, force=True)
    assert states(report) == {
        **dict.fromkeys(("export", "optimize fp32", "optimize int8", "target anserini"), "unchanged"),
        **dict.fromkeys(("evaluate fp32", "evaluate int8"), "ran"),
    }


def test_another_first_precision_has_the_first_name(folder: Path) -> None:
    """Also if its step ran before; gates on the difference from a base wait for one."""
    path = folder / "release.toml"
    text = (
        path.read_text().replace('["fp32", "int8"]', '["int8"]').replace('"ndcg@10<0"', '"ndcg@10<0", "overlap@10<1"')
    )
    path.write_text(text)
    report = make_release(read_config(path), force=True)
    assert report.models[0].path == "mini.onnx"
    assert states(report)["optimize int8"] == "ran"


def test_a_gate_leaves_the_old_release(folder: Path) -> None:
    """Of quality, and of the license."""
    before = (folder / "out" / FACTS_NAME).read_bytes()
    path = folder / "release.toml"
    path.write_text(CONFIG.replace("ndcg@10<0", "ndcg@10<2"))
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
        ('fail_if = ["ndcg@10<0"]', "p@50"),
    ],
    ids=["a collection", "the last release", "a gate"],
)
def test_what_a_later_step_would_refuse_is_refused_at_once(folder: Path, change: str, message: str) -> None:
    """A checkpoint is not exported for minutes before that."""
    replaced = {
        'data = "collection"': 'data = "nowhere"',
        "[export]": 'last = "collection"\n[export]',
        'fail_if = ["ndcg@10<0"]': 'fail_if = ["p@50<0.1"]',
    }
    shutil.rmtree(folder / ".onnxtool-release")
    path = folder / "release.toml"
    path.write_text(CONFIG.replace(change, replaced[change]))
    with pytest.raises(OnnxtoolError, match=message):
        make_release(read_config(path), force=True)
    assert not (folder / ".onnxtool-release").exists()


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "release.toml").write_text(CONFIG.replace("0.5", "0.6")), "options changed"),
        (lambda folder: (folder / "out" / "mini.onnx").write_bytes(b"x"), "mini.onnx is not the file"),
        (lambda folder: (folder / "out" / "README.md").unlink(), "README.md is missing"),
        (lambda folder: shutil.rmtree(folder / ".onnxtool-release"), "it never ran"),
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


def test_files_of_an_older_release_go(folder: Path) -> None:
    """Those that the new one lacks."""
    (folder / "release.toml").write_text(CONFIG.replace('targets = ["anserini"]', ""))
    make_release(read_config(folder / "release.toml"), force=True)
    assert not list((folder / "out").rglob("anserini/*"))
    assert check_release(folder / "out").problems == ()


def test_a_new_release_is_compared_with_the_last(folder: Path) -> None:
    """The first precision with that of the last release."""
    shutil.copytree(folder / "out", folder / "before")
    (folder / "release.toml").write_text(f'last = "before"\n{CONFIG}')
    make_release(read_config(folder / "release.toml"), force=True)
    found = read_facts(folder / "out").models[0].evaluations[0]
    assert found.base == "before/mini.onnx"
    assert found.differences["nDCG@10"].change == 0


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
        (("--config", "a.toml", "--private"), 2, "--private is for --push"),
        (("--check", ".", "--dry_run"), 2, "--dry_run says which steps would run; leave out --check"),
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


def test_a_release_is_signed_and_the_signature_is_verified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key whose password is in the environment; another key is a problem."""
    (folder / "other").mkdir()
    key, public = write_keys(folder, "secret")
    _, other = write_keys(folder / "other")
    path = folder / "release.toml"
    path.write_text(f'key = "{key.name}"\nkey_password = "RELEASE_PASSWORD"\n{CONFIG}')
    with pytest.raises(InputError, match="variable RELEASE_PASSWORD is not set"):
        make_release(read_config(path), force=True)
    monkeypatch.setenv("RELEASE_PASSWORD", "secret")
    assert make_release(read_config(path), force=True).signed
    done = run_onnxtool(folder, "release", "--check", "out", "--public_key", public.name, "--format", "json")
    assert json.loads(done.stdout)["signature"] == "verified"
    assert check_release(folder / "out").signature == "not verified"
    assert check_release(folder / "out", public_key=other).signature == "refused"
    key.unlink()
    with pytest.raises(InputError, match="no such file"):
        make_release(read_config(path), force=True)


def test_a_release_that_passes_its_check_is_uploaded(folder: Path, hub: Hub) -> None:
    """And no other."""
    arguments = ("release", "--check", "out", "--push", "org/name", "--quiet")
    done = run_onnxtool(folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{hub.url}/org/name/commit/" in done.stdout
    assert set(files_in(folder / "out")) <= set(hub.files)
    (folder / "out" / "mini.onnx").write_bytes(b"another")
    hub.requests.clear()
    assert run_onnxtool(folder, *arguments).returncode == 1
    assert hub.requests == []


def test_a_checkpoint_on_the_hub_needs_its_commit(tmp_path: Path) -> None:
    """A branch is another state tomorrow."""
    (tmp_path / "release.toml").write_text('checkpoint = "naver/splade"\n')
    with pytest.raises(InputError, match="names naver/splade, and no commit of it"):
        make_release(read_config(tmp_path / "release.toml"))
