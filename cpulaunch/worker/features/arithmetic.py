"""How numbers are computed: the precision of fp32 matrix products, denormals, and cuDNN's choice of algorithm."""

from __future__ import annotations

import torch

from cpulaunch.records.torch_settings import TorchSettings

_PRECISIONS = {"fp32": "highest", "tf32": "high", "medium": "medium"}
"""Source: torch.set_float32_matmul_precision."""


def set_precision(settings: TorchSettings) -> str:
    """Effect: fp32 matrix products may round their factors to fewer mantissa bits (tf32: 10 of 23, medium: 7)."""
    name = _PRECISIONS[settings.precision or "fp32"]
    torch.set_float32_matmul_precision(name)
    return f"float32 matrix products: {name}"


def flush_denormals(settings: TorchSettings) -> str:
    """Effect: numbers below 1.2e-38 become zero in this thread and in threads it starts.

    Raises: RuntimeError if the processor cannot do this.
    """
    if not torch.set_flush_denormal(True):
        raise RuntimeError("this processor cannot flush denormal numbers to zero")
    return "denormal numbers are flushed to zero"


def benchmark_cudnn(settings: TorchSettings) -> str:
    """Effect: cuDNN benchmarks its algorithms for each new shape. Raises: RuntimeError in a build without CUDA.

    CUDA is not initialized, because after that the program could not use it in forked children.
    """
    if not has_gpu_build():
        raise RuntimeError("this torch is built without CUDA")
    torch.backends.cudnn.benchmark = True
    return "cuDNN benchmarks its algorithms"


def has_gpu_build() -> bool:
    """Whether this build of torch supports GPUs (CUDA or ROCm)."""
    return bool(torch.version.cuda or torch.version.hip)
