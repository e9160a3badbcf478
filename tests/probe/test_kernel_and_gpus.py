"""Kernel settings and GPUs, from their files."""

import sys
from pathlib import Path

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.records.errors import ProbeError
from cpulaunch.records.host import Gpu
from tests.roots import RootSpec, host_of, write_root

CPU = "sys/devices/system/cpu"


def test_kernel_settings() -> None:
    kernel = host_of(
        RootSpec(
            files={
                "proc/sys/kernel/osrelease": "6.8.0-test",
                "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never",
                "proc/sys/kernel/numa_balancing": "0",
                f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
                f"{CPU}/smt/control": "forceoff",
                f"{CPU}/isolated": "2-3",
            }
        )
    ).kernel
    assert (kernel.release, kernel.transparent_hugepage, kernel.numa_balancing) == ("6.8.0-test", "always", False)
    assert (kernel.governor, kernel.smt, kernel.isolated_cpus) == ("powersave", "forceoff", {2, 3})


def test_a_captured_machine_has_no_facts_of_this_process() -> None:
    kernel = host_of(RootSpec()).kernel
    assert (kernel.mempolicy, kernel.page_bytes, kernel.governor, kernel.release) == ("unknown", None, None, None)
    assert host_of(RootSpec()).shm_free_bytes is None


@pytest.mark.skipif(sys.platform != "linux", reason="memory policies are Linux's")
def test_trying_memory_policies_changes_nothing() -> None:
    before = Path("/proc/self/numa_maps").read_text().split()[1] if Path("/proc/self/numa_maps").exists() else None
    kernel = probe_host(Root()).kernel
    assert kernel.mempolicy in ("permitted", "denied")
    assert probe_host(Root(), detail="launch").kernel.mempolicy == "unknown"
    if before is not None:
        assert Path("/proc/self/numa_maps").read_text().split()[1] == before


def device(address: str, **files: str) -> dict[str, str]:
    return {f"sys/bus/pci/devices/{address}/{name}": text for name, text in files.items()}


DEVICES = {
    **device("0000:00:02.0", **{"class": "0x030000", "vendor": "0x8086"}),
    **device("0000:00:1f.6", **{"class": "0x020000", "vendor": "0x8086"}),
    **device("0000:03:00.0", **{"class": "0x030000", "vendor": "0x1a03"}),
    **device("0000:17:00.0", **{"class": "0x030200", "vendor": "0x10de", "numa_node": "0", "local_cpulist": "0-3"}),
    **device("0000:4d:00.0", **{"class": "0x038000", "vendor": "0x8086", "numa_node": "-1", "local_cpus": "f"}),
    **device("0000:af:00.0", **{"class": "0x120000", "vendor": "0x1002", "numa_node": "1", "local_cpulist": "4-7"}),
    **device("0000:d8:00.0", **{"class": "0x120000", "vendor": "0x8086"}),
    **device("10000:01:00.0", **{"class": "0x030000", "vendor": "0x8086"}),
}


def test_board_and_integrated_graphics_are_not_listed() -> None:
    information = {"proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t H100\nGPU UUID: \t GPU-1234\n"}
    assert host_of(RootSpec(files=DEVICES | information)).gpus == (
        Gpu(
            index=0,
            vendor="nvidia",
            pci="0000:17:00.0",
            uuid="GPU-1234",
            model="H100",
            numa_node=0,
            cpus=frozenset(range(4)),
        ),
        Gpu(index=1, vendor="intel", pci="0000:4d:00.0", cpus=frozenset(range(4))),
        Gpu(index=2, vendor="amd", pci="0000:af:00.0", numa_node=1, cpus=frozenset(range(4, 8))),
        Gpu(index=3, vendor="intel", pci="10000:01:00.0"),
    )


def test_gpus_are_found_through_sysfs_links(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec())
    target = root / "sys/devices/pci0000:17/0000:17:00.0"
    target.mkdir(parents=True)
    (target / "class").write_text("0x030200\n")
    (target / "vendor").write_text("0x10de\n")
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:17:00.0").symlink_to("../../../devices/pci0000:17/0000:17:00.0")
    assert [gpu.pci for gpu in probe_host(Root(str(root))).gpus] == ["0000:17:00.0"]


def test_a_malformed_pci_class_is_named(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec(files=device("0000:17:00.0", **{"class": "display"})))
    with pytest.raises(ProbeError, match="hexadecimal"):
        probe_host(Root(str(root)))


@pytest.mark.parametrize(("driver", "found"), [("nvidia", 4), ("amdgpu", 4), ("xe", 4), ("i915", 4), ("ast", 0)])
def test_a_launch_looks_for_gpus_only_where_a_driver_is_loaded(driver: str, found: int) -> None:
    files = DEVICES | {f"sys/bus/pci/drivers/{driver}/bind": ""}
    assert len(host_of(RootSpec(files=files), detail="launch").gpus) == found
