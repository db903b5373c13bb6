"""Run texts through a model, and time it. Reads text with the model's own tokenizer; needs no torch."""

from onnxtool.infer.benchmark import BenchmarkOptions, benchmark_model
from onnxtool.infer.encode import infer_texts
from onnxtool.infer.loading import LoadedModel, load
from onnxtool.infer.vectors import DenseVectors, SparseVectors
from onnxtool.texts.inputs import TextInput, read_texts

__all__ = [
    "BenchmarkOptions",
    "DenseVectors",
    "LoadedModel",
    "SparseVectors",
    "TextInput",
    "benchmark_model",
    "infer_texts",
    "load",
    "read_texts",
]
