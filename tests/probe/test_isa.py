"""Vendor, model and features from the /proc/cpuinfo of each architecture."""

from pathlib import Path

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.records.host import FEATURES, CpuInfo
from tests.roots import EPYC, XEON, ArmCpu, RootSpec, X86Cpu, host_of, write_root


def cpu_of(text: str, tmp_path: Path) -> tuple[str, CpuInfo]:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    host = probe_host(Root(str(tmp_path)), detail="launch")
    return host.arch, host.cpu


def test_xeon_with_amx() -> None:
    cpu = host_of(RootSpec(cpu=XEON)).cpu
    assert (cpu.vendor, cpu.family, cpu.model, cpu.model_name) == ("GenuineIntel", 6, 143, "Synthetic Xeon")
    assert {"avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"} <= cpu.isa
    assert cpu.isa <= set(FEATURES)


def test_epyc() -> None:
    cpu = host_of(RootSpec(cpu=EPYC)).cpu
    assert (cpu.vendor, cpu.family, cpu.model) == ("AuthenticAMD", 25, 17)
    assert cpu.isa == {"avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"}


def test_hygon_and_old_flag_names() -> None:
    cpu = host_of(RootSpec(cpu=X86Cpu(vendor="HygonGenuine", family=24, flags="avx2 avx512vnni"))).cpu
    assert cpu.vendor == "HygonGenuine"
    assert cpu.isa == {"avx2", "avx512_vnni"}


@pytest.mark.parametrize(
    ("implementer", "part", "vendor", "name"),
    [
        (0x41, 0xD0C, "ARM", "Neoverse-N1"),
        (0x41, 0xD40, "ARM", "Neoverse-V1"),
        (0x41, 0xD4F, "ARM", "Neoverse-V2"),
        (0x41, 0xD49, "ARM", "Neoverse-N2"),
        (0xC0, 0xAC3, "Ampere", "Ampere-1"),
        (0x4E, 0x010, "NVIDIA", "Olympus"),
        (0x61, 0x023, "Apple", "Firestorm (M1)"),
        (0x41, 0xABC, "ARM", "ARM part 0xabc"),
        (0x99, 0x001, "0x99", "0x99 part 0x1"),
    ],
)
def test_arm_servers(implementer: int, part: int, vendor: str, name: str) -> None:
    host = host_of(RootSpec(cpu=ArmCpu(implementer=implementer, part=part)))
    assert (host.cpu.vendor, host.cpu.family, host.cpu.model, host.cpu.model_name) == (vendor, None, part, name)
    assert host.arch == "aarch64"


def test_arm_features() -> None:
    cpu = host_of(RootSpec(cpu=ArmCpu(features="fp asimd fphp asimdhp asimddp i8mm bf16 sve sve2 sme"))).cpu
    assert cpu.isa == {"neon", "fp16", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"}
    assert "fp16" not in host_of(RootSpec(cpu=ArmCpu(features="asimd fphp"))).cpu.isa


@pytest.mark.parametrize(
    ("text", "arch", "features"),
    [
        ("processor : 0\ncpu : POWER9 (raw), altivec supported\nclock : 1MHz\nrevision : 2\n", "ppc64le", {"vsx"}),
        ("processor : 0\ncpu : POWER7 (architected)\nclock : 1MHz\nrevision : 2\n", "ppc64", {"vsx"}),
        ("processor : 0\ncpu : POWER8\u00b2\n", "ppc64le", {"vsx"}),
        ("processor : 0\ncpu : POWER\u00b2\n", "ppc64", set()),
        ("processor : 0\nisa : rv64imafdcv_zicsr\n", "riscv64", {"rvv"}),
        ("processor : 0\nisa : rv64imafdc_zve\n", "riscv64", set()),
        ("vendor_id : GenuineIntel\nflags : fpu lm avx2\n", "x86_64", {"avx2"}),
        ("vendor_id : GenuineIntel\nflags : fpu sse2\n", "i686", set()),
        ("", "unknown", set()),
    ],
)
def test_other_architectures(tmp_path: Path, text: str, arch: str, features: set[str]) -> None:
    found, cpu = cpu_of(text, tmp_path)
    assert (found, cpu.isa) == (arch, features)


def test_features_after_the_first_block(tmp_path: Path) -> None:
    text = "Processor\t: ARMv7 rev 1\n" + "processor\t: 0\nBogoMIPS\t: 1\n\n" * 200
    _, cpu = cpu_of(
        text + "Features\t: neon\nCPU implementer\t: 0x41\nCPU architecture: 7\nCPU part\t: 0xc09\n", tmp_path
    )
    assert cpu.isa == {"neon"}
    assert cpu.model_name == "ARMv7 rev 1"


def test_only_the_first_cpu_is_read(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec(cores_per_l3=64))
    whole = (root / "proc/cpuinfo").read_text()
    (root / "proc/cpuinfo").write_text(whole.replace("Synthetic Xeon", "Another", 64).replace("Another", "First", 1))
    assert probe_host(Root(str(root))).cpu.model_name == "First"


def test_the_platform_comes_from_dmi() -> None:
    assert host_of(RootSpec(files={"sys/class/dmi/id/sys_vendor": "Amazon EC2"})).cpu.platform == "Amazon EC2"
    assert host_of(RootSpec()).cpu.platform is None
