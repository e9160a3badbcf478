#!/usr/bin/env python3
"""Generate text with a Llama of transformers and print tokens/s of decoding and of reading a prompt.

An ordinary program: random weights from a fixed seed; it sets no threads, allocator, binding or compilation.
"""

from __future__ import annotations

import argparse

import torch
from cases.text import llama_config
from generation_pacing import add_arguments, measure
from llama_shape import PREFILL_TOKENS, VOCABULARY
from models import SEED
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(llama_config()).eval()
    words = torch.randint(0, VOCABULARY, (1, PREFILL_TOKENS))

    def generate(prompt: int, tokens: int) -> object:
        return model.generate(words[:, :prompt], max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    with torch.no_grad():
        measure(generate, options)


if __name__ == "__main__":
    main()
