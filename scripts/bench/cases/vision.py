"""Programs that process images: convolutions, attention over patches, segmentation, images with texts."""

from __future__ import annotations

import torch
import transformers
from models import INFERENCE, LAYERS
from torch import Tensor, nn

from cases.program import Build, Program

CLASSES = 1000


def _convolution(channels: int, filters: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution with batch normalization and SiLU."""
    convolution = nn.Conv2d(channels, filters, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters), nn.SiLU())


class Squeeze(nn.Module):
    """Scales each channel by a factor that depends on the means of all channels."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(channels, narrow, 1)
        self.wide = nn.Conv2d(narrow, channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        means = image.mean((2, 3), keepdim=True)
        return image * torch.sigmoid(self.wide(nn.functional.silu(self.narrow(means))))


class InvertedBlock(nn.Module):
    """Widens the channels, applies a depthwise convolution and narrows them, as in MobileNetV2 and EfficientNet."""

    def __init__(self, channels: int, filters: int, size: int, stride: int) -> None:
        super().__init__()
        wide = 6 * channels
        self.body = nn.Sequential(
            _convolution(channels, wide, 1),
            _convolution(wide, wide, size, stride=stride, groups=wide),
            Squeeze(wide, channels // 4),
            nn.Conv2d(wide, filters, 1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.is_residual = stride == 1 and channels == filters

    def forward(self, image: Tensor) -> Tensor:
        result = self.body(image)
        return image + result if self.is_residual else result


class DepthwiseNet(nn.Module):
    """An image classifier with the stages of EfficientNet-B0."""

    STAGES = ((24, 3, 2, 2), (40, 5, 2, 2), (80, 3, 2, 3), (112, 5, 1, 3), (192, 5, 2, 4), (320, 3, 1, 1))
    """Filters, kernel size, stride and number of blocks of each stage."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, stride=2), _convolution(32, 16, 3)]
        channels = 16
        for filters, size, stride, blocks in self.STAGES:
            for block in range(blocks):
                layers.append(InvertedBlock(channels, filters, size, stride if block == 0 else 1))
                channels = filters
        self.layers = nn.Sequential(*layers, _convolution(channels, 1280, 1))
        self.classes = nn.Linear(1280, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.classes(self.layers(image).mean((2, 3)))


class UNet(nn.Module):
    """Segments an image: four levels of two convolutions each, halved in size, then doubled with skip connections."""

    LEVELS = (16, 32, 64, 128)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(self._level, (3, *self.LEVELS), self.LEVELS))
        pairs = list(zip(self.LEVELS, self.LEVELS[1:], strict=False))[::-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in pairs)
        self.up = nn.ModuleList(self._level(2 * narrow, narrow) for narrow, _ in pairs)
        self.mask = nn.Conv2d(self.LEVELS[0], 2, 1)

    @staticmethod
    def _level(channels: int, filters: int) -> nn.Sequential:
        return nn.Sequential(_convolution(channels, filters, 3), _convolution(filters, filters, 3))

    def forward(self, image: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for level in self.down:
            image = level(nn.functional.max_pool2d(image, 2) if skipped else image)
            skipped.append(image)
        skipped.pop()
        for widen, level in zip(self.widen, self.up, strict=True):
            image = level(torch.cat([skipped.pop(), widen(image)], dim=1))
        return self.mask(image)


def _on_images(model: nn.Module, *, batch: int = 1, size: int = 224) -> Program:
    model.eval()
    images = torch.randn(batch, 3, size, size)
    return Program(step=lambda _: model(images), amount=batch)


def _of_throughput(name: str) -> Program:
    """A model of scripts/bench/throughput."""
    build, batch = INFERENCE[name]
    case = build(batch)
    model = case.model.eval()
    return Program(step=lambda _: model(*case.inputs), amount=batch)


def _clip() -> Program:
    towers = {"num_hidden_layers": LAYERS}
    config = transformers.CLIPConfig(
        text_config=transformers.CLIPTextConfig(**towers).to_dict(),
        vision_config=transformers.CLIPVisionConfig(**towers).to_dict(),
    )
    model = transformers.CLIPModel(config).eval()
    texts, images = torch.randint(0, 40_000, (4, 16)), torch.randn(1, 3, 224, 224)
    return Program(step=lambda _: model(input_ids=texts, pixel_values=images).logits_per_image, amount=1)


VISION: dict[str, Build] = {
    "resnet": lambda: _of_throughput("resnet50"),
    "depthwise": lambda: _on_images(DepthwiseNet()),
    "vit": lambda: _of_throughput("vit"),
    "swin": lambda: _on_images(transformers.SwinForImageClassification(transformers.SwinConfig())),
    "convnext": lambda: _on_images(transformers.ConvNextForImageClassification(transformers.ConvNextConfig())),
    "clip": _clip,
    "unet": lambda: _on_images(UNet(), size=256),
    "dlrm": lambda: _of_throughput("dlrm"),
    "mlp": lambda: _of_throughput("mlp"),
}
"""Name -> builder."""
