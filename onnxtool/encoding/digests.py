"""Digests of texts and ids, which identify a corpus without storing it."""

from __future__ import annotations

from hashlib import blake2b

from onnxtool.encoding.sources import Document

DIGEST_BYTES = 16
# Part of the identity of vectors: digests of shards made in another way are not compared.
VERSION = "2"


def id_digest(name: str) -> bytes:
    """Return a digest of an id: two of ten billion ids collide with a probability of 10^-18."""
    return blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()


def text_digest(document: Document) -> bytes:
    """Return a digest of a text, or an image, and its id."""
    name = document.id.encode()
    contents = (document.sha256 or document.contents).encode()
    return blake2b(b"%d:%b%b" % (len(name), name, contents), digest_size=DIGEST_BYTES).digest()


def shard_digest() -> blake2b:
    """Return a hash that the digests of the texts of a shard are added to, in their order."""
    return blake2b(digest_size=DIGEST_BYTES)
