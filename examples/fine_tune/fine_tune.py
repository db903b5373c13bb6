"""Fine-tune a classifier of opinions, with training steps in onnxruntime.

Run `python fine_tune.py CHECKPOINT OUTPUT`, for example with MiniLM as the checkpoint; `--help` shows the options.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments, set_seed

from onnxtool.training import OrtTrainer

THINGS = ["soup", "service", "bread", "view", "music", "wine", "staff", "price", "dessert", "room"]
OPINIONS = {
    "positive": ["wonderful", "a pleasure", "better than ever", "worth the trip", "simply great"],
    "negative": ["awful", "a disappointment", "worse than ever", "not worth the trip", "simply bad"],
}
LABELS = list(OPINIONS)


def make_texts() -> list[tuple[str, int]]:
    """Return texts and their labels, shuffled."""
    texts = [
        (f"{opening} the {thing} was {opinion}", LABELS.index(label))
        for label, opinions in OPINIONS.items()
        for opening, thing, opinion in itertools.product(["", "last night", "to be honest"], THINGS, opinions)
    ]
    return [texts[number] for number in np.random.default_rng(0).permutation(len(texts))]


def fine_tune(checkpoint: str, output: str, *, steps: int, learning_rate: float) -> None:
    """Train the model of `checkpoint` with a new classification head, and save it in `output`."""
    set_seed(0)  # for the new head, dropout and the order of the batches
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    names = dict(enumerate(LABELS))
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=len(LABELS), id2label=names, label2id={name: number for number, name in names.items()}
    )
    for part in (model.base_model.embeddings, model.base_model.encoder.layer[:-2]):
        part.requires_grad_(False)  # the last two layers are enough for few texts, and take less time
    # All batches have one shape, so one graph is compiled; OrtTrainer(..., dynamic=True) handles other shapes.
    examples = [
        {**tokenizer(text, padding="max_length", max_length=16), "labels": label} for text, label in make_texts()
    ]
    trainer = OrtTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"{output}-training",
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=learning_rate,
            label_smoothing_factor=0.1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=examples[:240],
        eval_dataset=examples[240:],
        processing_class=tokenizer,
        compute_metrics=lambda result: {"accuracy": np.mean(result.predictions.argmax(-1) == result.label_ids)},
    )
    trainer.train()
    print(f"accuracy on texts it was not trained on: {trainer.evaluate()['eval_accuracy']:.2f}")
    print(trainer.explain())
    trainer.save_model(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a classifier of opinions.")
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    arguments = parser.parse_args()
    fine_tune(arguments.checkpoint, arguments.output, steps=arguments.steps, learning_rate=arguments.learning_rate)
