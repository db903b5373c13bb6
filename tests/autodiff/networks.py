"""Small networks of many kinds, random, as torch.onnx exports them for training."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from onnxtool.autodiff import differentiate, prepare
from tests.autodiff.gradients import run_onnxruntime
from tests.workshop import Workshop

IGNORED = -100
_VOCABULARY, _HIDDEN, _HEADS, _TOKENS, _SAMPLES = 37, 16, 2, 7, 3


class _Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self._names, inputs, strict=True))).logits
        return logits


@dataclass(frozen=True)
class Network:
    """A module with inputs and the classes that it should say.

    Attributes:
        module: in training mode, without dropout.
        inputs: of the module.
        labels: int64, the shape of the logits without their classes; -100 counts nothing.
        class_axis: where the logits have the classes.
    """

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    labels: torch.Tensor
    class_axis: int = -1

    def loss(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute the cross entropy in PyTorch, the parameters ready for `backward`."""
        self.module.to(dtype)
        self.module.zero_grad()
        inputs = [one.to(dtype) if one.is_floating_point() else one for one in self.inputs]
        logits = self.module(*inputs).movedim(self.class_axis, -1)
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), self.labels.reshape(-1))

    def gradients(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the gradient of each parameter in float64, computed in `dtype`."""
        self.loss(dtype).backward()
        # A tied parameter has several names, of which a graph keeps one.
        found = {name: parameter.grad for name, parameter in self.module.named_parameters(remove_duplicate=False)}
        return {name: grad.double() for name, grad in found.items() if grad is not None}


def exported(network: Network) -> ir.Model:
    """Export in training mode with the names of the parameters, and put the loss on top, called `loss`."""
    network.module.float()
    buffer = io.BytesIO()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network.module, network.inputs, dynamo=True, optimize=False, opset_version=20, verbose=False
        )
    program.save(buffer)
    model: ir.Model = ir.from_proto(onnx.load_model_from_string(buffer.getvalue()))
    _train_normalizations(model)
    _add_loss(model, network)
    return model


def promote(model: ir.Model) -> dict[str, NDArray[Any]]:
    """Turn the weights of `model` into inputs, and return them by name."""
    graph = model.graph
    weights = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or "." not in name:
            continue
        weights[name] = tensor.numpy().copy()
        del graph.initializers[name]
        value.const_value = None
        value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
        graph.inputs.append(value)
    return weights


def _train_normalizations(model: ir.Model) -> None:
    """The exporter writes BatchNormalization for inference whatever the mode is."""
    for node in model.graph:
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            node.resize_outputs(3)
            for place in (1, 2):
                node.outputs[place].name = f"{node.outputs[0].name}_running_{place}"


def _add_loss(model: ir.Model, network: Network) -> None:
    graph = model.graph
    logits = graph.outputs[0]
    shape = ir.Shape(network.labels.shape)
    labels = ir.Value(name="labels", shape=shape, type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(labels)
    rank = network.labels.ndim + 1
    last = network.class_axis % rank
    # The operator wants the classes as the second axis.
    order = [place for place in range(rank) if place != last]
    moved = ir.node("Transpose", [logits], {"perm": [order[0], last, *order[1:]]})
    loss = ir.node("SoftmaxCrossEntropyLoss", [moved.outputs[0], labels], {"ignore_index": IGNORED})
    moved.outputs[0].name, loss.outputs[0].name = "loss_logits", "loss"
    graph.extend([moved, loss])
    graph.outputs[:] = [loss.outputs[0]]


def _mlp() -> Network:
    module = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))
    return Network(module, (torch.randn(8, 10),), torch.randint(5, (8,)))


def _conv_batch_norm() -> Network:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return Network(module, (torch.randn(4, 3, 9, 8),), torch.randint(4, (4,)))


def _lenet() -> Network:
    module = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Sigmoid(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 3 * 3, 30), nn.ReLU(), nn.Linear(30, 10),
    )  # fmt: skip
    return Network(module, (torch.randn(4, 1, 20, 20),), torch.randint(10, (4,)))


class _Residual(nn.Module):
    """Two convolutions beside a strided one."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, groups=2, bias=False)
        self.short = nn.Conv2d(before, after, 1, stride=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(inner + self.norms[2](self.short(x)))


def _resnet() -> Network:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1), _Residual(8, 12), _Residual(12, 16), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return Network(module, (torch.randn(4, 3, 32, 32),), torch.randint(5, (4,)))


def _recurrent() -> Network:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(_VOCABULARY, 6)
            self.lstm = nn.LSTM(6, 8, bidirectional=True)
            self.gru = nn.GRU(16, 8)
            self.tags = nn.Linear(8, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            tags: torch.Tensor = self.tags(self.gru(self.lstm(self.words(ids))[0])[0])
            return tags

    return Network(Tagger(), (torch.randint(_VOCABULARY, (_TOKENS, _SAMPLES)),), torch.randint(5, (_TOKENS, _SAMPLES)))


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}


def _of_text(model: nn.Module, labels: torch.Tensor | None = None) -> Network:
    """Give a model texts of several lengths; what is padding counts nothing."""
    ids = torch.randint(3, _VOCABULARY, (_SAMPLES, _TOKENS))
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[2, 3:] = 0
    if labels is None:
        labels = torch.where(mask == 1, torch.randint(_VOCABULARY, ids.shape), IGNORED)
    return Network(_Logits(model, ("input_ids", "attention_mask")), (ids, mask), labels)


def _bert() -> Network:
    from transformers import BertConfig, BertForMaskedLM

    return _of_text(BertForMaskedLM(BertConfig(**{**_SIZES, **_NO_DROPOUT, "num_hidden_layers": 2})))


def _roberta() -> Network:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(**_SIZES, **_NO_DROPOUT, pad_token_id=1, num_labels=4, classifier_dropout=0.0)
    return _of_text(RobertaForSequenceClassification(config), torch.randint(4, (_SAMPLES,)))


def _distilbert() -> Network:
    from transformers import DistilBertConfig, DistilBertForTokenClassification

    config = DistilBertConfig(
        vocab_size=_VOCABULARY, dim=_HIDDEN, hidden_dim=24, n_heads=_HEADS, n_layers=1, dropout=0.0,
        attention_dropout=0.0, max_position_embeddings=20, num_labels=5,
    )  # fmt: skip
    return _of_text(DistilBertForTokenClassification(config), torch.randint(5, (_SAMPLES, _TOKENS)))


def _gpt2() -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY, n_embd=_HIDDEN, n_head=_HEADS, n_layer=1, n_positions=20, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return _of_text(GPT2LMHeadModel(config))


def _llama() -> Network:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _of_text(LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=1, use_cache=False)))


def _t5() -> Network:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY, d_model=_HIDDEN, d_kv=8, d_ff=24, num_layers=1, num_heads=_HEADS,
        dropout_rate=0.0, use_cache=False, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    inputs = (torch.randint(3, _VOCABULARY, (_SAMPLES, _TOKENS)), torch.randint(3, _VOCABULARY, (_SAMPLES, 5)))
    module = _Logits(
        T5ForConditionalGeneration._from_config(config, attn_implementation="eager"), ("input_ids", "decoder_input_ids")
    )
    return Network(module, inputs, torch.randint(_VOCABULARY, (_SAMPLES, 5)))


def _vit() -> Network:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = ViTConfig(**sizes, **_NO_DROPOUT, image_size=16, patch_size=4, num_labels=4)
    module = _Logits(ViTForImageClassification(config), ("pixel_values",))
    return Network(module, (torch.randn(_SAMPLES, 3, 16, 16),), torch.randint(4, (_SAMPLES,)))


NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": _mlp,
    "conv_batch_norm": _conv_batch_norm,
    "lenet": _lenet,
    "resnet": _resnet,
    "recurrent": _recurrent,
    "bert": _bert,
    "distilbert": _distilbert,
    "roberta": _roberta,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
}


def make_network(name: str) -> Network:
    """Make a network in training mode, the same one each time."""
    torch.manual_seed(3)
    network = NETWORKS[name]()
    network.module.train()
    return network


@dataclass(frozen=True)
class Errors:
    """How far gradients in float32 are from PyTorch's in float64, relative to the largest gradient of the network.

    Attributes:
        ours: of the gradient graph in onnxruntime on two threads.
        theirs: of PyTorch.
    """

    ours: float
    theirs: float


def shared_export(name: str, workshop: Workshop) -> Path:
    """Return the file of a network's export, which all tests share."""
    return workshop.made(f"networks/{name}.onnx", lambda path: ir.save(exported(make_network(name)), path))


def measure(network: Network, model: ir.Model) -> dict[str, Errors]:
    """Return the errors of each parameter; `model` is the network's export, and is changed."""
    prepare(model)
    expected, single = network.gradients(torch.float64), network.gradients(torch.float32)
    weights = promote(model)  # as inputs, which they are in a training graph
    found = differentiate(model, "loss", [name for name in expected if name in weights])
    model.graph.outputs.extend(dict.fromkeys(found.values()))
    names = [str(value.name) for value in model.graph.outputs]
    given = [str(value.name) for value in model.graph.inputs if value.name not in weights]
    inputs = [one.float() if one.is_floating_point() else one for one in (*network.inputs, network.labels)]
    feeds = weights | {name: one.numpy() for name, one in zip(given, inputs, strict=True)}
    results = dict(zip(names, run_onnxruntime(ir.to_proto(model), feeds), strict=True))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return {
        name: Errors(
            float((torch.tensor(results[str(gradient.name)]) - expected[name]).abs().max()) / largest,
            float((single[name] - expected[name]).abs().max()) / largest,
        )
        for name, gradient in found.items()
    }
