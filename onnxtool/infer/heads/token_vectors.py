"""Late-interaction encoders: a vector for each token that counts.

Shape letters: B batch, S sequence, W width of a vector, T tokens of all texts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.limits import EncodedText, Limit
from onnxtool.checkpoint.module_forms import PoolingModule
from onnxtool.checkpoint.page_modules import PROCESSOR_NAMES
from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.checkpoint.token_modules import MultiVectorMask, read_mask, read_token_modules
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import Batch, VectorHead, require_finite
from onnxtool.infer.static_queries import QUERY
from onnxtool.infer.vectors import TokenVectors

_MEAN = "meanmaxsim"


@dataclass(frozen=True)
class TokensOfTexts(VectorHead[TokenVectors]):
    """Token vectors from the graph, or its hidden states projected according to the checkpoint.

    Attributes:
        modules: the modules applied here; empty if the graph contains them.
        mask: the module that selects counting tokens; None if all attended tokens count.
        expansion: the expansion of short queries; None for no expansion.
        expansion_id: the added token.
        is_mean: whether a score is the mean over the query's tokens instead of the sum.
        num_left_out: number of leading tokens of a text that never count.
        skipped_ids: the tokens that do not count according to the mask.
    """

    kind = "token_vectors"

    tokenizer: TextTokenizer
    modules: tuple[PoolingModule, ...]
    mask: MultiVectorMask | None
    expansion: QueryExpansion | None
    expansion_id: int
    is_mean: bool
    num_left_out: int = 0
    skipped_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, folder: CheckpointFolder, tokenizer: TextTokenizer, *, in_graph: bool) -> TokensOfTexts:
        """Read the counting tokens, and the modules missing in the graph, from the checkpoint.

        Raises:
            InputError: the checkpoint is of another kind, or not supported here.
        """
        modules = folder.sentence_modules
        if not modules.is_late_interaction:
            if any(folder.file_at(name) for name in PROCESSOR_NAMES):
                raise InputError(
                    f"the files in {folder.path} are a page retriever's, whose texts are queries for images",
                    "pass the model of images, with --input, --query and this model as --text_model",
                )
            raise InputError(
                f"{folder.path} does not describe a late-interaction encoder",
                "the files beside the model belong to another one; pass --model_name with the right folder",
            )
        expansion = QueryExpansion.of(modules, folder)
        expansion_id = (
            0
            if expansion is None
            else expansion.find_token(
                tokenizer.id_of, tokenizer.expanding_tokens, folder, pads_left=tokenizer.pads_left
            )
        )
        mask = read_mask(modules)
        skipped = () if mask is None else map(tokenizer.id_of, mask.skipped)
        return cls(
            tokenizer,
            () if in_graph else read_token_modules(modules),
            mask,
            expansion,
            expansion_id,
            modules.encoder.get("similarity_fn_name") == _MEAN,
            skipped_ids=frozenset(token_id for token_id in skipped if token_id is not None),
        )

    @classmethod
    def of_m3(cls, tokenizer: TextTokenizer) -> TokensOfTexts:
        """Use the vectors of an M3 embedder: all but the first token's, and means, like FlagEmbedding."""
        return cls(tokenizer, (), None, None, 0, is_mean=True, num_left_out=1)

    def require_room(self, limit: Limit | None) -> None:
        """Refuse a query limit below the length of expanded queries.

        Raises:
            InputError: it is below.
        """
        if self.expansion is not None and limit is not None and limit.tokens < self.expansion.length:
            raise InputError(
                f"queries are expanded to {self.expansion.length} tokens, and {limit.source} allow {limit.tokens}",
                "the files beside the model belong to another one; pass --model_name with the right folder",
            )

    def prepare(self, text: EncodedText, task: str | None) -> EncodedText:
        """Return a text with query expansion applied and its counting tokens marked."""
        expansion = self.expansion if task == QUERY else None
        if expansion is not None:
            text = self.tokenizer.expand(text, expansion.length, self.expansion_id, attended=expansion.attend)
        if self.num_left_out:
            return replace(text, counted=tuple(place >= self.num_left_out for place in range(len(text))))
        if self.mask is None:  # unattended tokens do not count then
            return replace(text, counted=text.attended)
        return replace(text, counted=self.mask.counted(text.ids, task, self.skipped_ids))

    def pool(self, batch: Batch) -> TokenVectors:
        """Return the vectors of the counting tokens of B texts: float32 [T, W].

        Raises:
            SessionError: a value is not a finite number.
        """
        values = batch.output(3, TOKENS, "last_hidden_state")
        rows = []
        for row, text in zip(values, batch.texts, strict=True):
            part = row[-len(text) :] if self.tokenizer.pads_left else row[: len(text)]
            rows.append(part if text.counted is None else part[np.array(text.counted, np.bool_)])
        vectors = TokenVectors.stack(rows)
        if self.modules:
            from onnxtool.runtime.computed_modules import compute

            vectors = replace(vectors, vectors=compute(self.modules, vectors.vectors[None])[0])
        require_finite(vectors.vectors, "vector of a token")
        return vectors

    def join(self, vectors: TokenVectors, windows: Sequence[Sequence[EncodedText]]) -> TokenVectors:
        """Refuse windows, because each would begin with the prompt's tokens."""
        self.require_windows()
        return vectors
