"""The passages of a document that is longer than a model takes: each has an id, a vector, and a place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxtool.checkpoint.truncation import EncodedText
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
    found = []
    begin = end = 0
    for number, window in enumerate(windows):
        offsets = window.offsets
        if offsets is not None:
            spans = zip(offsets.parts, offsets.spans, strict=True)
            places = [span for part, span in spans if part == 0 and span[1] > num_before]
            begin = places[0][0] - num_before if number and places else begin
            end = places[-1][1] - num_before if places else end
        if number == len(windows) - 1:
            end = len(document.contents)
        name, span = f"{document.id}{_MARK}{number}", (max(begin, 0), end)
        found.append(replace(document, id=name, contents=document.contents[slice(*span)], span=span))
    return found


def document_of(passage: str) -> str:
    """Return the id of the document of a passage."""
    return passage.rpartition(_MARK)[0]
