"""The keys of a profile file, their checks, and combinations that conflict."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from cpulaunch.profile.model import PROFILE_KINDS, Choice, Profile
from cpulaunch.records.host import FEATURES

MAX_TEXT = 500
"""Limit on the characters of a reason, a summary or a value, which the plan prints on one line."""


def text(value: object) -> str:
    """The value as one line of printable text. Raises: ValueError."""
    if not isinstance(value, str):
        raise ValueError("expected a string")
    if not value.strip() or not value.isprintable() or len(value) > MAX_TEXT:
        raise ValueError(f"expected one line of printable text, at most {MAX_TEXT} characters")
    return value


def kind(value: object) -> str:
    """The value as a kind of profile. Raises: ValueError."""
    if value not in PROFILE_KINDS:
        raise ValueError("expected one of " + ", ".join(PROFILE_KINDS))
    return str(value)


def link(value: object) -> str:
    """The source of a value: a URL, or "measured: …" with machine and method. Raises: ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/]+\.[^\s/]+(/\S*)?|measured: .+", value):
        raise ValueError('expected a URL or "measured: …"')
    return text(value)


def day(value: object) -> str:
    """A TOML date as ISO text. Raises: ValueError."""
    if not isinstance(value, date) or isinstance(value, datetime):
        raise ValueError("expected a date without quotes, such as 2026-11-21")
    return value.isoformat()


def _list(value: object) -> list[Any]:
    if isinstance(value, list):
        if not value:
            raise ValueError("expected at least one value")
        return value
    return [value]


def texts(value: object) -> tuple[str, ...]:
    """The strings of a string or a list of strings. Raises: ValueError."""
    return tuple(text(each) for each in _list(value))


def features(value: object) -> tuple[str, ...]:
    """Names of CPU features. Raises: ValueError."""
    names = texts(value)
    if unknown := [name for name in names if name not in FEATURES]:
        raise ValueError(f"unknown feature {unknown[0]!r}; valid: " + ", ".join(FEATURES))
    return names


def ranges(value: object) -> tuple[tuple[int, int], ...]:
    """The (first, last) pairs of an integer, or of a list of integers and [first, last] pairs. Raises: ValueError."""
    return tuple(_range(each) for each in _list(value))


def _range(value: object) -> tuple[int, int]:
    match value:
        case bool():
            pass
        case int() if value >= 0:
            return value, value
        case [int() as low, int() as high] if 0 <= low <= high:
            return low, high
    raise ValueError("expected integers or [first, last] pairs, such as [0x8f, [0x30, 0x3f]]")


def flag(value: object) -> bool:
    """true or false. Raises: ValueError."""
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


TOP: Mapping[str, Callable[[object], Any]] = {"summary": text, "kind": kind, "not_for": text}
CHOICE: Mapping[str, Callable[[object], Any]] = {"reason": text, "source": link, "date": day}
PROVENANCE: Mapping[str, Callable[[object], Any]] = {
    **dict.fromkeys(
        ("tool", "program", "arguments", "options", "cpu", "cpus", "threads", "cpulaunch", "torch", "python"), text
    ),
    **dict.fromkeys(("metric", "speedup", "interval", "samples", "max_error", "note"), text),
    "date": day,
}
"""How a profile was measured, and where. All of it is text, and one line each."""
APPLIES: Mapping[str, Callable[[object], Any]] = {
    "arch": texts,
    "vendor": texts,
    "family": ranges,
    "models": ranges,
    "features": features,
    "features_absent": features,
    "platforms": texts,
    "platforms_absent": texts,
    "hybrid": flag,
    "quota": flag,
    "container": flag,
    "gpus": flag,
}

OWNED = {
    "OMP_NUM_THREADS": "threads",
    "MKL_NUM_THREADS": "threads",
    "OPENBLAS_NUM_THREADS": "threads",
    "NUMEXPR_NUM_THREADS": "threads",
    "KMP_AFFINITY": "affinity",
    "KMP_HW_SUBSET": "affinity",
    "GOMP_CPU_AFFINITY": "affinity",
    "OMP_PLACES": "affinity",
    "OMP_PROC_BIND": "affinity",
    "OMP_WAIT_POLICY": "wait_policy",
    "KMP_BLOCKTIME": "wait_policy",
    "GOMP_SPINCOUNT": "wait_policy",
    "LD_PRELOAD": "allocator",
    "THP_MEM_ALLOC_ENABLE": "huge_pages",
    "PYTHONUNBUFFERED": "buffered",
}
"""Variables that a setting controls: a profile sets the setting instead."""

FORBIDDEN = {
    "OMP_DYNAMIC": "with fewer threads than requested, compiled kernels give wrong results (pytorch#168965)",
    "OMP_THREAD_LIMIT": "with fewer threads than requested, compiled kernels give wrong results (pytorch#168965)",
    "KMP_DUPLICATE_LIB_OK": "it hides two OpenMP runtimes in one process, which can crash or give wrong results",
    "KMP_FORKJOIN_BARRIER_PATTERN": "its 'dist' barrier hangs with passive waiting (llvm-project#80664)",
    "KMP_PLAIN_BARRIER_PATTERN": "its 'dist' barrier hangs with passive waiting (llvm-project#80664)",
    "KMP_REDUCTION_BARRIER_PATTERN": "its 'dist' barrier hangs with passive waiting (llvm-project#80664)",
}
"""Variables that no profile may set, only `--env`, and why."""

ALLOWED = re.compile(
    r"OMP_(SCHEDULE|STACKSIZE|NESTED|MAX_ACTIVE_LEVELS|CANCELLATION|MAX_TASK_PRIORITY|DISPLAY_ENV)"
    r"|KMP_(STACKSIZE|LIBRARY|TPAUSE|USE_YIELD|SETTINGS|WARNINGS|TASKING|LOCK_KIND|ALIGN_ALLOC|INIT_AT_FORK|NESTING_MODE"
    r"|DETERMINISTIC_REDUCTION|FORCE_REDUCTION|HOT_TEAMS_(MODE|MAX_LEVEL)|ENABLE_TASK_THROTTLING|USER_LEVEL_MWAIT"
    r"|SPIN_BACKOFF_PARAMS|TASK_STEALING_CONSTRAINT|DISP_NUM_BUFFERS)"
    r"|GOMP_STACKSIZE|OPENBLAS_(CORETYPE|MAIN_FREE)"
    r"|MKL_(ENABLE_INSTRUCTIONS|CBWR|DYNAMIC|DOMAIN_NUM_THREADS|NUM_STRIPES|FAST_MEMORY_LIMIT|DISABLE_FAST_MM|VERBOSE)"
    r"|(DNNL|ONEDNN)_(PRIMITIVE_CACHE_CAPACITY|DEFAULT_FPMATH_MODE|MAX_CPU_ISA|CPU_ISA_HINTS|VERBOSE)"
    r"|ZENDNN_(MATMUL_ALGO|PRIMITIVE_CACHE_CAPACITY|WEIGHT_CACHING|TENSOR_POOL_LIMIT)"
    r"|LRU_CACHE_CAPACITY|ATEN_CPU_CAPABILITY|TORCH_MKLDNN_MATMUL_MIN_DIM|TOKENIZERS_PARALLELISM"
    r"|TORCHINDUCTOR_(FREEZING|CPP_WRAPPER|MAX_AUTOTUNE|MAX_AUTOTUNE_GEMM|COMPILE_THREADS|CPP_MIN_CHUNK_SIZE)"
    r"|MALLOC_(CONF|ARENA_MAX|TRIM_THRESHOLD_|TOP_PAD_|MMAP_THRESHOLD_|MMAP_MAX_)"
    r"|TCMALLOC_(MAX_TOTAL_THREAD_CACHE_BYTES|RELEASE_RATE|AGGRESSIVE_DECOMMIT|LARGE_ALLOC_REPORT_THRESHOLD)"
    r"|MIMALLOC_[A-Z_]+"
    r"|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|CUDA_(DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|CUBLAS_WORKSPACE_CONFIG"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
)
"""Variables that a profile may set: they tune threads, kernels and allocators. None names a file, a library, a command
or a network interface, so a profile from elsewhere cannot choose which code runs, what is written, or who listens."""

NOT_ALLOWED = (
    "it is not one of the tuning variables that docs/profiles.md lists, and others may change which code runs; "
    "give it on the command line: --env {name}=VALUE"
)


def check_variable(name: str) -> None:
    """Raises: ValueError if a profile may not set this environment variable."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("not the name of an environment variable")
    if name in OWNED:
        raise ValueError(f"use [settings.{OWNED[name]}] instead")
    if name in FORBIDDEN:
        raise ValueError(FORBIDDEN[name])
    if not ALLOWED.fullmatch(name):
        raise ValueError(NOT_ALLOWED.format(name=name))


def variable_value(name: str) -> Callable[[object], str]:
    """The check of the value of an environment variable in a profile."""
    return malloc_conf if name == "MALLOC_CONF" else text


def malloc_conf(value: object) -> str:
    """jemalloc's options, without those of its profiler, which writes files of any name. Raises: ValueError."""
    options = text(value)
    if any(option.strip().startswith("prof") for option in options.split(",")):
        raise ValueError("jemalloc's profiler writes files; give it on the command line: --env MALLOC_CONF=VALUE")
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A combination of values that conflicts; `path` is the key that the error names."""

    path: tuple[str, ...]
    applies: Callable[[Mapping[str, Any], Profile], bool]
    reason: str


def _always(profile: Profile, name: str, wanted: object) -> bool:
    """Whether every alternative of `applies` requires this value."""
    return bool(profile.applies) and all(dict(conditions).get(name) == wanted for conditions in profile.applies)


def _excludes(profile: Profile, name: str, value: str) -> bool:
    """Whether every alternative of `applies` excludes this value."""
    return bool(profile.applies) and all(
        name in dict(conditions) and value not in dict(conditions)[name] for conditions in profile.applies
    )


def _sets(variables: tuple[Choice, ...], prefix: str) -> bool:
    return any(variable.name.startswith(prefix) for variable in variables)


def _without_gpus(name: str) -> Conflict:
    return Conflict(
        path=("settings", name, "value"),
        applies=lambda chosen, profile: bool(chosen.get(name)) and _always(profile, "gpus", False),
        reason="it needs a GPU, but the profile applies to machines without one",
    )


def _keeps_weights(chosen: Mapping[str, Any]) -> bool:
    return chosen.get("weights") is not None or chosen.get("optimize", 1) > 1


def _captures(chosen: Mapping[str, Any]) -> bool:
    return bool(chosen.get("graph", "onednn" if chosen.get("optimize", 1) > 1 else "off") != "off")


PINNED = ("close", "spread", "explicit")
CONFLICTS = (
    Conflict(
        path=("settings", "wait_policy", "value"),
        applies=lambda chosen, profile: chosen.get("wait_policy") == "active" and _always(profile, "quota", True),
        reason="spinning threads would use up the CPU quota",
    ),
    Conflict(
        path=("settings", "affinity", "value"),
        applies=lambda chosen, profile: chosen.get("affinity") in PINNED and _always(profile, "quota", True),
        reason="a CPU quota does not reserve particular CPUs",
    ),
    Conflict(
        path=("settings", "affinity", "value"),
        applies=lambda chosen, profile: chosen.get("affinity") == "explicit" and chosen.get("binder") == "none",
        reason="explicit pinning needs bound workers, but binder is none",
    ),
    Conflict(
        path=("settings", "membind", "value"),
        applies=lambda chosen, profile: (
            chosen.get("membind", "none") != "none" and chosen.get("binder") in ("taskset", "none")
        ),
        reason="only the binders native and numactl place memory",
    ),
    Conflict(
        path=("settings", "mkl_dispatch", "value"),
        applies=lambda chosen, profile: (
            chosen.get("mkl_dispatch") == "on"
            and (_excludes(profile, "vendor", "AuthenticAMD") or _excludes(profile, "arch", "x86_64"))
        ),
        reason="on CPUs other than AMD's, MKL chooses its fast kernels by itself",
    ),
    Conflict(
        path=("settings", "openmp", "value"),
        applies=lambda chosen, profile: chosen.get("openmp") == "intel" and _excludes(profile, "arch", "x86_64"),
        reason="Intel's OpenMP runtime exists for x86_64 only",
    ),
    Conflict(
        path=("settings", "openmp", "value"),
        applies=lambda chosen, profile: chosen.get("openmp") == "default" and _sets(profile.env, "KMP_"),
        reason="torch's own OpenMP runtime ignores the KMP_ variables of the profile",
    ),
    Conflict(
        path=("settings", "allocator", "value"),
        applies=lambda chosen, profile: (
            chosen.get("allocator") in ("default", "tcmalloc", "mimalloc") and _sets(profile.env, "MALLOC_CONF")
        ),
        reason="only jemalloc reads the MALLOC_CONF of the profile",
    ),
    Conflict(
        path=("settings", "ipex", "value"),
        applies=lambda chosen, profile: bool(chosen.get("ipex")) and chosen.get("graph", "off") != "off",
        reason="ipex and graph both replace modules: set one of them",
    ),
    Conflict(
        path=("settings", "ipex", "value"),
        applies=lambda chosen, profile: bool(chosen.get("ipex")) and chosen.get("weights") is not None,
        reason="ipex and weights both replace modules: set one of them",
    ),
    Conflict(
        path=("settings", "release_weights", "value"),
        applies=lambda chosen, profile: bool(chosen.get("release_weights")) and not _keeps_weights(chosen),
        reason="there is nothing to release: set weights, or optimize = 2, in the same profile",
    ),
    Conflict(
        path=("settings", "graph_budget", "value"),
        applies=lambda chosen, profile: "graph_budget" in chosen and not _captures(chosen),
        reason="nothing is captured: set graph, or optimize = 2, in the same profile",
    ),
    Conflict(
        path=("settings", "compile_mode", "value"),
        applies=lambda chosen, profile: "compile_mode" in chosen and chosen.get("graph") != "inductor",
        reason='compile_mode needs graph = "inductor" in the same profile',
    ),
    _without_gpus("pin_memory"),
    _without_gpus("cudnn_benchmark"),
)
