"""Options from configuration files and the environment: what counts, what is wrong, and what no file may say."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from onnxtool.cli.choices import CheckpointType, PathType
from onnxtool.cli.commands import TABLES
from onnxtool.cli.configuration import RawSetting, all_configured, effect_of, options_of, settings_of
from onnxtool.cli.entry import find_command, main
from tests.cli.entry_point import json_of, run_onnxtool
from tests.graphs import save_operators
from tests.infer.tiny_models import VOCABULARY, TinyModel, table, write_checkpoint

GATES = "fail_if = ['num_nodes>2', 'size_bytes>+5%', 'count(delta.inputs.removed)>0']\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a small model."""
    (tmp_path / ".git").mkdir()
    save_operators(tmp_path / "model.onnx", ["Relu"] * 3)
    return tmp_path


def test_an_option_comes_from_the_first_that_says_it(folder: Path) -> None:
    """The command line, the environment, the file of onnxtool, that of the project; none of them hides the others."""
    (folder / "pyproject.toml").write_text("[tool.onnxtool.stats]\nformat = 'json'\nfail_if = ['num_nodes>1']\n")
    (folder / ".onnxtool.toml").write_text("[stats]\nformat = 'markdown'\n")
    given = {"ONNXTOOL_STATS_FORMAT": "html"}
    for start, options, variables in (("###", (), {}), ("<!doctype", (), given), ("{", ("--format", "json"), given)):
        done = run_onnxtool(folder, "stats", "model.onnx", *options, **variables)
        assert (done.returncode, done.stdout.lower()[: len(start)]) == (1, start)


def test_the_nearest_folder_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the root of the repository; without one, it is the folder itself."""
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert settings_of("stats") == {}
    (folder / "pyproject.toml").write_text("[tool.onnxtool.stats]\nweights = true\n[tool.onnxtool.infer]\ntop_k = 3\n")
    (folder / "a" / "pyproject.toml").write_text("[project]\nname = 'onnxtool-user'\n")
    source = str(Path("../../pyproject.toml"))
    expected = {"weights": RawSetting(True, f"{source} [tool.onnxtool.stats]", Path("../.."))}
    assert settings_of("stats") == expected
    (folder / "a" / ".onnxtool.toml").write_text("[stats]\nquiet = true\n")
    assert list(settings_of("stats")) == ["quiet"]
    assert list(settings_of("infer")) == ["top_k"]
    (folder / ".git").rmdir()
    assert settings_of("stats") == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[stats", ".onnxtool.toml is not valid TOML"),
        ("stats = " + "[" * 5000, "is not valid TOML"),
        ("x = 1\n" * 400_000, "has more than 1048576 bytes"),
        (
            "[stats]\nfail_of = []",
            ".onnxtool.toml [stats]: fail_of is not an option of onnxtool stats. Did you mean 'fail_if'?",
        ),
        ("[stat]\nfail_if = []", "has [stat], and there is no such command. Did you mean 'stats'?"),
        ("[stats]\nfail_if = 'x'", "fail_if: 'x' is not a list of strings"),
        ("[stats]\nfail_if = [1]", "fail_if: [0]: 1 is not a string"),
        ("[infer]\ntop_k = 0", ".onnxtool.toml [infer]: top_k: 0 is not in the range x>=1"),
        ("[infer]\ntop_k = true", "top_k: True is not an integer"),
        ("[stats]\nweights = 'yes'", "weights: 'yes' is not a boolean"),
        ("[stats]\nformat = 'xml'", "format: 'xml' is not one of"),
        ("stats = 3", "is not a table"),
        (b"\xff", "cannot read .onnxtool.toml"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, text: str | bytes, reason: str) -> None:
    """With the file, the key and the way out: wrong usage, and not a failure."""
    content = text if isinstance(text, bytes) else text.encode()
    (folder / ".onnxtool.toml").write_bytes(content)
    done = run_onnxtool(folder, "infer" if content.startswith(b"[infer]") else "stats", "model.onnx")
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ONNXTOOL_INFER_TOP_K", "x", "ONNXTOOL_INFER_TOP_K: top_k: 'x' is not a valid integer"),
        ("ONNXTOOL_INFER_TOPK", "1", "topk is not an option of onnxtool infer. Did you mean 'top_k'?"),
    ],
)
def test_a_wrong_variable_is_named(folder: Path, name: str, value: str, reason: str) -> None:
    """It is one of the command that runs; others are of no concern."""
    assert reason in run_onnxtool(folder, "infer", "model.onnx", **{name: value}).stderr
    assert run_onnxtool(folder, "env", "--quiet", **{name: value}).returncode == 0


@pytest.mark.parametrize("name", ["trust_remote_code", "allow_pickle", "force"])
def test_no_file_may_say_what_is_for_a_person_to_say(folder: Path, name: str) -> None:
    """A folder that was cloned or unpacked must not run code, or replace files, without anybody asking for it."""
    (folder / "pyproject.toml").write_text(f"[tool.onnxtool.export]\n{name} = true\n")
    for options, kind in (((), "this"), (("--config", "pyproject.toml"), "a")):
        done = run_onnxtool(folder, "export", "--model_name", "x", *options)
        assert done.returncode == 2
        assert (
            f"pyproject.toml [tool.onnxtool.export]: {name} cannot be set in {kind} file, because it r" in done.stderr
        )


@pytest.mark.parametrize(
    ("command", "line", "effect"),
    [
        ("export", "output = 'x'", "it says where to write"),
        ("export", "verify = false", "it can lower a check"),
        ("export", "revision = 'refs/pr/1'", "it chooses the checkpoint whose code --trust_remote_code runs"),
        ("optimize", "max_error = 9.0", "it can lower a check"),
        ("evaluate", "save_run = 'mine.txt'", "it says where to write"),
        ("evaluate", "cache = '..'", "it says where to write"),
        ("verify", "precision = 'int8'", "it can lower a check"),
        ("infer", "provider_library = 'evil.so'", "it can load libraries and write files"),
        ("infer", "provider = 'openvino?library=evil.so'", "it can load libraries and write files"),
        ("infer", "compare = 'openvino?library=evil.so'", "it can load libraries and write files"),
        ("optimize", "allow_fallback = true", "it can lower a check"),
        ("artifacts", "prefix = '../x'", "it says where to write"),
        ("encode_run", "engine = 'ray'", "it sends something"),
    ],
)
def test_a_file_of_the_folder_sets_what_is_harmless_alone(folder: Path, command: str, line: str, effect: str) -> None:
    """A file that the user names by --config may set the rest."""
    (folder / ".onnxtool.toml").write_text(f"[{command}]\n{line}\n")
    name = line.split()[0]
    arguments = (*command.split("_"), *(("a.onnx", "b.onnx") if command == "verify" else ()))
    done = run_onnxtool(folder, *arguments)
    assert done.returncode == 2
    assert f".onnxtool.toml [{command}]: {name} cannot be set in this file, because {effect}\n" in done.stderr
    assert f"pass --{name}, or set ONNXTOOL_{command.upper()}_{name.upper()}, or name the file by --con" in done.stderr
    assert "cannot be set" not in run_onnxtool(folder, *arguments, "--config", ".onnxtool.toml").stderr


def test_a_file_of_the_folder_reads_nothing_outside_of_it(folder: Path) -> None:
    """What it names could be a secret, which a command writes into a result; links do not help."""
    (folder / "here").mkdir()
    (folder / "here" / "link.onnx").symlink_to(folder / "model.onnx")
    for path in ("../model.onnx", "link.onnx", str(folder / "model.onnx")):
        (folder / "here" / ".onnxtool.toml").write_text(f"[infer]\nmodel_path = '{path}'\n")
        done = run_onnxtool(folder / "here", "infer", "--text", "a")
        assert done.returncode == 2
        assert f"model_path: {path} leaves the folder of the file" in done.stderr
        assert (
            "leaves" not in run_onnxtool(folder / "here", "infer", "--text", "a", "--config", ".onnxtool.toml").stderr
        )


def value_in_file(folder: Path, table: str, name: str, option: click.Option, text: str) -> str:
    """Return what a file of `folder` gives an option, or the problem."""
    value = [text] if option.multiple else text
    (folder / ".onnxtool.toml").write_text(f"[{table}]\n{name} = {value!r}\n")
    found, problems = all_configured(click.Context(main))
    return str([*problems, *(one.value for one in found)])


def test_every_path_in_a_file_stays_in_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every option that can hold one: relative to the file, never outside; an id stays an id, from anywhere."""
    for name in ("sub", "inside"):
        (folder / name).mkdir()
    monkeypatch.chdir(folder / "sub")
    tried = 0
    for section, path in TABLES.items():
        for name, option in options_of(find_command(path)).items():
            if not isinstance(option.type, PathType | CheckpointType) or effect_of(option):
                continue
            for outside in ("../outside", "/etc/passwd", "~/x", "sub/../../x"):
                said = value_in_file(folder, section, name, option, outside)
                assert "leaves the folder of the file" in said, (path, name)
            assert "../inside" in value_in_file(folder, section, name, option, "inside")
            if isinstance(option.type, CheckpointType):
                assert "BeIR/scifact" in (said := value_in_file(folder, section, name, option, "BeIR/scifact"))
                assert "../BeIR" not in said
            tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("name", "near"),
    [("STAT_FAIL_IF", "STATS_FAIL_IF"), ("FAIL_IF", "STATS_FAIL_IF"), ("ENCODE_RUNS", "ENCODE_RUN_"), ("X", "")],
)
def test_a_variable_of_no_command_is_wrong_usage(folder: Path, name: str, near: str) -> None:
    """Of every command, with the closest name; `onnxtool env` lists it."""
    variable = {f"ONNXTOOL_{name}": "num_nodes>2"}
    for words in (("stats", "model.onnx", "--format", "json"), ("release", "--check", "x")):
        done = run_onnxtool(folder, *words, **variable)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"ONNXTOOL_{name} is of no command. Did you mean ONNXTOOL_{near}" in done.stderr
    problems = json_of(run_onnxtool(folder, "env", "--format", "json", **variable))["problems"]
    assert any(f"ONNXTOOL_{name} is of no command" in problem for problem in problems)


def test_a_found_file_sets_no_option_with_an_effect() -> None:
    """Outputs, checks, code and libraries, of every command."""
    for path in TABLES.values():
        for name, option in options_of(find_command(path)).items():
            if re.match("output$|save_|atol|rtol|min_cosine|max_error|verify|allow_[^l]|force|trust|revision", name):
                assert effect_of(option), f"{path} --{name}"
            if re.match("provider|compare", name):
                assert effect_of(option, "openvino?library=x") == "library", f"{path} --{name}"


def test_an_option_with_a_parameter_of_another_name_is_set(folder: Path) -> None:
    """The command line calls the collection `--input`, and so does a file."""
    (folder / ".onnxtool.toml").write_text("[encode_run]\ninput = 'texts.jsonl'\n")
    done = run_onnxtool(folder, "encode", "run", "model.onnx", "--output", "vectors/")
    assert "Missing option" not in done.stderr
    assert "texts.jsonl" in done.stderr


def test_an_error_says_where_its_option_comes_from(folder: Path) -> None:
    """Options of infer and of its benchmark are of one table; paths are relative to the file."""
    TinyModel(table(len(VOCABULARY), 4), "last_hidden_state").write(folder / "tiny.onnx")
    write_checkpoint(folder / "tiny")
    (folder / "here").mkdir()
    (folder / ".onnxtool.toml").write_text("[infer]\nmodel_path = 'tiny.onnx'\nprompt = 'none'\nthreads = 1\n")
    options = ("infer", "--text", "a cat", "--model_name", "../tiny", "--quiet")
    done = run_onnxtool(folder / "here", *options)
    assert done.returncode == 1
    assert "has no prompt called 'none'" in done.stderr
    assert done.stderr.splitlines()[-1] == f"--prompt is set in {Path('../.onnxtool.toml')} [infer]"
    assert run_onnxtool(folder / "here", *options, "--prompt", "").returncode == 0
    (folder / ".onnxtool.toml").write_text("[infer]\nmodel_path = 'tiny.onnx'\noverlap = 4\n")
    done = run_onnxtool(folder, "infer", "--text", "a cat")
    assert done.returncode == 2
    assert "--overlap is set in .onnxtool.toml [infer]" in done.stderr


def test_gates_of_a_repository_hold_without_being_asked_for(folder: Path) -> None:
    """Those relative to a base wait for one; the command line adds its own; --config names another file."""
    save_operators(folder / "base.onnx", ["Relu"])
    (folder / ".onnxtool.toml").write_text("[stats]\n" + GATES)
    for more in ([], ["--format", "json"]):
        alone = run_onnxtool(folder, "stats", "model.onnx", *more)
        assert (alone.returncode, alone.stderr) == (1, "gate failed: num_nodes is 3, fails if num_nodes>2\n")
    both = run_onnxtool(folder, "stats", "model.onnx", "base.onnx", "--fail_if", "num_outputs==1")
    assert both.returncode == 1
    assert [line.rsplit(maxsplit=1)[1] for line in both.stderr.splitlines()] == ["num_outputs==1", "num_nodes>2"]
    (folder / "lax.toml").write_text("[stats]\nfail_if = ['num_nodes>9']\n")
    assert run_onnxtool(folder, "stats", "model.onnx", "--config", "lax.toml").returncode == 0
    (folder / "lax.toml").write_text("[infer]\n")
    assert "lax.toml has no table [stats]" in run_onnxtool(folder, "stats", "model.onnx", "--config", "lax.toml").stderr


def test_a_malformed_gate_of_a_repository_is_a_usage_error(folder: Path) -> None:
    """With the file, and the place in the gate."""
    (folder / ".onnxtool.toml").write_text("[stats]\nfail_if = ['num_nodes>>2']\n")
    result = run_onnxtool(folder, "stats", "model.onnx")
    assert (result.returncode, result.stdout) == (2, "")
    assert ".onnxtool.toml [stats]: no operator >>, at character 10 of the gate 'num_nodes>>2'" in result.stderr
    assert "\n  num_nodes>>2\n           ^\n" in result.stderr


def test_env_shows_what_is_configured_and_what_is_wrong(folder: Path) -> None:
    """Of all commands, with the source of each value and the order in which sources count."""
    (folder / ".onnxtool.toml").write_text("[optimize]\nprecision = 'int8'\n[export]\nopsett = 17\n")
    logged = run_onnxtool(folder, "stats", "model.onnx", "-v", ONNXTOOL_STATS_FORMAT="json").stderr
    assert "--format is json, from ONNXTOOL_STATS_FORMAT" in logged
    report = json_of(run_onnxtool(folder, "env", "--format", "json", ONNXTOOL_INFER_TOP_K="3"))
    assert report["configuration"] == [
        {"command": "optimize", "option": "precision", "value": "int8", "source": ".onnxtool.toml [optimize]"},
        {"command": "infer", "option": "top_k", "value": 3, "source": "ONNXTOOL_INFER_TOP_K"},
    ]
    assert any("opsett is not an option of onnxtool export. Did you mean 'opset'?" in one for one in report["problems"])
    assert report["precedence"][0] == "the command line"
    (folder / ".onnxtool.toml").write_text("[stats\n")
    (problem,) = {one for one in json_of(run_onnxtool(folder, "env", "--format", "json"))["problems"] if "TOML" in one}
    assert problem.endswith(": correct the file")
