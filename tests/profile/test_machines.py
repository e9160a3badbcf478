"""The presets that `auto` selects on captured and synthetic machines."""

import re
import tarfile

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.profile.model import matches, specificity
from cpulaunch.profile.selection import chosen_layers, presets
from tests.probe.captured import hwloc_machines
from tests.roots import ArmCpu, RootSpec, X86Cpu, host_of

CAPTURED = {
    "32intel64-2p8co2t+8ve": "xeon-skylake",
    "fakeheterocpunuma": "hybrid-desktop",
    "5intel64-hybrid-lakefield": "hybrid-desktop",
}
"""No preset applies to the other machines."""

EC2 = {"sys/class/dmi/id/sys_vendor": "Amazon EC2"}
NVIDIA = {"sys/class/dmi/id/sys_vendor": "NVIDIA"}
GPU = {
    "sys/bus/pci/devices/0000:17:00.0/class": "0x030200",
    "sys/bus/pci/devices/0000:17:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:17:00.0/numa_node": "0",
}
TURIN = X86Cpu(vendor="AuthenticAMD", family=26, model=2, flags="fpu avx2 avx512f avx512_vnni avx512_bf16")
SYNTHETIC = {
    "sapphire rapids": (RootSpec(sockets=2), "xeon-amx"),
    "turin": (RootSpec(cpu=TURIN, l3_per_numa=4), "epyc-zen5"),
    "turin in a pod": (RootSpec(cpu=TURIN, cgroup="v2", quota_cpus=1.5), "container,epyc-zen5"),
    "ice lake": (RootSpec(cpu=X86Cpu(model=106, flags="avx2 avx512f avx512_vnni")), "xeon-icelake"),
    "laptop": (RootSpec(cpu=X86Cpu(model=0x9A, flags="avx2"), smt=2, efficiency_cores=4), "hybrid-desktop"),
    "graviton 4": (RootSpec(cpu=ArmCpu(), files=EC2), "graviton4"),
    "graviton 2": (RootSpec(cpu=ArmCpu(part=0xD0C, features="fp asimd"), files=EC2), "graviton2"),
    "grace": (RootSpec(cpu=ArmCpu(), files=NVIDIA, memory_only=1), "grace"),
    "ampere one": (RootSpec(cpu=ArmCpu(implementer=0xC0, part=0xAC3), files=NVIDIA), "ampere"),
    "arm of unknown make": (RootSpec(cpu=ArmCpu()), None),
    "GPU node": (RootSpec(sockets=2, files=GPU), "gpu-node,xeon-amx"),
}


def assert_picked(host, label):
    assert chosen_layers(("auto",), host, config_dir=None)[1] == label
    counts = [specificity(preset, host) for preset in presets() if preset.kind == "server" and matches(preset, host)]
    assert not counts or counts.count(max(counts)) == 1


NEEDED = re.compile(
    r"/proc/(cpuinfo|sys|self|meminfo)|/sys/devices/(cpu_|system/cpu/(\w+$|cpu\d+/(online|cpu_capacity|cpufreq$|topology/)|cpufreq/policy\d+/base_frequency))|/dmi/"
)
"""The only files to unpack: unpacking all would take most of the time of these tests."""


def unpack_needed(machine, target):
    with tarfile.open(machine["path"]) as archive:
        members = [member for member in archive if NEEDED.search(member.name)]
        archive.extractall(target, members=members, filter="tar")
    return target / machine["root"]


@pytest.mark.parametrize("machine", hwloc_machines(), ids=lambda machine: machine["id"])
def test_captured(machine, tmp_path):
    assert_picked(probe_host(Root(str(unpack_needed(machine, tmp_path)))), CAPTURED.get(machine["id"]))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic(name):
    spec, label = SYNTHETIC[name]
    assert_picked(host_of(spec), label)
