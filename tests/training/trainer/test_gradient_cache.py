"""Losses over embeddings train on mini-batches with the gradients of the whole batch, or are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtool.errors import InputError, TrainingError
from onnxtool.training import OrtTrainer
from onnxtool.training.trainer.gradient_cache import GradientCache
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here
from tests.training.trainer.test_library_trainers import SIZES, figures_of, require_same
from tests.training.trainer.word_texts import WORDS, arguments, tokenizer

ROWS, SIZE = 8, 3  # the last mini-batch has two rows
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
"""Relative to the largest value: the gradients of a batch are float32 sums over mini-batches, in another order."""

Batch = dict[str, torch.Tensor]


class Encoder(torch.nn.Module):
    """Means of token embeddings, with dropout, a parameter without gradient, and a count of activations."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(20, 6)
        self.hidden = torch.nn.Linear(6, 6)
        self.unused = torch.nn.Linear(2, 2)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        tokens = torch.tanh(self.hidden(self.dropout(self.embedding(input_ids) * attention_mask[..., None])))
        embedding = self.dropout(tokens.sum(1)) * scale
        return {"sentence_embedding": embedding, "token_embeddings": tokens, "attention_mask": attention_mask}


def batch(seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (ROWS, 5), generator=draw)
    return {"input_ids": ids, "attention_mask": (torch.rand(ids.shape, generator=draw) < 0.8).long()}


def in_batch_negatives(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    """The cross-entropy of each query's document among the documents of all queries."""
    queries, documents = (
        torch.nn.functional.normalize(model(**inputs[name])["sentence_embedding"], dim=-1) for name in ("query", "doc")
    )
    return torch.nn.functional.cross_entropy(5 * queries @ documents.T, torch.arange(len(queries)))


def in_parts(model: Encoder) -> Callable[..., Any]:
    """The model in eager PyTorch, with random numbers drawn for one mini-batch after another."""

    def call(**inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(*(value.split(SIZE) for value in inputs.values()), strict=True)
        embeddings = [model(**dict(zip(inputs, part, strict=True)))["sentence_embedding"] for part in parts]
        return {"sentence_embedding": torch.cat(embeddings)}

    return call


def step(model: Encoder, compute_loss: Callable[[Any], torch.Tensor]) -> list[Any]:
    """Return the loss, the gradients of half of it after two batches, and the next random number."""
    model.zero_grad()
    torch.manual_seed(1)
    losses = []
    for seed in (0, 2):
        loss = compute_loss({"query": batch(seed), "doc": batch(seed + 1)})
        (loss / 2).backward()
        losses.append(loss.item())
    return [losses, {name: parameter.grad for name, parameter in model.named_parameters()}, torch.rand(())]


def require_equal(actual: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=LOSS_TOLERANCE, atol=0)
    for name, gradient in expected[1].items():
        assert (gradient is None) == (actual[1][name] is None) == name.startswith("unused"), name
        if gradient is not None:
            scale = GRADIENT_TOLERANCE * gradient.abs().max().item()
            torch.testing.assert_close(actual[1][name], gradient, rtol=0, atol=scale, msg=name)
    assert torch.equal(actual[2], expected[2])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_mini_batches_have_the_gradients_of_the_whole_batch(dropout: float) -> None:
    """With dropout, its masks are those of one mini-batch after another, and are drawn again for the gradients."""
    model = Encoder(dropout)
    ours = ModuleWithLoss(model, compute_loss=in_batch_negatives, mini_batch_size=SIZE, dynamic=True)
    actual = step(model, ours)
    require_equal(actual, step(model, lambda inputs: in_batch_negatives(in_parts(model), inputs)))
    if not dropout:
        require_equal(actual, step(model, lambda inputs: in_batch_negatives(model, inputs)))
    assert [graph.kind for graph in ours.explain().graphs] == ["inference", "forward", "backward"]
    assert "forward" not in vars(model)


def test_activations_of_one_mini_batch_are_alive_at_a_time() -> None:
    """In the forward pass and in the backward pass."""
    model, alive, most = Encoder(0.3), weakref.WeakSet[torch.Tensor](), 0

    def watch(_module: object, _inputs: object, output: torch.Tensor) -> None:
        nonlocal most
        alive.add(output)
        most = max(most, sum(len(activation) for activation in alive))

    model.hidden.register_forward_hook(watch)
    cache = GradientCache(model, model.forward, SIZE)
    with cache.in_place():
        in_batch_negatives(model, {"query": batch(0), "doc": batch(1)}).backward()
    assert SIZE <= most <= 2 * SIZE
    assert cache.num_calls == 2


class OwnGenerator(Encoder):
    """Draws noise from a generator of its own."""

    draw = torch.Generator().manual_seed(0)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        outputs = super().forward(*args, **inputs)
        noise = torch.rand(outputs["sentence_embedding"].shape, generator=self.draw)
        return {"sentence_embedding": outputs["sentence_embedding"] * noise}


class WithLoss(Encoder):
    """Returns a loss, as transformers' models do with labels."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return {"loss": super().forward(*args, **inputs)["sentence_embedding"].mean()}


def embeddings_of(inputs: Any) -> Callable[[Any], torch.Tensor]:
    return lambda model: model(**inputs)["sentence_embedding"].sum()


def replace_part(model: Any) -> torch.Tensor:
    model.hidden.forward = torch.tanh
    return embeddings_of(batch())(model)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (OwnGenerator(), embeddings_of(batch()), "is embedded differently the second time, (?s:.*)set dropout to 0"),
        (WithLoss(), embeddings_of(batch()), r"WithLoss returns \['loss'\], of shape \[\], for 3 rows"),
        (Encoder(), lambda model: model.embedding.weight.sum(), "the loss did not call the Encoder"),
        (Encoder(), lambda model: model(**batch())["token_embeddings"].sum(), "output token_embeddings, which"),
        (Encoder(), replace_part, "the loss replaces the forward pass of hidden"),
        (
            Encoder(),
            embeddings_of({**batch(), "attention_mask": torch.ones(2, 5)}),
            r"differ in their number of rows: \['input_ids'\] has 8, \['attention_mask'\] has 2",
        ),
        (Encoder(), embeddings_of({**batch(), "scale": [1.0]}), r"\['scale'\] is a list"),
        (Encoder(), embeddings_of({**batch(), "scale": torch.ones(8, 1, requires_grad=True)}), "requires a gradient"),
    ],
)
def test_what_has_no_rows_is_refused_by_name(
    model: Encoder, loss: Callable[[Any], torch.Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained on other gradients than those of the whole batch, or in silence without mini-batches."""
    module = ModuleWithLoss(
        model,
        compute_loss=lambda model, inputs, return_outputs=False, num_items=None: loss(model),
        mini_batch_size=SIZE,
    )
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(TrainingError, match=message):
        module({}).backward()


def test_batch_normalization_and_wrong_options_are_refused() -> None:
    """The statistics of mini-batches are other ones."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(TrainingError, match="the statistics of 1, a BatchNorm1d, depend on the whole batch"):
        ModuleWithLoss(model, mini_batch_size=2)
    with pytest.raises(InputError, match="mini_batch_size is 0"):
        ModuleWithLoss(Encoder(), mini_batch_size=0)
    with pytest.raises(InputError, match="overlap_exchange with mini_batch_size"):
        ModuleWithLoss(Encoder(), mini_batch_size=2, overlap_exchange=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_caches_gradients_in_the_same_way(tmp_path: Path) -> None:
    """Its Cached losses in PyTorch, in onnxruntime, and the plain loss with a mini-batch size; with dropout."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    import transformers
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=16)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    texts = [" ".join(WORDS[start : start + 6]) for start in range(32)]
    ort = type("Ort", (OrtTrainer, library.SentenceTransformerTrainer), {})

    def make(kind: Any, is_cached: bool, **options: Any) -> Any:
        model = library.SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(8)], device="cpu")
        cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
        return kind(
            model=model,
            args=library.SentenceTransformerTrainingArguments(**arguments(tmp_path)),
            train_dataset=datasets.Dataset.from_dict({"anchor": texts[:16], "positive": texts[16:]}),
            loss=cached if is_cached else losses.MultipleNegativesRankingLoss(model),
            **options,
        )

    theirs = figures_of(make(library.SentenceTransformerTrainer, is_cached=True))
    for is_cached, options in ((True, {}), (False, {"mini_batch_size": 2})):
        trainer = make(ort, is_cached, **options)
        require_same([theirs, figures_of(trainer)], trainer.ort_backend.execution_count)
    with pytest.raises(TrainingError, match="CachedMultipleNegativesRankingLoss splits batches itself"):
        make(ort, is_cached=True, mini_batch_size=2).create_model_with_loss()
