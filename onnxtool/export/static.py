"""Checkpoints without a transformer: lookup tables of vectors or weights for the tokens of a text.

They are exported as a model that looks up tokens, like any other model. The definitions are StaticEmbedding (as
distilled by model2vec) and SparseStaticEmbedding in sentence-transformers 6.2.

Shape letters: B batch, S sequence, V vocabulary, W width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.sentence_modules import SPARSE_STATIC, STATIC, as_object, positive
from onnxtool.checkpoint.static_embeddings import SparseStaticEmbedding, read_vectors
from onnxtool.checkpoint.tokenizer_guard import panics_as_exceptions
from onnxtool.errors import CheckpointError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.source import Source
from onnxtool.runtime.quiet import quiet

_TASKS = {STATIC: "sentence-similarity", SPARSE_STATIC: "sparse-encoding"}
_MODEL_TYPE = "static-embedding"


@dataclass(frozen=True)
class StaticCheckpoint(Checkpoint):
    """A checkpoint without a transformer: a lookup table of vectors or weights for the tokens of a text.

    Attributes:
        table: float32 [V, W] for vectors, or [V] for weights.
    """

    table: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32), repr=False)

    @classmethod
    def open_static(cls, source: Source, *, task: str = "auto") -> StaticCheckpoint:
        """Read the table.

        Raises:
            CheckpointError: it is missing or malformed, unsupported modules follow it, or `task` is not the table's
                task.
        """
        from transformers import PretrainedConfig

        modules = source.sentence_modules
        kind = modules.kinds[0]
        if task not in ("auto", _TASKS[kind]):
            raise CheckpointError(
                f"{source.model_name} is a table of {kind}, which is for {_TASKS[kind]}, but --task {task} was passed",
                "leave --task out",
            )
        if kind == STATIC:
            table = read_vectors(modules.modules[0])
        else:
            settings = (
                source.read_object("config.json") if not modules.modules[0].folder else modules.modules[0].settings
            )
            table = SparseStaticEmbedding.read(replace(modules.modules[0], settings=settings)).weights
            limits = ("max_active_dims",) if modules.encoder.get("max_active_dims") is not None else ()
            if unsupported := (*modules.kinds[1:], *limits):
                raise source.refuse(
                    f"{source.model_name} computes {', '.join(unsupported)} after its term weights, which onnxtool "
                    "does not",
                    "use sentence-transformers for this checkpoint",
                )
        config = PretrainedConfig(vocab_size=len(table), hidden_size=table.shape[-1])
        config.model_type = _MODEL_TYPE
        return cls(source, config, kind, _TASKS[kind], table=table)

    def load_tokenizer(self) -> Any:
        """Load tokenizer.json; for a table of vectors nothing else, so its limit is the one in that file.

        Raises:
            CheckpointError: the checkpoint has none, or it cannot be loaded.
        """
        if self.architecture != STATIC:
            return super().load_tokenizer()
        from transformers import PreTrainedTokenizerFast

        path = self.source.locate("tokenizer.json")
        if path is None:
            raise CheckpointError(
                f"{self.source.model_name} has no tokenizer (tokenizer.json)", "fetch the whole checkpoint"
            )
        self.require_sound_tokenizer()
        truncation = as_object(self.source.read_object("tokenizer.json").get("truncation"))
        try:
            with quiet(), panics_as_exceptions():
                tokenizer = PreTrainedTokenizerFast(
                    tokenizer_file=str(path), model_max_length=positive(truncation.get("max_length"))
                )
        except Exception as error:  # the library raises bare Exception for anything wrong with the file
            raise self.source.unreadable(error) from error
        if tokenizer.pad_token is None:  # any token works because the mask excludes it
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        return tokenizer

    def load_model(
        self,
        *,
        dtype: str,
        device: str,
        attention: str | None,
        allow_missing_weights: bool = False,
        allow_unused_weights: bool = False,
    ) -> Any:
        """Make a PyTorch model that looks up tokens.

        Args:
            dtype: a torch dtype name.
            device: the torch device.
            attention: unused; there is no attention.
            allow_missing_weights: unused; no weights can be missing.
            allow_unused_weights: unused; the module that reads the table checks its tensors.
        """
        import torch

        class Lookup(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
            def __init__(self, table: NDArray[np.float32], config: Any) -> None:
                super().__init__()
                self.config = config
                self.weight = torch.nn.Parameter(torch.from_numpy(table.copy()), requires_grad=False)

            @property
            def device(self) -> Any:
                return self.weight.device

            @property
            def dtype(self) -> Any:
                return self.weight.dtype

        class Vectors(Lookup):
            def forward(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
                real = attention_mask.unsqueeze(-1).to(self.weight.dtype)
                return {"last_hidden_state": torch.nn.functional.embedding(input_ids, self.weight) * real}

        class Weights(Lookup):
            def forward(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
                counts = torch.zeros(input_ids.shape[0], self.weight.shape[0], dtype=self.weight.dtype)
                counts = counts.to(self.weight.device).scatter_add(1, input_ids, attention_mask.to(self.weight.dtype))
                return {"sparse": (counts > 0).to(self.weight.dtype) * self.weight}

        model = (Vectors if self.architecture == STATIC else Weights)(self.table, self.config)
        return model.to(device=device, dtype=getattr(torch, dtype)).eval()
