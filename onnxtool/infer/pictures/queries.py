"""Encode the query that pictures are ranked for, with the model of texts beside that of pictures.

Letters of shapes: D width of a vector.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxtool.checkpoint.folder import find_checkpoint_folder
from onnxtool.checkpoint.page_processors import page_limit, write_page_query
from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import require_finite
from onnxtool.infer.loading import load
from onnxtool.infer.options import InferOptions
from onnxtool.infer.pictures.model import PictureModel
from onnxtool.infer.vectors import DenseVectors, TokenVectors
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import WEIGHTS_KEY
from onnxtool.progress import tell
from onnxtool.runtime.feeds import index_bounds
from onnxtool.runtime.session import open_session
from onnxtool.runtime.text_feeds import text_feeds
from onnxtool.runtime.tokens import open_tokenizer


def encode_query(model: PictureModel, query: str, options: InferOptions) -> DenseVectors | TokenVectors:
    """Return the vector of `query`, float32 [1, D], or those of its tokens.

    Raises:
        InputError: the model of texts is not named, gives other vectors, or comes from another checkpoint.
        OnnxtoolError: it cannot be loaded or run.
    """
    path = options.text_model
    if path is None:
        raise InputError(
            "--query ranks pictures for a text, and the model of texts is not named",
            "export it from the same checkpoint (--task late-interaction of a retriever of pages, else --task "
            "sentence-similarity), and pass it with --text_model",
        )
    texts = ModelFile.open(path)
    if texts.metadata.get(WEIGHTS_KEY) != model.session.model.metadata.get(WEIGHTS_KEY):
        raise InputError(
            f"{path} and {model.session.model.path} come from different weights, and their vectors are of no common "
            "space",
            "export both sides from one checkpoint",
        )
    encode = _encode_tokens if model.by_token else _encode_text
    vectors = encode(path, query, options)
    width = next(info.shape[-1] for info in model.session.model.structure.outputs if info.name == model.vector)
    found = vectors.vectors if isinstance(vectors, TokenVectors) else vectors
    if found.dtype != np.float32 or found.shape[1:] != (width,):
        raise InputError(
            f"{path} gives other vectors than {model.session.model.path}, of {width} numbers of float32",
            "take both sides from one checkpoint",
        )
    return vectors


def _encode_text(path: Path, query: str, options: InferOptions) -> DenseVectors | TokenVectors:
    texts = load(path, provider=options.provider, threads=options.threads)
    return np.asarray(texts.encode([query], prompt=options.prompt, task="query"))


def _encode_tokens(path: Path, query: str, options: InferOptions) -> DenseVectors | TokenVectors:
    """Encode a query for pages: written as the processor of the checkpoint does, with a vector for each token."""
    texts = ModelFile.open(path)
    if options.prompt is not None:
        raise InputError("queries for pages are written as the checkpoint's processor does", "leave --prompt out")
    if [len(info.shape) for info in texts.structure.outputs if info.name == TOKENS] != [3]:
        raise InputError(f"{path} gives no {TOKENS}", "export it with --task late-interaction from the same checkpoint")
    folder = find_checkpoint_folder(texts)
    tokenizer = open_tokenizer(folder)
    arrays = tokenizer.pad(tokenizer.encode([write_page_query(query, folder, tokenizer)], page_limit(folder)))
    known, largest = index_bounds(texts).get("input_ids"), arrays["input_ids"].max()
    if known is not None and largest >= known:
        raise InputError(
            f"the tokenizer gives token {largest}, and {path} knows {known} tokens",
            "the tokenizer belongs to another model; export the model again",
        )
    tell(f"loading {path}")
    session = open_session(path, provider=options.provider, threads=options.threads)
    values = session.run(text_feeds(texts, arrays))[TOKENS][0].astype(np.float32)
    require_finite(values, "vector of a token")
    return TokenVectors.stack([values])
