"""Small models, and the Trainer of transformers that trains them: the oracle of OrtTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput

from onnxtool.training import OrtTrainer

VOCABULARY, CLASSES = 100, 3
TOLERANCE = 1e-6
"""Relative, of losses: float32 sums in another order."""

Example = dict[str, torch.Tensor]


def classifier(**changes: Any) -> torch.nn.Module:
    """A BERT of one layer with dropout."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    return BertForSequenceClassification(
        # Its type is given, because the model would note it down at its first call.
        BertConfig(
            vocab_size=VOCABULARY,
            num_labels=CLASSES,
            problem_type="single_label_classification",
            **sizes,
            **changes,
        )
    )


class Sorter(torch.nn.Module):
    """A classifier that is not of transformers, with dropout.

    What a Trainer does around a model is the same for every model, and this one is compiled in a third of the time.
    """

    def __init__(self, *, return_dict: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.1)
        self.output = torch.nn.Linear(8, CLASSES)
        self._return_dict = return_dict

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        mean = (self.embedding(input_ids) * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        logits = self.output(self.dropout(torch.tanh(self.hidden(mean))))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss, logits) if self._return_dict else (loss, logits)


class Tagger(torch.nn.Module):
    """A classifier of tokens that is not of transformers, with dropout and an output head that rows are kept from.

    It takes the number of labels of a step, as models of transformers do, and is compiled in a third of their time.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace()  # the Trainer looks into it where losses are smoothed
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(8, VOCABULARY)

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the layer that transformers calls so."""
        return self.head

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, labels: torch.Tensor | None = None, **more: Any
    ) -> MaskedLMOutput:
        logits = self.head(self.dropout(torch.tanh(self.hidden(self.embedding(input_ids)))))
        loss = None if labels is None else ForMaskedLMLoss(logits, labels, VOCABULARY, **more)
        return MaskedLMOutput(loss, logits)


def decoder() -> torch.nn.Module:
    """A Llama of one layer."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def classified(number: int, lengths: Sequence[int] = (8,)) -> list[Example]:
    """Texts of random tokens, of these lengths in turns, whose class is that of their first token."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, VOCABULARY, (lengths[index % len(lengths)],), generator=draw) for index in range(number)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % CLASSES} for ids in texts]


def continued(number: int, ignored: int = 3) -> list[Example]:
    """Texts of random tokens, the first ones of which are ignored as labels: one more in each text, from `ignored`."""
    examples = classified(number)
    for index, example in enumerate(examples):
        labels = example["input_ids"].clone()
        labels[: (ignored + index) % 6] = -100
        example["labels"] = labels
    return examples


def trainer_of(
    trainer_class: type[Trainer],
    model: torch.nn.Module,
    examples: Sequence[Example],
    folder: Path,
    arguments: dict[str, Any] | None = None,
    **of_trainer: Any,
) -> Trainer:
    """Make a Trainer on the CPU that logs every step and prints nothing; three steps, where nothing else is said."""
    torch._dynamo.reset()
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    sizes = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 0.05, "optim": "sgd"}
    trainer = trainer_class(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**quiet, **sizes, **(arguments or {})}),
        train_dataset=list(examples),
        **of_trainer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    """The loss of every step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def require_same_training(expected: Trainer, actual: OrtTrainer, tolerance: float = TOLERANCE) -> None:
    """Insist on the same losses, and the same parameters within ten times the tolerance of the losses."""
    assert actual.ort_backend.execution_count >= 2 * len(losses_of(expected))
    torch.testing.assert_close(losses_of(actual), losses_of(expected), rtol=tolerance, atol=0)
    theirs = dict(expected.model.named_parameters())
    for name, value in actual.model.named_parameters():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=10 * tolerance, msg=name)
