"""The libraries preloaded into workers: an OpenMP runtime, an allocator, MKL's dispatch, each after a trial start."""

from __future__ import annotations

from cpulaunch.plan.variables.openmp import Runtime
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, Library, LibraryKind
from cpulaunch.records.plan import Note, PreloadCandidate
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import LaunchRequest, Origin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

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
TITLES = {
    "intel": "Intel's OpenMP runtime",
    "llvm": "LLVM's OpenMP runtime",
    "mkl-dispatch": "the MKL dispatch library",
}
_FILE_NAMES: tuple[tuple[str, LibraryKind, str], ...] = (
    ("libtcmalloc", "allocator", "tcmalloc"),
    ("libjemalloc", "allocator", "jemalloc"),
    ("libmimalloc", "allocator", "mimalloc"),
    ("libiomp5", "openmp", "intel"),
    ("libomp", "openmp", "llvm"),
    ("libgomp", "openmp", "gnu"),
)


@record
class Preloads:
    """The value for LD_PRELOAD (None: leave it as it is), and the runtime and allocator that workers then have."""

    ld_preload: str | None
    origin: Origin
    reason: str
    runtime: Runtime
    allocator: str
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]


@record(kw_only=False)
class _Preference:
    """The libraries of one kind to try, best first; `reason` says why these, or why none."""

    kind: LibraryKind
    names: tuple[str, ...]
    origin: Origin
    reason: str
    required: bool = False
    warning: str | None = None

    @property
    def setting(self) -> str:
        """The setting that chooses a library of this kind."""
        return self.kind.replace("-", "_")


def users_preloads(request: LaunchRequest) -> dict[LibraryKind, str]:
    """The kinds of library that the user's own LD_PRELOAD loads, with the name of each library."""
    found: dict[LibraryKind, str] = {}
    for path in _users_list(request):
        base = path.rpartition("/")[2]
        for start, kind, name in _FILE_NAMES:
            if base.startswith(start):
                found.setdefault(kind, name)
                break
    return found


def _users_list(request: LaunchRequest) -> list[str]:
    text = dict(request.settings.env).get("LD_PRELOAD", request.environ.get("LD_PRELOAD", ""))
    return text.replace(":", " ").split()


def preload_candidates(host: Host, request: LaunchRequest) -> tuple[PreloadCandidate, ...]:
    """The libraries to try, the best of each kind first; the first one of a kind with which Python starts is used.

    Raises: UsageError if a library requested by name is not installed or not trusted.
    """
    return tuple(each for preference in _preferences(host, request) for each in _candidates(host, preference))


def choose_preloads(host: Host, request: LaunchRequest, trials: Trials | None) -> Preloads:
    """The libraries of the plan. `trials` None: nothing was tried, so the first of each kind is chosen.

    Raises: UsageError if a library requested by name is missing, not trusted, or failed its trial.
    """
    chosen: list[str] = []
    origins: list[Origin] = []
    names: dict[LibraryKind, str] = {}
    notes: list[Note] = []
    warnings: list[str] = []
    for each in _preferences(host, request):
        candidate, failures = _first_that_starts(_candidates(host, each), trials)
        reasons = [each.reason, *failures, _missing(host, each, candidate)]
        if candidate is not None:
            chosen.append(candidate.path)
            origins.append(each.origin)
            names[each.kind] = candidate.name
            reasons.append(candidate.path + ("" if trials is not None else " (not tried)"))
        value = candidate.name if candidate else "off" if each.kind == "mkl-dispatch" else "default"
        reason = "; ".join(filter(None, reasons))
        notes.append(Note(setting=each.setting, value=value, origin=each.origin, reason=reason))
        warnings.extend(() if each.warning is None else (each.warning,))
        warnings.extend(_untrusted_warnings(host, each, candidate))
    users = users_preloads(request)
    own = "your own LD_PRELOAD first, then " if _users_list(request) else ""
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


def _preferences(host: Host, request: LaunchRequest) -> tuple[_Preference, ...]:
    return (_openmp(host, request), _allocator(host, request), _mkl_dispatch(host, request))


def _decided(host: Host, request: LaunchRequest, kind: Literal["openmp", "allocator"]) -> _Preference | None:
    """The preference of a kind that is settled without `auto`: by the user's LD_PRELOAD, "default" or a name."""
    value: str = getattr(request.settings, kind)
    origin = request.origin(kind)
    why = request.reasons.get(kind, f"--{kind} {value}" if origin == "cli" else "")
    users = users_preloads(request).get(kind)
    if users is not None:
        reason = f"your LD_PRELOAD already loads {users}"
        ignored = f"--{kind} {value} is not applied: {reason}"
        refused = origin == "cli" and value not in ("auto", "default", users)
        return _Preference(kind, (), "environment", reason, warning=ignored if refused else None)
    if value == "default":
        return _Preference(kind, (), origin, why)
    if not host.can_bind:
        return _Preference(kind, (), "default", "cpulaunch preloads libraries on Linux only")
    if value != "auto":
        return _Preference(kind, (value,), origin, why, required=origin == "cli")
    if _runs_command(request):
        return _Preference(kind, (), "default", _COMMAND)
    return None


_COMMAND = "a preload would affect every program that the command starts"


def _runs_command(request: LaunchRequest) -> bool:
    return request.program is not None and request.program.kind == "command"


_INTEL = "with Intel's runtime threads wait less, and small operations have less overhead"


MIN_SHM_BYTES = 1024 * 1024
"""Of a page for each process; the rest is for what other programs write meanwhile."""
_SHM_FULL = "/dev/shm is full: Intel's and LLVM's runtimes write to it as they start, and SIGBUS would end the program"


def _openmp(host: Host, request: LaunchRequest) -> _Preference:
    """The preferred runtime; none that a full /dev/shm would kill, unless the command line insists on it.

    Source: LLVM 20, openmp/runtime/src/kmp_runtime.cpp, __kmp_register_library_startup: a page that it maps.
    """
    preference = _preferred_openmp(host, request)
    if host.shm_free_bytes is None or host.shm_free_bytes >= MIN_SHM_BYTES or not _usable(host, preference):
        return preference
    if preference.required:
        return replace(preference, warning=_SHM_FULL)
    chosen = preference.origin != "default"  # By a profile, for instance.
    return _Preference("openmp", (), "default", _SHM_FULL, warning=_SHM_FULL if chosen else None)


def _preferred_openmp(host: Host, request: LaunchRequest) -> _Preference:
    decided = _decided(host, request, "openmp")
    if decided is not None:
        return _with_fallbacks(decided, ("intel",) if host.arch in X86 else ())
    if host.arch not in X86:
        return _Preference("openmp", (), "default", f"torch's own runtime is used on {_architecture(host)}")
    bundled = "" if host.torch is None else host.torch.bundled_openmp or ""
    if "libiomp5" in bundled:
        return _Preference("openmp", (), "default", "torch already includes Intel's runtime")
    if host.calibration is not None:
        from cpulaunch.plan.variables.measured import measured_openmp

        if measured := measured_openmp(host.calibration):
            return _Preference("openmp", measured[0], "default", measured[1])
    return _Preference("openmp", ("intel",), "default", _INTEL)


_REUSE = "a preloaded allocator reuses freed memory instead of returning it to the kernel"


def _allocator(host: Host, request: LaunchRequest) -> _Preference:
    decided = _decided(host, request, "allocator")
    if decided is None and host.calibration is not None:
        from cpulaunch.plan.variables.measured import measured_allocator

        if measured := measured_allocator(host.calibration, ALLOCATORS):
            return _Preference("allocator", measured[0], "default", measured[1])
    if decided is None:
        return _Preference("allocator", ALLOCATORS, "default", _REUSE)
    return _with_fallbacks(decided, ALLOCATORS)


def _with_fallbacks(decided: _Preference, others: tuple[str, ...]) -> _Preference:
    """The library that a profile prefers, then the others; the command line insists on its library."""
    if decided.required or not decided.names:
        return decided
    return replace(decided, names=tuple(dict.fromkeys(decided.names + others)))


def _mkl_dispatch(host: Host, request: LaunchRequest) -> _Preference:
    value, origin = request.settings.mkl_dispatch, request.origin("mkl_dispatch")
    symbol = host.torch is not None and host.torch.mkl_dispatch_symbol
    if value == "on":
        return _Preference(
            "mkl-dispatch",
            ("mkl-dispatch",),
            origin,
            request.reasons.get("mkl_dispatch", "--mkl-dispatch on"),
            required=origin == "cli",
            warning=_NO_DISPATCH if host.torch is not None and not symbol else None,
        )
    if value == "off":
        reason = request.reasons.get("mkl_dispatch", "--mkl-dispatch off")
    elif host.cpu.vendor not in MKL_VENDORS:
        reason = _already_fast(host)
    elif _runs_command(request):
        reason = _COMMAND
    elif not symbol:
        reason = "no torch with MKL was found"
    else:
        return _Preference("mkl-dispatch", ("mkl-dispatch",), origin, _SLOW_PATH)
    return _Preference("mkl-dispatch", (), origin, reason)


_NO_DISPATCH = "--mkl-dispatch on has no effect: this torch has no MKL dispatch"
_SLOW_PATH = "by default MKL uses slow kernels on this vendor's CPUs; the fast ones have the same precision"


def _already_fast(host: Host) -> str:
    """Why MKL needs no dispatch library here."""
    if host.arch not in X86:
        return f"MKL is not used on {_architecture(host)}"
    return "MKL already uses its fast kernels on " + ("Intel CPUs" if host.cpu.vendor == "GenuineIntel" else "this CPU")


def _architecture(host: Host) -> str:
    return "this architecture" if host.arch == "unknown" else host.arch


def _candidates(host: Host, preference: _Preference) -> tuple[PreloadCandidate, ...]:
    usable = _usable(host, preference)
    if preference.required and not usable:
        raise _unavailable(host, preference, _found(host, preference))
    return tuple(
        PreloadCandidate(kind=preference.kind, name=library.name, path=library.path, required=preference.required)
        for library in usable
    )


def _usable(host: Host, preference: _Preference) -> list[Library]:
    """The preferred libraries that can be preloaded, best first."""
    return [library for library in _found(host, preference) if _distrust(library) is None]


def _found(host: Host, preference: _Preference) -> list[Library]:
    """The preferred libraries that are on the machine, best first, usable or not."""
    return [library for name in preference.names for library in host.libraries if _matches(library, preference, name)]


def _matches(library: Library, preference: _Preference, name: str) -> bool:
    return library.kind == preference.kind and (library.name == name or preference.kind == "mkl-dispatch")


def _distrust(library: Library) -> str | None:
    """Why a library cannot be preloaded. The loader splits LD_PRELOAD at spaces and colons (man 8 ld.so)."""
    if _splits(library.path):
        return f"{library.path}: the loader cannot preload a path with spaces or colons"
    return None if library.untrusted is None else f"{library.path}: {library.untrusted}"


def _splits(path: str) -> bool:
    return any(character in path for character in " :\t\n")


def _unavailable(host: Host, preference: _Preference, found: list[Library]) -> UsageError:
    name = preference.names[0]
    title = TITLES.get(name, name)
    flag = "--" + preference.setting.replace("_", "-")
    if name in X86_ONLY and host.arch not in X86:
        return UsageError(
            f"{title} exists for x86_64 only", value=_architecture(host), source=flag, hint=f"drop {flag}"
        )
    if found:
        return UsageError(
            f"{title} cannot be preloaded safely", value=_distrust(found[0]), source=flag, hint=INSTALL[name]
        )
    return UsageError(f"{title} is not installed", source=flag, hint=INSTALL[name])


def _first_that_starts(
    candidates: tuple[PreloadCandidate, ...], trials: Trials | None
) -> tuple[PreloadCandidate | None, list[str]]:
    """The first candidate whose trial passed, and why those before it are not used."""
    refused: list[str] = []
    for candidate in candidates:
        failure = None if trials is None else trials.get(candidate.path, "it was not tried")
        if failure is None:
            return candidate, refused
        if candidate.required:
            raise UsageError(
                f"Python does not start with {TITLES.get(candidate.name, candidate.name)} preloaded",
                value=failure,
                source=candidate.path,
                hint="choose another library, or drop the option",
            )
        refused.append(f"{candidate.path} is not used: {failure}")
    return None, refused


def _missing(host: Host, preference: _Preference, candidate: PreloadCandidate | None) -> str:
    """What to install if no library of this kind is on the machine; empty if one is."""
    if candidate is not None or not preference.names or _found(host, preference):
        return ""
    return f"none is installed: {INSTALL[preference.names[0]]}"


def _untrusted_warnings(host: Host, preference: _Preference, chosen: PreloadCandidate | None) -> tuple[str, ...]:
    """A warning if libraries that are preferred to the chosen one are not trusted: others may make any number."""
    reasons = []
    for library in _found(host, preference):
        if chosen is not None and library.path == chosen.path:
            break
        if (reason := _distrust(library)) is not None:
            reasons.append(reason)
    more = f"; and {len(reasons) - 1} more (cpulaunch probe shows them)" if reasons[1:] else ""
    return tuple(f"not preloaded: {reason}{more}" for reason in reasons[:1])


def _runtime(host: Host, name: str | None) -> Runtime:
    """The OpenMP runtime that a worker will have: a preloaded one, else torch's own."""
    if name is None and host.torch is not None and host.torch.bundled_openmp:
        base = host.torch.bundled_openmp.rpartition("/")[2]
        name = next((known for start, kind, known in _FILE_NAMES if kind == "openmp" and base.startswith(start)), None)
    return "intel" if name == "intel" else "llvm" if name == "llvm" else "gnu"


def _torch_runtime(host: Host) -> list[str]:
    """The path of torch's own OpenMP runtime where it has to be first in LD_PRELOAD, which is on Arm; else empty.

    Loaded later there, it may find no room for its thread-local storage ("cannot allocate memory in static
    TLS block"). Source: pytorch and glibc bug reports; NVIDIA/DALI issue 5519.
    """
    path = host.torch.bundled_openmp if host.torch is not None and host.arch == "aarch64" else None
    return [] if path is None or _splits(path) else [path]
