"""Models of a few nodes and a tokenizer of a few words, whose answers a test can work out by hand.

Letters of shapes: B batch, S sequence, H hidden size, V vocabulary, L labels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from onnxtool.infer import DenseVectors, SparseVectors, TextInput, TokenVectors, load
from onnxtool.infer.report import InferReport
from tests.module_files import write_modules

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("a", "cat", "dog", "sat", "on", "the", "red", "blue", "mat", "house")
VOCABULARY = (*SPECIAL, *WORDS)
PAD, UNK, CLS, SEP, MASK = range(5)

NAMED_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# Of different lengths, so that they are padded, and not sorted by length, so that an order that is lost shows.
TEXTS = ("the cat sat on the mat", "a dog", "red house", "the red dog sat on a blue mat", "cat")
POOLED: dict[str, dict[str, Any]] = {"Transformer": {}, "Pooling": {"pooling_mode": "mean"}, "Normalize": {}}
THREE_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def ids_of(text: str) -> list[int]:
    """Return the ids of `text` as a loop over its words, special tokens included."""
    words = [VOCABULARY.index(word) if word in VOCABULARY else UNK for word in text.split()]
    return [CLS, *words, SEP]


def write_checkpoint(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    modules: Mapping[str, Mapping[str, Any]] | None = None,
    sentence_bert: Mapping[str, Any] | None = None,
) -> Path:
    """Write tokenizer and configuration into `folder`; `modules` maps a module's type to its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token=SPECIAL[UNK])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    # What the last training run left behind, as in many checkpoints: to be ignored.
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(40)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {**NAMED_TOKENS, **(tokenizer_config or {})})
    _write_json(folder / "config.json", {"model_type": "bert", **(config or {})})
    if sentence_bert is not None:
        _write_json(folder / "sentence_bert_config.json", sentence_bert)
    if modules is not None:
        first, *others = modules
        write_modules(folder, *((kind, modules[kind]) for kind in others), first=first)
    return folder


@dataclass(frozen=True)
class TinyModel:
    """A graph that looks each token up in a table.

    Attributes:
        table: float [V, H], [V, V] or [V, L].
        output: the name of the output.
        pooled: whether the graph sums over tokens, real ones only where it has a mask: [B, L] in place of [B, S, L].
        inputs: the names of its inputs; only input_ids, and attention_mask where it pools, are read.
        positions: rows of a position table of zeros that is looked up as well; None for no table.
        fixed: batch size and sequence length, None where dynamic.
    """

    table: NDArray[Any]
    output: str
    pooled: bool = False
    inputs: Sequence[str] = THREE_INPUTS
    dtype: int = TensorProto.INT64
    positions: int | None = None
    fixed: tuple[int | None, int | None] = (None, None)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write the model to `path`."""
        batch, sequence = self.fixed[0] or "batch_size", self.fixed[1] or "sequence"
        element = helper.np_dtype_to_tensor_dtype(self.table.dtype)
        width = self.table.shape[1]
        initializers = [numpy_helper.from_array(self.table, "word_embeddings.weight")]
        nodes = [helper.make_node("Gather", ["word_embeddings.weight", "input_ids"], ["looked_up"])]
        states = "looked_up"
        if self.positions is not None:
            nodes += _position_nodes()
            table = np.zeros((self.positions, width), self.table.dtype)
            initializers += [numpy_helper.from_array(table, "position_embeddings.weight"), *_position_constants()]
            states = "with_offsets"
        if self.pooled:
            if "attention_mask" in self.inputs:
                nodes += [
                    helper.make_node("Cast", ["attention_mask"], ["mask"], to=element),
                    helper.make_node("Unsqueeze", ["mask", "last_axis"], ["column"]),
                    helper.make_node("Mul", [states, "column"], ["masked"]),
                ]
                states = "masked"
            nodes.append(helper.make_node("ReduceSum", [states, "sequence_axis"], [self.output], keepdims=0))
            initializers += [
                numpy_helper.from_array(np.array([-1], np.int64), "last_axis"),
                numpy_helper.from_array(np.array([1], np.int64), "sequence_axis"),
            ]
        else:
            nodes.append(helper.make_node("Identity", [states], [self.output]))
        shape = [batch, width] if self.pooled else [batch, sequence, width]
        save_graph(
            path,
            nodes,
            [helper.make_tensor_value_info(name, self.dtype, [batch, sequence]) for name in self.inputs],
            [helper.make_tensor_value_info(self.output, element, shape)],
            initializers,
            self.metadata,
        )
        return path


def save_graph(
    path: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    initializers: Sequence[Any] = (),
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a graph to `path`, with versions that every onnxruntime of the last years reads."""
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    helper.set_model_props(model, dict(metadata or {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def write_model(path: Path, model: TinyModel, **files: Any) -> Path:
    """Write `model` to `path`/model.onnx, and the checkpoint that `files` describe beside it."""
    stamped = {**model.metadata, **tokenizer_stamp(write_checkpoint(path / "model", **files))}
    return replace(model, metadata=stamped).write(path / "model.onnx")


def tokenizer_stamp(folder: Path) -> dict[str, str]:
    """Return what an export says of its tokenizer.json: that it reads texts as transformers does."""
    content = (folder / "tokenizer.json").read_bytes()
    return {"onnxtool.tokenizer_sha256": hashlib.sha256(content).hexdigest()}


def model_for(task: str, values: NDArray[Any], output: str, **settings: Any) -> TinyModel:
    """Make a model whose metadata names its task and its files."""
    return TinyModel(values, output, metadata={"onnxtool.task": task, "onnxtool.files": "model"}, **settings)


def infer(
    path: Path,
    texts: Sequence[str | tuple[str, str] | TextInput],
    *,
    top_k: int | None = None,
    provider: str = "cpu",
) -> InferReport:
    """Load the model at `path` and answer for `texts`."""
    return load(path, provider=provider).answer(texts, top_k=top_k)


def rows_of(vectors: DenseVectors | SparseVectors | TokenVectors) -> DenseVectors:
    """Return the vectors of an embedder, which are no terms."""
    assert isinstance(vectors, np.ndarray)
    return vectors


def scores_of(report: InferReport) -> list[dict[str, float]]:
    """Return label to score for each text."""
    return [{candidate.label: candidate.score for candidate in answer.candidates} for answer in report.answers]


def splade_terms(values: NDArray[Any], text: str) -> dict[str, float]:
    """SPLADE's definition in a loop: the largest log(1 + relu) over the tokens, framing tokens left out."""
    weights = {}
    for term in range(len(VOCABULARY)):
        weight = max(math.log1p(max(0.0, float(values[token, term]))) for token in ids_of(text))
        if weight > 0 and term not in (PAD, CLS, SEP):
            weights[VOCABULARY[term]] = weight
    return weights


def table(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    """Make a table of numbers, with a huge row for padding, so that padding that is read shows."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    values[PAD] = 1000.0
    return values


def _position_nodes() -> list[Any]:
    return [
        helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["length_scalar"]),
        helper.make_node("Range", ["zero", "length_scalar", "one"], ["places"]),
        helper.make_node("Gather", ["position_embeddings.weight", "places"], ["placed_rows"]),
        helper.make_node("Add", ["looked_up", "placed_rows"], ["with_offsets"]),
    ]


def _position_constants() -> list[Any]:
    return [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("zero", 0), ("one", 1))]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
