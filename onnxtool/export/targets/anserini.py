"""Anserini: it reads a text's terms and their weights from a graph that takes one text at a time.

From its source, SpladePlusPlusEncoder.java.

Shape letters: B batch, V vocabulary, N terms with weights above 0, over all texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.tokenizer_library import read_vocabulary
from onnxtool.errors import TargetError
from onnxtool.export.heads.head import Head
from onnxtool.export.sidecar_files import is_wordpiece, wordpiece_vocabulary
from onnxtool.export.target import SPARSE, TEXT_INPUTS, Delivery, Target, TargetModel, Use
from onnxtool.graph.builder import Builder
from onnxtool.reports import TensorInfo
from onnxtool.runtime.tokens import named_tokens

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

_TEXTS, _TERMS, _WEIGHTS = "output_text", "output_idx", "output_weights"
# It looks tokens up by name in vocab.txt and drops these ids by number.
_DROPPED_IDS = {"[PAD]": 0, "[CLS]": 101, "[SEP]": 102}
_VOCABULARY = "{name}-vocab.txt"
# It splits words of up to 200 characters, while transformers' tokenizer gives up above 100.
_LONGEST_WORD = 100
_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]")


class Anserini(Target):
    """Has its own tokenizer, which reads a WordPiece vocabulary. A second graph takes many texts at once."""

    name = "anserini"
    title = "Anserini"
    uses = (
        Use(
            SPARSE,
            (TensorInfo(_TERMS, "int64", ("terms",)), TensorInfo(_WEIGHTS, "float32", ("terms",))),
            head="splade",
            declares=TEXT_INPUTS,
        ),
    )
    graph = "{name}-optimized.onnx"
    files = (_VOCABULARY,)
    batch = 1
    max_ir = 9  # onnxruntime 1.17.0
    max_opset = 20

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse everything but uncased WordPiece with the ids that it drops by number."""
        if not is_wordpiece(tokenizer):
            raise TargetError(
                f"Anserini tokenizes with a WordPiece vocabulary; {type(tokenizer).__name__} is none",
                "only models with BERT's tokenizer can be used there; --target sentence-transformers, fastembed or "
                "vespa take this model",
            )
        for token, token_id in _DROPPED_IDS.items():
            found = tokenizer.get_vocab().get(token)
            if found != token_id:
                raise TargetError(
                    f"Anserini takes token {token_id} for {token} and drops it from every text; "
                    f"in this vocabulary {token} is {'missing' if found is None else f'token {found}'}",
                    "pass --target plain",
                )
        if tokenizer.tokenize("Anserini") != tokenizer.tokenize("anserini"):
            raise TargetError(
                "Anserini lower-cases every text, but this tokenizer is case-sensitive",
                "use an uncased model, or --target plain",
            )

    def read_texts(self, folder: Path, model: TargetModel, texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        """Return the ids using only the vocabulary."""
        return read_vocabulary(folder / _VOCABULARY.format(name=model.name), texts, limit)

    def reads_as_trained(self, text: Text, tokenizer: Any) -> bool:
        """Return whether a text is single, without special tokens, Chinese or huge words; see `instruction`."""
        if isinstance(text, tuple):
            return False
        has_token = any(token.lower() in text.lower() for token in named_tokens(tokenizer))
        words = text.split()
        return not has_token and not _CHINESE.search(text) and max(map(len, words), default=0) <= _LONGEST_WORD

    def adapt_outputs(self, graph: ir.Model, head: Head | None) -> None:
        """Replace weights over the whole vocabulary with the terms of the text."""
        if head is not None:
            _append_terms(graph, head.output, with_texts=False)

    def second_graph(self, graph: ir.Model, head: Head | None) -> ir.Model | None:
        """Return a graph for many texts at once, which also outputs the text of each term."""
        if head is None:
            return None
        twin = graph.clone()
        _append_terms(twin, head.output, with_texts=True)
        return twin

    def second_path(self, graph: Path, name: str) -> Path:
        """Return NAME-batched.onnx next to the first."""
        return graph.with_name(f"{name}-batched.onnx")

    def restore(self, outputs: Mapping[str, NDArray[Any]], model: TargetModel, batch: int) -> dict[str, NDArray[Any]]:
        """Convert terms back to weights over the whole vocabulary: float32 [B, V]."""
        if model.head is None:
            return dict(outputs)
        weights = np.zeros((batch, model.vocabulary_size), dtype=np.float32)
        texts = outputs.get(_TEXTS, np.zeros_like(outputs[_TERMS]))
        weights[texts, outputs[_TERMS]] = outputs[_WEIGHTS]
        return {model.head.output: weights}

    def write_files(self, to: Delivery) -> None:
        """Write the vocabulary under Anserini's name for it."""
        vocabulary = wordpiece_vocabulary(to.tokenizer, to.model.vocabulary_size)
        (to.folder / _VOCABULARY.format(name=to.model.name)).write_text(vocabulary, encoding="utf-8")

    def instruction(self, model: TargetModel) -> str:
        """Say where Anserini looks for files, and what the second graph is for."""
        return (
            "Anserini looks for graph and vocabulary in ~/.cache/pyserini/encoders; "
            f"{model.name}-batched.onnx takes many texts, and its output_text says which of them a term is of. In "
            "texts, it reads special tokens, Chinese and words of over 100 characters differently from the tokenizer"
        )


def _append_terms(model: ir.Model, sparse: str, *, with_texts: bool) -> None:
    """Replace the output `sparse`, float [B, V], with the terms whose weight is above 0 and their weights, in place.

    `output_idx`: int64 [N] and `output_weights`: float32 [N], sorted by text and then by term. Anserini does not need
    the text of a term because it runs one at a time; `with_texts` adds it as `output_text`: int64 [N].
    """
    import onnx_ir as ir

    graph = model.graph
    value = next(output for output in graph.outputs if output.name == sparse)
    build = Builder(graph, ir.DataType.FLOAT)
    weights = value if value.dtype == ir.DataType.FLOAT else build.cast(value)
    places = build.op("NonZero", weights)  # [2, N], sorted by text and then by term
    found = [
        (_TEXTS, build.op("Gather", places, build.constant(np.array(0, dtype=np.int64)), axis=0)),
        (_TERMS, build.op("Gather", places, build.constant(np.array(1, dtype=np.int64)), axis=0)),
        (_WEIGHTS, build.op("GatherND", weights, build.op("Transpose", places, perm=[1, 0]))),
    ]
    for name, output in found:
        output.name = name
        output.dtype = ir.DataType.FLOAT if name == _WEIGHTS else ir.DataType.INT64
        output.shape = ir.Shape(["terms"])
    graph.outputs[:] = [output for _, output in found[0 if with_texts else 1 :]]


TARGET = Anserini()
