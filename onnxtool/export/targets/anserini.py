"""Anserini: it reads a text's terms and their weights from a graph that takes one text at a time.

It has its own tokenizer, which reads a WordPiece vocabulary. From its source, SpladePlusPlusEncoder.java.

Shape letters: B batch, V vocabulary, N terms with weights above 0, over all texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.tokenizer_library import read_vocabulary
from onnxtool.errors import TargetError
from onnxtool.export.sidecar_files import is_wordpiece
from onnxtool.export.target_specification import Arrays, TargetSpecification
from onnxtool.graph.builder import Builder
from onnxtool.runtime.running import Session
from onnxtool.runtime.tokens import OwnTokenizer, ReadTokens, named_tokens

_TEXTS = "output_text"
# It looks tokens up by name in vocab.txt and drops these ids by number.
_DROPPED_IDS = {"[PAD]": 0, "[CLS]": 101, "[SEP]": 102}
# It splits words of up to 200 characters, while transformers' tokenizer gives up above 100.
_LONGEST_WORD = 100
_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]")


class AnseriniSpecification(TargetSpecification):
    """Terms of a text; a second graph takes many texts at once."""

    def accepts(self) -> None:
        """Refuse everything but uncased WordPiece with the ids that it drops by number."""
        tokenizer = self.tokenizer
        if not is_wordpiece(tokenizer):
            raise TargetError(
                f"Anserini tokenizes with a WordPiece vocabulary; {type(tokenizer).__name__} is none",
                "only models with BERT's tokenizer can be used there; --target sentence-transformers, fastembed or "
                "vespa take this model",
            )
        for token, token_id in _DROPPED_IDS.items():
            actual_id = tokenizer.get_vocab().get(token)
            if actual_id != token_id:
                raise TargetError(
                    f"Anserini takes token {token_id} for {token} and drops it from every text; "
                    f"in this vocabulary {token} is {'missing' if actual_id is None else f'token {actual_id}'}",
                    "pass --target plain",
                )
        if tokenizer.tokenize("Anserini") != tokenizer.tokenize("anserini"):
            raise TargetError(
                "Anserini lower-cases every text, but this tokenizer is case-sensitive",
                "use an uncased model, or --target plain",
            )

    def reader(self, folder: Path) -> ReadTokens:
        """Return a reader that uses only the vocabulary."""
        return partial(read_vocabulary, folder / self.file_names[0])

    def check_tokens(self, tokenizer: OwnTokenizer, folder: Path, texts: Sequence[Text]) -> None:
        """Compare tokens of single texts without special tokens, Chinese or huge words; see the target's note."""
        super().check_tokens(tokenizer, folder, [text for text in texts if isinstance(text, str) and self._reads(text)])

    def _reads(self, text: str) -> bool:
        has_token = any(token.lower() in text.lower() for token in named_tokens(self.tokenizer))
        return not has_token and not _CHINESE.search(text) and max(map(len, text.split()), default=0) <= _LONGEST_WORD

    def convert(self, graph: ir.Model) -> dict[str, ir.Model]:
        """Replace weights over the whole vocabulary by the terms of the text; return a graph for many texts at once."""
        batched = graph.clone()
        self._append_terms(batched, with_texts=True)
        self._append_terms(graph, with_texts=False)
        return {f"{self.source.name}-batched.onnx": batched}

    def run(self, session: Session, feeds: Arrays) -> Arrays:
        """Run a graph, by single texts if it takes no more, and return weights of all terms: float32 [B, V]."""
        terms, values = (info.name for info in self.usage.outputs)
        count = len(feeds["input_ids"])
        weights = np.zeros((count, self.vocabulary_size), dtype=np.float32)
        if _TEXTS in session.output_names:
            outputs = session.run(feeds)
            weights[outputs[_TEXTS], outputs[terms]] = outputs[values]
        else:
            for row in range(count):
                outputs = session.run({name: array[row : row + 1] for name, array in feeds.items()})
                weights[row, outputs[terms]] = outputs[values]
        return {"sparse": weights}

    def _append_terms(self, model: ir.Model, *, with_texts: bool) -> None:
        """Replace the head's output, float [B, V], with the terms whose weight is above 0 and their weights, in place.

        `output_idx`: int64 [N] and `output_weights`: float32 [N], sorted by text and then by term. Anserini does not
        need the text of a term because it runs one at a time; `with_texts` adds it as `output_text`: int64 [N].
        """
        (value,) = model.graph.outputs
        build = Builder(model.graph, ir.DataType.FLOAT)
        weights = value if value.dtype == ir.DataType.FLOAT else build.cast(value)
        places = build.op("NonZero", weights)  # [2, N], sorted by text and then by term
        values = [
            build.op("Gather", places, build.constant(np.array(0, dtype=np.int64)), axis=0),
            build.op("Gather", places, build.constant(np.array(1, dtype=np.int64)), axis=0),
            build.op("GatherND", weights, build.op("Transpose", places, perm=[1, 0])),
        ]
        names = (_TEXTS, *(info.name for info in self.usage.outputs))
        dtypes = (ir.DataType.INT64, ir.DataType.INT64, ir.DataType.FLOAT)
        for output, name, dtype in zip(values, names, dtypes, strict=True):
            output.name, output.dtype, output.shape = name, dtype, ir.Shape(["terms"])
        model.graph.outputs[:] = values if with_texts else values[1:]


SPECIFICATION = AnseriniSpecification
