"""Describe an ONNX file, or what separates two of them, without reading the weights."""

from onnxtool.stats.difference import compare_models as compare_models
from onnxtool.stats.difference import compare_stats as compare_stats
from onnxtool.summary import summarize_model as summarize_model
