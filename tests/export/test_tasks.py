"""A checkpoint tells what it is for by its architecture, its sentence-transformers modules and its card."""

from __future__ import annotations

import pytest

from onnxtool.export.tasks import TASKS, recognize_task


@pytest.mark.parametrize(
    ("architecture", "modules", "tags", "task"),
    [
        ("BertForMaskedLM", (), (), "fill-mask"),
        ("BertForMaskedLM", (), ("splade",), "sparse-encoding"),
        ("BertForMaskedLM", ("sentence_transformers.sparse_encoder.models.SpladePooling",), (), "sparse-encoding"),
        ("BertModel", (), (), "feature-extraction"),
        ("BertModel", ("sentence_transformers.models.Pooling",), (), "sentence-similarity"),
        ("BertModel", (), ("splade",), "feature-extraction"),
        ("DistilBertForSequenceClassification", (), (), "text-classification"),
        ("GPT2LMHeadModel", (), (), "text-generation"),
        ("LlamaForCausalLM", (), (), "text-generation"),
        ("BertForTokenClassification", (), (), "token-classification"),
        ("BertForQuestionAnswering", (), (), "question-answering"),
        ("BertForMultipleChoice", (), (), "other"),
    ],
)
def test_the_task_follows_from_what_the_checkpoint_says(
    architecture: str, modules: tuple[str, ...], tags: tuple[str, ...], task: str
) -> None:
    """A base model with a sparse card has no vocabulary to weigh, so the card alone does not make it one."""
    assert recognize_task(architecture, modules=modules, tags=tags) == task


def test_every_task_names_a_class_that_transformers_has() -> None:
    """A row with a typing error would show only to the user who asks for it."""
    import transformers

    assert all(hasattr(transformers, task.auto_class) for task in TASKS)
