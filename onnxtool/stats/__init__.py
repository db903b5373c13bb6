"""Describe an ONNX file, or what separates two of them, without reading the weights."""

from onnxtool.stats.difference import compare_models as compare_models
from onnxtool.stats.difference import compare_stats as compare_stats
from onnxtool.stats.difference import describe_model as describe_model
from onnxtool.stats.settings import Settings as Settings
from onnxtool.stats.settings import Shape as Shape
from onnxtool.stats.settings import find_settings as find_settings
from onnxtool.stats.settings import read_settings as read_settings
from onnxtool.summary import summarize_model as summarize_model
