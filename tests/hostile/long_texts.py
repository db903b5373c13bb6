"""Cases of a megabyte: one name or many, wherever a command reads from outside. Its messages have to stay short."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click
import onnx

from onnxtool.cli.commands import RUNNABLE
from onnxtool.cli.entry import find_command
from tests.hostile.fields import lengthen_field
from tests.hostile.surroundings import ENCODER, KINDS, Case

LONG = "x" * 1_000_000
MANY = [f"n{number}" for number in range(100_000)]
MOST_CHARACTERS = 6_000
_MODEL = "checkpoint/model.onnx"
_ALONE = ("env", "completion", "release", "encode run", "encode part", "encode merge", "encode status")


def options() -> list[tuple[str, ...]]:
    """Return a command line for each option that takes a value, with a megabyte of it.

    Texts and paths reach the library; choices, numbers and lists are parsed alike, so one of each kind is enough.
    """
    found: dict[object, tuple[str, ...]] = {}
    for name in RUNNABLE:
        given = () if name in _ALONE else ("--model_name", "none") if name == "export" else (_MODEL,)
        for parameter in find_command(name).params:
            if not isinstance(parameter, click.Option) or parameter.is_flag or parameter.count:
                continue
            option, kind = parameter.opts[0], type(parameter.type)
            others = () if option == "--model_name" and name == "export" else given
            is_free = issubclass(kind, click.Path | type(click.STRING))
            found.setdefault(option if is_free else kind, (*name.split(), *others, option, LONG))
    return [*found.values(), (LONG,), ("stats", f"--{LONG}")]


def lengthen(folder: Path, choices: random.Random) -> Case:
    """Make one thing in a folder a megabyte long, or a list of 100,000 names."""
    return choices.choice((_document, _field, _location, _lines, _configuration))(folder, choices)


def _document(folder: Path, choices: random.Random) -> Case:
    """Replace a value of a JSON file of the checkpoint."""
    path = choices.choice(
        sorted(path for path in (folder / "checkpoint").rglob("*.json") if ".index." not in path.name)
    )
    content: Any = json.loads(path.read_text("utf-8"))
    inner = content[0] if isinstance(content, list) else content
    key, value = choices.choice([*inner, LONG]), choices.choice((LONG, MANY, {LONG: LONG}, dict.fromkeys(MANY, 1)))
    inner[key] = value
    several = [{**inner, "type": f"a.{name}"} for name in MANY] if content is not inner else value
    whole = choices.choice((content, content, value, several))
    path.write_text(json.dumps(whole), "utf-8")
    export = ("export", "--model_name", "checkpoint", "--output", "out.onnx", "--exporter", "torchscript")
    infer = ("infer", _MODEL, "--model_name", "checkpoint", "--text", "a")
    command = choices.choice((export, export, (*export, "--dry_run", "--format", "json"), infer))
    return Case(f"{path.name}: {key[:40]}", command)


def _field(folder: Path, choices: random.Random) -> Case:
    """Replace a text or bytes of the model."""
    model = onnx.load(folder / _MODEL)
    place = lengthen_field(model, LONG, MANY, choices)
    (folder / _MODEL).write_bytes(model.SerializeToString())
    commands = (
        ("stats", _MODEL, "--fail_if", "num_nodes>0"),
        ("optimize", _MODEL, "--output", "out.onnx", "--dry_run"),
        ("infer", _MODEL, "--model_name", "checkpoint", "--text", "a"),
        ("verify", _MODEL, _MODEL),
    )
    return Case(place, choices.choice(commands))


def _location(folder: Path, choices: random.Random) -> Case:
    """Let the data of a weight be in a file of a long name, or give many facts of where it is."""
    model = onnx.load(folder / _MODEL)
    tensor = choices.choice(model.graph.initializer)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in choices.choice(
        ([("location", LONG)], [("location", "a"), ("offset", LONG)], [(name, name) for name in MANY])
    ):
        tensor.external_data.add(key=key, value=value)
    (folder / _MODEL).write_bytes(model.SerializeToString())
    return Case("external data", ("stats", _MODEL))


def _lines(folder: Path, choices: random.Random) -> Case:
    """Write a line of texts, or of judgements, that is long, or has many fields."""
    many = dict.fromkeys(MANY, "a")
    lines = (json.dumps(many), json.dumps({"id": LONG}), json.dumps({"id": [LONG]}), LONG, " ".join(MANY))
    for name in ("corpus.jsonl", "queries.jsonl"):
        (folder / name).write_text('{"_id": "1", "text": "a"}\n')
    (folder / "qrels.tsv").write_text("1\t1\t1\n")
    path = folder / choices.choice(("corpus.jsonl", "queries.jsonl", "qrels.tsv", "texts.tsv"))
    path.write_text(choices.choice(lines) + "\n", "utf-8")
    model = (_MODEL, "--model_name", "checkpoint")
    command = ("evaluate", *model, "--data", ".") if path.stem != "texts" else ("infer", *model, "--input", path.name)
    return Case(f"{path.name}: a line", command)


def _configuration(folder: Path, choices: random.Random) -> Case:
    """Name and set an option by a megabyte, in a file or in a variable."""
    table, name = choices.choice(("stats", LONG)), choices.choice(("fail_if", "format", LONG))
    if choices.random() < 0.3:
        return Case("a variable", ("stats", _MODEL), {"ONNXTOOL_STATS_FORMAT": LONG[:100_000]})
    value = choices.choice((json.dumps(LONG), json.dumps(MANY)))
    (folder / ".onnxtool.toml").write_text(choices.choice((f"[{table}]\n{name} = {value}\n", LONG)), "utf-8")
    return Case(".onnxtool.toml", ("stats", _MODEL))


QUICK = (_field, _location, _lines, _configuration)
ALL_KINDS = {**KINDS, "long": (lengthen, (ENCODER,))}
