"""What a profile file may say: its keys, their types, and what they cannot mean together. Pure data and checks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from cpulaunch.profile.model import PROFILE_KINDS, Choice, Profile
from cpulaunch.records.host import FEATURES

MAX_TEXT = 500
"""Characters in a reason, a summary or a value: they are printed on one line of the plan."""


def text(value: object) -> str:
    """A line of printable text. Raises: ValueError."""
    if not isinstance(value, str):
        raise ValueError("expected a string")
    if not value.strip() or not value.isprintable() or len(value) > MAX_TEXT:
        raise ValueError(f"expected one line of printable text, at most {MAX_TEXT} characters")
    return value


def kind(value: object) -> str:
    """One of the kinds of profile. Raises: ValueError."""
    if value not in PROFILE_KINDS:
        raise ValueError("expected one of " + ", ".join(PROFILE_KINDS))
    return str(value)


def link(value: object) -> str:
    """Where a value comes from: a web address, or "measured: …" with where and how. Raises: ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/]+\.[^\s/]+(/\S*)?|measured: .+", value):
        raise ValueError('expected a link (https://…) or "measured: …"')
    return text(value)


def day(value: object) -> str:
    """A date without quotes, as text. Raises: ValueError."""
    if not isinstance(value, date) or isinstance(value, datetime):
        raise ValueError("expected a date without quotes, such as 2026-11-21")
    return value.isoformat()


def _list(value: object) -> list[Any]:
    if isinstance(value, list):
        if not value:
            raise ValueError("expected at least one")
        return value
    return [value]


def texts(value: object) -> tuple[str, ...]:
    """A string or a list of strings. Raises: ValueError."""
    return tuple(text(each) for each in _list(value))


def features(value: object) -> tuple[str, ...]:
    """Names of CPU features. Raises: ValueError."""
    names = texts(value)
    if unknown := [name for name in names if name not in FEATURES]:
        raise ValueError(f"no such feature: {unknown[0]}; known are " + ", ".join(FEATURES))
    return names


def ranges(value: object) -> tuple[tuple[int, int], ...]:
    """An integer, or a list of integers and [first, last] pairs. Raises: ValueError."""
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
"""Variables that a setting decides, so that two places cannot say two things."""

FORBIDDEN = {
    "OMP_DYNAMIC": "fewer threads than asked for make compiled kernels wrong (pytorch#168965)",
    "OMP_THREAD_LIMIT": "fewer threads than asked for make compiled kernels wrong (pytorch#168965)",
    "KMP_DUPLICATE_LIB_OK": "it hides two OpenMP runtimes in one process, which crash or give wrong results",
    "KMP_FORKJOIN_BARRIER_PATTERN": "its dist barrier hangs where threads wait passively (llvm-project#80664)",
    "KMP_PLAIN_BARRIER_PATTERN": "its dist barrier hangs where threads wait passively (llvm-project#80664)",
    "KMP_REDUCTION_BARRIER_PATTERN": "its dist barrier hangs where threads wait passively (llvm-project#80664)",
}
"""Variables no profile may set, and why; `--env` may."""

_FORBIDDEN_NAMES = re.compile(
    r"LD_.*|DYLD_.*|PYTHON.*|PATH|HOME|IFS|ENV|BASH_ENV|SHELL|CPULAUNCH_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)


def check_variable(name: str) -> None:
    """Raises: ValueError if a profile may not set this environment variable."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("not the name of an environment variable")
    if name in OWNED:
        raise ValueError(f"it belongs to the setting {OWNED[name]}: write [settings.{OWNED[name]}]")
    if name in FORBIDDEN:
        raise ValueError(FORBIDDEN[name])
    if _FORBIDDEN_NAMES.fullmatch(name):
        raise ValueError("it changes what is run or belongs to the launcher; use --env on the command line")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two things a profile cannot mean together; `path` is the key to blame."""

    path: tuple[str, ...]
    holds: Callable[[Mapping[str, Any], Profile], bool]
    why: str


def _always(profile: Profile, name: str, wanted: object) -> bool:
    """Whether every alternative of `applies` has this condition."""
    return bool(profile.applies) and all(dict(conditions).get(name) == wanted for conditions in profile.applies)


def _excludes(profile: Profile, name: str, value: str) -> bool:
    """Whether every alternative of `applies` rules a value out."""
    return bool(profile.applies) and all(
        name in dict(conditions) and value not in dict(conditions)[name] for conditions in profile.applies
    )


def _sets(variables: tuple[Choice, ...], prefix: str) -> bool:
    return any(variable.name.startswith(prefix) for variable in variables)


def _without_gpus(name: str) -> Conflict:
    return Conflict(
        path=("settings", name, "value"),
        holds=lambda chosen, profile: bool(chosen.get(name)) and _always(profile, "gpus", False),
        why="it is for machines with GPUs, and the profile applies where there are none",
    )


PINNED = ("close", "spread", "explicit")
CONFLICTS = (
    Conflict(
        path=("settings", "wait_policy", "value"),
        holds=lambda chosen, profile: chosen.get("wait_policy") == "active" and _always(profile, "quota", True),
        why="spinning threads use up the CPU quota the profile applies to",
    ),
    Conflict(
        path=("settings", "affinity", "value"),
        holds=lambda chosen, profile: chosen.get("affinity") in PINNED and _always(profile, "quota", True),
        why="a CPU quota gives no right to particular CPUs",
    ),
    Conflict(
        path=("settings", "affinity", "value"),
        holds=lambda chosen, profile: chosen.get("affinity") == "explicit" and chosen.get("binder") == "none",
        why="explicit pinning needs the worker's CPUs, and binder none leaves them open",
    ),
    Conflict(
        path=("settings", "membind", "value"),
        holds=lambda chosen, profile: (
            chosen.get("membind", "none") != "none" and chosen.get("binder") in ("taskset", "none")
        ),
        why="only the binders native and numactl place memory",
    ),
    Conflict(
        path=("settings", "mkl_dispatch", "value"),
        holds=lambda chosen, profile: (
            chosen.get("mkl_dispatch") == "on"
            and (_excludes(profile, "vendor", "AuthenticAMD") or _excludes(profile, "arch", "x86_64"))
        ),
        why="MKL chooses its kernels by itself where the CPU is not AMD's",
    ),
    Conflict(
        path=("settings", "openmp", "value"),
        holds=lambda chosen, profile: chosen.get("openmp") == "intel" and _excludes(profile, "arch", "x86_64"),
        why="Intel's OpenMP runtime exists for x86_64 only",
    ),
    Conflict(
        path=("settings", "openmp", "value"),
        holds=lambda chosen, profile: chosen.get("openmp") == "default" and _sets(profile.env, "KMP_"),
        why="torch's own OpenMP runtime reads none of the KMP_ variables the profile sets",
    ),
    Conflict(
        path=("settings", "allocator", "value"),
        holds=lambda chosen, profile: (
            chosen.get("allocator") in ("default", "tcmalloc", "mimalloc") and _sets(profile.env, "MALLOC_CONF")
        ),
        why="only jemalloc reads the MALLOC_CONF the profile sets",
    ),
    Conflict(
        path=("settings", "ipex", "value"),
        holds=lambda chosen, profile: bool(chosen.get("ipex")) and chosen.get("graph", "off") != "off",
        why="ipex.optimize and graph take care of the same modules: choose one",
    ),
    Conflict(
        path=("settings", "compile_mode", "value"),
        holds=lambda chosen, profile: "compile_mode" in chosen and chosen.get("graph") != "inductor",
        why='only torch.compile has modes: graph = "inductor" in the same profile',
    ),
    _without_gpus("pin_memory"),
    _without_gpus("cudnn_benchmark"),
)
