"""Small networks with convolutions and normalizations, with random weights and statistics, as exporters write them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from onnxtool.runtime.quiet import quiet

IMAGES, SOUND, VIDEO = (2, 3, 32, 32), (2, 8, 64), (2, 3, 8, 16, 16)


def _conv(width: int, out: int, size: int = 3, **options: Any) -> nn.Sequential:
    """Return a convolution, its normalization and an activation."""
    act = options.pop("act", nn.ReLU)
    conv = nn.Conv2d(width, out, size, padding=size // 2, bias=options.pop("bias", False), **options)
    return nn.Sequential(conv, nn.BatchNorm2d(out), act())


class _Residual(nn.Module):
    """Adds the input of its layers, or a projection of it, to their output."""

    def __init__(self, layers: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.skip = layers, skip or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) + self.skip(x)
        return y


class _Excitation(nn.Module):
    """Scales channels by a function of their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(width, 4, 1), nn.SiLU(), nn.Conv2d(4, width, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.gate(x.mean((2, 3), keepdim=True))
        return y


class _Dense(nn.Module):
    """Appends new channels to its input, which it normalizes before the convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), *_conv(width, 16, 1), nn.Conv2d(16, 8, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


class _UNet(nn.Module):
    """Two scales, joined by a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = _conv(3, 8), nn.Sequential(nn.MaxPool2d(2), _conv(8, 16), _conv(16, 16))
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Sequential(_conv(16, 8), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        y: Tensor = self.out(torch.cat([high, self.up(self.low(high))], 1))
        return y


class _Block(nn.Module):
    """A block of a ConvNeXt: a depthwise convolution, a normalization of channels, two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + y


class _Statistics(nn.Module):
    """Mean and standard deviation over time, of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(2).unsqueeze(2)
        return torch.cat([mean, (x - mean).square().mean(2).unsqueeze(2).sqrt()], 1).squeeze(2)


class _Logits(nn.Module):
    """A model of transformers, with only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def _mobile(act: type[nn.Module]) -> nn.Module:
    block = nn.Sequential(
        _conv(16, 32, 1, act=act), _conv(32, 32, groups=32, act=act), _Excitation(32), *_conv(32, 16, 1)[:2]
    )
    return nn.Sequential(_conv(3, 16, stride=2, act=act), _Residual(block), _conv(16, 24, 1, act=act))


def _efficient() -> nn.Module:
    """Pad in front of strided convolutions, as TensorFlow's does."""
    strided = nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(16, 16, 3, 2, groups=16), nn.BatchNorm2d(16, eps=1e-3)
    )
    return nn.Sequential(_mobile(nn.SiLU)[:2], strided, nn.SiLU(), _Excitation(16), *_conv(16, 16, 1)[:2])


def _resnet() -> nn.Module:
    first = nn.Sequential(_conv(8, 8, bias=True), *_conv(8, 8)[:2])
    second = nn.Sequential(_conv(8, 16, stride=2), *_conv(16, 16)[:2])
    return nn.Sequential(
        _conv(3, 8), nn.MaxPool2d(2), _Residual(first), _Residual(second, _conv(8, 16, 1, stride=2)[:2])
    )


def _vgg() -> nn.Module:
    return nn.Sequential(_conv(3, 8, bias=True), _conv(8, 8, bias=True), nn.MaxPool2d(2), _conv(8, 16, bias=True))


def _convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), _Block(8), nn.Conv2d(8, 16, 2, 2), nn.BatchNorm2d(16), _Block(16))


def _speech() -> nn.Module:
    layers: list[nn.Module] = []
    for width, dilation in ((8, 1), (16, 2), (16, 3)):
        layers += [nn.Conv1d(width, 16, 3, dilation=dilation), nn.BatchNorm1d(16), nn.ReLU()]
    return nn.Sequential(*layers, _Statistics(), nn.Linear(32, 8))


def _video() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 3), nn.BatchNorm3d(8)
    )


def _transformers(name: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    return _Logits(getattr(transformers, f"{name}ForImageClassification")(config))


_SMALL = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 3}
_VIT = {"image_size": 32, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 16]}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet": (_resnet, IMAGES),
    "MobileNet": (lambda: _mobile(nn.Hardswish), IMAGES),
    "VGG": (_vgg, IMAGES),
    "DenseNet": (lambda: nn.Sequential(_conv(3, 8), _Dense(8), _Dense(16), *_conv(24, 8, 1)), IMAGES),
    "EfficientNet": (_efficient, IMAGES),
    "ConvNeXt": (_convnext, IMAGES),
    "U-Net": (_UNet, IMAGES),
    "x-vector (sound)": (_speech, SOUND),
    "3D ResNet (video)": (_video, VIDEO),
    "RegNet of transformers": (lambda: _transformers("RegNet", groups_width=8, **_SMALL), IMAGES),
    "ResNet of transformers": (lambda: _transformers("ResNet", **_SMALL), IMAGES),
    "MobileViT of transformers": (lambda: _transformers("MobileViT", num_attention_heads=2, **_VIT), IMAGES),
}
"""Networks by name: a function that makes one, and the shape of its input."""


def make(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network in evaluation mode, with random statistics, and an input."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    network = build().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            nn.init.normal_(module.weight, 1.0, 0.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.1, 3.0)
    return network, torch.randn(shape)


def exported(network: nn.Module, sample: Tensor, *, dynamo: bool) -> ir.Model:
    """Return a network as exported with its normalizations, which both exporters can fold themselves."""
    axes = {0: "batch"}
    with quiet(), io.BytesIO() as file:
        if dynamo:
            batch = ({0: torch.export.Dim.DYNAMIC},)
            program = torch.onnx.export(
                network, (sample,), dynamo=True, opset_version=18, dynamic_shapes=batch, optimize=False
            )
            proto = program.model_proto
        else:
            torch.onnx.export(
                network,
                (sample,),
                file,
                dynamo=False,
                opset_version=17,
                input_names=["x"],
                dynamic_axes={"x": axes},
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
            )
            proto = onnx.load_from_string(file.getvalue())
    model: ir.Model = ir.from_proto(proto)
    return model
