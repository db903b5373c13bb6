"""No consumer in particular: the graph as it is, with its files in a folder beside it."""

from __future__ import annotations

from onnxtool.export.target import Target


class Plain(Target):
    """Takes any graph."""

    name = "plain"
    title = "onnxtool"


TARGET = Plain()
