"""The constants and inputs of a graph in JSON, with tensors by their shape."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

SENT_BYTES = 1 << 18
"""Largest tensor of integers that is sent with its values: as an index, a value decides whether an operation works."""

SENT_FLOATS = 16
"""Largest number of floating-point values that are sent: an epsilon or a bound decides about infinities."""

NORMAL_SCALE = 0.05
"""Standard deviation of random weights, about that of trained ones."""


class UnsendableError(Exception):
    """A constant that has no form in JSON; the message names its type."""


def describe(values: Iterable[Any]) -> list[Any]:
    """The values in JSON: tensors of floats without their elements. Raises: UnsendableError."""
    return [_described(value) for value in values]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _described_tensor(value)
    if isinstance(value, float | complex):
        return {"number": repr(value)}
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, list | tuple) and not any(isinstance(item, Tensor) for item in value):
        return {type(value).__name__: [_described(item) for item in value]}
    raise UnsendableError(f"a constant of type {type(value).__name__}")


def _described_tensor(value: Tensor) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise UnsendableError("a tensor that is not dense")
    kind = str(value.dtype).removeprefix("torch.")
    described = {"dtype": kind, "shape": list(value.shape), "strides": list(value.stride())}
    inexact = value.is_floating_point() or value.is_complex()
    if value.numel() <= SENT_FLOATS if inexact else value.numel() * value.element_size() <= SENT_BYTES:
        elements = value.detach().contiguous().flatten().view(torch.uint8) if value.numel() else None
        data = b"" if elements is None else bytes(elements.tolist())
        described["data"] = base64.b64encode(data).decode()
    return described


def total_bytes(described: list[Any]) -> int:
    """Bytes of all tensors among the described values."""
    tensors = [value for value in described if isinstance(value, dict) and "dtype" in value]
    return sum(torch.Size(value["shape"]).numel() * getattr(torch, value["dtype"]).itemsize for value in tensors)


def value_of(described: Any) -> Any:
    """The value; elements that were not sent are random numbers, zeros for integers and true for booleans."""
    if not isinstance(described, dict):
        return described
    if "number" in described:
        text = described["number"]
        return complex(text) if "j" in text else float(text)
    if "device" in described:
        return torch.device(described["device"])
    if "dtype" in described:
        return _tensor(described)
    [(kind, items)] = described.items()
    return [value_of(item) for item in items] if kind == "list" else tuple(value_of(item) for item in items)


def _tensor(described: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, described["dtype"])
    shape, strides = described["shape"], described["strides"]
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    if "data" in described:
        data = bytearray(base64.b64decode(described["data"]))
        return _filled(tensor, torch.frombuffer(data, dtype=dtype).view(shape)) if data else tensor
    elements = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
    if dtype.is_floating_point:
        elements.normal_(0, NORMAL_SCALE)
    else:
        elements.fill_(dtype is torch.bool)
    return tensor


def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    """The tensor with these values. Expanded dimensions are written to once, because torch refuses to do it twice."""
    target = tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    target.copy_(values)
    return tensor
