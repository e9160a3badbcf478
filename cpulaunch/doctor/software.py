"""The checks of torch and of the user's environment variables."""

from collections.abc import Callable
from dataclasses import dataclass

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.findings import WITH_COMPILER, Finding, Status, advice, ok, problem, skipped
from cpulaunch.doctor.torch_report import BrokenTorch, TorchFacts
from cpulaunch.plan.placement.threads import first_count
from cpulaunch.plan.plugin.checks import AUTOLOAD, plugin_missing_reason
from cpulaunch.records.host import count_text

TORCH_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


def _true(value: str) -> bool:
    return value.strip().lower() in ("true", "1", "yes", "on")


def _pins(value: str) -> bool:
    return value.strip().lower() not in ("", "false", "none", "disabled", "respect", "norespect")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hazard:
    """An environment variable that may do harm: with which values (given the threads of the budget), and why."""

    name: str
    harmful: Callable[[str, int], bool]
    status: Status
    why: str


_FORKS = "pins threads when torch is imported: forked DataLoader workers inherit a single CPU (pytorch#101850)"
_FEWER = "OpenMP may start fewer threads than requested: compiled kernels give wrong results (pytorch#168965)"
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
        why="not a number, or more threads than usable CPUs",
    ),
    _Hazard(
        name="MKL_NUM_THREADS",
        harmful=lambda value, threads: (first_count(value) or threads + 1) > threads,
        status="advice",
        why="not a number, or more threads than usable CPUs",
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
        why="torch's kernels then use only baseline vector instructions",
    ),
)


def environment(facts: Facts) -> tuple[Finding, ...]:
    """The variables of the user's environment that slow programs down or break them."""
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
    return findings or ok("no harmful variables")


def code_of_others(facts: Facts) -> tuple[Finding, ...]:
    """Whether another user can change the Python, the torch or the cpulaunch that runs programs here."""
    if not facts.live:
        return skipped("not part of a captured machine")
    if not facts.untrusted_code:
        return ok("only you and root can change the interpreter, and the files of torch and cpulaunch")
    why = "that user could run code in your programs"
    fix = "chmod go-w PATH, setfacl -b PATH where it has an ACL, or use an environment of your own"
    return tuple(Finding(status="advice", found=found, why=why, fix=fix) for found in facts.untrusted_code)


def python(facts: Facts) -> tuple[Finding, ...]:
    """Which Python runs the programs, and so has the torch that is checked."""
    if facts.python is None:
        return skipped("not part of a captured machine")
    found = f"{facts.python.path} ({facts.python.reason})"
    if not facts.python.notice:
        return ok(found)
    return advice(found, why=facts.python.notice, fix="activate the environment that has torch")


def torch(facts: Facts) -> tuple[Finding, ...]:
    """Whether torch can be imported and was built for this CPU."""
    if not facts.live:
        return skipped("torch cannot be queried on a captured machine")
    match facts.torch:
        case None:
            path = "" if facts.python is None or facts.python.origin == "default" else f"{facts.python.path} -m "
            why = "needed in this environment to run PyTorch programs"
            return advice("not installed", why=why, fix=path + TORCH_INSTALL)
        case BrokenTorch(reason=reason):
            why = "`import torch` fails: no program that needs it can start"
            return problem(reason, why=why, fix=f"{TORCH_INSTALL} --force-reinstall")
        case TorchFacts() as report:
            return (*_build(report, facts),)


def _build(report: TorchFacts, facts: Facts) -> tuple[Finding, ...]:
    parts = [report.version, report.capability]
    parts += [name for name, has in (("oneDNN", report.onednn), ("MKL", report.mkl), ("OpenMP", report.openmp)) if has]
    found = ", ".join(parts) + f", {count_text(report.threads, 'thread')}"
    lacking = [name for name, has in (("oneDNN", report.onednn), ("OpenMP", report.openmp)) if not has]
    if lacking:
        why = f"built without {' and '.join(lacking)}: matrix products and convolutions are slow or single-threaded"
        return problem(found, why=why, fix=TORCH_INSTALL)
    if report.capability == "DEFAULT" and "avx2" in facts.host.cpu.isa:
        why = "torch does not use this CPU's AVX2"
        return problem(found, why=why, fix="unset ATEN_CPU_CAPABILITY")
    return ok(found)


def plugin(facts: Facts) -> tuple[Finding, ...]:
    """Whether torch loads the plugin that applies the settings inside torch and guards forks."""
    if facts.host.torch is None:
        return skipped("no torch was found")
    missing = plugin_missing_reason(facts.host, facts.environ)
    if missing is None:
        return ok("loaded by torch: settings inside torch take effect")
    fix = "pip install cpulaunch in the environment of torch"
    if AUTOLOAD in missing:
        fix = f"unset {AUTOLOAD}"
    elif "cannot load plugins" in missing:
        fix = TORCH_INSTALL
    why = "--graph, --precision and the other settings inside torch have no effect, and forks inherit pinned CPUs"
    return advice(missing, why=why, fix=fix)


def loaded_runtimes(facts: Facts) -> tuple[Finding, ...]:
    """Whether importing torch loads two OpenMP runtimes."""
    if not isinstance(facts.torch, TorchFacts):
        return skipped("torch could not be queried")
    files = facts.torch.openmp_files
    if len(files) < 2:
        return ok(_base(files[0]) if files else "none loaded")
    preloaded = facts.environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in files):
        return ok("the preloaded runtime replaces torch's own")
    return advice(
        " and ".join(map(_base, files)),
        why="importing torch loads two OpenMP runtimes, which compete for cores; some combinations crash",
        fix="pip install --force-reinstall torch, from one source (pip or conda) only",
    )


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def mkl_on_amd(facts: Facts) -> tuple[Finding, ...]:
    """Whether MKL inside torch takes its fast path on AMD."""
    if facts.host.cpu.vendor not in ("AuthenticAMD", "HygonGenuine"):
        return ok("not needed: not an AMD CPU")
    installed = facts.host.torch
    if installed is None or not installed.mkl_dispatch_symbol:
        return ok("not needed: torch has no MKL")
    if any(library.kind == "mkl-dispatch" for library in facts.host.libraries):
        return ok("cpulaunch's dispatch library makes MKL use its fast kernels")
    return advice(
        "the dispatch library is missing",
        why="MKL uses slow kernels on AMD CPUs: fp32 products can be 2.2 times as fast at the same precision",
        fix=WITH_COMPILER,
    )


AMX_MODELS = (0x8F, 0xCF, 0xAD, 0xAE)
"""Of family 6. A virtual machine may report another model for a CPU that has AMX, so the feature counts first."""


def hidden_amx(facts: Facts) -> tuple[Finding, ...]:
    """Whether the AMX of this CPU is visible. Source: Linux, arch/x86/include/asm/intel-family.h."""
    cpu = facts.host.cpu
    if "amx_tile" in cpu.isa:
        return ok("available")
    if (cpu.vendor, cpu.family) != ("GenuineIntel", 6) or cpu.model not in AMX_MODELS:
        return ok("not a CPU with AMX")
    return advice(
        "hidden",
        why="the hypervisor or an old kernel hides AMX, without which bf16 is hardly faster",
        fix="use Linux 5.16 or newer, and a virtual machine type that exposes AMX",
    )
