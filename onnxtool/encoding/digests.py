"""Digests of texts and of their ids, by which a corpus is compared without being kept."""

from __future__ import annotations

from hashlib import blake2b

from onnxtool.encoding.sources import Document

DIGEST_BYTES = 16
# Is part of the identity of vectors: digests of shards that were made otherwise are not compared.
VERSION = "2"


def id_digest(name: str) -> bytes:
    """Return a digest of an id: two of ten billion ids have the same one with a chance of one in 10^18."""
    return blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()


def text_digest(document: Document) -> bytes:
    """Return a digest of a text, or a picture, and its id."""
    name = document.id.encode()
    contents = (document.sha256 or document.contents).encode()
    return blake2b(b"%d:%b%b" % (len(name), name, contents), digest_size=DIGEST_BYTES).digest()


def shard_digest() -> blake2b:
    """Return a hash that the digests of the texts of a shard are added to, in their order."""
    return blake2b(digest_size=DIGEST_BYTES)
