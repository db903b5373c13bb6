"""Whether a text is the one that the record of a release gives."""

from __future__ import annotations

import difflib

_MAX_CHARACTERS = 200


def first_difference(text: str, expected: str) -> str:
    """Say which line of `text` is the first that is not as expected; empty where both are equal to the last byte."""
    if text == expected:
        return ""
    theirs, ours = text.splitlines(), expected.splitlines()
    for tag, start, end, first, last in difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if tag != "equal":
            found, wanted = " ".join(theirs[start:end]), " ".join(ours[first:last])
            return (
                f"line {start + 1} is {found[:_MAX_CHARACTERS]!r}, and by the record of the release "
                f"{wanted[:_MAX_CHARACTERS]!r}"
            )
    return "its lines end otherwise than those by the record of the release"
