"""Allocators and OpenMP runtimes that a worker could preload, the environment's before the system's."""

from __future__ import annotations

import os

from cpulaunch.probe.software.elf import fits, needed_from
from cpulaunch.probe.software.ldcache import read_ld_cache
from cpulaunch.records.host import Library, LibraryKind
from cpulaunch.records.record import record
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@record(kw_only=False)
class Family:
    """A library under the file names it goes by. `stems` come in order of preference."""

    kind: LibraryKind
    name: str
    stems: tuple[str, ...]


FAMILIES = (
    Family("allocator", "tcmalloc", ("libtcmalloc_minimal", "libtcmalloc")),
    Family("allocator", "jemalloc", ("libjemalloc",)),
    Family("allocator", "mimalloc", ("libmimalloc",)),
    Family("openmp", "intel", ("libiomp5",)),
    Family("openmp", "llvm", ("libomp",)),
    Family("openmp", "gnu", ("libgomp",)),
)
STEMS = {stem: (family, rank) for family in FAMILIES for rank, stem in enumerate(family.stems)}
NAMES = tuple(f"{stem}.so" for stem in STEMS)
TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu", "ppc64le": "powerpc64le-linux-gnu"}

BY_PATH = "needed by its path"
HWCAPS = "glibc-hwcaps"
"""The loader looks into the folders in it before the one that it is in. Source: glibc 2.33, elf/dl-hwcaps.c."""
OLDER_HWCAPS = ("tls", "haswell", "xeon_phi", "avx512_1", "x86_64", "atomics", "aarch64", "power8", "power9", "power10")
OLDER_DEPTH = 4
"""Folders, as tls/haswell/avx512_1/x86_64, into which it looked too. Source: glibc 2.36, elf/dl-hwcaps.c, ld.so(8)."""


def read_libraries(root: Root, arch: str, *, prefix: str | None, environ: Mapping[str, str]) -> tuple[Library, ...]:
    """Every library found, best first within its kind: environment, LD_LIBRARY_PATH, loader cache, usual folders.

    Control characters in a path of a captured machine would reach the scripts that --emit writes: it is left out.
    """
    paths = [path for folder in _environment_folders(prefix, environ) for path in _matching(root, folder)]
    paths += sorted(read_ld_cache(root, NAMES), key=_preference)
    paths += [path for folder in _system_folders(arch) for path in _matching(root, folder)]
    paths = paths if root.live else [path for path in paths if path.isprintable()]
    found: dict[str, Library] = {}
    for path in paths:
        stem, _ = _parts(path)
        real = _real(root, path)
        if stem not in STEMS or not real or real in found:
            continue
        family, _ = STEMS[stem]
        untrusted = _changeable_part(path) if root.live else None
        if untrusted is None:  # Else it is not read: another user's link may lead to a file whose reading has effects.
            if not fits(root.bytes(real, limit=20), arch):
                continue
            untrusted = _untrusted_need(path) if root.live else None
        found[real] = Library(kind=family.kind, name=family.name, path=path, untrusted=untrusted)
    order = [(family.kind, family.name) for family in FAMILIES]
    return tuple(sorted(found.values(), key=lambda library: order.index((library.kind, library.name))))


def mkl_dispatch_library() -> tuple[Library, ...]:
    """cpulaunch's own MKL dispatch library, if it was built when cpulaunch was installed."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    path = os.path.join(package, "lib", "libcpulaunch_mkl.so")
    if not os.path.isfile(path):
        return ()
    return (
        Library(
            kind="mkl-dispatch",
            name="mkl-dispatch",
            path=path,
            untrusted=_changeable_part(path) or _untrusted_need(path),
        ),
    )


def _changeable_part(path: str) -> str | None:
    """What others may change of a library or on the way to it; it is not read."""
    from cpulaunch.system.files.trust import untrusted_part  # Here and below: not needed where there is no library.

    return untrusted_part(path)


def _untrusted_need(path: str) -> str | None:
    """What others may change of the files that a library needs, by a path or in its RUNPATH, or where these may be."""
    from cpulaunch.system.files.trust import untrusted_part

    if (needed := needed_from(Root(), path)) is None:
        return "its RUNPATH cannot be read"
    folders, needs = needed
    by_path = [each for each in needs if "/" in each or "$" in each]
    names = [each for each in needs if each not in by_path]
    for entry, where in (*((each, "in its RUNPATH") for each in folders), *((each, BY_PATH) for each in by_path)):
        place = entry.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", os.path.dirname(path))
        if not place.startswith("/") or "$" in place:
            return f"{entry or 'the current folder'} is {where}"
        reason = untrusted_part(place) if where == BY_PATH else _untrusted_search(place, names)
        if reason is not None:
            return f"{reason} ({where})"
    return None


def _untrusted_search(folder: str, names: Sequence[str]) -> str | None:
    """What others may change of what the loader finds by these names in a folder of a RUNPATH, and why; None: nothing.

    A name that is missing does not matter, as others can put nothing there.
    """
    from cpulaunch.system.files.trust import untrusted_folder, untrusted_part

    for searched in _searched(folder, OLDER_HWCAPS):
        if (reason := untrusted_folder(searched)) is not None:
            return reason
        for path in (f"{searched}/{name}" for name in names):
            if os.path.lexists(path) and (reason := untrusted_part(path, may_be_missing=True)) is not None:
                return reason
    return None


def _searched(folder: str, older: Sequence[str]) -> Iterator[str]:
    """A folder, and those in it in which the loader looks too. Each is yielded before what is in it is looked at."""
    yield folder
    if os.path.lexists(path := f"{folder}/{HWCAPS}"):
        yield path
        try:
            found = sorted(os.listdir(path))
        except OSError:
            found = []
        yield from (f"{path}/{name}" for name in found)
    if len(OLDER_HWCAPS) - len(older) < OLDER_DEPTH:
        for name in older:
            if os.path.lexists(path := f"{folder}/{name}"):
                yield from _searched(path, [each for each in older if each != name])


def _environment_folders(prefix: str | None, environ: Mapping[str, str]) -> Iterator[str]:
    if prefix not in (None, "/", "/usr"):
        yield f"{prefix}/lib"
    if environ.get("CONDA_PREFIX", "").startswith("/"):
        yield f"{environ['CONDA_PREFIX']}/lib"
    yield from (folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/"))


def _system_folders(arch: str) -> Iterator[str]:
    triplet = TRIPLETS.get(arch, f"{arch}-linux-gnu")
    for base in ("/usr/local", "/usr"):
        yield from (f"{base}/lib/{triplet}", f"{base}/lib64", f"{base}/lib")


def _matching(root: Root, folder: str) -> list[str]:
    names = (name for name in root.names(folder) if name.startswith(NAMES) and _parts(name)[0] in STEMS)
    return sorted((f"{folder}/{name}" for name in names), key=_preference)


def _parts(path: str) -> tuple[str, int]:
    """("libx", 2) for /usr/lib/libx.so.4.5; ("", 0) for what is no library's name."""
    stem, _, version = os.path.basename(path).partition(".so")
    return (stem, version.count(".")) if not version.strip(".0123456789") else ("", 0)


def _preference(path: str) -> tuple[int, int, str]:
    """Among one library's names: the preferred variant, then its soname (one number: libx.so.4)."""
    stem, numbers = _parts(path)
    return (STEMS[stem][1] if stem in STEMS else len(STEMS)), abs(numbers - 1), path


def _real(root: Root, path: str) -> str | None:
    try:
        real = root.resolve_links(path)[-1]
    except OSError:
        return None
    return real if root.exists(real) else None
