"""Encode a collection of texts: read, tokenize, run and write it as a stream, and resume where a run was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.corpus.options import CorpusOptions as CorpusOptions
    from onnxtool.corpus.options import CorpusProgress as CorpusProgress
    from onnxtool.corpus.run import encode_corpus as encode_corpus
    from onnxtool.corpus.run import plan_corpus as plan_corpus

_MODULES = {
    "CorpusOptions": "onnxtool.corpus.options",
    "CorpusProgress": "onnxtool.corpus.options",
    "encode_corpus": "onnxtool.corpus.run",
    "plan_corpus": "onnxtool.corpus.run",
}

__all__ = ["CorpusOptions", "CorpusProgress", "encode_corpus", "plan_corpus"]

__getattr__ = lazy_names(__name__, _MODULES)
