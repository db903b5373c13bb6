"""Train with the trainers of several libraries, in PyTorch and with OrtTrainer before them; compare losses and times.

The libraries are transformers, also with adapters of PEFT and packed documents, sentence-transformers and TRL. Each
case is trained in turns, PyTorch and onnxruntime, twice. The table has the largest relative difference of a loss, the
time of a step after the measured ones as a ratio to PyTorch's on the same batch (the median and its 95 % interval), the
share of rows that the layers computed, and where these steps ran. PyTorch also trains with
another number of threads, which changes the order of its sums: a case fails whose losses differ by more than 1e-5 and
by more than PyTorch's differ from themselves.

`python scripts/check_trainers.py --hidden 384 --layers 6 [case ...]` has the size of MiniLM, the defaults are small.
Needs sentence-transformers, trl, datasets and peft (the extra `dev`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from harness.pages import print_head, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool.runtime.timing import interval_of_median
from onnxtool.training import OrtTrainer
from tests.training.trainer.trainers import losses_of
from tests.training.trainer.word_texts import arguments, tokenizer

WORDS, LONGEST = tuple(f"w{number}" for number in range(995)), 64
TOLERANCE = 1e-5  # relative, of the losses of 50 steps
MEASURED = 24  # first steps, which compile, and are measured by OrtTrainer itself


@dataclass(frozen=True)
class Sizes:
    """Of the models: hidden units, layers, and the probability of dropout."""

    hidden: int
    layers: int
    dropout: float

    def of(self, kind: type[Any], **settings: Any) -> Any:
        """Return a model of this class of transformers."""
        torch.manual_seed(0)
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        sizes = dict(zip(names, (self.hidden, self.layers, 4, 4 * self.hidden), strict=True))
        return kind(kind.config_class(vocab_size=1000, **sizes, **settings))


def texts(seed: int) -> list[str]:
    """Return 256 texts of 20 to 40 words."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    return [" ".join(draw.choices(WORDS, k=draw.randint(20, 40))) for _ in range(256)]


def bert(head: type[Any], sizes: Sizes, folder: Path) -> str:
    """Save a BERT with this head and its tokenizer, and return the folder."""
    rates = {"hidden_dropout_prob": sizes.dropout, "attention_probs_dropout_prob": sizes.dropout}
    sizes.of(head, max_position_embeddings=64, **rates).save_pretrained(folder)
    tokenizer(WORDS, LONGEST).save_pretrained(folder)
    return str(folder)


class StepTimes(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is not followed here
    """When each step began, and when it ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_args: Any, **_named: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    on_step_end = on_step_begin


# A trainer's class, and what it is made with.
Made = tuple[type[Any], dict[str, Any]]
Make = Callable[[Sizes, dict[str, Any], Path], Made]


def dense(sizes: Sizes, shared: dict[str, Any], folder: Path, *, matryoshka: bool = False) -> Made:
    """Make vectors from in-batch negatives."""
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    encoder = Transformer(bert(transformers.BertModel, sizes, folder))
    model = SentenceTransformer(modules=[encoder, Pooling(sizes.hidden)], device="cpu")
    loss = losses.MultipleNegativesRankingLoss(model)
    if matryoshka:
        loss = losses.MatryoshkaLoss(model, loss, [sizes.hidden, sizes.hidden // 2, sizes.hidden // 4])
    pairs = Dataset.from_dict({"anchor": texts(1), "positive": texts(2)})
    made = {"model": model, "args": Arguments(**shared), "train_dataset": pairs, "loss": loss}
    return SentenceTransformerTrainer, made


def sparse(sizes: Sizes, shared: dict[str, Any], folder: Path) -> Made:
    """Make a SPLADE, whose regularizers grow from 0."""
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sentence_transformer.modules import Transformer
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    encoder = Transformer(bert(transformers.BertForMaskedLM, sizes, folder), transformer_task="fill-mask")
    model = SparseEncoder(modules=[encoder, SpladePooling("max")], device="cpu")
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(model, ranking, document_regularizer_weight=3e-3, query_regularizer_weight=5e-3)
    pairs = Dataset.from_dict({"anchor": texts(1), "positive": texts(2)})
    args = SparseEncoderTrainingArguments(**shared)
    return SparseEncoderTrainer, {"model": model, "args": args, "train_dataset": pairs, "loss": loss}


def llama(sizes: Sizes) -> Any:
    """Make a decoder."""
    return sizes.of(transformers.LlamaForCausalLM, attention_dropout=sizes.dropout)


def supervised(sizes: Sizes, shared: dict[str, Any], _folder: Path, *, lora: bool = False, **of_config: Any) -> Made:
    """Make a Llama that reads texts, with settings of TRL."""
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer, {
        "model": llama(sizes),
        "args": SFTConfig(**shared, **of_config, bf16=False, activation_checkpointing=False),
        "train_dataset": Dataset.from_dict({"text": texts(3)}),
        "processing_class": tokenizer(WORDS, LONGEST),
        "peft_config": low_rank("CAUSAL_LM", ["q_proj", "v_proj"], sizes) if lora else None,
    }


def low_rank(task: str, targets: list[str], sizes: Sizes) -> Any:
    """Return a configuration of PEFT: adapters of some layers, all else frozen."""
    from peft import LoraConfig

    return LoraConfig(task_type=task, r=8, lora_alpha=64, target_modules=targets, lora_dropout=sizes.dropout)


def adapters(sizes: Sizes, shared: dict[str, Any], folder: Path) -> Made:
    """Make adapters of a BERT that classifies texts."""
    from peft import get_peft_model

    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(bert(kind, sizes, folder))
    tokens = tokenizer(WORDS, LONGEST)(texts(4), padding=True)["input_ids"]
    rows = [{"input_ids": row, "attention_mask": [int(i != 0) for i in row], "labels": row[0] % 2} for row in tokens]
    torch.manual_seed(1)
    model = get_peft_model(model, low_rank("SEQ_CLS", ["query", "value"], sizes))
    args = transformers.TrainingArguments(**shared)
    return transformers.Trainer, {"model": model, "args": args, "train_dataset": Dataset.from_list(rows)}


def packed(sizes: Sizes, shared: dict[str, Any], _folder: Path) -> Made:
    """Make a Llama that reads the documents of a batch packed into one sequence."""
    return transformers.Trainer, {
        "model": llama(sizes),
        "args": transformers.TrainingArguments(**shared),
        "train_dataset": Dataset.from_dict({"input_ids": tokenizer(WORDS, LONGEST)(texts(5))["input_ids"]}),
        "data_collator": transformers.DataCollatorWithFlattening(),
    }


CASES: dict[str, Make] = {
    "MultipleNegativesRankingLoss": dense,
    "MatryoshkaLoss": partial(dense, matryoshka=True),
    "SpladeLoss": sparse,
    "SFTTrainer": supervised,
    "SFTTrainer, LoRA": partial(supervised, lora=True),
    "SFTTrainer, padding_free": partial(supervised, padding_free=True, max_length=None),
    "SFTTrainer, packing": partial(supervised, packing=True, max_length=64),
    "Trainer, LoRA": adapters,
    "Trainer, packed": packed,
}


def run(make: Make, mixin: type[Any] | None, sizes: Sizes, steps: int) -> tuple[Any, list[float]]:
    """Return the trainer after its steps, and the seconds of each."""
    torch._dynamo.reset()  # noqa: SLF001 - public by its documentation
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_steps": steps, "per_device_train_batch_size": 8, "learning_rate": 1e-4}
        library, made = make(sizes, arguments(Path(folder), **settings), Path(folder))
        trainer = library(**made) if mixin is None else type("Ort", (mixin, library), {})(**made, dynamic=True)
        trainer.remove_callback(transformers.PrinterCallback)
        clock = StepTimes()
        trainer.add_callback(clock)
        trainer.train()
        return trainer, [end - begin for begin, end in zip(*[iter(clock.times)] * 2, strict=True)][MEASURED:]


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return the largest difference of a loss, relative to that of the others."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def check(name: str, sizes: Sizes, steps: int) -> bool:
    """Print the row of a case, and return whether its losses are PyTorch's."""
    make, ratios = CASES[name], list[float]()
    for _ in range(2):
        eager, theirs = run(make, None, sizes, steps)
        ours, seconds = run(make, OrtTrainer, sizes, steps)
        ratios += [a / b for a, b in zip(seconds, theirs, strict=True)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    other, _ = run(make, None, sizes, steps)
    torch.set_num_threads(threads)
    difference, own = (largest_difference(losses_of(trainer), losses_of(eager)) for trainer in (ours, other))
    explained, milliseconds = ours.explain(), 1e3 * statistics.median(theirs)
    where = "onnxruntime" if explained.steps is None or explained.steps.in_onnxruntime else "PyTorch"
    figures = f"{difference:.2g}", f"{own:.2g}", len(explained.graphs), f"{milliseconds:.0f}"
    low, high = interval_of_median(ratios)
    rows = ours.model_with_loss.unpadding
    share = rows.num_kept_rows / rows.num_rows if rows.num_rows else 1.0
    ratio = f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
    print_row(name, f"{sizes.dropout:g}", *figures, ratio, f"{share:.2f}", where)
    return difference <= max(TOLERANCE, own) and bool(ours.ort_backend.execution_count)


def main() -> int:
    """Print the table, and return 1 where losses differ or nothing ran in onnxruntime."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, nargs="+", default=(0.0, 0.1))
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.steps <= MEASURED:
        parser.error(f"--steps is {options.steps}; times are of the steps after the first {MEASURED}")
    warnings.simplefilter("ignore")
    columns = (
        "trainer and loss | dropout | difference | PyTorch's own | graphs | PyTorch's step, ms | ratio | rows | in"
    )
    print_head(columns.split(" | "))
    sizes = [Sizes(options.hidden, options.layers, dropout) for dropout in options.dropout]
    passed = [check(name, size, options.steps) for name in options.cases or CASES for size in sizes]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
