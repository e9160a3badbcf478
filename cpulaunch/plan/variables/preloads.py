"""Which libraries a worker starts with: one OpenMP runtime, one allocator, MKL's dispatch; after a trial start."""

from __future__ import annotations

from cpulaunch.plan.variables.openmp import Runtime
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, Library
from cpulaunch.records.plan import Note, PreloadCandidate, PreloadKind
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest, Origin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

Allocator: TypeAlias = 'Literal["default", "tcmalloc", "jemalloc", "mimalloc"]'
Trials: TypeAlias = "Mapping[str, str | None]"
"""Library path -> None if the worker's interpreter started with it, else the reason."""

ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")
X86 = ("x86_64", "AMD64")
X86_ONLY = ("intel", "mkl-dispatch")
MKL_VENDORS = frozenset(("AuthenticAMD", "HygonGenuine"))
INSTALL = {
    "tcmalloc": "apt install libtcmalloc-minimal4",
    "jemalloc": "apt install libjemalloc2",
    "mimalloc": "apt install libmimalloc2.0",
    "intel": "pip install intel-openmp",
    "llvm": "apt install libomp5",
    "mkl-dispatch": "install a C compiler, then pip install --force-reinstall cpulaunch",
}
_MARKS: tuple[tuple[str, PreloadKind, str], ...] = (
    ("libtcmalloc", "allocator", "tcmalloc"),
    ("libjemalloc", "allocator", "jemalloc"),
    ("libmimalloc", "allocator", "mimalloc"),
    ("libiomp5", "openmp", "intel"),
    ("libomp", "openmp", "llvm"),
    ("libgomp", "openmp", "gnu"),
)


@record
class Preloads:
    """The preload list (None: leave LD_PRELOAD alone), what it brings, and who chose what and why."""

    ld_preload: str | None
    origin: Origin
    reason: str
    runtime: Runtime
    allocator: str
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]


@record(kw_only=False)
class _Wanted:
    """What to preload of one kind, best first; `reason` says why nothing or why this."""

    kind: PreloadKind
    setting: str
    names: tuple[str, ...]
    origin: Origin
    reason: str
    required: bool = False
    warning: str | None = None


def users_preloads(request: LaunchRequest) -> dict[PreloadKind, str]:
    """The kinds of library that the user's own LD_PRELOAD already brings, by their names."""
    found: dict[PreloadKind, str] = {}
    for path in _users_list(request):
        base = path.rpartition("/")[2]
        for mark, kind, name in _MARKS:
            if base.startswith(mark):
                found.setdefault(kind, name)
                break
    return found


def _users_list(request: LaunchRequest) -> list[str]:
    text = dict(request.settings.env).get("LD_PRELOAD", request.environ.get("LD_PRELOAD", ""))
    return text.replace(":", " ").split()


def preload_candidates(host: Host, request: LaunchRequest) -> tuple[PreloadCandidate, ...]:
    """Libraries to try, in order of preference within each kind; the first of a kind that starts is used.

    Raises: UsageError if a library is asked for by name that is not installed or not to be trusted.
    """
    return tuple(candidate for wanted in _all_wanted(host, request) for candidate in _candidates(host, wanted))


def choose_preloads(host: Host, request: LaunchRequest, trials: Trials | None) -> Preloads:
    """The libraries of the plan. `trials` None: nothing was tried, so the first of each kind is named.

    Raises: UsageError if a library asked for by name is missing, not to be trusted, or failed its trial.
    """
    chosen: list[str] = []
    origins: list[Origin] = []
    names: dict[PreloadKind, str] = {}
    notes: list[Note] = []
    warnings: list[str] = []
    for wanted in _all_wanted(host, request):
        candidate, why = _first_that_starts(_candidates(host, wanted), trials)
        reason = "; ".join(filter(None, (wanted.reason, *why, _missing(host, wanted, candidate))))
        if candidate is not None:
            chosen.append(candidate.path)
            origins.append(wanted.origin)
            names[wanted.kind] = candidate.name
            reason += f"; {candidate.path}" + ("" if trials is not None else " (not tried)")
        value = candidate.name if candidate else "off" if wanted.kind == "mkl-dispatch" else "default"
        notes.append(Note(setting=wanted.setting, value=value, origin=wanted.origin, reason=reason.lstrip("; ")))
        warnings.extend(_passed_over(host, wanted, candidate) if wanted.warning is None else (wanted.warning,))
    users = users_preloads(request)
    own = "your own list, then " if _users_list(request) else ""
    runtime = names.get("openmp") or users.get("openmp")
    first = [] if runtime else _torch_runtime(host)
    return Preloads(
        ld_preload=":".join(dict.fromkeys([*first, *_users_list(request), *chosen])) if chosen else None,
        origin=next((origin for origin in origins if origin != "default"), "default"),
        reason=f"{own}the libraries chosen above",
        runtime=_runtime(host, runtime),
        allocator=names.get("allocator") or users.get("allocator") or "default",
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _all_wanted(host: Host, request: LaunchRequest) -> tuple[_Wanted, ...]:
    return (_openmp(host, request), _allocator(host, request), _mkl_dispatch(host, request))


def _asked(host: Host, request: LaunchRequest, kind: PreloadKind, setting: str) -> _Wanted | None:
    """What decides a kind before `auto` does: the user's own preload, "default", or a name."""
    value: str = getattr(request.settings, setting)
    origin = request.origin(setting)
    why = request.reasons.get(setting, f"--{setting} {value}" if origin == "cli" else "")
    users = users_preloads(request).get(kind)
    if users is not None:
        reason = f"your LD_PRELOAD brings {users}, and one is enough"
        ignored = f"--{setting} {value} is not applied: your LD_PRELOAD brings {users}"
        refused = origin == "cli" and value not in ("auto", "default", users)
        return _Wanted(kind, setting, (), "environment", reason, warning=ignored if refused else None)
    if value == "default":
        return _Wanted(kind, setting, (), origin, why)
    if not host.can_bind:
        return _Wanted(kind, setting, (), "default", "preloads are a matter of Linux")
    if value != "auto":
        return _Wanted(kind, setting, (value,), origin, why, required=origin == "cli")
    if request.program is not None and request.program.kind == "command":
        return _Wanted(kind, setting, (), "default", "a preload would reach every program that the command starts")
    return None


def _openmp(host: Host, request: LaunchRequest) -> _Wanted:
    asked = _asked(host, request, "openmp", "openmp")
    if asked is not None:
        return _or_else(asked, ("intel",) if host.arch in X86 else ())
    if host.arch not in X86:
        return _Wanted("openmp", "openmp", (), "default", f"torch's own runtime is the tested one on {host.arch}")
    bundled = "" if host.torch is None else host.torch.bundled_openmp or ""
    if "libiomp5" in bundled:
        return _Wanted("openmp", "openmp", (), "default", "torch brings Intel's runtime")
    return _Wanted("openmp", "openmp", ("intel",), "default", "short waits, less overhead in small operations")


def _allocator(host: Host, request: LaunchRequest) -> _Wanted:
    asked = _asked(host, request, "allocator", "allocator")
    if asked is None:
        return _Wanted("allocator", "allocator", ALLOCATORS, "default", "tensors are allocated and freed all the time")
    return _or_else(asked, ALLOCATORS)


def _or_else(asked: _Wanted, others: tuple[str, ...]) -> _Wanted:
    """What a profile prefers, then the others: only the command line insists."""
    if asked.required or not asked.names:
        return asked
    names = tuple(dict.fromkeys(asked.names + others))
    return _Wanted(asked.kind, asked.setting, names, asked.origin, asked.reason)


def _mkl_dispatch(host: Host, request: LaunchRequest) -> _Wanted:
    value, origin = request.settings.mkl_dispatch, request.origin("mkl_dispatch")

    def wanted(reason: str, *, use: bool = False, warning: str | None = None) -> _Wanted:
        names = ("mkl-dispatch",) if use else ()
        required = use and value == "on" and origin == "cli"
        return _Wanted("mkl-dispatch", "mkl_dispatch", names, origin, reason, required=required, warning=warning)

    if value == "off":
        return wanted(request.reasons.get("mkl_dispatch", "--mkl-dispatch off"))
    if value == "on":
        absent = host.torch is not None and not host.torch.mkl_dispatch_symbol
        useless = "--mkl-dispatch on has no effect: this torch does not ask MKL's dispatch" if absent else None
        return wanted(request.reasons.get("mkl_dispatch", "--mkl-dispatch on"), use=True, warning=useless)
    if host.cpu.vendor not in MKL_VENDORS:
        return wanted(_fast_already(host))
    if request.program is not None and request.program.kind == "command":
        return wanted("a preload would reach every program that the command starts")
    if host.torch is None or not host.torch.mkl_dispatch_symbol:
        return wanted("no torch with MKL was found, so there is nothing to dispatch")
    return wanted("MKL takes a slow path on this vendor's CPUs unless told otherwise; same precision", use=True)


def _fast_already(host: Host) -> str:
    if host.arch not in X86:
        return f"MKL is not used on {host.arch}"
    return "MKL already takes its fast kernels on " + ("Intel" if host.cpu.vendor == "GenuineIntel" else "this CPU")


def _candidates(host: Host, wanted: _Wanted) -> tuple[PreloadCandidate, ...]:
    found = _found(host, wanted)
    usable = [library for library in found if _distrust(library) is None]
    if wanted.required and not usable:
        raise _unavailable(host, wanted, found)
    return tuple(
        PreloadCandidate(kind=wanted.kind, name=library.name, path=library.path, required=wanted.required)
        for library in usable
    )


def _found(host: Host, wanted: _Wanted) -> list[Library]:
    """What is on the machine of it, best first, usable or not."""
    return [library for name in wanted.names for library in host.libraries if _matches(library, wanted, name)]


def _matches(library: Library, wanted: _Wanted, name: str) -> bool:
    return library.kind == wanted.kind and (library.name == name or wanted.kind == "mkl-dispatch")


def _distrust(library: Library) -> str | None:
    """Why a library cannot be preloaded. The loader splits LD_PRELOAD at spaces and colons (man 8 ld.so)."""
    if _splits(library.path):
        return f"{library.path}: the loader cannot preload a path with spaces or colons"
    return None if library.untrusted is None else f"{library.path}: {library.untrusted}"


def _splits(path: str) -> bool:
    return any(character in path for character in " :\t\n")


def _unavailable(host: Host, wanted: _Wanted, found: list[Library]) -> UsageError:
    name = wanted.names[0]
    flag = "--" + wanted.setting.replace("_", "-")
    if name in X86_ONLY and host.arch not in X86:
        return UsageError(f"{name} exists for x86_64 only", value=host.arch, source=flag, hint=f"leave {flag} out")
    if found:
        return UsageError(
            f"{name} cannot be preloaded safely", value=_distrust(found[0]), source=flag, hint=INSTALL[name]
        )
    return UsageError(f"{name} is not installed", value=name, source=flag, hint=INSTALL[name])


def _first_that_starts(
    candidates: tuple[PreloadCandidate, ...], trials: Trials | None
) -> tuple[PreloadCandidate | None, list[str]]:
    """The first candidate whose trial passed, and why those before it are not used."""
    refused: list[str] = []
    for candidate in candidates:
        failure = None if trials is None else trials.get(candidate.path, "no trial start was made")
        if failure is None:
            return candidate, refused
        if candidate.required:
            raise UsageError(
                f"a Python start with {candidate.name} preloaded fails",
                value=failure,
                source=candidate.path,
                hint="choose another, or leave the option out",
            )
        refused.append(f"{candidate.path} not used: {failure}")
    return None, refused


def _missing(host: Host, wanted: _Wanted, candidate: PreloadCandidate | None) -> str:
    """What to install if nothing of the wanted kind is on the machine."""
    if candidate is not None or not wanted.names or _found(host, wanted):
        return ""
    return f"none found: {INSTALL[wanted.names[0]]}"


def _passed_over(host: Host, wanted: _Wanted, chosen: PreloadCandidate | None) -> tuple[str, ...]:
    """A warning for each library that would have come before the chosen one and is not to be trusted."""
    warnings = []
    for library in _found(host, wanted):
        if chosen is not None and library.path == chosen.path:
            break
        if (reason := _distrust(library)) is not None:
            warnings.append(f"not preloaded: {reason}")
    return tuple(warnings)


def _runtime(host: Host, name: str | None) -> Runtime:
    """The OpenMP runtime a worker will have: a preloaded one, else torch's own."""
    if name is None and host.torch is not None and host.torch.bundled_openmp:
        base = host.torch.bundled_openmp.rpartition("/")[2]
        name = next((known for mark, kind, known in _MARKS if kind == "openmp" and base.startswith(mark)), None)
    return "intel" if name == "intel" else "llvm" if name == "llvm" else "gnu"


def _torch_runtime(host: Host) -> list[str]:
    """Torch's own OpenMP runtime where it has to lead a preload list, which is on Arm.

    Loaded late there, it finds no room left for its thread-local storage ("cannot allocate memory in static
    TLS block"). Source: pytorch and glibc bug reports; NVIDIA/DALI issue 5519.
    """
    path = host.torch.bundled_openmp if host.torch is not None and host.arch == "aarch64" else None
    return [] if path is None or _splits(path) else [path]
