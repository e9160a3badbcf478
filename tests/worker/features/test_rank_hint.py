"""The hint below torch's error about missing RANK."""

import sys

import pytest

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.features.rank_hint import HINT, RENDEZVOUS, install

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def handlers(monkeypatch):
    """torch's table of rendezvous handlers, as it is restored after the test."""

    table = sys.modules[RENDEZVOUS]._rendezvous_handlers
    monkeypatch.setitem(table, "env", table["env"])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return table


def test_a_program_of_ranks_without_ranks_reads_how_to_start_them(handlers):
    install(TorchSettings())
    with pytest.raises(ValueError, match="RANK expected") as caught:
        torch.distributed.init_process_group("gloo")
    assert caught.value.__notes__ == [HINT]


def test_another_missing_variable_has_no_hint(handlers, monkeypatch):
    install(TorchSettings())
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE expected") as caught:
        torch.distributed.init_process_group("gloo")
    assert not hasattr(caught.value, "__notes__")


def test_a_rank_has_no_handler_of_ours(handlers, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    plain = handlers["env"]
    install(TorchSettings())
    assert handlers["env"] is plain
