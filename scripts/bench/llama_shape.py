"""The shape of the Llama that generates text in the benches, and the bytes that generating a token reads."""

from __future__ import annotations

LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, VOCABULARY = 8, 1024, 2816, 16, 4, 32_000
HEAD_WIDTH = WIDTH // HEADS

PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS = 64, 48, 256
"""Tokens of the prompt and of the answer of one generation, and of the prompt that is only read."""

MATRICES = {
    "attn_q": (HEADS * HEAD_WIDTH, WIDTH),
    "attn_k": (KV_HEADS * HEAD_WIDTH, WIDTH),
    "attn_v": (KV_HEADS * HEAD_WIDTH, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_WIDTH),
    "ffn_gate": (FEED_FORWARD, WIDTH),
    "ffn_up": (FEED_FORWARD, WIDTH),
    "ffn_down": (WIDTH, FEED_FORWARD),
}
"""Matrix of a layer, as GGUF names it -> rows and columns."""

WEIGHT_BYTES = {"f32": 4.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Type of GGUF -> bytes for each weight; 32 weights of a quantized type share a scale of two bytes."""


def bytes_per_token(kind: str) -> float:
    """Bytes of weights that a generated token reads: all matrices of the layers, and that of the words."""
    layer = sum(rows * columns for rows, columns in MATRICES.values())
    return (LAYERS * layer + VOCABULARY * WIDTH) * WEIGHT_BYTES[kind]
