"""Models of transformers: correct results in the caller's types, captured or not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from tests.worker.capturing import Plugin, close, installed  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(params=[None, "bf16"])
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plugin]:
    torch.manual_seed(0)
    with installed(tmp_path, TorchSettings(graph="onednn", precision=request.param)) as plugin:
        plugin.tolerance = 1e-4 if request.param is None else 5e-2
        yield plugin


def gpt2(kind: str):
    config = transformers.GPT2Config(**SMALL)
    return getattr(transformers, kind)(config).eval()


def test_gpt2_with_its_cache_object(plugin: Plugin) -> None:
    model = gpt2("GPT2Model")
    for _ in range(3):
        ids = torch.randint(3, 100, (1, 12))
        result, expected = model(input_ids=ids), plugin.eager(model, input_ids=ids)
        assert type(result) is type(expected)
        assert type(result.past_key_values) is type(expected.past_key_values)
        assert result.past_key_values.get_seq_length() == 12
        close(result.last_hidden_state, expected.last_hidden_state, tolerance=plugin.tolerance)
        close(tuple(result.to_tuple()[0]), tuple(expected.to_tuple()[0]), tolerance=plugin.tolerance)
    assert plugin.captured() == ["GPT2Model"]


def test_generate(plugin: Plugin) -> None:
    model = gpt2("GPT2LMHeadModel")
    for length in (5, 5, 9):
        ids = torch.randint(3, 100, (1, length))
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        result = model.generate(ids, **options)
        assert result.shape[1] > length
        if plugin.tolerance < 1e-3:
            close(result, plugin.eager(model.generate, ids, **options))
        torch.manual_seed(7)
        sampled = model.generate(ids, max_new_tokens=8, do_sample=True, pad_token_id=0)
        torch.manual_seed(7)
        if plugin.tolerance < 1e-3:
            close(sampled, plugin.eager(model.generate, ids, max_new_tokens=8, do_sample=True, pad_token_id=0))
    assert plugin.reasons()


def test_bert_with_a_configuration_that_changes(plugin: Plugin) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)).eval()
    ids = torch.randint(0, 100, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    for wanted in (False, True, False, True, False):
        model.config.output_hidden_states = wanted
        for arguments in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
            result, expected = model(**arguments), plugin.eager(model, **arguments)
            close(dict(result), dict(expected), tolerance=plugin.tolerance)
            assert ("hidden_states" in result) is wanted
    assert plugin.captured().count("BertModel") >= 2
