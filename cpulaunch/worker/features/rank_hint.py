"""A hint below torch's error about missing RANK: the program is a job of ranks and was started as none."""

from __future__ import annotations

import os
import sys

from cpulaunch.records.torch_settings import TorchSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RENDEZVOUS = "torch.distributed.rendezvous"
HINT = "cpulaunch: this program is a job of ranks: start it with --nproc-per-node, e.g. cpulaunch --nproc-per-node 2"


def install(settings: TorchSettings) -> str:
    """An empty note. Effect: the error of an `init_process_group` without RANK has the hint as a note.

    Source: torch/distributed/rendezvous.py, register_rendezvous_handler("env", ...).
    """
    handlers = getattr(sys.modules.get(RENDEZVOUS), "_rendezvous_handlers", {})
    if "env" in handlers and "RANK" not in os.environ:
        handlers["env"] = _explained(handlers["env"])
    return ""


def _explained(plain: Any) -> Any:
    """The handler, whose error about RANK has the hint."""

    def handler(*arguments: Any, **named: Any) -> Any:
        try:
            yield from plain(*arguments, **named)
        except ValueError as error:
            if "RANK expected" in str(error):
                error.add_note(HINT)
            raise

    return handler
