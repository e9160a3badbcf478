"""The entry point that torch (2.5 and later) calls at the end of every `import torch`."""

import os

VARIABLE = "CPULAUNCH_WORKER"
"""The one of torch_settings, repeated because without it nothing else may be imported."""


def activate() -> None:
    """Effect: without cpulaunch's variable none; else its settings are applied to torch.

    Source: torch/__init__.py, _import_device_backends (entry-point group "torch.backends").
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    from cpulaunch.worker.apply import apply_all

    apply_all(text)
