"""Trainers of other libraries train in onnxruntime with OrtTrainer before them, with the losses of PyTorch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onnxtool.torch_backend import OrtBackend
from onnxtool.training import OrtTrainer
from onnxtool.training.trainer.losses import CriterionLoss
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss
from onnxtool.training.trainer.ort_trainer import ChangingNumbers, WholeTexts
from tests.packages import need
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here
from tests.training.trainer.word_texts import arguments, texts, tokenizer

TOLERANCE = 1e-5
"""Relative; float32 sums in another order."""


class Weighted(torch.nn.Module):
    """A loss with a weight that a schedule changes, and a margin that it decides by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0
        self.margin = 0.5

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(outputs, targets) + self.weight * outputs.abs().mean()
        return loss + 1.0 if self.margin > 0.25 else loss


def test_a_number_that_a_schedule_changes_is_compiled_once() -> None:
    """And a number that stays is a number; between steps all of them are."""
    torch.manual_seed(0)
    linear, loss = torch.nn.Linear(4, 3), Weighted()
    model = ModuleWithLoss(linear, compute_loss=CriterionLoss(loss))
    numbers = ChangingNumbers(loss, linear)
    inputs, targets = torch.randn(5, 4), torch.arange(5) % 3
    for step in range(6):
        loss.weight = 0.1 * step
        with numbers.as_tensors():
            assert isinstance(loss.weight, torch.Tensor) == (step > 0)
            actual = model((inputs, targets))
        assert (loss.weight, loss.margin) == (0.1 * step, 0.5)
        torch.testing.assert_close(actual, loss(linear(inputs), targets), rtol=TOLERANCE, atol=0)
    assert [graph.kind for graph in model.explain().graphs] == ["forward", "forward"]


def test_numbers_of_the_model_and_of_no_loss_stay() -> None:
    """A layer may need its number as a number, for instance dropout."""
    loss, dropout = Weighted(), torch.nn.Dropout(0.1)
    loss.layer = dropout
    numbers = ChangingNumbers({"first": loss}, dropout)
    for probability in (0.2, 0.3):
        dropout.p = loss.weight = probability
        with numbers.as_tensors():
            assert dropout.p == probability
    assert isinstance(loss.weight, float)
    with ChangingNumbers(None, dropout).as_tensors():
        pass


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def figures_of(trainer: Any, *names: str) -> list[list[float]]:
    """Train, and return the loss and these figures of every step."""
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [[entry[name] for name in ("loss", *names)] for entry in trainer.state.log_history[:-1]]


def require_same(figures: list[list[list[float]]], num_runs: int) -> None:
    """Insist on the same figures at every step of two trainings, and on runs of sessions, forward and backward."""
    theirs, ours = figures
    assert len(theirs) == 3
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=1e-6)
    assert num_runs >= 2 * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_sentence_transformers_trains_vectors_of_several_sizes(tmp_path: Path) -> None:
    """In-batch negatives inside of MatryoshkaLoss."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=16)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    figures = []
    for bases in ((), (OrtTrainer,)):
        model = library.SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(8)], device="cpu")
        trainer = type("Mine", (*bases, library.SentenceTransformerTrainer), {})(
            model=model,
            args=library.SentenceTransformerTrainingArguments(**arguments(tmp_path)),
            train_dataset=datasets.Dataset.from_dict({"anchor": texts(1), "positive": texts(2)}),
            loss=losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [8, 4]),
        )
        figures.append(figures_of(trainer))
    require_same(figures, trainer.ort_backend.execution_count)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_trl_trains_and_counts_its_tokens_once(tmp_path: Path) -> None:
    """A check of label pruning would call its loss more often than there are steps."""
    library = need("trl")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    figures = []
    for bases in ((), (OrtTrainer,)):
        torch.manual_seed(0)
        trainer = type("Mine", (*bases, library.SFTTrainer), {})(
            model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
            args=library.SFTConfig(**arguments(tmp_path), bf16=False, activation_checkpointing=False),
            train_dataset=datasets.Dataset.from_dict({"text": texts(3)}),
            processing_class=tokenizer(),
        )
        figures.append(figures_of(trainer, "num_tokens", "entropy", "mean_token_accuracy"))
    require_same(figures, trainer.ort_backend.execution_count)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_sparse_vectors_of_texts_of_any_length_are_compiled_once(strategy: str, activation: str) -> None:
    """As the module's own loop over chunks pools them, which it does again after the step."""
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules", reason="it is not installed")
    pooling = modules.SpladePooling(strategy, activation, embedding_dimension=5)
    backend = OrtBackend()
    compiled, texts_of = torch.compile(pooling, backend=backend, dynamic=True), WholeTexts(pooling)
    for length in (7, 4, 9):
        logits, mask = torch.randn(3, length, 5), torch.arange(length).expand(3, length) < length - 1
        results = []
        for module in (pooling, compiled):
            leaf = logits.clone().requires_grad_()
            with texts_of.in_one_turn() if module is compiled else contextlib.nullcontext():
                pooled = module({"token_embeddings": leaf * 1, "attention_mask": mask})["sentence_embedding"]
            pooled.square().sum().backward()
            results.append((pooled, leaf.grad))
        torch.testing.assert_close(results[1], results[0], rtol=TOLERANCE, atol=1e-6)
        assert "forward" not in vars(pooling)
    assert [graph.kind for graph in backend.explain().graphs] == ["forward", "backward"]


@pytest.mark.filterwarnings("ignore")
def test_chunks_that_somebody_asked_for_stay() -> None:
    """They take less memory."""
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules", reason="it is not installed")
    pooling = modules.SpladePooling("max", chunk_size=8)
    with WholeTexts(pooling).in_one_turn():
        assert "forward" not in vars(pooling)
