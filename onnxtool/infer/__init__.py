"""Run texts and images through a model, with its own tokenizer and without torch."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.checkpoint.quantized_vectors import restore_vectors as restore_vectors
    from onnxtool.checkpoint.text_files import TextInput as TextInput
    from onnxtool.infer.chats import LongTexts as LongTexts
    from onnxtool.infer.generation.writing import generate as generate
    from onnxtool.infer.generation.writing import load_writer as load_writer
    from onnxtool.infer.loading import LoadedModel as LoadedModel
    from onnxtool.infer.loading import encode as encode
    from onnxtool.infer.loading import load as load
    from onnxtool.infer.options import LONG_TEXTS as LONG_TEXTS
    from onnxtool.infer.options import FileDescription as FileDescription
    from onnxtool.infer.options import GenerateOptions as GenerateOptions
    from onnxtool.infer.options import InferOptions as InferOptions
    from onnxtool.infer.pictures import PictureModel as PictureModel
    from onnxtool.infer.pictures import load_pictures as load_pictures
    from onnxtool.infer.run import run_texts as run_texts
    from onnxtool.infer.vectors import DenseVectors as DenseVectors
    from onnxtool.infer.vectors import SparseVectors as SparseVectors
    from onnxtool.infer.vectors import TokenVectors as TokenVectors

_NAMES = {
    "onnxtool.checkpoint.quantized_vectors": ("restore_vectors",),
    "onnxtool.checkpoint.text_files": ("TextInput",),
    "onnxtool.infer.chats": ("LongTexts",),
    "onnxtool.infer.options": ("GenerateOptions", "LONG_TEXTS", "FileDescription", "InferOptions"),
    "onnxtool.infer.generation.writing": ("generate", "load_writer"),
    "onnxtool.infer.loading": ("LoadedModel", "encode", "load"),
    "onnxtool.infer.pictures": ("PictureModel", "load_pictures"),
    "onnxtool.infer.run": ("run_texts",),
    "onnxtool.infer.vectors": ("DenseVectors", "SparseVectors", "TokenVectors"),
}

__all__ = [*chain(*_NAMES.values())]

__getattr__ = lazy_names(__name__, _NAMES)
