"""Encode a collection of texts as a stream: read, tokenize, run and write, and resume interrupted runs."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.encoding.merge import corpus_status as corpus_status
    from onnxtool.encoding.merge import merge_parts as merge_parts
    from onnxtool.encoding.options import CorpusOptions as CorpusOptions
    from onnxtool.encoding.options import CorpusProgress as CorpusProgress
    from onnxtool.encoding.options import PartOptions as PartOptions
    from onnxtool.encoding.options import RunOptions as RunOptions
    from onnxtool.encoding.options import VectorOptions as VectorOptions
    from onnxtool.encoding.reading import Shard as Shard
    from onnxtool.encoding.reading import by_document as by_document
    from onnxtool.encoding.reading import read_shards as read_shards
    from onnxtool.encoding.run import encode_corpus as encode_corpus
    from onnxtool.encoding.run import encode_part as encode_part
    from onnxtool.encoding.run import encode_parts as encode_parts

_NAMES = {
    "onnxtool.encoding.options": ("CorpusOptions", "CorpusProgress", "PartOptions", "RunOptions", "VectorOptions"),
    "onnxtool.encoding.reading": ("Shard", "by_document", "read_shards"),
    "onnxtool.encoding.run": ("encode_corpus", "encode_part", "encode_parts"),
    "onnxtool.encoding.merge": ("corpus_status", "merge_parts"),
}

__all__ = [*chain(*_NAMES.values())]

__getattr__ = lazy_names(__name__, _NAMES)
