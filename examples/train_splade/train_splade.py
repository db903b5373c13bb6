"""Train a sparse encoder (SPLADE) from a dense one, with training steps in onnxruntime.

Run `python train_splade.py CHECKPOINT COLLECTION OUTPUT`: the dense encoder, a folder that `scripts/make_collection.py`
wrote, and the folder of the result; `--help` shows the options.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from onnxtool.training import OrtTrainer

QUERY_TOKENS, DOCUMENT_TOKENS, MOST_TOKENS = 20, 64, 256  # the first two for training, the last for the result
TEACHER, STUDENT = 0.05, 6.0  # temperatures: for cosines, and for dot products of weights, which are around 50
RATES = {"body": 5e-5, "head": 1e-3, "bias": 2e-2}  # logits are up to 50, and the bias shifts them as a whole
NEIGHBOURS = 8  # adjacent pairs in the collection, which are hard to tell apart
COMPARED = 3  # steps of each Trainer, for comparing their times
CARD = "---\ntags:\n- splade\n- sparse-encoder\n---\n\n# A sparse encoder, trained by examples/train_splade\n"


class OrtSplade(OrtTrainer):
    """Train a sparse encoder in onnxruntime, with its loss and the weight of its regularization."""

    flops = 0.0

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Return the loss of a batch of pairs, float [].

        The documents of the other pairs are a query's negatives. The teacher rates how relevant each of them is, and
        the student's dot products should have the same distribution. FLOPS (Paria et al., 2020) suppresses terms that
        occur in many texts.
        """
        queries = weights_of_terms(model, inputs["query_ids"], inputs["query_mask"])
        documents = weights_of_terms(model, inputs["document_ids"], inputs["document_mask"])
        scores = queries @ documents.T / STUDENT
        shares = torch.softmax(inputs["query_vector"] @ inputs["document_vector"].T / TEACHER, dim=-1)
        distilled = -(shares * torch.log_softmax(scores, dim=-1)).sum(-1).mean()
        found = -torch.log_softmax(scores, dim=-1).diagonal().mean()
        regularized = 3.0 * queries.mean(0).square().sum() + documents.mean(0).square().sum()
        loss = distilled + 0.5 * found + inputs["flops"] * regularized
        return (loss, {"scores": scores}) if return_outputs else loss

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Increase the regularization with the square of the step, during the first third of the steps."""
        state = self.state
        grown = min(1.0, 3 * (state.global_step + 1) / state.max_steps) ** 2
        return super().training_step(model, {**inputs, "flops": torch.tensor(self.flops * grown)}, num_items_in_batch)


def weights_of_terms(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return SPLADE's weights, float [texts, terms]: log(1 + relu(logit)), maximum over tokens."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    return torch.log1p(torch.relu((logits * mask.unsqueeze(-1)).amax(1)))


def read_collection(folder: Path) -> tuple[dict[str, str], list[str], list[tuple[str, str]]]:
    """Return texts by name, the names of the documents, and the training pairs (query, document)."""
    corpus, queries = (
        {entry["_id"]: entry["text"] for entry in map(json.loads, (folder / name).read_text("utf-8").splitlines())}
        for name in ("corpus.jsonl", "queries.jsonl")
    )
    lines = (folder / "qrels" / "train.tsv").read_text("utf-8").splitlines()[1:]
    pairs = [(query, document) for query, document, _ in (line.split("\t") for line in lines)]
    return queries | corpus, list(corpus), pairs


def in_batches(pairs: Sequence[tuple[str, str]], number: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return `number` pairs in an order that keeps some neighbours together; repeat them if there are too few."""
    ordered: list[tuple[str, str]] = []
    while len(ordered) < number:
        for block in rng.permutation(len(pairs) // NEIGHBOURS):
            ordered += pairs[block * NEIGHBOURS : (block + 1) * NEIGHBOURS]
    return ordered[:number]


def rarities(tokenizer: Any, documents: list[str]) -> torch.Tensor:
    """Return inverse document frequencies, float [V], as BM25 computes them; -inf for special tokens."""
    frequencies = torch.zeros(len(tokenizer))
    for ids in tokenizer(documents, truncation=True, add_special_tokens=False)["input_ids"]:
        frequencies[list(set(ids))] += 1
    rarity = torch.log((len(documents) - frequencies + 0.5) / (frequencies + 0.5) + 1)
    rarity[[number for word, number in tokenizer.get_vocab().items() if re.fullmatch(r"\[.+\]", word)]] = -torch.inf
    return rarity


@torch.no_grad()
def teach(teacher: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the teacher's hidden states, float [texts, tokens, H], and its vectors, float [texts, H], of length 1."""
    batches = zip(ids.split(64), mask.split(64), strict=True)
    states = torch.cat([teacher(input_ids=some, attention_mask=real).last_hidden_state for some, real in batches])
    return states, torch.nn.functional.normalize((states * mask.unsqueeze(-1)).sum(1), dim=-1)


@torch.no_grad()
def sparse_encoder(
    body: torch.nn.Module, states: torch.Tensor, ids: torch.Tensor, rarity: torch.Tensor
) -> BertForMaskedLM:
    """Return `body` with a head on its word embeddings, which starts with weights like BM25's.

    A dense encoder has no head for words. A regression recovers the words, from a token's hidden state to the embedding
    of its word. The bias then gives this word a weight by its rarity, and other words less or none. A head with random
    weights would need far more steps.

    Args:
        body: the dense encoder.
        states: hidden states of tokens, float [tokens, H].
        ids: the ids of these tokens, int64 [tokens].
        rarity: the rarity of each word, float [V], see `rarities`.
    """
    changed = {"tie_word_embeddings": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**{**body.config.to_dict(), **changed}))
    model.bert.load_state_dict({name: value for name, value in body.state_dict().items() if "pooler" not in name})
    model.tie_weights()
    words = body.embeddings.word_embeddings.weight
    wanted = torch.nn.functional.normalize(words - words.mean(1, keepdim=True), dim=1)[ids]
    ordinary = rarity.isfinite()
    real = ordinary[ids]
    states, ids, wanted = states[real], ids[real], wanted[real]
    inputs = torch.cat([states, torch.ones(len(states), 1)], dim=1)
    squares = inputs.T @ inputs
    ridge = 1e-3 * squares.diagonal().mean() * torch.eye(len(squares))
    solution = torch.linalg.solve(squares + ridge, inputs.T @ wanted)
    head = model.cls.predictions
    # GELU is the identity for large inputs, and the normalization removes the shift again.
    head.transform.dense.weight.copy_(20 * solution[:-1].T)
    head.transform.dense.bias.copy_(20 * solution[-1] + 8)
    head.transform.LayerNorm.weight.fill_(2.0)
    logits = (head.transform(states) * words[ids]).sum(-1)
    counts = torch.bincount(ids, minlength=len(words))
    sums = torch.bincount(ids, weights=logits, minlength=len(words))
    average = (sums / counts)[counts > 2].mean()
    # Words seen only a few times have unreliable logits, and a word with too high a bias is in every text.
    usual = ((sums + 10 * average) / (counts + 10)).clamp(min=average)
    head.bias.copy_(torch.where(ordinary, torch.expm1(rarity.clamp(max=7).sqrt()) - usual, -100.0))
    return model


def optimizer(model: BertForMaskedLM, trained_layers: int) -> torch.optim.Optimizer:
    """Return an optimizer for the head and the last layers; the other layers and the embeddings are frozen."""
    model.requires_grad_(False)
    head, layers = model.cls.predictions, model.bert.encoder.layer
    groups = {
        "body": [value for layer in layers[len(layers) - trained_layers :] for value in layer.parameters()],
        "head": list(head.transform.parameters()),
        "bias": [head.bias],
    }
    for values in groups.values():
        for value in values:
            value.requires_grad_(True)
    return torch.optim.AdamW(
        [{"params": values, "lr": RATES[name]} for name, values in groups.items()], weight_decay=0.0
    )


def read_examples(
    teacher: torch.nn.Module, tokenizer: Any, texts: Mapping[str, str], pairs: Sequence[tuple[str, str]]
) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Return the examples, and for their document tokens the teacher's states, float [tokens, H], and ids."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for side, length, both in zip(
        ("query", "document"), (QUERY_TOKENS, DOCUMENT_TOKENS), zip(*pairs, strict=True), strict=True
    ):
        names = list(dict.fromkeys(both))
        tokens = tokenizer(
            [texts[name] for name in names],
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        states, vectors = teach(teacher, ids, mask)
        for row, name in enumerate(names):
            seen[name] = {f"{side}_ids": ids[row], f"{side}_mask": mask[row], f"{side}_vector": vectors[row]}
    return [seen[query] | seen[document] for query, document in pairs], states[mask.bool()], ids[mask.bool()]


def train(asked: argparse.Namespace) -> None:
    """Train a sparse encoder on the training pairs of a collection, and save it."""
    started = time.perf_counter()
    set_seed(0)
    texts, documents, pairs = read_collection(asked.collection)
    pairs = in_batches(pairs, asked.steps * asked.batch_size, np.random.default_rng(0))
    tokenizer = AutoTokenizer.from_pretrained(asked.checkpoint, model_max_length=MOST_TOKENS)
    teacher = AutoModel.from_pretrained(asked.checkpoint).eval()
    examples, states, ids = read_examples(teacher, tokenizer, texts, pairs)
    model = sparse_encoder(teacher, states, ids, rarities(tokenizer, [texts[name] for name in documents]))
    settings = TrainingArguments(
        output_dir=f"{asked.output}-training",
        max_steps=asked.steps,
        per_device_train_batch_size=asked.batch_size,
        train_sampling_strategy="sequential",
        warmup_steps=asked.steps // 10,
        max_grad_norm=0.0,
        logging_steps=5,
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = OrtSplade(
        model=model,
        args=settings,
        train_dataset=examples,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        optimizers=(optimizer(model, asked.trained_layers), None),
        label_sparsity=False,
    )
    trainer.flops = asked.flops
    print(f"Ready to train after {time.perf_counter() - started:.0f} s")
    trainer.train()
    print(trainer.explain())
    trainer.save_model(asked.output)
    Path(asked.output, "README.md").write_text(CARD, encoding="utf-8")
    compare(trainer, asked.flops)
    print(f"Done after {time.perf_counter() - started:.0f} s")


def compare(trainer: OrtSplade, flops: float) -> None:
    """Print the time of forward and backward in onnxruntime and PyTorch, in alternating steps, and compare losses."""
    eager = functools.partial(OrtSplade.compute_loss, trainer, trainer.model)
    ways = {"onnxruntime": functools.partial(trainer.compute_loss, trainer.model_with_loss), "PyTorch": eager}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for batch in itertools.islice(trainer.get_train_dataloader(), COMPARED):
        for way, compute_loss in ways.items():
            trainer.model.zero_grad()
            start = time.perf_counter()
            loss = compute_loss({**batch, "flops": torch.tensor(flops)})
            loss.backward()
            seconds[way].append(time.perf_counter() - start)
            losses[way].append(loss.item())
    for way, measured in seconds.items():
        print(f"Forward and backward of a batch in {way}: {np.median(measured):.2f} s")
    resolution = float(np.finfo(np.float32).eps)
    print(f"Losses agree to a relative error of {max(resolution, *abs(np.divide(*losses.values()) - 1)):.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a sparse encoder from a dense one.")
    parser.add_argument("checkpoint", help="a BERT of sentence-transformers with mean pooling, e.g. MiniLM")
    parser.add_argument("collection", type=Path, help="a folder written by scripts/make_collection.py")
    parser.add_argument("output", help="the folder of the sparse encoder")
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--trained_layers", type=int, default=3, help="last layers to train, with the head")
    parser.add_argument("--flops", type=float, default=0.003, help="weight of the regularization; more is sparser")
    train(parser.parse_args())
