"""Rank 0's store in a job whose ranks are all on this host: it listens on the loopback interface only."""

from __future__ import annotations

from importlib import import_module

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.system.loopback_store import on_loopback

NAME = "TCPStore"


def install(settings: TorchSettings) -> str:
    """Effect: stores of init_process_group, by env:// and tcp://, listen on loopback where their address is loopback's.

    Source: torch/distributed/rendezvous.py, _create_c10d_store, which takes TCPStore from its own module.
    """
    if not import_module("torch.distributed").is_available():
        return ""
    rendezvous = import_module("torch.distributed.rendezvous")
    setattr(rendezvous, NAME, on_loopback(getattr(rendezvous, NAME)))
    return ""
