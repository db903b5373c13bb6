"""Vespa's embedders: SpladeEmbedder, and HuggingFaceEmbedder, which pools by mean or first token.

From the sources of Vespa 8: SpladeEmbedder.java, HuggingFaceEmbedder.java.
"""

from __future__ import annotations

from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.export.target import (
    DENSE,
    HIDDEN_STATES,
    LOGITS,
    PLAIN_SPLADE,
    POOLED_IN_GRAPH,
    SCORES,
    SPARSE,
    TEXT_INPUTS,
    Delivery,
    Target,
    TargetModel,
    Use,
    read_object,
    write_json,
)
from onnxtool.reports import Json


class Vespa(Target):
    """Reads only tokenizer.json; its users write all other settings in services.xml."""

    name = "vespa"
    title = "Vespa"
    uses = (
        # SpladeEmbedder feeds all three, and fails if the graph lacks one; HuggingFaceEmbedder checks first.
        Use(SPARSE, (LOGITS,), after=PLAIN_SPLADE, declares=TEXT_INPUTS),
        Use(DENSE, (HIDDEN_STATES,), after=(Pooling(("mean",)), Pooling(("cls",)), Normalize())),
        POOLED_IN_GRAPH,
    )
    graph = "model.onnx"
    files = ("tokenizer.json",)
    max_ir = 10
    max_opset = 21
    refused = ((SCORES, "a ranking model of Vespa names its inputs itself (onnx-model): pass --target plain"),)

    def write_files(self, to: Delivery) -> None:
        """State the maximum text length in tokenizer.json: Vespa follows whatever the last training left there.

        all-MiniLM-L6-v2, for example, states 128 there but accepts 256.
        """
        path = to.folder / "tokenizer.json"
        content = read_object(path)
        if to.max_length is None or not isinstance(content.get("truncation"), dict):
            return  # Vespa's own setting, transformer-max-tokens, then applies
        truncation: Json = {"direction": "Right", "max_length": to.max_length, "strategy": "LongestFirst", "stride": 0}
        if content["truncation"] != truncation:
            write_json(path, {**content, "truncation": truncation})

    def instruction(self, model: TargetModel) -> str:
        """Describe the component in services.xml."""
        if model.use.kind == SPARSE:
            return "services.xml: a component of type splade-embedder"
        in_graph = model.head is not None
        settings = [f"<pooling-strategy>{'none' if in_graph else model.pooling_mode or 'mean'}</pooling-strategy>"]
        settings += ["<transformer-output>sentence_embedding</transformer-output>"] if in_graph else []
        settings += ["<normalize>true</normalize>"] if model.is_normalized_outside else []
        return f"services.xml: a component of type hugging-face-embedder with {''.join(settings)}"


TARGET = Vespa()
