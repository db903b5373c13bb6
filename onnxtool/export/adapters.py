"""PEFT adapters: checkpoints that are a small difference to another one, merged into its weights by PEFT itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.files import ADAPTER_NAME
from onnxtool.errors import CheckpointError, some
from onnxtool.export.source import Source
from onnxtool.export.weights import StoredTensor, read_headers
from onnxtool.runtime.quiet import quiet

_WEIGHTS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
# PEFT's prefix for the model's names.
_PREFIX = "base_model.model."
# PEFT's task names, and ours.
TASKS: Mapping[Any, str] = {
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "CAUSAL_LM": "text-generation",
    "SEQ_2_SEQ_LM": "text2text-generation",
    "FEATURE_EXTRACTION": "feature-extraction",
}


@dataclass(frozen=True)
class PeftAdapter:
    """The adapter in a checkpoint.

    Attributes:
        file: its weights.
        stored: its tensors, under the names of the model they belong to.
    """

    source: Source
    file: Path
    stored: Mapping[str, StoredTensor]

    @classmethod
    def find(cls, source: Source) -> PeftAdapter:
        """Return the adapter of a checkpoint that has one.

        Raises:
            CheckpointError: its weights are missing or in a pickle that was not allowed, or PEFT is not installed.
        """
        file = source.locate(_WEIGHTS)
        if file is None and (pickle := source.locate(_PICKLE)) is not None:
            if not source.allow_pickle:
                raise CheckpointError(
                    f"{source.model_name} has its adapter in a pickle ({_PICKLE}) only, which can run code",
                    "if you trust it, pass --allow_pickle; save_pretrained(...) of PEFT writes safetensors",
                )
            file = pickle
        if file is None:
            raise CheckpointError(
                f"{source.model_name} has an adapter ({ADAPTER_NAME}) without weights ({_WEIGHTS})",
                f"fetch the whole checkpoint; or delete {ADAPTER_NAME} if the adapter is already merged",
            )
        try:
            import peft  # noqa: F401  checked before the model is loaded
        except ImportError as error:
            raise CheckpointError(
                f"{source.model_name} has an adapter ({ADAPTER_NAME}), which PEFT merges, and PEFT cannot be "
                f"imported: {error}",
                "pip install 'onnxtool-cli[adapters]'; or merge it with merge_and_unload() and save_pretrained()",
            ) from error
        headers = read_headers([file], source.model_name).values()
        coded = [f"{tensor.name} ({tensor.dtype})" for tensor in headers if not tensor.is_float]
        if coded:
            raise CheckpointError(
                f"{len(coded)} tensors of the adapter of {source.model_name} are quantized, and nothing would apply "
                f"their scales: {some(coded)}",
                "take the adapter as it was trained, in floats",
            )
        return cls(source, file, {tensor.name.removeprefix(_PREFIX): tensor for tensor in headers})

    @property
    def note(self) -> str:
        """A note about it for the report."""
        base = self.source.base
        return f"an adapter ({self.source.adapter.get('peft_type')}) is merged" + (
            "" if base is None else f" into the weights of {base.model_name}"
        )

    def num_labels(self, model: Any) -> int | None:
        """Return the number of labels of the adapter's own head, if the model was created with a different number."""
        state, count = model.state_dict(), getattr(model.config, "num_labels", None)
        sizes = {
            tensor.shape[0]
            for name, tensor in self.stored.items()
            if name in state and tensor.shape != tuple(state[name].shape)
            if tensor.shape[1:] == tuple(state[name].shape[1:]) and state[name].shape[0] == count
        }
        return sizes.pop() if len(sizes) == 1 else None

    def inject(self, model: Any) -> Any:
        """Return PEFT's model, which adds the adapter to the layers of `model`, in place.

        Raises:
            CheckpointError: PEFT cannot load it, or tensors are missing or do not fit.
        """
        import peft
        import torch

        folder = self.file.parent
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                adapted = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
                expected = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
                whole = adapted.state_dict()
        except Exception as error:  # each kind of adapter validates its settings differently
            raise CheckpointError(
                f"PEFT cannot load the adapter of {self.source.model_name}: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                "the adapter was trained on a different model, or is damaged",
            ) from error
        names = {tensor.name: tensor for tensor in self.stored.values()}
        missing = sorted(expected.keys() - names.keys())
        if missing:
            raise CheckpointError(
                f"the adapter of {self.source.model_name} has no weights for {some(missing)}",
                "the file may be damaged, or the adapter was trained on another architecture",
            )
        unknown = sorted(
            name
            for name in names.keys() - expected.keys()
            if name not in whole or not torch.equal(whole[name].float(), names[name].load().float())
        )
        if unknown:
            raise CheckpointError(
                f"{len(unknown)} tensors of the adapter of {self.source.model_name} fit nowhere in "
                f"{type(model).__name__}: {some(unknown)}",
                "the adapter was trained on another architecture; merge it with PEFT where it was trained",
            )
        return adapted

    def merge(self, model: Any) -> Any:
        """Return the model with the adapter merged into its weights by PEFT's merge_and_unload.

        Raises:
            CheckpointError: as for `inject`, or PEFT cannot merge it.
        """
        adapted = self.inject(model)
        if not hasattr(adapted, "merge_and_unload"):
            raise self._unmergeable("it changes inputs, not weights")
        try:
            with quiet():
                return adapted.merge_and_unload(safe_merge=True)
        except (AttributeError, NotImplementedError, ValueError, TypeError) as error:
            raise self._unmergeable(" ".join(str(error).split())) from error

    def _unmergeable(self, reason: str) -> CheckpointError:
        kind = self.source.adapter.get("peft_type")
        return CheckpointError(
            f"the adapter of {self.source.model_name} ({kind}) cannot be merged into the weights: {reason}",
            "export a model that was trained with LoRA or another kind that PEFT merges",
        )
