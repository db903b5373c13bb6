"""Run the checkpoint itself with sentence-transformers in PyTorch, as the reference for an ONNX file.

This is the only module of this package that loads PyTorch, and only to compare with a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import numpy as np

from onnxtool.encoding.reading import Shard
from onnxtool.errors import CheckpointError, InputError, first_line, imported
from onnxtool.evaluation.collection import Collection, read_documents
from onnxtool.evaluation.options import (
    BM25,
    COSINE,
    DENSE,
    DOT,
    LATE_INTERACTION,
    MAXSIM,
    RERANKER,
    SPARSE,
    EvaluateOptions,
)
from onnxtool.evaluation.systems import Reranking, System, VectorSystem, grouped
from onnxtool.infer.vectors import SparseVectors, TokenVectors
from onnxtool.progress import Stage, tell
from onnxtool.reading import require_small_settings
from onnxtool.runtime.providers import is_on_cuda
from onnxtool.runtime.quiet import quiet

_CLASSES = {
    DENSE: "SentenceTransformer",
    SPARSE: "SparseEncoder",
    LATE_INTERACTION: "MultiVectorEncoder",
    RERANKER: "CrossEncoder",
}


def open_checkpoint(name: str, kind: str, options: EvaluateOptions) -> System:
    """Load a checkpoint with the sentence-transformers class for `kind`. Code in the checkpoint is never run.

    Args:
        name: its folder or hub id.
        kind: the kind of the ONNX file to compare it with.
        options: the options of the evaluation.

    Raises:
        InputError: sentence-transformers is not installed.
        CheckpointError: it cannot load the checkpoint.
    """
    if options.long != "truncate":
        raise InputError(
            f"--long {options.long} is for ONNX files, and sentence-transformers cuts what is long",
            "leave out --long, or compare with an ONNX file",
        )
    tell(f"loading {name} in PyTorch")
    model = load_encoder(name, kind, "cuda" if is_on_cuda(options.provider) else "cpu")
    if kind == RERANKER and model.num_labels != 1:
        raise CheckpointError(
            f"{name} has {model.num_labels} labels, and a reranker has one", "pass a reranker, or an ONNX file of one"
        )
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    return _TorchReranker(name, model, options) if kind == RERANKER else _TorchVectors(name, kind, model, options)


def load_encoder(name: str, kind: str, device: str = "cpu") -> Any:
    """Load a checkpoint with the sentence-transformers class for `kind`. Code in the checkpoint is never run.

    Raises:
        InputError: sentence-transformers is not installed.
        CheckpointError: it cannot load the checkpoint.
    """
    sentence_transformers = imported(
        "sentence_transformers",
        "a checkpoint is run by sentence-transformers",
        "pip install 'onnxtool-cli[sentence-transformers]', or compare with an ONNX file",
    )
    pickles: list[str] = []
    try:
        if (folder := Path(name)).is_dir():
            for place in (folder, *filter(Path.is_dir, folder.iterdir())):  # modules have separate settings
                require_small_settings(place, folder)
        with quiet(), _without_pickles(pickles):
            model = getattr(sentence_transformers, _CLASSES[kind])(name, device=device, trust_remote_code=False)
    except Exception as error:
        if pickles:
            raise CheckpointError(
                f"{name} has weights in a pickle only ({pickles[0]}), which can run code",
                "convert it: save_pretrained(...) of sentence-transformers writes safetensors; or compare with an ONNX "
                "file, which onnxtool export --allow_pickle makes",
            ) from error
        raise CheckpointError(
            f"sentence-transformers cannot load {name} as a {_CLASSES[kind]}: {first_line(error)}",
            f"pass the folder of a checkpoint, an ONNX file, or {BM25}",
        ) from error
    return model


@contextmanager
def _without_pickles(pickles: list[str]) -> Iterator[None]:
    """Make torch.load, which transformers and modules use for pickles, fail in the block, and name the files."""
    import torch

    def refuse(file: Any, *_arguments: Any, **_options: Any) -> NoReturn:
        pickles.append(Path(str(file)).name)
        raise UnpicklingError(f"{file} is a pickle")

    load, torch.load = torch.load, refuse
    try:
        yield
    finally:
        torch.load = load


class _TorchVectors(VectorSystem):
    def __init__(self, name: str, kind: str, model: Any, options: EvaluateOptions) -> None:
        super().__init__(options)
        self.name, self.kind, self._model = f"{name} in PyTorch", kind, model
        stated = getattr(model, "similarity_fn_name", None)
        fallback = {SPARSE: DOT, LATE_INTERACTION: MAXSIM}.get(kind, COSINE)
        self.similarity = str(getattr(stated, "value", stated) or fallback)

    def encode_queries(self, texts: Sequence[str]) -> Any:
        return self._vectors(self._model.encode_query, texts)

    def shards(self, collection: Collection, rejects: Counter[str]) -> Iterator[Shard]:
        done = 0
        for part in grouped(read_documents(collection, rejects)):
            tell(Stage("encoding documents in PyTorch", done, 0))
            texts = [document.contents for document in part]
            yield Shard([document.id for document in part], self._vectors(self._model.encode_document, texts))
            done += len(part)

    def _vectors(self, encode: Callable[..., Any], texts: Sequence[str]) -> Any:
        options = self._options
        if self.kind == DENSE:
            more = {} if options.dimensions is None else {"truncate_dim": options.dimensions}
            return encode(list(texts), show_progress_bar=False, convert_to_numpy=True, **more)
        if self.kind == LATE_INTERACTION:
            rows = encode(list(texts), show_progress_bar=False, convert_to_numpy=True)
            return TokenVectors.stack([np.asarray(row, np.float32) for row in rows])
        terms = encode(list(texts), show_progress_bar=False, convert_to_sparse_tensor=False, save_to_cpu=True)
        tokenizer = self._model.tokenizer
        vocabulary = tokenizer.convert_ids_to_tokens(range(terms.shape[1]))
        vectors = SparseVectors.from_dense(terms.float().numpy(), vocabulary)
        return vectors if options.keep_special else vectors.without(_framing(tokenizer))


def _framing(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens that are added around a text."""
    return frozenset(tokenizer("").input_ids)


class _TorchReranker(Reranking):
    def __init__(self, name: str, model: Any, options: EvaluateOptions) -> None:
        super().__init__(options)
        self.name, self._model = f"{name} in PyTorch", model

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        return [float(score) for score in self._model.predict(list(pairs), show_progress_bar=False)]
