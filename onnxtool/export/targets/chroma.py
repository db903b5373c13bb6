"""Chroma: its ONNX embedding function uses mean pooling, and is subclassed for models other than its own MiniLM.

From the source of chromadb 1.5, onnx_mini_lm_l6_v2.py.
"""

from __future__ import annotations

from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.errors import TargetError
from onnxtool.export.sidecar_files import wordpiece_vocabulary
from onnxtool.export.target import (
    DENSE,
    HIDDEN_STATES,
    TEXT_INPUTS,
    TOKENIZER_FILES,
    Delivery,
    Target,
    TargetModel,
    Use,
)

_VOCABULARY = "vocab.txt"
_NUM_TOKENS = 256  # fed for every text: longer texts are cut, shorter ones padded


class Chroma(Target):
    """Feeds texts of 256 tokens with padding, takes the mean of the first output, and scales it to length 1."""

    name = "chroma"
    title = "Chroma"
    uses = (Use(DENSE, (HIDDEN_STATES,), after=(Pooling(("mean",)), Normalize()), declares=TEXT_INPUTS),)
    graph = "model.onnx"
    files = ("config.json", *TOKENIZER_FILES, "special_tokens_map.json", _VOCABULARY)
    max_ir = 8  # it allows onnxruntime 1.14
    max_opset = 18

    def write_files(self, to: Delivery) -> None:
        """Write a vocabulary, without which it would download its own model; it reads only tokenizer.json.

        Raises:
            TargetError: the checkpoint's maximum is shorter than the texts it feeds.
        """
        if to.max_length is not None and to.max_length < _NUM_TOKENS:
            raise TargetError(
                f"Chroma feeds {_NUM_TOKENS} tokens of every text, and this checkpoint takes {to.max_length}",
                "raise max_seq_length in sentence_bert_config.json if the model has as many positions; else pass "
                "--target plain, and call the graph from an embedding function of your own",
            )
        if not (to.folder / _VOCABULARY).is_file():
            (to.folder / _VOCABULARY).write_text(wordpiece_vocabulary(to.tokenizer), encoding="utf-8")

    def instruction(self, model: TargetModel) -> str:
        """Say how to make it read the folder, and where its vectors differ from the checkpoint's."""
        how = (
            "subclass chromadb's ONNXMiniLM_L6_V2 with DOWNLOAD_PATH = FOLDER, EXTRACTED_FOLDER_NAME = '', with "
            "its own name() and build_from_config()"
        )
        notes = [how]
        if model.max_tokens is None or model.max_tokens > _NUM_TOKENS:
            notes.append(f"it cuts texts to {_NUM_TOKENS} tokens")
        if not model.is_normalized_outside:
            notes.append("it scales vectors to length 1, which this checkpoint does not")
        return "; ".join(notes)


TARGET = Chroma()
