"""torch's warning of too many DataLoader workers: when it appears, and which line it names."""

import os
import warnings

import pytest

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.process import fork_guard

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind"),
]
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.fixture
def loader(monkeypatch):
    """DataLoader with the guard of a worker that is bound to one CPU, and without it after the test."""
    from torch.utils.data import DataLoader
    from torch.utils.data._utils import worker

    monkeypatch.setattr(DataLoader, "check_worker_number_rationality", DataLoader.check_worker_number_rationality)
    monkeypatch.setattr(worker, "_worker_loop", worker._worker_loop)
    monkeypatch.setattr(fork_guard, "_inherited_cpus", lambda: 4)
    fork_guard._wrap_loader(TorchSettings(cpus=str(CPUS[0])))
    return DataLoader


def warned(loader, workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader([1, 2], num_workers=workers)
    return [(str(each.message), each.filename) for each in caught]


def test_workers_that_the_machine_has_cpus_for_are_no_warning(loader):
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CPUS[:1])
    try:
        assert warned(loader, 4) == []
    finally:
        os.sched_setaffinity(0, own)


def test_a_warning_keeps_its_place(loader):
    ((message, file),) = warned(loader, 4000)
    assert "4000 worker processes" in message
    assert file.endswith(os.path.join("torch", "utils", "data", "dataloader.py"))
