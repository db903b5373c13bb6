"""The passages of a document that is longer than a model takes: each has an id, a vector, and a place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxtool.checkpoint.limits import EncodedText
from onnxtool.encoding.sources import Document

_MARK = "#"


def passages(document: Document, windows: Sequence[EncodedText], num_before: int) -> list[Document]:
    """Return a passage for each window over the text of `document`, called `ID#0`, `ID#1` and so on.

    A text that fits is `ID#0`, so that the last `#` of any id parts it, whatever ids a corpus has. The first passage
    begins with the text and the last one ends with it.

    Args:
        document: the text.
        windows: what is run of it, with offsets.
        num_before: characters of the prompt before the text, which offsets count.
    """
    text, found = document.contents, []
    begin = end = 0
    for number, window in enumerate(windows):
        if window.offsets is not None:
            spans = zip(window.offsets.parts, window.offsets.spans, strict=True)
            places = [span for part, span in spans if part == 0 and span[1] > num_before]
            if places:
                begin, end = max(0, places[0][0] - num_before), places[-1][1] - num_before
        if number:  # some tokenizers have the space before a word in its token
            begin += end - begin - len(text[begin:end].lstrip())
        else:
            begin = 0
        end = len(text) if number == len(windows) - 1 else end
        name = f"{document.id}{_MARK}{number}"
        found.append(replace(document, id=name, contents=text[begin:end], span=(begin, end)))
    return found


def document_of(passage: str) -> str:
    """Return the id of the document of a passage."""
    return passage.rpartition(_MARK)[0]
