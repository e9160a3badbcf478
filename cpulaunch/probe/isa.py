"""The CPU: vendor, model, and those of its instruction sets that torch uses.

Source: /proc/cpuinfo. The names of its x86 and Arm flags are explained in the kernel
(arch/x86/include/asm/cpufeatures.h, Documentation/arch/arm64/elf_hwcaps.rst).
"""

from __future__ import annotations

from cpulaunch.probe.arm_parts import IMPLEMENTERS, PARTS
from cpulaunch.records.host import FEATURES, CpuInfo
from cpulaunch.system.root import Root, natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_BLOCK = 1 << 12
WHOLE_FILE = 1 << 16
FLAG_KEYS = ("flags", "Features", "features", "isa")
MODEL_NAME_KEYS = ("model name", "Model Name", "cpu model", "Processor", "uarch", "cpu")
VENDOR_KEYS = ("vendor_id", "vendor")
ALIASES = {"asimd": "neon", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16"}


def read_cpu_info(root: Root) -> CpuInfo:
    """Vendor, model and features of the first CPU that /proc/cpuinfo lists."""
    entries = _entries(root)
    implementer = _integer(entries, "CPU implementer")
    part = _integer(entries, "CPU part")
    model = _integer(entries, "model") if part is None else part
    return CpuInfo(
        vendor=_vendor(entries, implementer),
        model_name=_model_name(entries, implementer, part),
        family=_integer(entries, "cpu family", "family"),
        model=model,
        isa=_features(entries),
        platform=root.text("sys/class/dmi/id/sys_vendor"),
    )


def read_arch(root: Root) -> str:
    """The machine's architecture as `uname -m` names it; "unknown" if nothing says.

    Source: /proc/sys/kernel/arch (Linux 6.1); before that it is inferred from /proc/cpuinfo.
    """
    text = root.text("proc/sys/kernel/arch")
    return text if text is not None else _inferred_arch(_entries(root))


def _entries(root: Root) -> dict[str, str]:
    """The first value of each key. One CPU's block is enough: the kernel needs about 1 ms for each."""
    data = root.bytes("proc/cpuinfo", limit=FIRST_BLOCK) or b""
    entries = _parse(data)
    if len(data) == FIRST_BLOCK and not (b"\n\n" in data and any(key in entries for key in FLAG_KEYS)):
        entries = _parse(root.bytes("proc/cpuinfo", limit=WHOLE_FILE) or b"")
    return entries


def _parse(data: bytes) -> dict[str, str]:
    entries: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        key, colon, value = line.partition(":")
        if colon and value.strip():
            entries.setdefault(key.strip(), value.strip())
    return entries


def _integer(entries: dict[str, str], *keys: str) -> int | None:
    for key in keys:
        try:
            return int(entries[key], 0)
        except (KeyError, ValueError):
            continue
    return None


def _first(entries: dict[str, str], keys: tuple[str, ...]) -> str | None:
    return next((" ".join(entries[key].split()) for key in keys if key in entries), None)


def _vendor(entries: dict[str, str], implementer: int | None) -> str | None:
    if implementer is None:
        return _first(entries, VENDOR_KEYS)
    return IMPLEMENTERS.get(implementer, f"{implementer:#x}")


def _model_name(entries: dict[str, str], implementer: int | None, part: int | None) -> str | None:
    written = _first(entries, MODEL_NAME_KEYS)
    if written is not None or implementer is None or part is None:
        return written
    return PARTS.get((implementer, part), f"{_vendor(entries, implementer)} part {part:#x}")


def _features(entries: dict[str, str]) -> frozenset[str]:
    found = set(features_of((_first(entries, ("flags", "Features", "features")) or "").split()))
    if _power_generation(entries) >= 7:
        found.add("vsx")
    if "v" in entries.get("isa", "").partition("_")[0].removeprefix("rv"):
        found.add("rvv")
    return frozenset(found)


def features_of(flags: Iterable[str]) -> frozenset[str]:
    """Those of FEATURES that a processor with these flags, named as by Linux or py-cpuinfo, has."""
    found = {ALIASES.get(flag, flag) for flag in flags}
    if {"fphp", "asimdhp"} <= found:
        found.add("fp16")
    return frozenset(FEATURES) & found


def _power_generation(entries: dict[str, str]) -> int:
    """8 for "POWER8E (raw), altivec supported"; 0 for other processors."""
    name = entries.get("cpu", "")
    digits = name.removeprefix("POWER")[:2] if name.startswith("POWER") else ""
    return natural(digits) or natural(digits[:1]) or 0


def _inferred_arch(entries: dict[str, str]) -> str:
    flags = (_first(entries, ("flags",)) or "").split()
    architecture = entries.get("CPU architecture", "")
    rules = (
        ("x86_64", "lm" in flags or "avx2" in flags),
        ("i686", bool(flags)),
        ("aarch64", architecture in ("8", "9", "AArch64")),
        ("armv7l", bool(architecture)),
        ("ppc64le", _power_generation(entries) >= 8),
        ("ppc64", entries.get("cpu", "").startswith(("POWER", "Cell"))),
        ("ppc", "clock" in entries and "revision" in entries),
        ("riscv64", entries.get("isa", "").startswith("rv64")),
        ("loongarch64", "loongarch64" in entries.get("ISA", "")),
        ("ia64", entries.get("arch") == "IA-64"),
        ("s390x", entries.get("vendor_id") == "IBM/S390"),
        ("sparc64", entries.get("type", "").startswith("sun4")),
        ("alpha", entries.get("cpu") == "Alpha"),
    )
    return next((arch for arch, applies in rules if applies), "unknown")
