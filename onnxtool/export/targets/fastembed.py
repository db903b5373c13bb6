"""fastembed: it computes common pooling itself, and learns about other models from `add_custom_model`.

From the sources of fastembed 0.9.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder
from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.sentence_modules import as_object
from onnxtool.checkpoint.static_embeddings import IDF_NAME
from onnxtool.checkpoint.token_modules import read_mask
from onnxtool.checkpoint.tokenizer_library import read_file
from onnxtool.errors import TargetError
from onnxtool.export.sidecar_files import query_weights, read_object, write_json
from onnxtool.export.source import Source
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.targets import INFERENCE_FREE, SPARSE, TOKENS
from onnxtool.runtime.tokens import ReadTokens

# Its Colbert class has hard-coded settings: the tokens inserted after the first token of a text, the query expansion,
# and the document tokens to skip.
_COLBERT = "colbert-ir/colbertv2.0"
_MARKERS = {"query": 1, "document": 2}
_EXPANSION = QueryExpansion(32, is_exact=True, attend=False, token=None)
_MASK = "[MASK]"


class FastembedSpecification(TargetSpecification):
    """One kind of late interaction, and weights of queries by token."""

    def accepts(self) -> None:
        """Refuse late interaction with tokens, an expansion or a skip list different from fastembed's."""
        if self.usage.kind == TOKENS and (other := list(other_than_colbert(self.source, self.tokenizer))):
            raise TargetError(
                f"fastembed's late interaction is fixed to {_COLBERT}; {self.source.model_name} has {'; '.join(other)}",
                "pass --target sentence-transformers, whose MultiVectorEncoder follows the checkpoint",
            )
        if self.usage.kind in (SPARSE, INFERENCE_FREE, TOKENS) and self.precisions:
            raise TargetError(
                f"fastembed opens model.onnx alone for {self.usage.kind}, whose lists take no models of one's own",
                "leave --precisions out",
            )
        super().accepts()

    def reader(self, folder: Path) -> ReadTokens:
        """Return a reader that also recognizes the tokens in special_tokens_map.json."""
        special_tokens = read_object(folder / "special_tokens_map.json")
        return partial(read_file, folder / TOKENIZER_NAME, special_tokens=special_tokens)

    def files(self, folder: Path, longest: int | None) -> None:
        """State the text length, for late interaction that of documents, and write the weights of query tokens."""
        if self.usage.kind == TOKENS:
            longest = CheckpointFolder(folder).sentence_modules.stated_length("document") or longest
        super().files(folder, longest)
        if self.usage.kind == INFERENCE_FREE:
            weights, vocabulary = query_weights(folder).tolist(), self.tokenizer.get_vocab()
            tokens = sorted(vocabulary, key=vocabulary.__getitem__)  # tokenizers returns them in a random order
            write_json(folder / IDF_NAME, {token: weights[vocabulary[token]] for token in tokens})

    @property
    def pooling_name(self) -> str:
        """The name in PoolingType."""
        name = super().pooling_name
        return {"none": "DISABLED", "lasttoken": "LAST_TOKEN"}.get(name, name.upper())


def other_than_colbert(source: Source, tokenizer: Any) -> Iterator[str]:
    """Yield how its settings differ from fastembed's hard-coded ones."""
    modules = source.sentence_modules
    prompts, vocabulary = as_object(modules.encoder.get("prompts")), tokenizer.get_vocab()
    for role, marker in _MARKERS.items():
        prompt = str(prompts.get(role) or "")
        is_token = prompt in modules.prefixes or tokenizer.tokenize(prompt) == [prompt.strip()]
        if not is_token or vocabulary.get(prompt.strip()) != marker:
            yield f"{prompt!r} before each {role}, not token {marker}"
    expansion = QueryExpansion.of(modules, source)
    if expansion is None or replace(expansion, token=None) != _EXPANSION or tokenizer.mask_token != _MASK:
        yield f"the query expansion {expansion}, not {_EXPANSION.length} tokens with {_MASK}, unseen"
    elif expansion.token not in (None, _MASK):
        yield f"queries expanded by {expansion.token!r}, not {_MASK}"
    mask = read_mask(modules)
    if mask is None or {*mask.skipped} != {*string.punctuation} or mask.tasks != ("document",) or mask.kept_ids:
        yield "another skip list than punctuation in documents"
    if modules.kinds[-1] != "Normalize":
        yield "vectors of tokens that are not scaled to length 1"


SPECIFICATION = FastembedSpecification
