"""The models that the bench programs run: random weights from the caller's seed, without downloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import transformers  # As a whole: a class of it is imported where it is first used, and most take seconds.
from torch import Tensor, nn

SEED = 20
LAYERS = 6
TRAINING_LAYERS = 4
TOKENS = 128
CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its positional arguments (ipexrun --auto-ipex captures no call with keyword arguments)."""

    model: nn.Module
    inputs: tuple[Tensor, ...]


class Dlrm(nn.Module):
    """Recommender with the layer sizes of DLRM's Criteo recipe (dimension 64) and 26 tables of 100,000 rows."""

    TABLES, ROWS, DIMENSION, DENSE = 26, 100_000, 64, 13

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(self.ROWS, self.DIMENSION, mode="sum") for _ in range(self.TABLES))
        self.bottom = _dense_layers(self.DENSE, 512, 256, self.DIMENSION)
        features = self.TABLES + 1
        self.top = _dense_layers(self.DIMENSION + features * (features - 1) // 2, 512, 512, 256, 1)
        rows, columns = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        sparse = [bag(table, offsets) for bag, table in zip(self.bags, indices, strict=True)]
        features = torch.stack([bottom, *sparse], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns]
        return torch.sigmoid(self.top(torch.cat([bottom, products], dim=1)))


def _dense_layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)))


def _bert(batch: int) -> Case:
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=LAYERS))
    return Case(model=model, inputs=(torch.randint(0, 30_000, (batch, TOKENS)),))


def _resnet50(batch: int) -> Case:
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    return Case(model=model, inputs=(torch.randn(batch, 3, 224, 224),))


def _vit(batch: int) -> Case:
    model = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=LAYERS))
    _redraw(model)
    return Case(model=model, inputs=(torch.randn(batch, 3, 224, 224),))


def _redraw(model: nn.Module) -> None:
    """Effect: draws weights that are equal in torch 2.8 and 2.13; ViT's own trunc_normal_ differs between them."""
    torch.manual_seed(SEED)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)


def _gpt2(batch: int) -> Case:
    model = transformers.GPT2Model(transformers.GPT2Config(n_layer=LAYERS))
    return Case(model=model, inputs=(torch.randint(0, 50_000, (batch, TOKENS)),))


def _dlrm(batch: int) -> Case:
    dense = torch.randn(batch, Dlrm.DENSE)
    indices = torch.randint(0, Dlrm.ROWS, (Dlrm.TABLES, batch))
    return Case(model=Dlrm(), inputs=(dense, indices, torch.arange(batch)))


def _mlp(batch: int) -> Case:
    return Case(model=_dense_layers(*[512] * 9), inputs=(torch.randn(batch, 512),))


INFERENCE: dict[str, tuple[Callable[[int], Case], int]] = {
    "bert": (_bert, 1),
    "resnet50": (_resnet50, 1),
    "vit": (_vit, 1),
    "gpt2": (_gpt2, 1),
    "dlrm": (_dlrm, 128),
    "mlp": (_mlp, 1),
}
"""Name -> function that builds the case for a batch size, and the default batch size."""


def _bert_training(samples: int) -> Case:
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(num_hidden_layers=TRAINING_LAYERS, num_labels=CLASSES)
    )
    return Case(model=model, inputs=(torch.randint(0, 30_000, (samples, TOKENS)), _labels(samples)))


def _resnet50_training(samples: int) -> Case:
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=CLASSES))
    return Case(model=model, inputs=(torch.randn(samples, 3, 224, 224), _labels(samples)))


def _labels(samples: int) -> Tensor:
    return torch.randint(0, CLASSES, (samples,))


TRAINING: dict[str, Callable[[int], Case]] = {"bert": _bert_training, "resnet50": _resnet50_training}
"""Name -> function that builds a model that returns its loss, with the given number of labelled samples."""
