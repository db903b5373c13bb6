"""A license is read as cards and configurations write it, and kept in one line."""

from __future__ import annotations

from typing import Any

import pytest

from onnxtool.model_file.metadata import License


@pytest.mark.parametrize(
    ("card", "config", "found"),
    [
        ({"license": "Apache-2.0"}, {}, License("apache-2.0")),
        ({"license": " mit\n"}, {"license": "bsd"}, License("mit")),
        ({}, {"license": "BSD-3-Clause"}, License("bsd-3-clause")),
        ({"license": "unknown"}, {"license": "mit"}, License("mit")),
        (
            {"license": "other", "license_name": "My\nLicense", "license_link": "LICENSE"},
            {},
            License("other", "My License", "LICENSE"),
        ),
        ({"license": ["mit", "Apache-2.0"]}, {}, License("other", "mit, apache-2.0")),
        ({"license": ["mit"]}, {}, License("mit")),
        ({"license": []}, {}, License()),
        ({"license": False}, {"license": 3}, License()),
        ({"license": "a\x1b[2Jb"}, {}, License("a[2jb")),
        ({"license": "x" * 999}, {}, License("x" * 200)),
        ({}, {}, License("unknown")),
    ],
)
def test_a_checkpoint_says_its_license(card: dict[str, Any], config: dict[str, Any], found: License) -> None:
    """The card before the configuration; nothing that it says reaches a terminal as more than a text."""
    assert License.of_checkpoint(card, config) == found
    assert License.of_file(found.stamps) == found


@pytest.mark.parametrize(
    ("found", "allowed", "is_among"),
    [
        (License("apache-2.0"), ["MIT", "Apache-2.0"], True),
        (License("apache-2.0"), ["mit,apache-2.0"], True),
        (License("apache-2.0"), ["mit"], False),
        (License("apache-2.0"), [], False),
        (License(), ["unknown", ""], False),
        (License("other"), ["other", ""], False),
        (License("other", "Llama 3"), ["llama 3"], True),
        (License("other", "Llama 3"), ["other"], False),
    ],
)
def test_an_allow_list_has_ids_and_names(found: License, allowed: list[str], is_among: bool) -> None:
    """What is unknown, or another license that nobody named, is never allowed."""
    assert found.is_among(allowed) is is_among
