"""Encode a collection of texts: read, tokenized, run and written as a stream, and resumed where it was stopped."""

from onnxtool.corpus.options import CorpusOptions, CorpusProgress
from onnxtool.corpus.run import encode_corpus

__all__ = ["CorpusOptions", "CorpusProgress", "encode_corpus"]
