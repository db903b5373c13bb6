"""Run texts through a model, and time it. Reads text with the model's own tokenizer; needs no torch."""

from onnxtool.infer.benchmark import BenchmarkOptions, benchmark_model
from onnxtool.infer.encode import infer_texts
from onnxtool.texts.inputs import TextInput, read_texts

__all__ = ["BenchmarkOptions", "TextInput", "benchmark_model", "infer_texts", "read_texts"]
