"""Encode a collection of texts: read, tokenize, run and write it as a stream, and resume where a run was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.encoding.engines import encode_part as encode_part
    from onnxtool.encoding.engines import encode_plan as encode_plan
    from onnxtool.encoding.options import CorpusOptions as CorpusOptions
    from onnxtool.encoding.options import CorpusProgress as CorpusProgress
    from onnxtool.encoding.options import VectorOptions as VectorOptions
    from onnxtool.encoding.parts import PartOptions as PartOptions
    from onnxtool.encoding.parts import corpus_status as corpus_status
    from onnxtool.encoding.parts import merge_parts as merge_parts
    from onnxtool.encoding.plan import make_plan as make_plan
    from onnxtool.encoding.reading import Shard as Shard
    from onnxtool.encoding.reading import by_document as by_document
    from onnxtool.encoding.reading import read_shards as read_shards
    from onnxtool.encoding.run import encode_corpus as encode_corpus
    from onnxtool.encoding.run import plan_corpus as plan_corpus
    from onnxtool.encoding.workers import RunOptions as RunOptions

_MODULES = {
    "CorpusOptions": "onnxtool.encoding.options",
    "CorpusProgress": "onnxtool.encoding.options",
    "PartOptions": "onnxtool.encoding.parts",
    "Shard": "onnxtool.encoding.reading",
    "RunOptions": "onnxtool.encoding.workers",
    "VectorOptions": "onnxtool.encoding.options",
    "by_document": "onnxtool.encoding.reading",
    "corpus_status": "onnxtool.encoding.parts",
    "encode_corpus": "onnxtool.encoding.run",
    "encode_part": "onnxtool.encoding.engines",
    "encode_plan": "onnxtool.encoding.engines",
    "make_plan": "onnxtool.encoding.plan",
    "merge_parts": "onnxtool.encoding.parts",
    "plan_corpus": "onnxtool.encoding.run",
    "read_shards": "onnxtool.encoding.reading",
}

__all__ = [*_MODULES]

__getattr__ = lazy_names(__name__, _MODULES)
