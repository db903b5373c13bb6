"""Names come from model files, which are untrusted: no escape sequence of theirs may reach a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape control characters, line breaks and marks that reorder text as Python writes them in a string."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def is_text(argument: str) -> bool:
    """Whether an argument is text: Python makes lone surrogates of bytes that are none, and no library takes those."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)
