"""No particular consumer: the unchanged graph, with its files in a folder next to it."""

from __future__ import annotations

from onnxtool.export.target import Target


class Plain(Target):
    """Accepts any graph."""

    name = "plain"
    title = "onnxtool"


TARGET = Plain()
