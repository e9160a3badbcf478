#!/usr/bin/env python3
"""Generate text with llama.cpp and print tokens/s of decoding and of reading a prompt.

Needs the package llama-cpp-python: scripts/bench/setup-peers llama.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Sequence

import llama_cpp
import numpy as np
from generation_pacing import add_arguments, measure
from llama_shape import PREFILL_TOKENS, VOCABULARY


class Llama:
    """A model of llama.cpp in memory, with its context."""

    def __init__(self, file: str, *, threads: int, repack: bool) -> None:
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), loading)
        if not self.model:
            raise OSError(f"llama.cpp cannot load {file}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = 512, 512, 512
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.prompt = np.random.default_rng(20).integers(0, VOCABULARY, PREFILL_TOKENS).tolist()

    def generate(self, prompt: int, tokens: int) -> list[int]:
        """The tokens that greedy search generates from the first words of the prompt."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        answer = [self._next(self.prompt[:prompt])]
        while len(answer) < tokens:
            answer.append(self._next(answer[-1:]))
        return answer

    def _next(self, words: Sequence[int]) -> int:
        array = (llama_cpp.llama_token * len(words))(*words)
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(words))):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * VOCABULARY)).contents
        return int(np.frombuffer(values, dtype=np.float32).argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--cpus", type=int, nargs="+", help="run on these CPUs only")
    parser.add_argument("--no-repack", action="store_true", help="keep weights as they are in the file")
    add_arguments(parser)
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, options.cpus)
    threads = len(os.sched_getaffinity(0))
    measure(Llama(options.file, threads=threads, repack=not options.no_repack).generate, options)


if __name__ == "__main__":
    main()
