"""Train artifacts of new networks' files, and compare six losses and the trained numbers with PyTorch's.

The networks are of transformers and own ones: normalizations of all kinds, tied heads, recurrent cells, convolutions,
embeddings with padding. Each is exported by torch's dynamo exporter, and by its TorchScript exporter as
onnxruntime-training's documentation asks (training mode, constants not folded). A network fails whose losses differ by
more than 1e-5, or whose parameters are neither trained as in PyTorch nor named in a note.

    python scripts/check_artifacts.py [NETWORK ...]
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool.errors import OnnxtoolError
from onnxtool.training import artifacts
from onnxtool.training.api import CheckpointState, Module, Optimizer

EXPORTERS = ("dynamo", "torchscript")
STEPS, RATE = 6, 0.05
TOLERANCE, MOVED = 1e-5, 1e-4  # relative, of losses, and of the way that all parameters went
UNSTABLE = 0.01  # relative difference of PyTorch's own losses in float32 from those in float64
IDS = torch.tensor([[5, 6, 7, 8, 1, 1], [9, 4, 5, 11, 12, 13], [3, 2, 14, 15, 1, 1]])
VECTORS, SERIES, IMAGES = torch.randn(6, 8), torch.randn(3, 7, 8), torch.randn(4, 3, 32, 32)


class Own(nn.Module):  # type: ignore[misc]  # torch is not followed here
    """A function of modules."""

    def __init__(self, forward: Callable[..., torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the function."""
        return self.function(self, x)


class Output(nn.Module):  # type: ignore[misc]
    """One output of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, or the first output."""
        result = self.model(x)
        return result.get("logits", result[0])


class Scale(nn.Module):  # type: ignore[misc]
    """Scales and offsets of one number, written as a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(1, 8))
        self.offset, self.other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, 8]."""
        return torch.tanh(x * self.first + self.offset) * self.second + self.other


def stack(*modules: nn.Module) -> nn.Module:
    """Return a sequence."""
    return nn.Sequential(*modules)


def blocks(normalization: Callable[[], nn.Module]) -> nn.Module:
    """Return convolutions with a normalization of four channels after each."""
    return stack(
        nn.Conv2d(3, 4, 3, stride=2), normalization(), nn.SiLU(), nn.Conv2d(4, 4, 3, stride=2), normalization(),
        nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


def tied() -> nn.Module:
    """Return a language model whose head is its embedding, which has a padding index."""
    model = Own(
        lambda one, ids: one.head(one.norm(functional.silu(one.layer(one.table(ids))))),
        table=nn.Embedding(16, 8, padding_idx=1), layer=nn.Linear(8, 8), norm=nn.LayerNorm(8),
        head=nn.Linear(8, 16, bias=False),
    )  # fmt: skip
    model.head.weight = model.table.weight
    return model


def zeros(model: nn.Module) -> nn.Module:
    """Set all biases to zero, as many libraries do."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def mlp() -> nn.Module:
    """Return layers of one size."""
    return zeros(stack(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8)))))


def recurrent(kind: type[nn.RNNBase], **settings: Any) -> nn.Module:
    """Return the mean of the outputs of a recurrent network."""
    return Own(lambda one, x: one.cells(x)[0].mean(1), cells=kind(8, 6, batch_first=True, **settings))


def words(**settings: Any) -> nn.Module:
    """Return a classifier of word ids."""
    return Own(
        lambda one, ids: one.head(one.table(ids).mean(1)), table=nn.Embedding(16, 8, **settings), head=nn.Linear(8, 3)
    )


def of(name: str, **settings: Any) -> nn.Module:
    """Return a small model of a class of transformers."""
    kind = getattr(transformers, name)
    known = {
        "vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = kind.config_class(**{**known, **settings})
    for key in list(config.to_dict()):
        if "drop" in key and isinstance(getattr(config, key, None), float):
            setattr(config, key, 0.0)
    config.use_cache = False
    return Output(kind._from_config(config, attn_implementation="eager"))  # noqa: SLF001 - no public name


NETWORKS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "layers": (mlp, VECTORS),
    "formula": (Scale, VECTORS),
    "PReLU": (lambda: stack(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 1)), VECTORS),
    "LayerNorm without bias": (
        lambda: stack(nn.Linear(8, 8), nn.LayerNorm(8, bias=False), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 3)),
        VECTORS,
    ),
    "RMSNorm": (
        lambda: stack(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8), nn.SiLU(), nn.RMSNorm(8), nn.Linear(8, 3)),
        VECTORS,
    ),
    "BatchNorm1d": (
        lambda: zeros(stack(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.BatchNorm1d(8), nn.Linear(8, 8))),
        VECTORS,
    ),
    "BatchNorm2d": (lambda: blocks(partial(nn.BatchNorm2d, 4)), IMAGES),
    "GroupNorm": (lambda: blocks(partial(nn.GroupNorm, 2, 4)), IMAGES),
    "InstanceNorm2d": (lambda: blocks(partial(nn.InstanceNorm2d, 4, affine=True)), IMAGES),
    "LayerNorm of channels": (
        lambda: stack(nn.Conv2d(3, 4, 4, stride=4), nn.LayerNorm([4, 8, 8]), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Linear(4, 3)),
        IMAGES,
    ),
    "depthwise": (
        lambda: zeros(
            stack(nn.Conv2d(3, 6, 3), nn.ReLU6(), nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.Hardswish(),
                  nn.MaxPool2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
        ),
        IMAGES,
    ),
    "transposed": (
        lambda: stack(nn.Conv2d(3, 4, 4, stride=4), nn.ELU(), nn.ConvTranspose2d(4, 4, 2, stride=2), nn.BatchNorm2d(4),
                      nn.ConvTranspose2d(4, 3, 2, stride=2)),
        IMAGES,
    ),
    "Conv1d": (
        lambda: stack(nn.Conv1d(7, 5, 3, padding=1), nn.BatchNorm1d(5), nn.GELU(), nn.Conv1d(5, 5, 3, dilation=2),
                      nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(20, 3)),
        SERIES,
    ),
    "LSTM": (lambda: recurrent(nn.LSTM), SERIES),
    "LSTM, both directions": (lambda: recurrent(nn.LSTM, bidirectional=True), SERIES),
    "LSTM, two layers, zero biases": (lambda: zeros(recurrent(nn.LSTM, num_layers=2)), SERIES),
    "GRU": (lambda: recurrent(nn.GRU), SERIES),
    "RNN": (lambda: recurrent(nn.RNN), SERIES),
    "embedding": (words, IDS),
    "embedding with padding": (lambda: words(padding_idx=1), IDS),
    "tied head": (tied, IDS),
    "two towers of one encoder": (
        lambda: Own(lambda one, x: one.layer(functional.silu(one.layer(x))), layer=zeros(nn.Linear(8, 8))), VECTORS,
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), SERIES,
    ),
    "MultiheadAttention": (
        lambda: Own(lambda one, x: one.attention(x, x, x, need_weights=False)[0],
                    attention=nn.MultiheadAttention(8, 2, batch_first=True)),
        SERIES,
    ),
    "weight_norm": (
        lambda: stack(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)), VECTORS,
    ),
    "BERT, masked": (lambda: of("BertForMaskedLM"), IDS),
    "RoBERTa": (lambda: of("RobertaForSequenceClassification"), IDS),
    "DistilBERT": (
        lambda: of("DistilBertForSequenceClassification", dim=16, n_layers=2, n_heads=2, hidden_dim=32), IDS,
    ),
    "ALBERT": (lambda: of("AlbertModel", embedding_size=8), IDS),
    "ELECTRA": (lambda: of("ElectraForTokenClassification", embedding_size=16), IDS),
    "MPNet": (lambda: of("MPNetModel"), IDS),
    "DeBERTa": (
        lambda: of("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
                   max_relative_positions=8, norm_rel_ebd="layer_norm", share_att_key=True),
        IDS,
    ),
    "ModernBERT": (lambda: of("ModernBertModel", cls_token_id=2, sep_token_id=3), IDS),
    "GPT-2": (lambda: of("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2), IDS),
    "OPT": (lambda: of("OPTForCausalLM", ffn_dim=32, word_embed_proj_dim=16), IDS),
    "Llama": (lambda: of("LlamaForCausalLM", num_key_value_heads=1), IDS),
    "Gemma": (lambda: of("GemmaForCausalLM", num_key_value_heads=1, head_dim=8), IDS),
    "Qwen3": (lambda: of("Qwen3ForCausalLM", num_key_value_heads=1, head_dim=8), IDS),
    "GPT-NeoX": (lambda: of("GPTNeoXForCausalLM"), IDS),
    "T5 encoder": (lambda: of("T5EncoderModel", d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2), IDS),
    "ViT": (lambda: of("ViTForImageClassification"), IMAGES),
    "DINOv2": (lambda: of("Dinov2Model"), IMAGES),
    "ConvNeXt": (
        lambda: of("ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), IMAGES,
    ),
    "ResNet": (
        lambda: of("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]), IMAGES,
    ),
    "MobileNetV2": (lambda: of("MobileNetV2ForImageClassification", depth_multiplier=0.25), IMAGES),
    "SegFormer": (
        lambda: of("SegformerForImageClassification", num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 16],
                   decoder_hidden_size=16, sr_ratios=[2, 1], num_attention_heads=[1, 2], patch_sizes=[7, 3],
                   strides=[4, 2], mlp_ratios=[2, 2]),
        IMAGES,
    ),
    "Wav2Vec2": (
        lambda: of("Wav2Vec2Model", conv_dim=[8, 8], conv_kernel=[4, 3], conv_stride=[2, 2], num_feat_extract_layers=2,
                   num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False),
        torch.randn(2, 80),
    ),
}  # fmt: skip


def export(network: nn.Module, x: torch.Tensor, exporter: str, path: Path) -> None:
    """Write the file of a network, whose batch size is dynamic."""
    torch.manual_seed(0)
    if exporter == "torchscript":
        torch.onnx.export(
            network.train(), (x,), path, dynamo=False, input_names=["x"], output_names=["y"], opset_version=18,
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}}, training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )  # fmt: skip
        return
    torch.onnx.export(
        network.eval(), (x,), path, dynamo=True, input_names=["x"], output_names=["y"], verbose=False,
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), optimize=exporter == "dynamo",
    )  # fmt: skip


def train(network: nn.Module, x: torch.Tensor, target: torch.Tensor, rate: float) -> tuple[list[float], float]:
    """Return PyTorch's losses, and how far the parameters moved in sum."""
    parameters = list(network.train().parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer, losses = torch.optim.SGD(parameters, lr=rate), list[float]()
    for _ in range(STEPS):
        loss = functional.mse_loss(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(float((a - b).abs().sum()) for a, b in zip(parameters, before, strict=True))


def train_artifacts(folder: Path, x: torch.Tensor, target: torch.Tensor, rate: float) -> tuple[list[float], float]:
    """Return the losses of the artifacts in a folder, and how far the parameters moved in sum."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module, losses = Module(folder / "training_model.onnx", state), list[float]()
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    names = list(state.checkpoint.trainable)
    before = [module.read(name) for name in names]
    for _ in range(STEPS):
        losses.append(float(np.ravel(module(x.numpy(), target.numpy()))[0]))
        optimizer.step()
        module.lazy_reset_grad()
    return losses, sum(float(np.abs(module.read(one) - array).sum()) for one, array in zip(names, before, strict=True))


def check(name: str, exporter: str, rate: float = RATE) -> tuple[bool, str]:
    """Train a network and the artifacts of its file; return whether they are equal, and the figures.

    What a note says about the file is done: a padding row is trained, and a network of which the exporter computed
    parameters is exported without its optimizer.
    """
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    network = make()
    with torch.no_grad():
        target = torch.randn(network.eval()(x).shape) * 3
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(copy.deepcopy(network), x, exporter, folder / "m.onnx")
        report = artifacts.generate_artifacts(
            folder / "m.onnx", ["*"], loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.SGD,
            artifact_directory=folder, loss_input_names=["y"],
        )  # fmt: skip
        ours, moved = train_artifacts(folder, x, target, rate)
    if any("padding" in note for note in report.notes):
        for module in network.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
    inputs = x.double() if x.is_floating_point() else x
    exact, exact_distance = train(copy.deepcopy(network).double(), inputs, target.double(), rate)
    theirs, distance = train(network, x, target, rate)
    difference = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    apart = abs(moved - distance) / distance
    notes = "".join(f"; {note}" for note in report.notes)
    figures = f"{theirs[0]:.4g} to {theirs[-1]:.4g}, off by {difference:.1e}, parameters by {apart:.1e}{notes}"
    # Gradients of a thousand times the loss amplify rounding: PyTorch's own figures then differ from those in float64.
    own = max(abs(a - b) / abs(b) for a, b in zip(theirs, exact, strict=True))
    if own > UNSTABLE:
        is_equal, again = check(name, exporter, rate / 1000)
        return is_equal, f"diverges at a rate of {rate:g}; at {rate / 1000:g}: {again}"
    own_way = abs(exact_distance - distance) / exact_distance
    figures += f" (PyTorch itself by {own:.1e}, {own_way:.1e})" if max(own, own_way) > TOLERANCE else ""
    is_equal = difference <= max(TOLERANCE, 4 * own) and apart <= max(MOVED, 4 * own_way)
    if not is_equal and exporter == "dynamo" and "the exporter" in notes:
        is_equal, again = check(name, "dynamo, not optimized", rate)
        figures = f"named: {figures}. Not optimized: {again}"
    return is_equal, figures


def main() -> int:
    """Print a line for each network and exporter, and return 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="some of them only")
    warnings.simplefilter("ignore")
    outcomes: Counter[str] = Counter()
    for name in parser.parse_args().networks or NETWORKS:
        for exporter in EXPORTERS:
            try:
                is_equal, figures = check(name, exporter)
                outcome = "right" if is_equal else "WRONG"
            except (torch.onnx.errors.OnnxExporterError, TypeError) as error:  # what PyTorch cannot export
                outcome, figures = "not exported", " ".join(str(error).split())[:100]
            except OnnxtoolError as error:
                outcome, figures = "REFUSED", str(error)
            outcomes[outcome] += 1
            print(f"{outcome}: {name}, {exporter}: {figures}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()))
    return int(bool(outcomes["WRONG"] + outcomes["REFUSED"]))


if __name__ == "__main__":
    sys.exit(main())
