"""Run texts through a model. Reads text with the model's own tokenizer; needs no torch."""

from onnxtool.checkpoint.text_files import TextInput, read_texts
from onnxtool.infer.loading import LoadedModel, encode, load
from onnxtool.infer.long_texts import LONG_TEXTS, LongTexts
from onnxtool.infer.vectors import DenseVectors, SparseVectors

__all__ = [
    "LONG_TEXTS",
    "DenseVectors",
    "LoadedModel",
    "LongTexts",
    "SparseVectors",
    "TextInput",
    "encode",
    "load",
    "read_texts",
]
