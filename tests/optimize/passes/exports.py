"""Tiny transformers of many architectures, and what PyTorch exports for them.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from filelock import FileLock
from numpy.typing import NDArray

from onnxtool.model_file.weights import load_model, write_inline
from tests.workshop import Workshop

Feeds = Mapping[str, NDArray[Any]]
VOCABULARY = 50
TEXT: dict[str, tuple[int | str, ...]] = {
    "input_ids": ("batch_size", "sequence_length"),
    "attention_mask": ("batch_size", "sequence_length"),
}
PIXELS: dict[str, tuple[int | str, ...]] = {"pixel_values": ("batch_size", 3, 16, 16)}
SAMPLES: dict[str, tuple[int | str, ...]] = {"input_values": ("batch_size", "num_samples")}
_TRACED = {"batch_size": 2, "sequence_length": 9, "num_samples": 91}
# Large enough for attention to be sharp: one key more or less then moves what comes out.
_SPREAD_OF_MATRICES, _SPREAD_OF_VECTORS = 0.3, 0.1

_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_DEBERTA = {
    **_BERT,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
# Tokens beyond the vocabulary are warned of.
_NO_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
_DECODER = {**_BERT, "use_cache": False}


@dataclass(frozen=True)
class Architecture:
    """A model of transformers to build with random weights.

    Attributes:
        name: of the class, which has to return a `last_hidden_state`.
        config: the arguments of its configuration.
        inputs: the shape of each input, a name for a dynamic axis.
        length: of the sequences that it is asked, longer than the one it was traced with.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=lambda: _BERT)
    inputs: Mapping[str, tuple[int | str, ...]] = field(default_factory=lambda: TEXT)
    length: int = 14

    @property
    def num_layers(self) -> int:
        """How many attentions there are, one a layer."""
        names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
        return int(next(self.config[name] for name in names if name in self.config))

    def build(self, attention: str) -> Any:
        """Return the model in evaluation mode, the same weights each time."""
        import torch
        import transformers

        model_class = getattr(transformers, self.name)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = model_class._from_config(model_class.config_class(**self.config), attn_implementation=attention)
            # Biases start as zeros, and one that is lost would not be seen.
            for weight in model.parameters():
                spread = _SPREAD_OF_MATRICES if weight.ndim > 1 else _SPREAD_OF_VECTORS
                weight.add_(torch.randn_like(weight) * spread)
        return model.eval()

    def feeds(self) -> dict[str, NDArray[Any]]:
        """Return inputs of four rows: padded right, padded left, with a hole, and whole."""
        sizes = {"batch_size": 4, "sequence_length": self.length, "num_samples": 131}
        return _feeds(self.inputs, sizes)


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("BertModel"),
    "roberta": Architecture("RobertaModel"),
    "distilbert": Architecture(
        "DistilBertModel", {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    ),
    "albert": Architecture("AlbertModel", {**_BERT, "embedding_size": 16}),
    "mpnet": Architecture("MPNetModel"),
    "deberta-v2": Architecture("DebertaV2Model", {**_DEBERTA, "share_att_key": True}, length=24),
    "deberta-v2-own-keys": Architecture("DebertaV2Model", {**_DEBERTA, "share_att_key": False}, length=24),
    # One layer sees everything, the next ones a window of four tokens to each side.
    "modernbert": Architecture(
        "ModernBertModel",
        {**_BERT, "local_attention": 8, "global_attn_every_n_layers": 2, **_NO_TOKENS},
        length=24,
    ),
    "gpt2": Architecture(
        "GPT2Model", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    ),
    # A window that a table of all places holds, where no number tells its width.
    "gpt-neo": Architecture(
        "GPTNeoModel",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "use_cache": False,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 12,
            "max_position_embeddings": 64,
        },
        length=24,
    ),
    "llama": Architecture("LlamaModel", {**_DECODER, "num_hidden_layers": 1, "num_key_value_heads": 2}),
    "qwen3": Architecture("Qwen3Model", {**_DECODER, "num_key_value_heads": 2, "head_dim": 8}),
    "mistral": Architecture("MistralModel", {**_DECODER, "num_key_value_heads": 2, "sliding_window": 6}, length=24),
    "bloom": Architecture(
        "BloomModel", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    ),
    # Scores are multiplied by a table of zeros and ones.
    "openai-gpt": Architecture("OpenAIGPTModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    # Einsums, with the sequence before the batch.
    "xlnet": Architecture(
        "XLNetModel",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "use_mems_eval": False},
    ),
    "t5": Architecture(
        "T5EncoderModel",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "vit": Architecture("ViTModel", {**_BERT, "image_size": 16, "patch_size": 4}, PIXELS),
    "wav2vec2": Architecture(
        "Wav2Vec2Model",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": (16, 16),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "vocab_size": VOCABULARY,
        },
        SAMPLES,
    ),
}

# Its attention has no like among onnxruntime's operators.
CAPPED = "gemma2"
_REFUSED = {
    CAPPED: Architecture(
        "Gemma2Model", {**_DECODER, "num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 5.0}
    )
}


def export(workshop: Workshop, name: str, attention: str) -> ir.Model:
    """Return the graph of an architecture as TorchScript traces it, from the disk where it was made before."""
    architecture = (ARCHITECTURES | _REFUSED)[name]
    path = workshop.folder / "architectures" / f"{name}-{architecture.num_layers}-{attention}.onnx"
    path.parent.mkdir(exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            write_inline(_export(architecture, attention), path)
    return load_model(path)


def _export(architecture: Architecture, attention: str) -> ir.Model:
    from onnxtool.export.signature import Signature, tidy, to_tensors
    from onnxtool.export.tracing import EXPORTERS, trace

    outputs: dict[str, tuple[int | str, ...]] = {"last_hidden_state": ("batch_size", "sequence_length", 32)}
    if architecture.inputs is PIXELS:
        outputs = {"last_hidden_state": ("batch_size", 17, 32)}
    signature = Signature(architecture.inputs, outputs)
    model = architecture.build(attention)
    sample = to_tensors(model, _feeds(architecture.inputs, _TRACED))
    row = next(row for row in EXPORTERS if row.name == "torchscript")
    graph = trace(row, model, sample, signature, None)
    tidy(graph, signature, model)
    return graph


def _feeds(inputs: Mapping[str, tuple[int | str, ...]], sizes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """Make up ids, a ragged mask and samples."""
    generator = np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {}
    for name, shape in inputs.items():
        numbers = [size if isinstance(size, int) else sizes[size] for size in shape]
        if name == "attention_mask":
            feeds[name] = ragged_mask(*numbers)
        elif name == "input_ids":
            feeds[name] = generator.integers(3, VOCABULARY, numbers)  # none of them a token of padding
        else:
            feeds[name] = generator.standard_normal(numbers).astype(np.float32)
    return feeds


def ragged_mask(rows: int, length: int) -> NDArray[np.int64]:
    """Return a mask of rows that are padded right, padded left, with a hole, and whole."""
    mask = np.ones((rows, length), np.int64)
    for row, hole in enumerate((slice(2 * length // 3, None), slice(None, length // 3), slice(length // 3, -2))[:rows]):
        mask[row, hole] = 0
    return mask


def ask_torch(architecture: Architecture, attention: str, feeds: Feeds) -> NDArray[np.float32]:
    """Return the last hidden state that PyTorch computes."""
    from onnxtool.export.signature import run_torch_tensors

    hidden: NDArray[np.float32] = run_torch_tensors(architecture.build(attention), feeds)["last_hidden_state"].numpy()
    return hidden


def ask(model: ir.Model, feeds: Feeds) -> NDArray[np.float32]:
    """Return the first output that onnxruntime computes with all its own optimizations."""
    content = ir.to_proto(ir.external_data.load_to_model(model)).SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 3  # what reads the old weights no more has left them for another pass to drop
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    hidden: NDArray[np.float32] = session.run(None, dict(feeds))[0]
    return hidden
