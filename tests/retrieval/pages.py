"""Small retrievers of pages as images, saved by transformers and by sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sentence_transformers.multi_vector_encoder import MultiVectorEncoder

from tests.retrieval.checkpoints import Case
from tests.retrieval.tiny_pages import colmodernvbert, colpali, colqwen2

PAGES = "pages"
_MAKERS: dict[str, Callable[[Path], Any]] = {"ColPali": colpali, "ColModernVBERT": colmodernvbert, "ColQwen2": colqwen2}


def _of_transformers(make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    def save(folder: Path, _base: Path) -> None:
        make(folder)

    return save


def _of_modules(make: Callable[[Path], Any], *, of_pixels: bool = False) -> Callable[[Path, Path], None]:
    def save(folder: Path, base: Path) -> None:
        processor = make(base)
        encoder = MultiVectorEncoder(str(base), device="cpu")
        if of_pixels:
            mask: Any = encoder[1]
            mask.keep_only_token_ids = [processor.image_token_id]
        encoder.save_pretrained(str(folder))

    return save


def page_cases() -> Iterator[Case]:
    """List the checkpoints."""
    for name, make in _MAKERS.items():
        yield Case(f"{name}, of transformers", PAGES, _of_transformers(make))
    for name, make in _MAKERS.items():
        yield Case(f"{name}, of sentence-transformers", PAGES, _of_modules(make))
    for name, make in (("ColPali", colpali), ("ColQwen2", colqwen2)):
        yield Case(f"{name}, keep_only_token_ids", PAGES, _of_modules(make, of_pixels=True))
