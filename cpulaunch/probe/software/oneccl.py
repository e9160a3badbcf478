"""The oneCCL beside the worker's torch, from its files; asked by launches and checks that measure or judge it."""

from __future__ import annotations

import os

from cpulaunch.records.host import Torch
from cpulaunch.system.root import Root

LIBRARY = "libccl.so.2"
METADATA = "oneccl-"
UNKNOWN = "unknown"


def oneccl_version(root: Root, torch: Torch) -> str | None:
    """The version of oneCCL that torch's environment has, "unknown" without pip's word for it; None if it has none."""
    packages = os.path.dirname(torch.path)
    for name in root.names(packages):
        if name.startswith(METADATA) and name.endswith(".dist-info"):
            return name.removeprefix(METADATA).removesuffix(".dist-info")
    prefix = os.path.dirname(os.path.dirname(os.path.dirname(packages)))
    return UNKNOWN if root.exists(f"{prefix}/lib/{LIBRARY}") else None


def host_name(root: Root) -> str:
    """What tells this host from others, now and after its next start. Source: machine-id(5)."""
    return (root.text("etc/machine-id") or "").strip() or (root.text("proc/sys/kernel/hostname") or "").strip()
