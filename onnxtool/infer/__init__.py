"""Run texts through a model, and time it. Reads text with the model's own tokenizer; needs no torch."""

from onnxtool.infer.benchmark import BenchmarkOptions
from onnxtool.infer.loading import LoadedModel, encode, load
from onnxtool.infer.long_texts import LONG_TEXTS, LongTexts
from onnxtool.infer.vectors import DenseVectors, SparseVectors
from onnxtool.texts.inputs import TextInput, read_texts

__all__ = [
    "LONG_TEXTS",
    "BenchmarkOptions",
    "DenseVectors",
    "LoadedModel",
    "LongTexts",
    "SparseVectors",
    "TextInput",
    "encode",
    "load",
    "read_texts",
]
