"""Which libraries are found, in which order, and which are untrusted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.probe.software.ldcache import read_ld_cache
from cpulaunch.probe.software.libraries import _untrusted_search, read_libraries
from cpulaunch.records.host import Host, Library
from cpulaunch.system.files.trust import untrusted_part
from tests.opens import opens
from tests.probe.libraries import elf_header, ld_cache, library
from tests.roots import GRACE, RootSpec, X86Cpu, write_root
from tests.strangers import UID, needs_root

MULTIARCH = "/usr/lib/x86_64-linux-gnu"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links and ELF files are Unix's")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "machine", RootSpec(cores_per_l3=1))


def found(root: Path, *, interpreter: str | None = None, **environ: str) -> list[tuple[str, str]]:
    host: Host = probe_host(Root(str(root)), interpreter=interpreter, environ=environ, detail="launch")
    return [(library.name, library.path) for library in host.libraries]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (f"{MULTIARCH}/libtcmalloc.so.4", "tcmalloc"),
        (f"{MULTIARCH}/libtcmalloc_minimal.so.4.5.9", "tcmalloc"),
        ("/usr/lib64/libjemalloc.so.2", "jemalloc"),
        ("/usr/local/lib/libmimalloc.so.2.1", "mimalloc"),
        ("/usr/lib/libiomp5.so", "intel"),
        ("/usr/local/lib64/libomp.so.5", "llvm"),
        (f"{MULTIARCH}/libgomp.so.1", "gnu"),
    ],
)
def test_every_soname_in_every_usual_folder(root: Path, file: str, name: str) -> None:
    library(root, file)
    assert found(root) == [(name, file)]


@pytest.mark.parametrize(
    "file",
    ["libtcmalloc_debug.so.4", "libjemalloc.a", "libjemalloc.so.2.bak", "libomptarget.so", "libgomp-24e2ab19.so.1"],
)
def test_other_files_are_ignored(root: Path, file: str) -> None:
    library(root, f"{MULTIARCH}/{file}")
    assert found(root) == []


def test_the_minimal_tcmalloc_comes_first_and_links_count_once(root: Path) -> None:
    library(root, f"{MULTIARCH}/libtcmalloc.so.4")
    library(root, f"{MULTIARCH}/libtcmalloc_minimal.so.4.5.9")
    for name in ("libtcmalloc_minimal.so", "libtcmalloc_minimal.so.4"):
        (root / MULTIARCH[1:] / name).symlink_to("libtcmalloc_minimal.so.4.5.9")
    assert found(root) == [
        ("tcmalloc", f"{MULTIARCH}/libtcmalloc_minimal.so.4"),
        ("tcmalloc", f"{MULTIARCH}/libtcmalloc.so.4"),
    ]


def test_the_environment_comes_before_the_system(root: Path) -> None:
    for folder in (MULTIARCH, "/opt/env/lib", "/opt/conda/lib", "/extra"):
        library(root, f"{folder}/libjemalloc.so.2")
    (root / "opt/env/lib/python3.12/site-packages").mkdir(parents=True)
    names = found(
        root, interpreter="/opt/env/bin/python", CONDA_PREFIX="/opt/conda", LD_LIBRARY_PATH="/extra:relative:"
    )
    assert [path for _, path in names] == [
        f"{folder}/libjemalloc.so.2" for folder in ("/opt/env/lib", "/opt/conda/lib", "/extra", MULTIARCH)
    ]


def test_a_relative_folder_of_an_environment_is_left_out(root: Path) -> None:
    """The loader would look for it in the current folder."""
    library(root, "/conda/lib/libjemalloc.so.2")
    assert found(root, CONDA_PREFIX="conda") == []


def test_a_path_with_escape_sequences_is_left_out_of_a_captured_machine(root: Path) -> None:
    path = "/opt/\x1b]0;owned\x07/libtcmalloc.so.4"
    library(root, path)
    (root / "etc").mkdir()
    (root / "etc/ld.so.cache").write_bytes(ld_cache([("libtcmalloc.so.4", path)]))
    assert found(root) == []


def test_libraries_are_listed_in_preload_order(root: Path) -> None:
    for name in ("libgomp.so.1", "libiomp5.so", "libmimalloc.so", "libjemalloc.so.2", "libtcmalloc.so.4"):
        library(root, f"{MULTIARCH}/{name}")
    assert [name for name, _ in found(root)] == ["tcmalloc", "jemalloc", "mimalloc", "intel", "gnu"]


@pytest.mark.parametrize("old_format_first", [False, True])
def test_libraries_in_other_folders_are_found_through_the_loader_cache(root: Path, old_format_first: bool) -> None:
    library(root, "/opt/odd/libtcmalloc_minimal.so.4")
    entries = [
        ("libc.so.6", "/usr/lib/libc.so.6"),
        ("libtcmalloc_minimal.so.4", "/opt/odd/libtcmalloc_minimal.so.4"),
        ("libjemalloc.so.2", "/gone/libjemalloc.so.2"),
    ]
    (root / "etc").mkdir()
    (root / "etc/ld.so.cache").write_bytes(ld_cache(entries, old_format_first=old_format_first))
    assert found(root) == [("tcmalloc", "/opt/odd/libtcmalloc_minimal.so.4")]


@pytest.mark.parametrize("size", [0, 10, 30, 60, 75])
def test_a_damaged_loader_cache_is_ignored(root: Path, size: int) -> None:
    library(root, "/opt/odd/libjemalloc.so.2")
    (root / "etc").mkdir()
    whole = ld_cache([("libjemalloc.so.2", "/opt/odd/libjemalloc.so.2"), ("libx.so", "/x")])
    (root / "etc/ld.so.cache").write_bytes(whole[:size])
    assert found(root) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"INPUT(-ljemalloc)", elf_header(183), elf_header(3, elf_class=1), elf_header(62, order=">")],
)
def test_a_library_for_another_machine_is_left_out(root: Path, content: bytes) -> None:
    library(root, f"{MULTIARCH}/libjemalloc.so.2").write_bytes(content)
    assert found(root) == []


def test_libraries_must_match_the_machine_of_the_root(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec(cpu=GRACE))
    file = library(root, "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2", machine=183)
    assert found(root) == [("jemalloc", "/" + str(file.relative_to(root)))]
    assert found(write_root(tmp_path, RootSpec(cpu=X86Cpu()))) == []


def test_trust_is_not_checked_in_a_captured_machine(root: Path) -> None:
    library(root, f"{MULTIARCH}/libjemalloc.so.2").chmod(0o666)
    assert probe_host(Root(str(root))).libraries[0].untrusted is None


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder that only this user may write."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o755)
    return folder


def test_files_of_this_user_are_trusted(private: Path) -> None:
    assert untrusted_part(str(library(private, "libjemalloc.so.2"))) is None


@pytest.mark.parametrize("where", ["file", "folder"])
def test_parts_that_everyone_may_write_are_named(private: Path, where: str) -> None:
    file = library(private, "lib/libjemalloc.so.2")
    part = file if where == "file" else file.parent
    part.chmod(0o777)
    assert untrusted_part(str(file)) == f"{part} may be written by everyone"


def test_a_sticky_folder_is_trusted(private: Path) -> None:
    file = library(private, "lib/libjemalloc.so.2")
    file.parent.chmod(0o1777)
    assert untrusted_part(str(file)) is None


def test_folders_of_links_are_checked_too(private: Path) -> None:
    file = library(private, "real/libjemalloc.so.2")
    shared = private / "shared"
    shared.mkdir()
    (shared / "libjemalloc.so.2").symlink_to(file)
    shared.chmod(0o777)
    assert untrusted_part(str(shared / "libjemalloc.so.2")) == f"{shared} may be written by everyone"


@pytest.mark.root
def test_groups_and_other_owners(private: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of files")
    file = library(private, "lib/libjemalloc.so.2")
    file.chmod(0o664)
    assert untrusted_part(str(file)) is None
    os.chown(file, 0, 12345)
    assert untrusted_part(str(file)) == f"{file} may be written by group 12345"
    os.chown(file, 12345, 12345)
    assert untrusted_part(str(file)) == f"{file} belongs to user 12345"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("/usr/lib:$ORIGIN", None),
        ("$ORIGIN/none:${ORIGIN}/../none", None),
        ("$ORIGIN/../shared", "{private}/shared may be written by everyone (in its RUNPATH)"),
        ("/usr/lib:{private}/sticky", "{private}/sticky may be written by others (in its RUNPATH)"),
        ("{private}/sticky/none", "{private}/sticky/none is missing (in its RUNPATH)"),
        ("/usr/lib:", "the current folder is in its RUNPATH"),
        ("lib", "lib is in its RUNPATH"),
        ("/usr/$LIB", "/usr/$LIB is in its RUNPATH"),
    ],
)
@pytest.mark.parametrize("tags", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_library_that_looks_for_others_where_anyone_may_put_them_is_untrusted(
    private: Path, entry: str, reason: str | None, tags: str
) -> None:
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
        pytest.skip("no C compiler that makes 64-bit ELF files")
    file = private / "lib/libjemalloc.so.2"
    for name, mode in (("lib", 0o755), ("shared", 0o777), ("sticky", 0o1777)):
        (private / name).mkdir()
        (private / name).chmod(mode)
    rpath = entry.format(private=private) if "{private}" in entry else entry
    command = [compiler, "-shared", "-nostdlib", f"-Wl,{tags},-rpath,{rpath}", "-x", "c", os.devnull, "-o", str(file)]
    subprocess.run(command, check=True)
    environ = {"LD_LIBRARY_PATH": str(file.parent)}
    libraries = read_libraries(Root(), os.uname().machine, prefix=None, environ=environ)
    [untrusted] = (each.untrusted for each in libraries if each.path == str(file))
    assert untrusted == (reason.format(private=private) if reason else None)


@pytest.mark.parametrize(
    ("needed", "reason"),
    [
        ("./lib/libneeded.so", "./lib/libneeded.so is needed by its path"),
        ("lib/libneeded.so", "lib/libneeded.so is needed by its path"),
        ("{private}/lib/libneeded.so", None),
        ("{private}/shared/libneeded.so", "{private}/shared may be written by everyone (needed by its path)"),
    ],
)
def test_a_library_that_needs_another_by_a_path_that_others_can_take_is_untrusted(
    private: Path, needed: str, reason: str | None
) -> None:
    """A linker records the path of a library that has no name of its own; a relative one starts where the user is."""
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
        pytest.skip("no C compiler that makes 64-bit ELF files")
    empty = ("-shared", "-nostdlib", "-Wl,--no-as-needed", "-x", "c", os.devnull, "-x", "none")
    for name, mode in (("lib", 0o755), ("shared", 0o777)):
        (private / name).mkdir()
        subprocess.run([compiler, *empty, "-o", str(private / name / "libneeded.so")], check=True)
        (private / name).chmod(mode)
    file = private / "lib/libjemalloc.so.2"
    subprocess.run([compiler, *empty, needed.format(private=private), "-o", str(file)], check=True, cwd=private)
    environ = {"LD_LIBRARY_PATH": str(file.parent)}
    libraries = read_libraries(Root(), os.uname().machine, prefix=None, environ=environ)
    [untrusted] = (each.untrusted for each in libraries if each.path == str(file))
    assert untrusted == (reason.format(private=private) if reason else None)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("lib/libneeded.so", "lib/libneeded.so"),
        ("lib/glibc-hwcaps/x86-64-v3/libneeded.so", "lib/glibc-hwcaps/x86-64-v3/libneeded.so"),
        ("lib/glibc-hwcaps/x86-64-v3/libother.so", None),
        ("lib/glibc-hwcaps/x86-64-v3", "lib/glibc-hwcaps/x86-64-v3"),
        ("lib/glibc-hwcaps", "lib/glibc-hwcaps"),
        ("lib/tls/haswell/avx512_1/x86_64", "lib/tls/haswell/avx512_1/x86_64"),
        ("lib/haswell/libneeded.so", "lib/haswell/libneeded.so"),
        ("lib/other/libneeded.so", None),
        ("lib/haswell/tls/x86_64/avx512_1/xeon_phi", None),
    ],
)
def test_a_library_that_finds_in_its_run_path_what_others_may_change_is_untrusted(
    private: Path, place: str, reason: str | None
) -> None:
    """As `tar -x` by root leaves the owner of a file or folder."""
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
        pytest.skip("no C compiler that makes 64-bit ELF files")
    empty = ("-shared", "-nostdlib", "-Wl,--no-as-needed", "-x", "c", os.devnull, "-x", "none")
    (private / "built").mkdir()
    (private / "lib").mkdir()
    needed = ("-Wl,-soname,libneeded.so", "-o", str(private / "built/libneeded.so"))
    subprocess.run([compiler, *empty, *needed], check=True)
    file = private / "lib/libjemalloc.so.2"
    rpath = ("-Wl,-rpath,$ORIGIN", "-o", str(file))
    subprocess.run([compiler, *empty, str(private / "built/libneeded.so"), *rpath], check=True)
    changeable = private / place
    changeable.mkdir(parents=True)
    if changeable.suffix:
        changeable.rmdir()
        changeable.write_bytes(b"")
    changeable.chmod(0o777)
    libraries = read_libraries(Root(), os.uname().machine, prefix=None, environ={"LD_LIBRARY_PATH": str(file.parent)})
    [untrusted] = (each.untrusted for each in libraries if each.path == str(file))
    assert untrusted == (f"{private}/{reason} may be written by everyone (in its RUNPATH)" if reason else None)


@pytest.mark.parametrize(("target", "trusted"), [("gone/libneeded.so", True), ("open/libneeded.so", False)])
def test_a_needed_name_that_leads_nowhere_matters_only_where_others_can_put_something(
    private: Path, target: str, trusted: bool
) -> None:
    """The loader goes on to the next folder."""
    (private / "lib").mkdir()
    (private / "open").mkdir()
    (private / "open").chmod(0o1777)
    (private / "lib/libneeded.so").symlink_to(private / target)
    assert (_untrusted_search(str(private / "lib"), ["libneeded.so"]) is None) == trusted


@needs_root
def test_what_others_can_change_is_not_read(private: Path) -> None:
    """A link of another user may lead to a file whose reading has effects: the kernel's log is gone then."""
    file, others = library(private, "real.so"), private / "others/lib"
    others.mkdir(parents=True)
    (others / "libjemalloc.so.2").symlink_to(file)
    os.chown(others, UID, UID)
    found: list[Library] = []

    def read() -> None:
        environ = {"CONDA_PREFIX": str(others.parent)}
        found.extend(read_libraries(Root(), os.uname().machine, prefix=None, environ=environ))

    assert not opens(file, read)
    [untrusted] = (each.untrusted for each in found if each.path == str(others / "libjemalloc.so.2"))
    assert untrusted == f"{others} belongs to user {UID}"


@pytest.mark.parametrize(
    ("arch", "header"), [("i686", elf_header(3, elf_class=1)), ("s390x", elf_header(22, order=">"))]
)
def test_a_library_whose_run_path_cannot_be_read_is_untrusted(private: Path, arch: str, header: bytes) -> None:
    file = library(private, "lib/libjemalloc.so.2")
    file.write_bytes(header + bytes(100))
    found = read_libraries(Root(), arch, prefix=None, environ={"LD_LIBRARY_PATH": str(file.parent)})
    assert [each.untrusted for each in found if each.path == str(file)] == ["its RUNPATH cannot be read"]


def test_this_machines_libraries_are_real_files() -> None:
    libraries = probe_host(Root(), interpreter=sys.executable, detail="launch").libraries
    assert all(os.path.isfile(library.path) for library in libraries)
    assert len({os.path.realpath(library.path) for library in libraries}) == len(libraries)


def test_paths_in_a_loader_cache_are_limited_in_length_and_number(tmp_path: Path) -> None:
    """One string of megabytes may be the path of as many libraries as fit in a cache."""
    long = "/" + "a" * 5000
    entries = [("libtcmalloc.so.4", path) for path in (long, *[f"/lib/{number}.so" for number in range(2000)])]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(ld_cache(entries))
    found = read_ld_cache(Root(str(tmp_path)), ("libtcmalloc",))
    assert found == [f"/lib/{number}.so" for number in range(1000)]
