"""The checks of doctor on the user's environment variables and on torch."""

from collections.abc import Callable
from dataclasses import dataclass

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.machine import WITH_COMPILER, Finding, Status, skipped
from cpulaunch.doctor.torch_report import BrokenTorch, TorchFacts
from cpulaunch.plan.placement.threads import first_count
from cpulaunch.plan.plugin.checks import AUTOLOAD, plugin_missing_reason

TORCH_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


def _true(value: str) -> bool:
    return value.strip().lower() in ("true", "1", "yes", "on")


def _pins(value: str) -> bool:
    return value.strip().lower() not in ("", "false", "none", "disabled", "respect", "norespect")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hazard:
    """A variable, the values of it that do harm (given the budget's threads), how much, and why."""

    name: str
    harmful: Callable[[str, int], bool]
    status: Status
    why: str


_FORKS = "threads are pinned while torch is imported: forked DataLoader workers inherit one CPU (pytorch#101850)"
_FEWER = "fewer threads than asked for: compiled kernels give wrong results (pytorch#168965)"
HAZARDS = (
    _Hazard(name="OMP_DYNAMIC", harmful=lambda value, _: _true(value), status="problem", why=_FEWER),
    _Hazard(
        name="OMP_THREAD_LIMIT",
        harmful=lambda value, threads: (first_count(value) or threads) < threads,
        status="problem",
        why=_FEWER,
    ),
    _Hazard(
        name="KMP_DUPLICATE_LIB_OK",
        harmful=lambda value, _: _true(value),
        status="problem",
        why="hides two OpenMP runtimes in one process, which crash or give wrong results",
    ),
    _Hazard(
        name="OMP_NUM_THREADS",
        harmful=lambda value, threads: (first_count(value) or threads + 1) > threads,
        status="advice",
        why="it is no number, or more threads than the CPUs this process may use: they take turns",
    ),
    _Hazard(
        name="MKL_NUM_THREADS",
        harmful=lambda value, threads: (first_count(value) or threads + 1) > threads,
        status="advice",
        why="it is no number, or more threads than the CPUs this process may use: they take turns",
    ),
    _Hazard(name="KMP_AFFINITY", harmful=lambda value, _: _pins(value), status="advice", why=_FORKS),
    _Hazard(name="OMP_PROC_BIND", harmful=lambda value, _: _pins(value), status="advice", why=_FORKS),
    _Hazard(
        name="GOMP_CPU_AFFINITY",
        harmful=lambda value, _: _pins(value),
        status="advice",
        why=_FORKS + "; with the pip wheel torch may also use one thread (pytorch#149422)",
    ),
    _Hazard(
        name="ATEN_CPU_CAPABILITY",
        harmful=lambda value, _: value.strip().lower() == "default",
        status="advice",
        why="torch's own kernels then use no vector instructions beyond the oldest",
    ),
)


def environment(facts: Facts) -> tuple[Finding, ...]:
    """The variables in force that slow programs down or break them."""
    if not facts.live:
        return skipped("not part of a captured machine")
    threads = facts.host.limits.budget.threads
    findings = tuple(
        Finding(
            status=hazard.status,
            found=f"{hazard.name}={facts.environ[hazard.name]}",
            why=hazard.why,
            fix=f"unset {hazard.name}",
        )
        for hazard in HAZARDS
        if hazard.name in facts.environ and hazard.harmful(facts.environ[hazard.name], threads)
    )
    return findings or (Finding(status="ok", found="no variable that does harm"),)


def torch(facts: Facts) -> tuple[Finding, ...]:
    """Whether torch imports and uses what the CPU has."""
    if not facts.live:
        return skipped("a captured machine's torch cannot be asked")
    match facts.torch:
        case None:
            return (
                Finding(status="advice", found="not installed", why="cpulaunch runs it from here", fix=TORCH_INSTALL),
            )
        case BrokenTorch(reason=reason):
            why = "`import torch` fails: no program that needs it can start"
            return (Finding(status="problem", found=reason, why=why, fix=f"{TORCH_INSTALL} --force-reinstall"),)
        case TorchFacts() as said:
            return (*_build(said, facts),)


def _build(said: TorchFacts, facts: Facts) -> tuple[Finding, ...]:
    parts = [said.version, said.capability]
    parts += [name for name, has in (("oneDNN", said.onednn), ("MKL", said.mkl), ("OpenMP", said.openmp)) if has]
    found = ", ".join(parts) + f", {said.threads} threads"
    lacking = [name for name, has in (("oneDNN", said.onednn), ("OpenMP", said.openmp)) if not has]
    if lacking:
        why = f"built without {' and '.join(lacking)}: products and convolutions are slow or use one thread"
        return (Finding(status="problem", found=found, why=why, fix=TORCH_INSTALL),)
    if said.capability == "DEFAULT" and "avx2" in facts.host.cpu.isa:
        why = "this CPU has AVX2 and torch uses none of it"
        return (Finding(status="problem", found=found, why=why, fix="unset ATEN_CPU_CAPABILITY"),)
    return (Finding(status="ok", found=found),)


def plugin(facts: Facts) -> tuple[Finding, ...]:
    """Whether torch will load cpulaunch's plugin, which applies the settings inside torch and guards forks."""
    if facts.host.torch is None:
        return skipped("no torch was found")
    missing = plugin_missing_reason(facts.host, facts.environ)
    if missing is None:
        return (Finding(status="ok", found="torch loads it: settings inside torch apply in every worker"),)
    fix = "pip install cpulaunch, into the environment of torch"
    if AUTOLOAD in missing:
        fix = f"unset {AUTOLOAD}"
    elif "loads no plugins" in missing:
        fix = TORCH_INSTALL
    why = "--graph, --precision and the others inside torch do nothing, and forks are not guarded"
    return (Finding(status="advice", found=missing, why=why, fix=fix),)


def loaded_runtimes(facts: Facts) -> tuple[Finding, ...]:
    """Whether torch itself comes up with two OpenMP runtimes."""
    if not isinstance(facts.torch, TorchFacts):
        return skipped("torch gave no answer")
    files = facts.torch.openmp_files
    if len(files) < 2:
        return (Finding(status="ok", found=_base(files[0]) if files else "none seen"),)
    preloaded = facts.environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in files):
        return (Finding(status="ok", found="the preloaded one answers for torch's own"),)
    return (
        Finding(
            status="advice",
            found=" and ".join(map(_base, files)),
            why="importing torch loads two OpenMP runtimes: each has its own threads, and some pairs crash",
            fix="pip install --force-reinstall torch, from one source (pip or conda) only",
        ),
    )


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def mkl_on_amd(facts: Facts) -> tuple[Finding, ...]:
    """Whether MKL inside torch can take its fast path on AMD."""
    if facts.host.cpu.vendor not in ("AuthenticAMD", "HygonGenuine"):
        return (Finding(status="ok", found="not an AMD CPU: MKL chooses its fast kernels by itself"),)
    installed = facts.host.torch
    if installed is None or not installed.mkl_dispatch_symbol:
        return (Finding(status="ok", found="torch brings no MKL that would need it"),)
    if any(library.kind == "mkl-dispatch" for library in facts.host.libraries):
        return (Finding(status="ok", found="cpulaunch's dispatch library makes MKL take its fast kernels"),)
    return (
        Finding(
            status="advice",
            found="the dispatch library is missing",
            why="MKL takes a slow path on AMD: fp32 products can be 2.2 times faster, at the same precision",
            fix=WITH_COMPILER,
        ),
    )


AMX_MODELS = (0x8F, 0xCF, 0xAD, 0xAE)


def hidden_amx(facts: Facts) -> tuple[Finding, ...]:
    """Whether a CPU that has AMX shows it. Source: Linux, arch/x86/include/asm/intel-family.h."""
    cpu = facts.host.cpu
    if (cpu.vendor, cpu.family) != ("GenuineIntel", 6) or cpu.model not in AMX_MODELS:
        return (Finding(status="ok", found="not a CPU with AMX"),)
    if "amx_tile" in cpu.isa:
        return (Finding(status="ok", found="available: bf16 and int8 products are several times faster"),)
    return (
        Finding(
            status="advice",
            found="hidden",
            why="this CPU has AMX and the hypervisor or an old kernel hides it: bf16 gains little without",
            fix="a kernel from 5.16 on, and a virtual machine type that passes AMX through",
        ),
    )
