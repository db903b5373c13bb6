"""Messages stay short, whatever they quote."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from onnxtool.errors import OnnxtoolError, bounded, some
from tests.cli.entry_point import run_onnxtool
from tests.hostile.long_texts import LONG, MANY, MOST_CHARACTERS, QUICK, options
from tests.workshop import Workshop

# Files of a checkpoint that is refused before it is loaded.
DOCUMENTS = {
    "config.json": ({"architectures": [LONG], "model_type": "bert"}, {"model_type": LONG}),
    "modules.json": ([{"idx": 0, "path": "", "name": name, "type": f"a.{name}"} for name in MANY],),
}


def run(folder: Path, command: Sequence[str], **variables: str) -> None:
    done = run_onnxtool(folder, *command, HF_HUB_OFFLINE="1", **variables)
    shown = done.stderr + (done.stdout if done.returncode else "")
    assert len(shown) < MOST_CHARACTERS, shown[:2000]
    assert "Traceback" not in done.stderr


def test_an_option_of_a_megabyte_gives_a_short_message(tmp_path: Path) -> None:
    """Whichever option it is."""
    for command in options():
        run(tmp_path, command)


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, several in DOCUMENTS.items() for one in several])
def test_a_checkpoint_of_a_megabyte_gives_a_short_message(
    name: str, content: object, workshop: Workshop, tmp_path: Path
) -> None:
    """The name of its model or of its class, or a hundred thousand modules."""
    shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / name).write_text(json.dumps(content))
    run(tmp_path, ("export", "--model_name", "checkpoint"))


@pytest.mark.parametrize("number", range(3 * len(QUICK)))
def test_what_is_read_from_outside_gives_a_short_message(number: int, workshop: Workshop, tmp_path: Path) -> None:
    """Fields of a model, lines and configurations of a megabyte; some commands succeed."""
    exported = workshop.exported("tiny-encoder")
    shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint")
    shutil.copy(exported, tmp_path / "checkpoint" / "model.onnx")
    case = QUICK[number % len(QUICK)](tmp_path, random.Random(number))  # noqa: S311  a case, not a secret
    run(tmp_path, case.command, **{name: value for name, value in case.variables.items() if value})


def test_a_long_message_keeps_its_words() -> None:
    """Names lose their middle, lists all but the first and last entries, and what is left out is counted."""
    assert bounded(f"no {LONG}: rename it") == f"no {'x' * 80}…{'x' * 40} (1000000 characters): rename it"
    told = bounded(f"it has {', '.join(MANY)} and no more\nsecond line")
    assert told.startswith("it has n0, n1, n2, n3, … 99992 more …, ")
    assert told.endswith("n99999 and no more\nsecond line")
    assert len(bounded("a " * 500_000)) < 2_000
    assert bounded("a" * 2_000) == "a" * 2_000
    assert some(MANY) == "n0, n1, n2, n3 and 99996 more"
    assert len(str(OnnxtoolError(LONG, LONG))) < 500
