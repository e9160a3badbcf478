"""Programs that read and write text: encoders, decoders, speech to text, recurrent networks."""

from __future__ import annotations

from collections.abc import Callable

import llama_shape as shape
import torch
import transformers
from models import INFERENCE, LAYERS
from torch import Tensor, nn

from cases.program import Build, Program

LENGTHS = (37, 12, 128, 19, 64, 90, 16, 48, 112, 23, 77, 31)
"""Tokens of the texts that the encoder reads in turn."""

SHORT_TOKENS = 32
"""New tokens of one call of generate() of the smaller models."""


def llama_config() -> transformers.LlamaConfig:
    """A Llama of 8 layers and width 1024."""
    return transformers.LlamaConfig(
        num_hidden_layers=shape.LAYERS,
        hidden_size=shape.WIDTH,
        intermediate_size=shape.FEED_FORWARD,
        num_attention_heads=shape.HEADS,
        num_key_value_heads=shape.KV_HEADS,
        vocab_size=shape.VOCABULARY,
        eos_token_id=None,
    )


def _encoder() -> Program:
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=LAYERS)).eval()
    texts = [torch.randint(0, 30_000, (1, length)) for length in LENGTHS]
    return Program(step=lambda number: model(texts[number % len(texts)]), amount=1, cycle=len(texts))


def _llama() -> Program:
    model = transformers.LlamaForCausalLM(llama_config()).eval()
    return _generation(model, torch.randint(0, shape.VOCABULARY, (1, shape.PROMPT_TOKENS)), shape.NEW_TOKENS)


def _t5() -> Program:
    config = transformers.T5Config(eos_token_id=None, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    return _generation(model, torch.randint(0, 32_000, (1, shape.PROMPT_TOKENS)), SHORT_TOKENS)


def _whisper() -> Program:
    config = transformers.WhisperConfig(
        eos_token_id=None, decoder_start_token_id=1, pad_token_id=0, suppress_tokens=None
    )
    config.begin_suppress_tokens = None
    model = transformers.WhisperForConditionalGeneration(config).eval()
    return _generation(model, torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions), SHORT_TOKENS)


def _generation(model: nn.Module, inputs: Tensor, tokens: int) -> Program:
    """Greedy generation of exactly this number of tokens by each step."""
    generate: Callable[..., object] = model.generate
    return Program(
        step=lambda _: generate(inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False),
        amount=tokens,
        unit="tokens/s",
    )


class Tagger(nn.Module):
    """Tags each of 100 words: an embedding, two LSTM layers in both directions, a linear layer."""

    WORDS, WIDTH, TAGS = 20_000, 256, 32

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.WORDS, self.WIDTH)
        self.lstm = nn.LSTM(self.WIDTH, self.WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * self.WIDTH, self.TAGS)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        return self.tags(states)


def _lstm() -> Program:
    model = Tagger().eval()
    words = torch.randint(0, Tagger.WORDS, (4, 100))
    return Program(step=lambda _: model(words), amount=4)


def _gpt2() -> Program:
    build, batch = INFERENCE["gpt2"]
    case = build(batch)
    model = case.model.eval()
    return Program(step=lambda _: model(*case.inputs), amount=batch)


TEXT: dict[str, Build] = {
    "encoder": _encoder,
    "t5": _t5,
    "llama": _llama,
    "whisper": _whisper,
    "gpt2": _gpt2,
    "lstm": _lstm,
}
"""Name -> builder."""
