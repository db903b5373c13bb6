"""Documents packed into one sequence train as each document alone does, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, DataCollatorWithFlattening

from onnxtool.errors import TrainingError
from onnxtool.training import ModuleWithLoss
from onnxtool.training.trainer.packed_documents import PackedDocuments
from tests.training.trainer.language_models import require_same_step, step_of
from tests.training.trainer.trainers import VOCABULARY, Example, decoder

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def documents(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random tokens, so many in each."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]


def packed(texts: Sequence[torch.Tensor], **more: Any) -> Example:
    """One sequence of all documents; the first token of each is no label, as nothing comes before it."""
    return dict(DataCollatorWithFlattening(**more)([{"input_ids": text.tolist()} for text in texts]))


def without_cache() -> torch.nn.Module:
    model = decoder()
    model.config.use_cache = False  # as a Trainer does
    return model


def alone(model: torch.nn.Module, texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean loss of a token, each document run by itself in eager PyTorch."""
    count = sum(len(text) - 1 for text in texts)
    losses = [model(input_ids=text[None], labels=text[None]).loss * (len(text) - 1) / count for text in texts]
    return torch.stack(losses).sum()


def test_documents_in_a_sequence_do_not_see_each_other() -> None:
    """Loss and gradients are those of the documents alone, where later batches have other boundaries as well."""
    model, oracle = without_cache(), without_cache()
    module = ModuleWithLoss(model)
    for seed, lengths in enumerate([(5, 3, 4), (2, 7, 3), (4, 8)]):
        texts = documents(*lengths, seed=seed)
        ours = step_of(partial(module.forward, packed(texts)), model)
        require_same_step(ours, step_of(partial(alone, oracle, texts), oracle))
    assert [graph.kind for graph in module.explain().graphs] == ["forward", "backward"]
    assert module.backend.execution_count == 6


def masked_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZES))


def with_mask(batch: Example) -> Example:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def without_positions(_batch: Example) -> Example:
    return packed(documents(5, 3, 4), return_position_ids=False, return_flash_attn_kwargs=True)


@pytest.mark.parametrize(
    ("make", "change", "way_out"),
    [
        (without_cache, with_mask, "leave attention_mask out"),
        (without_cache, without_positions, "position_ids, which restart"),
        (decoder, dict, "use_cache = False"),
        (masked_model, dict, "train without packing"),
    ],
)
def test_documents_that_see_each_other_are_refused(make: Any, change: Any, way_out: str) -> None:
    """Eager PyTorch trains them in silence, and not with the loss of the documents."""
    batch, model = change(packed(documents(5, 3, 4))), make()
    with pytest.raises(TrainingError, match=f"attend to each other in {type(model).__name__}") as failure:
        ModuleWithLoss(model)(batch)
    assert way_out in failure.value.hint
    assert all(part.training for part in model.modules())  # as before


def test_a_batch_with_padding_before_its_texts_is_not_packed() -> None:
    """Positions of padding are all the same, and count as no document."""
    ids, mask = torch.tensor([[0, 0, 7, 8], [4, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids}
    PackedDocuments(decoder()).require_separate(batch)


def test_one_output_for_a_packed_sequence_is_refused() -> None:
    """There is nothing to tell documents apart by."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **SIZES))
    batch = {name: packed(documents(5, 3))[name] for name in ("input_ids", "position_ids")}
    with pytest.raises(TrainingError, match="the first output of BertForSequenceClassification is not one for each"):
        ModuleWithLoss(model)({**batch, "labels": torch.tensor([1])})


def test_embedded_documents_are_checked_as_well() -> None:
    """Where there are no tokens to change."""
    model = decoder()
    batch = packed(documents(5, 3, 4))
    embedded = {"inputs_embeds": torch.rand(1, 12, 16), "position_ids": batch["position_ids"]}
    with pytest.raises(TrainingError, match="attend to each other"):
        PackedDocuments(model).require_separate(embedded)
    model.config.use_cache = False
    PackedDocuments(model).require_separate(embedded)
