"""The entry point that torch (2.5 and later) calls at the end of every `import torch`."""

import os
import sys

VARIABLE = "CPULAUNCH_WORKER"
"""Repeats torch_settings.VARIABLE: while it is not set, this module must import nothing else of the package."""

OLDEST_PYTHON = (3, 10)
"""The oldest Python that the plugin runs in, where cpulaunch itself runs in another one."""


def activate() -> None:
    """Effect: applies the settings in CPULAUNCH_WORKER to torch; does nothing if the variable is not set.

    Source: torch/__init__.py, _import_device_backends (entry-point group "torch.backends").
    """
    text = os.environ.get(VARIABLE)
    if text is None or sys.version_info < OLDEST_PYTHON:  # An older one may be a child of a worker.
        return
    from cpulaunch.worker.apply import apply_all

    apply_all(text)
