"""Encode a collection of texts: read, tokenize, run and write it as a stream, and resume where a run was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.encoding.options import CorpusOptions as CorpusOptions
    from onnxtool.encoding.options import CorpusProgress as CorpusProgress
    from onnxtool.encoding.run import encode_corpus as encode_corpus
    from onnxtool.encoding.run import plan_corpus as plan_corpus

_MODULES = {
    "CorpusOptions": "onnxtool.encoding.options",
    "CorpusProgress": "onnxtool.encoding.options",
    "encode_corpus": "onnxtool.encoding.run",
    "plan_corpus": "onnxtool.encoding.run",
}

__all__ = ["CorpusOptions", "CorpusProgress", "encode_corpus", "plan_corpus"]

__getattr__ = lazy_names(__name__, _MODULES)
