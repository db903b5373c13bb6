"""Modules are found under the names of the release before, for one release."""

from __future__ import annotations

import importlib

import pytest

from onnxtool.renamed import MOVED, RENAMED, successor


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_gives_the_module_of_the_new_one_and_warns(old: str) -> None:
    """The warning says what to write instead; the module is one and the same."""
    with pytest.warns(DeprecationWarning, match=f"{RENAMED[old]}; the old name goes"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(RENAMED[old])


def test_modules_inside_a_renamed_package_follow_it() -> None:
    """Users import from them directly."""
    with pytest.warns(DeprecationWarning, match="onnxtool.training.trainer.losses"):
        losses = importlib.import_module("onnxtool.training.with_loss.losses")
    assert losses is importlib.import_module("onnxtool.training.trainer.losses")


def test_no_other_name_is_taken() -> None:
    """A name that merely begins like an old one is nobody's."""
    assert successor("onnxtool.wires") == ""
    with pytest.raises(ModuleNotFoundError, match="onnxtool.nothing"):
        importlib.import_module("onnxtool.nothing")


@pytest.mark.parametrize(
    ("old", "new", "name"), [(old, new, name) for old, news in MOVED.items() for new in news for name in news[new]]
)
def test_a_name_is_found_where_it_was(old: str, new: str, name: str) -> None:
    """The warning says where it is now."""
    with pytest.warns(DeprecationWarning, match=f"{name} is now in {new}"):
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(new), name)


def test_a_module_has_no_other_names() -> None:
    """A misspelled one is an error as everywhere."""
    with pytest.raises(AttributeError, match="no attribute 'BenchmarkOption'"):
        importlib.import_module("onnxtool.infer").BenchmarkOption  # noqa: B018
