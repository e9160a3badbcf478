"""Finding torch without importing it, and looking up symbols in libraries."""

import ctypes
import os
import struct
import sys
import sysconfig
from pathlib import Path

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.probe.software.elf import exports
from cpulaunch.probe.software.torch_files import has_torch, python_version
from cpulaunch.records.host import Torch
from tests.roots import RootSpec, write_root

VERSION = "from typing import Optional\n__all__ = ['__version__']\n__version__ = '2.13.0+cpu'\ndebug = False\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "machine", RootSpec(cores_per_l3=1))


def install(root: Path, site: str, *, version: str = VERSION, openmp: str | None = None) -> None:
    folder = root / site.lstrip("/") / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "version.py").write_text(version)
    if openmp:
        (root / site.lstrip("/") / openmp).parent.mkdir(parents=True, exist_ok=True)
        (root / site.lstrip("/") / openmp).write_bytes(b"")


def torch_of(root: Path, interpreter: str | None) -> Torch | None:
    return probe_host(Root(str(root)), interpreter=interpreter, detail="launch").torch


def test_a_virtual_environment(root: Path) -> None:
    site = "/env/lib/python3.12/site-packages"
    install(root, site, openmp="torch/lib/libgomp.so.1")
    assert torch_of(root, "/env/bin/python") == Torch(
        version="2.13.0+cpu", path=f"{site}/torch", bundled_openmp=f"{site}/torch/lib/libgomp.so.1"
    )


def test_openmp_beside_torch(root: Path) -> None:
    site = "/env/lib/python3.12/site-packages"
    install(root, site, version='__version__: str = "2.5.1"\n', openmp="torch.libs/libgomp-24e2ab19.so.1.0.0")
    torch = torch_of(root, "/env/bin/python")
    assert torch is not None
    assert (torch.version, torch.bundled_openmp) == ("2.5.1", f"{site}/torch.libs/libgomp-24e2ab19.so.1.0.0")


@pytest.mark.parametrize(("visible", "version"), [("true", "2.13.0+cpu"), ("false", None)])
def test_an_environment_with_or_without_system_packages(root: Path, visible: str, version: str | None) -> None:
    install(root, "/usr/lib/python3/dist-packages")
    (root / "env/lib/python3.11/site-packages").mkdir(parents=True)
    (root / "env/pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = {visible}\n")
    torch = torch_of(root, "/env/bin/python")
    assert (torch.version if torch else None) == version


def test_a_linked_interpreter_belongs_to_its_real_environment(root: Path) -> None:
    install(root, "/opt/conda/lib/python3.12/site-packages")
    for folder in ("opt/conda/bin", "home/bin"):
        (root / folder).mkdir(parents=True)
    (root / "opt/conda/bin/python3.12").write_text("")
    (root / "home/bin/python").symlink_to("/opt/conda/bin/python3.12")
    torch = torch_of(root, "/home/bin/python")
    assert torch is not None
    assert torch.path == "/opt/conda/lib/python3.12/site-packages/torch"


@pytest.mark.parametrize("interpreter", [None, "python", "/elsewhere/bin/python"])
def test_no_torch(root: Path, interpreter: str | None) -> None:
    install(root, "/env/lib/python3.12/site-packages")
    assert torch_of(root, interpreter) is None


def test_a_version_file_without_version_is_ignored(root: Path) -> None:
    install(root, "/env/lib/python3.12/site-packages", version="")
    assert torch_of(root, "/env/bin/python") is None


SITE = "/env/lib/python3.12/site-packages"


def entry_points(root: Path, site: str, text: str, *, name: str = "cpulaunch-0.2.0.dist-info") -> None:
    folder = root / site.lstrip("/") / name
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_text(text)


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("[torch.backends]\ncpulaunch = cpulaunch.worker.autoload:activate\n", "cpulaunch-0.2.0.dist-info", True),
        ("[torch.backends]\ncpulaunch = cpulaunch.worker.autoload:activate\n", "cpulaunch-0.2.0.egg-info", True),
        ("[console_scripts]\ncpulaunch = cpulaunch.__main__:main\n", "cpulaunch-0.1.0.dist-info", False),
        ("[torch.backends]\nother = other:start\n", "other-1.0.dist-info", False),
    ],
)
def test_the_plugin_beside_torch(root: Path, text: str, name: str, found: bool) -> None:
    install(root, SITE)
    entry_points(root, SITE, text, name=name)
    torch = torch_of(root, "/env/bin/python")
    assert torch is not None
    assert torch.plugin is found


def test_the_plugin_and_torch_in_different_folders(root: Path) -> None:
    install(root, "/usr/lib/python3/dist-packages")
    (root / "env").mkdir()
    (root / "env/pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = true\n")
    entry_points(root, SITE, "[torch.backends]\ncpulaunch = x:y\n")
    torch = torch_of(root, "/env/bin/python")
    assert torch is not None
    assert torch.plugin


def test_extensions_beside_torch(root: Path) -> None:
    install(root, SITE)
    for name in ("zentorch", "intel_extension_for_pytorch", "torchvision"):
        (root / SITE.lstrip("/") / name).mkdir()
    torch = torch_of(root, "/env/bin/python")
    assert torch is not None
    assert torch.extensions == ("intel_extension_for_pytorch", "zentorch")


@pytest.mark.parametrize(
    ("config", "link", "folders", "version"),
    [
        ("version = 3.12.4\n", None, ("python3.12", "python3.11"), (3, 12)),
        ("version_info = 3.13.0.final.0\n", None, ("python3.13",), (3, 13)),
        ("", "/usr/bin/python3.14", (), (3, 14)),
        ("", None, ("python3.10",), (3, 10)),
        ("", None, ("python3.10", "python3.11"), None),
        ("version = unknown\n", None, (), None),
    ],
)
def test_the_version_of_a_python_from_files(
    root: Path, config: str, link: str | None, folders: tuple[str, ...], version: tuple[int, int] | None
) -> None:
    (root / "env/bin").mkdir(parents=True)
    if config:
        (root / "env/pyvenv.cfg").write_text(config)
    if link:
        (root / "env/bin/python").symlink_to(link)
    for folder in folders:
        (root / "env/lib" / folder).mkdir(parents=True)
    assert python_version(Root(str(root)), "/env/bin/python", "/env") == version


def test_the_torch_of_another_version_of_python_is_not_this_ones(root: Path) -> None:
    install(root, "/env/lib/python3.11/site-packages")
    (root / "env/lib/python3.12/site-packages").mkdir(parents=True)
    (root / "env/pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.1\n")
    assert torch_of(root, "/env/bin/python") is None


@pytest.mark.parametrize(
    ("before", "found"), [("/missing\n" * 100, True), ("/missing\n" * 2000, False), ("x" * (1 << 16) + "\n", False)]
)
def test_pth_files_are_read_within_limits(root: Path, before: str, found: bool) -> None:
    """Of an environment of the current folder, which may be another user's: a hint names it if it has torch."""
    install(root, "/shared")
    (root / SITE.lstrip("/")).mkdir(parents=True)
    (root / SITE.lstrip("/") / "shared.pth").write_text(f"{before}/shared\n")
    assert (torch_of(root, "/env/bin/python") is not None) is found


def test_torch_in_a_folder_that_a_pth_file_adds(root: Path) -> None:
    install(root, "/shared")
    (root / SITE.lstrip("/")).mkdir(parents=True)
    (root / SITE.lstrip("/") / "shared.pth").write_text("# of the team\nimport site; site.x\n/missing\n/shared\n")
    torch = torch_of(root, "/env/bin/python")
    assert torch is not None
    assert torch.path == "/shared/torch"


@pytest.mark.parametrize(
    ("name", "known"), [("numpy", True), ("__editable___torch_2_13_0_finder.py", False), (None, False)]
)
def test_whether_the_lack_of_torch_is_known(root: Path, name: str | None, known: bool) -> None:
    if name is not None:
        (root / SITE.lstrip("/") / name).mkdir(parents=True)
    host = probe_host(Root(str(root)), interpreter="/env/bin/python", detail="launch")
    assert (host.torch, host.torch_known) == (None, known)


def test_torch_in_the_users_folder_and_in_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to("/nowhere/python3.12")
    (tmp_path / "env/lib/python3.12/site-packages").mkdir(parents=True)
    python, prefix = str(tmp_path / "env/bin/python"), str(tmp_path / "env")
    install(tmp_path, "home/.local/lib/python3.12/site-packages")
    install(tmp_path, "path")
    for environ, expected in (
        ({"HOME": str(tmp_path / "home")}, True),
        ({"HOME": str(tmp_path / "home"), "PYTHONNOUSERSITE": "1"}, False),
        ({"PYTHONUSERBASE": str(tmp_path / "home/.local")}, True),
        ({"PYTHONPATH": f"relative:{tmp_path}/path"}, True),
        ({}, False),
    ):
        assert has_torch(Root(), python, prefix, environ) is expected
    (tmp_path / "env/pyvenv.cfg").write_text("version = 3.12.0\n")
    assert not has_torch(Root(), python, prefix, {"HOME": str(tmp_path / "home")})


def loaded_libc() -> str | None:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return next((line.split()[-1] for line in lines if "/libc.so" in line or "/ld-musl" in line), None)


@pytest.mark.skipif(loaded_libc() is None or sys.byteorder == "big", reason="needs a little-endian Linux C library")
def test_symbols_defined_by_a_real_library() -> None:
    path = loaded_libc() or ""
    for name in ("malloc", "getpid", "qsort", "printf"):
        assert exports(Root(), path, name)
        assert hasattr(ctypes.CDLL(path), name)
    for name in ("mkl_serv_intel_cpu_true", "mallo", "malloc_", ""):
        assert not exports(Root(), path, name)


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_an_undefined_symbol_is_not_exported() -> None:
    folder = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    modules = sorted(folder.glob("_json*.so")) + sorted(folder.glob("_ctypes*.so"))
    if not modules:
        pytest.skip("this Python has its modules built in")
    name = modules[0].name.partition(".")[0]
    assert exports(Root(), str(modules[0]), f"PyInit_{name}")
    assert not exports(Root(), str(modules[0]), "PyModuleDef_Init")
    assert not exports(Root(), str(modules[0]), "PyObject_Free")


def elf(*segments: tuple[int, int, int], rest: bytes = b"") -> bytes:
    """An ELF library with these segments (type, offset and address, bytes), and `rest` at 0x200."""
    table = b"".join(struct.pack("<IIQQQQQQ", kind, 4, at, at, 0, size, size, 8) for kind, at, size in segments)
    head = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q", 64).ljust(22, b"\0")
    return (head + struct.pack("<HH", 56, len(segments))).ljust(64, b"\0") + table.ljust(0x1C0, b"\0") + rest


LOAD, DYNAMIC = 1, 2
EMPTY_HASH = struct.pack("<QQQQQQ", 0x6FFFFEF5, 0x300, 6, 0x300, 5, 0x300).ljust(0x200, b"\0")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF",
        b"\x7fELF\x02\x01" + bytes(58),
        b"text" * 100,
        elf((LOAD, 0, 0x1000)),
        elf((LOAD, 0, 0x1000), (DYNAMIC, 0x200, 1 << 62)),
        elf((LOAD, 0, 0x1000), (DYNAMIC, 0x200, 48), rest=EMPTY_HASH),
    ],
)
def test_damaged_files_define_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "libtorch_cpu.so"
    file.write_bytes(content)
    assert not exports(Root(), str(file), "malloc")
    assert not exports(Root(), str(tmp_path / "absent"), "malloc")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_in_place_of_torch_does_not_block_the_probe(root: Path) -> None:
    site = "/env/lib/python3.12/site-packages"
    install(root, site)
    os.mkfifo(root / site.lstrip("/") / "torch/lib/libtorch_cpu.so")
    torch = torch_of(root, "/env/bin/python")
    assert torch is not None
    assert not torch.mkl_dispatch_symbol
