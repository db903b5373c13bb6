"""What sentence-transformers writes is read in every form of its versions, and nothing outside a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnxtool.checkpoint.sentence_modules import (
    Module,
    encoder_type,
    max_sequence_length,
    pooling_modes,
    read_modules,
    read_settings,
    stays_inside,
)
from onnxtool.errors import CheckpointError
from onnxtool.reports import Json


def reader(files: dict[str, Json]) -> Callable[[str], Json]:
    """Read from `files`."""
    return files.get


def malformed(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name}: {reason}")


def test_modules_are_known_by_their_class() -> None:
    """Packages moved between versions."""
    listed: Json = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling", "path": "1_Pooling"},
    ]
    read = reader({"modules.json": listed, "1_Pooling/config.json": {"pooling_mode": "cls"}})
    modules = read_modules(read, malformed)
    assert modules == (Module("Transformer", ""), Module("Pooling", "1_Pooling"))
    assert read_settings(modules[1], read, malformed) == {"pooling_mode": "cls"}
    assert modules[0].file("x") == "x"


@pytest.mark.parametrize(
    "content", [{}, [1], [{"type": "Pooling"}], [{"type": "a.Pooling", "path": "../x"}], [{"type": 3, "path": ""}]]
)
def test_malformed_modules_are_refused_as_the_caller_says(content: Json) -> None:
    """Its error names the file."""
    with pytest.raises(CheckpointError, match=r"modules\.json: "):
        read_modules(reader({"modules.json": content}), malformed)


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({}, ("mean",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("cls", "max")),
        ({"pooling_mode": ["max", "mean"], "pooling_mode_cls_token": True}, ("max", "mean")),
        ({"pooling_mode_attention": True}, ("pooling_mode_attention",)),
    ],
)
def test_pooling_of_any_age_is_read(settings: dict[str, Json], modes: tuple[str, ...]) -> None:
    """Flags of old versions, names of new ones, and a flag that nobody knows, which is not passed over."""
    assert pooling_modes(settings) == modes


def test_the_longest_text_is_read_from_old_names_too() -> None:
    """And a file that does not say it is passed over."""
    assert max_sequence_length(reader({}), malformed) is None
    read = reader(
        {"sentence_bert_config.json": {"do_lower_case": True}, "sentence_xlnet_config.json": {"max_seq_length": 75}}
    )
    assert max_sequence_length(read, malformed) == (75, "sentence_xlnet_config.json")


def test_the_encoder_says_what_it_is() -> None:
    """Since version 5."""
    assert encoder_type(reader({"config_sentence_transformers.json": {"model_type": "SparseEncoder"}}), malformed) == (
        "SparseEncoder"
    )
    assert encoder_type(reader({}), malformed) == ""


@pytest.mark.parametrize("path", ["", "1_Pooling", "a/b", "a..b"])
def test_paths_below_the_checkpoint_are_taken(path: str) -> None:
    """The checkpoint's own folder among them."""
    assert stays_inside(path)


@pytest.mark.parametrize("path", ["..", "a/../..", "/etc", "a\\b", "C:x", "a\0b"])
def test_paths_that_leave_the_checkpoint_are_not(path: str) -> None:
    """In the notation of any system."""
    assert not stays_inside(path)
