"""An ordinary inference program: a model with random weights answers one request after another.

It does not use cpulaunch and sets no threads, allocator or binding. Its last line is the measured rate.
"""

import argparse
import time

import torch
from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Six layers of bert-base and one request of 128 tokens."""
    model = BertModel(BertConfig(num_hidden_layers=6))
    return model, {"input_ids": torch.randint(0, 30_000, (1, 128))}


def resnet50() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """ResNet-50 and one image."""
    return ResNetForImageClassification(ResNetConfig()), {"pixel_values": torch.randn(1, 3, 224, 224)}


def samples_per_second(model: torch.nn.Module, request: dict[str, torch.Tensor], seconds: float) -> float:
    """Requests answered per second, measured for `seconds`."""
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        model(**request)
        done += 1
    return done / elapsed


def main() -> None:
    """Effect: warms the model up, measures it and prints the rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("bert", "resnet50"), default="bert")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, request = bert() if options.model == "bert" else resnet50()
    model.eval()
    with torch.inference_mode():
        samples_per_second(model, request, options.seconds / 4)
        print(f"{options.model}: {samples_per_second(model, request, options.seconds):.1f} samples/s")


if __name__ == "__main__":
    main()
