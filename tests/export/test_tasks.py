"""A checkpoint tells what it is for by its architecture, its sentence-transformers kinds and its card."""

from __future__ import annotations

import pytest

from onnxtool.checkpoint.tasks import TASKS, recognize_task
from onnxtool.export.configuration import task_of_architecture


@pytest.mark.parametrize(
    ("model_type", "architecture", "kinds", "tags", "task"),
    [
        ("bert", "BertForMaskedLM", (), (), "fill-mask"),
        ("bert", "BertForMaskedLM", (), ("splade",), "sparse-encoding"),
        (
            "bert",
            "BertForMaskedLM",
            ("SpladePooling",),
            (),
            "sparse-encoding",
        ),
        ("bert", "BertModel", (), (), "feature-extraction"),
        ("bert", "BertModel", ("Pooling",), (), "sentence-similarity"),
        ("bert", "BertModel", (), ("splade",), "feature-extraction"),
        ("distilbert", "DistilBertForSequenceClassification", (), (), "text-classification"),
        ("gpt2", "GPT2LMHeadModel", (), (), "text-generation"),
        ("llama", "LlamaForCausalLM", (), (), "text-generation"),
        ("qwen3", "Qwen3ForCausalLM", ("Transformer", "LogitScore"), (), "text-ranking"),
        ("qwen3", "Qwen3ForCausalLM", (), ("text-ranking",), "text-ranking"),
        ("bert", "BertForSequenceClassification", (), ("text-ranking",), "text-classification"),
        ("bert", "BertForTokenClassification", (), (), "token-classification"),
        ("bert", "BertForQuestionAnswering", (), (), "question-answering"),
        ("bert", "BertForMultipleChoice", (), (), "other"),
        ("xlm", "XLMWithLMHeadModel", (), (), "fill-mask"),
        ("t5", "T5ForConditionalGeneration", (), (), "text2text-generation"),
        ("bart", "BartForConditionalGeneration", (), (), "text2text-generation"),
        ("vit", "ViTForImageClassification", (), (), "image-classification"),
        ("clip", "CLIPModel", (), (), "zero-shot-image-classification"),
        ("whisper", "WhisperForConditionalGeneration", (), (), "automatic-speech-recognition"),
        ("wav2vec2", "Wav2Vec2ForCTC", (), (), "automatic-speech-recognition"),
        ("wav2vec2", "Wav2Vec2ForSequenceClassification", (), (), "audio-classification"),
        ("of_its_own", "OfItsOwnForMaskedLM", (), (), "fill-mask"),
    ],
)
def test_the_task_follows_from_what_the_checkpoint_says(
    model_type: str, architecture: str, kinds: tuple[str, ...], tags: tuple[str, ...], task: str
) -> None:
    """A base model with a sparse card has no vocabulary to weigh, so the card alone does not make it one."""
    assert recognize_task(task_of_architecture(model_type, architecture), kinds=kinds, tags=tags) == task


def test_every_task_names_a_class_that_transformers_has() -> None:
    """A row with a typing error would show only to the user who asks for it."""
    import transformers

    assert all(hasattr(transformers, name) for task in TASKS for name in task.auto_classes)
