"""Text generated with packed fp32 weights is that of eager execution."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from tests.worker.capturing import installed  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZES = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TOKENS = {"max_new_tokens": 40, "pad_token_id": 0}


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_those_of_eager_execution(tmp_path: Path, measured: bool, sampled: bool) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()
    prompts = [torch.randint(3, 500, (1, length)) for length in (7, 12)]

    def generate() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [model.generate(prompt, do_sample=sampled, **TOKENS) for prompt in prompts]

    with installed(tmp_path, TorchSettings(weights="fp32"), measured=measured) as plugin:
        expected = plugin.eager(generate)
        got = generate()
        (event,) = plugin.events("weights")
        assert event["layers"] >= 10
    assert all(tokens.shape[1] == prompt.shape[1] + 40 for tokens, prompt in zip(got, prompts, strict=True))
    assert all(map(torch.equal, got, expected))
