"""The variable that carries a worker's settings: decoding returns what was encoded, and the text is JSON."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.records.record import fields
from cpulaunch.records.settings import setting_specs
from cpulaunch.records.torch_settings import TorchSettings, decode, encode
from cpulaunch.worker import autoload

# What an environment can hold: undecodable bytes arrive as lone surrogates (PEP 383).
variable = st.binary(max_size=40).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))


@given(variable, st.integers(0, 4096), st.booleans(), st.sampled_from([None, "bf16", "fp32"]))
def test_decoding_returns_what_was_encoded(preload: str, threads: int, flag: bool, precision: str | None) -> None:
    settings = TorchSettings(
        threads=threads, ld_preload=preload, restore_preload=flag, debug_apis=flag, precision=precision
    )
    text = encode(settings)
    assert decode(text) == settings
    assert set(json.loads(text)) <= set(fields(TorchSettings))
    assert decode(os.fsdecode(os.fsencode(text))) == settings


def test_defaults_are_omitted() -> None:
    assert encode(TorchSettings()) == "{}"


def test_unknown_names_are_ignored() -> None:
    assert decode('{"threads": 3, "no_such_setting": 1}') == TorchSettings(threads=3)


@pytest.mark.parametrize("text", ["", "[]", "1", "{", "null"])
def test_text_that_is_no_json_object_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


def test_a_field_with_the_name_of_a_setting_has_its_default() -> None:
    table = setting_specs()
    shared = {name: entry.default for name, entry in fields(TorchSettings).items() if name in table and name != "cpus"}
    assert shared == {name: table[name].default for name in shared}


def test_autoload_reads_the_variable_of_torch_settings() -> None:
    from cpulaunch.records.torch_settings import VARIABLE

    assert autoload.VARIABLE == VARIABLE
