"""Hosts with only those facts that the conditions of profiles use."""

from typing import Any

from cpulaunch.records.host import Budget, CpuInfo, Gpu, Host, Limits, LogicalCpu, Quota

ONE = frozenset({0})


def host(
    *,
    arch: str = "x86_64",
    quota: float | None = None,
    kinds: tuple[Any, ...] = (None,),
    gpus: int = 0,
    container: bool = False,
    **cpu: Any,
) -> Host:
    """A host with one core for each of `kinds`; `cpu` are the fields of CpuInfo."""
    return Host(
        arch=arch,
        cpu=CpuInfo(**{**cpu, "isa": frozenset(cpu.get("isa", ()))}),
        cpus=tuple(LogicalCpu(id=number, core=number, socket=0, kind=kind) for number, kind in enumerate(kinds)),
        limits=Limits(
            affinity=ONE,
            quota=None if quota is None else Quota(cpus=quota, source="sys/fs/cgroup/cpu.max"),
            budget=Budget(cpus=ONE, threads=1, limited_by="affinity"),
        ),
        gpus=tuple(Gpu(index=number, vendor="nvidia", pci=f"0000:{number:02x}:00.0") for number in range(gpus)),
        container=container,
    )


AVX512 = ("avx2", "avx512f", "avx512_vnni")
AMX = (*AVX512, "amx_tile")


def xeon(model: int, *isa: str, **more: Any) -> Host:
    """An Intel host of family 6."""
    return host(vendor="GenuineIntel", family=6, model=model, isa=isa, **more)


def amd(family: int, model: int, *isa: str, **more: Any) -> Host:
    """An AMD host."""
    return host(vendor="AuthenticAMD", family=family, model=model, isa=isa, **more)


def arm(part: int, *, vendor: str = "ARM", platform: str | None = None, **more: Any) -> Host:
    """An Arm host; `platform` is the DMI system vendor."""
    return host(arch="aarch64", vendor=vendor, model=part, platform=platform, isa=("neon",), **more)
