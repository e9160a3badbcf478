"""Writes a GGUF file with random weights and the shape in llama_shape.py. Needs the packages gguf and numpy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_shape as shape
import numpy as np

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


def matrices(layers: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, rows and columns of each matrix."""
    yield "token_embd.weight", (shape.VOCABULARY, shape.WIDTH)
    yield "output.weight", (shape.VOCABULARY, shape.WIDTH)
    for layer in range(layers):
        for name, size in shape.MATRICES.items():
            yield f"blk.{layer}.{name}.weight", size


def write_file(path: Path, kind: str, layers: int = shape.LAYERS) -> None:
    """Effect: writes the file, with weights of this type and random values from a fixed seed."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_facts(writer, layers)
    random = np.random.default_rng(20)
    for name, size in matrices(layers):
        values = random.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        writer.add_tensor(name, gguf.quants.quantize(values, TYPES[kind]), raw_dtype=TYPES[kind])
    norms = [f"blk.{layer}.{name}_norm.weight" for layer in range(layers) for name in ("attn", "ffn")]
    for name in (*norms, "output_norm.weight"):
        writer.add_tensor(name, np.ones(shape.WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_facts(writer: Any, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.WIDTH)
    writer.add_feed_forward_length(shape.FEED_FORWARD)
    writer.add_head_count(shape.HEADS)
    writer.add_head_count_kv(shape.KV_HEADS)
    writer.add_rope_dimension_count(shape.HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.VOCABULARY)
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("--layers", type=int, default=shape.LAYERS)
    options = parser.parse_args()
    write_file(options.file, options.type, options.layers)


if __name__ == "__main__":
    main()
