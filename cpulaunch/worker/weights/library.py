"""The compiled library cpulaunch/lib/linear_kernels.c: products with packed weights, on torch's own OpenMP threads.

The library is optional, and it needs a CPU with AVX2. Nothing is loaded before the first call of `library`.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
LIBRARY = os.path.join(PACKAGE, "lib", "libcpulaunch_linear.so")
VERSION = 2
"""Version of the library's interface; a library of another version (after an update in place) is not used."""
KINDS = ("fp32", "bf16", "int8", "int4")
"""Types of packed weights, in the order of `enum kind`."""
INSTRUCTION_SETS = ("", "AVX2", "AVX-512", "AVX512_VNNI")
"""In the order of `enum instructions`."""

_WEIGHTS_INPUT_OUTPUT = (c_void_p, c_void_p, c_void_p)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "version": (),
    "instructions": (),
    "fp32": (*_WEIGHTS_INPUT_OUTPUT, c_int64, c_int),
    "bf16": (*_WEIGHTS_INPUT_OUTPUT, c_int64, c_int),
    "dequantize": (c_void_p, c_void_p, c_int),
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float),
}
"""Function, without its prefix cpulaunch_linear_ -> its arguments' types; each returns an int."""


class PreparedWeights(Structure):
    """struct weights: addresses and sizes of a packed weight. The tensors must be kept alive with it."""

    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("kind", c_int32),
        ("instructions", c_int32),
    )


class LinearLibrary:
    """The functions of the compiled library; `instructions` is the index of the CPU's best in INSTRUCTION_SETS."""

    def __init__(self, path: str) -> None:
        """Raises: OSError if the file or an OpenMP runtime is missing; AttributeError if it lacks a function."""
        loaded = ctypes.CDLL(path)
        functions = {name: loaded[f"cpulaunch_linear_{name}"] for name in PROTOTYPES}
        for name, arguments in PROTOTYPES.items():
            functions[name].argtypes = arguments
        self.version: int = functions["version"]()
        self.instructions: int = functions["instructions"]()
        self.multiply = {torch.float32: functions["fp32"], torch.bfloat16: functions["bf16"]}
        """Type of the activations -> function(weights, input, output, rows of the input, threads)."""
        self.dequantize = functions["dequantize"]
        self.rms_norm = functions["rms_norm"]


def library() -> LinearLibrary | None:
    """The library, loaded once in a process; None if it cannot be used here (see `missing_reason`)."""
    loaded = load(LIBRARY)
    return None if isinstance(loaded, str) else loaded


def missing_reason() -> str:
    """Why `library` returns None; empty if it does not."""
    loaded = load(LIBRARY)
    return loaded if isinstance(loaded, str) else ""


@cache
def load(path: str) -> LinearLibrary | str:
    """The library at the path, or the reason why it cannot be used."""
    if not os.path.exists(path):
        return "cpulaunch was installed without a C compiler"
    try:
        loaded = LinearLibrary(path)
    except (OSError, AttributeError) as error:
        return f"{os.path.basename(path)} cannot be loaded: {error}"
    if loaded.version != VERSION:
        return f"{os.path.basename(path)} belongs to another version of cpulaunch"
    return loaded if loaded.instructions else "the CPU does not support AVX2"
