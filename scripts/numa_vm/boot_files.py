"""The files that an emulated machine boots from: QEMU and busybox, a kernel, its modules, and the initramfs."""

import fcntl
import lzma
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from numa_vm.errors import NotAvailableError

MODULES = ("virtio_pci", "9pnet_virtio", "9p", "virtio_console", "overlay")
PACKAGES = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static"}
LOCK_SECONDS = 900

INIT = """#!/bin/busybox sh
# First process of the guest: mounts, changes root, starts the runner. The host ends the machine when it receives the
# exit status of the command; the machine powers off by itself if something fails before that.
/bin/busybox mkdir -p /dev /proc /sys /host /memory /root /control
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules/order); do /bin/busybox insmod /modules/$module; done
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /host
/bin/busybox mount -t tmpfs -o size=50% memory /memory
/bin/busybox mkdir /memory/upper /memory/work
/bin/busybox mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work root /root
/bin/busybox mount --move /dev /root/dev
/bin/busybox mkdir -p /root/dev/shm /root/dev/pts
/bin/busybox mount -t tmpfs shm /root/dev/shm
/bin/busybox mount -t devpts pts /root/dev/pts
/bin/busybox mount -t proc proc /root/proc
/bin/busybox mount -t sysfs sysfs /root/sys
/bin/busybox mount -t cgroup2 cgroup /root/sys/fs/cgroup
/bin/busybox mount -t tmpfs run /root/run
/bin/busybox mkdir /root/run/control
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro control /root/run/control
/bin/busybox ifconfig lo up
/bin/busybox sh -e /root/run/control/mounts && /bin/busybox chroot /root @PYTHON@ -I -S /run/control/runner.py
/bin/busybox poweroff -f
"""


def prepare_boot_files() -> Path:
    """A directory with `vmlinuz` and `modules/`, created once per kernel package.

    Effect: installs QEMU and busybox if they are missing and the user is root. Raises: NotAvailableError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpulaunch-numa-vm"
    cache.mkdir(parents=True, exist_ok=True)
    image, unfinished = cache / "kernel-1", cache / "unfinished"  # Increment the number when the contents change.
    with exclusive_lock(cache / "lock"):
        install_missing_programs()
        if not image.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            unpack_kernel(unfinished)
            (unfinished / "boot-files").rename(image)
            shutil.rmtree(unfinished)
    return image


@contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Effect: holds the lock inside the block; waits while another process holds it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install_missing_programs() -> None:
    """Effect: installs QEMU and busybox if they are missing and the user is root. Raises: NotAvailableError."""
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotAvailableError(f"missing: {' '.join(missing)} (as root: apt-get install {' '.join(missing)})")
    apt("update")
    apt("install", "--yes", "--no-install-recommends", *missing)


def apt(*arguments: str, cwd: Path | None = None) -> None:
    """Effect: runs apt-get, waiting for other instances of it. Raises: NotAvailableError with its output."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    waiting = ["-o", "Acquire::Retries=3", "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}"]
    command = ["apt-get", "-qq", *waiting, *arguments]
    while True:
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
        held = re.search(r"Could not get lock (/\S*?)\.?\s", result.stderr)
        if held is None:
            raise NotAvailableError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
        wait_until_free(held[1])


def wait_until_free(lock: str) -> None:
    """Effect: waits until a lock file of apt-get is free (apt-get itself waits for the lock of dpkg only).

    Raises: NotAvailableError after LOCK_SECONDS.
    """

    def give_up(*_: object) -> None:
        raise NotAvailableError(f"{lock} has been held by another process for {LOCK_SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LOCK_SECONDS)
    try:
        with open(lock, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def unpack_kernel(directory: Path) -> None:
    """Effect: downloads this distribution's newest kernel package; extracts what a boot needs into boot-files/."""
    directory.chmod(0o755)
    subprocess.run(["dpkg", "-x", download_kernel(directory), directory / "root"], check=True)
    boot_files = directory / "boot-files"
    boot_files.mkdir()
    (kernel,) = (directory / "root/boot").glob("vmlinuz-*")
    shutil.copy(kernel, boot_files / "vmlinuz")
    (boot_files / "modules").mkdir()
    order = []
    for name, content in modules_in_load_order(directory / "root"):
        (boot_files / "modules" / name).write_bytes(content)
        order.append(name)
    (boot_files / "modules/order").write_text("\n".join(order) + "\n")


def download_kernel(directory: Path) -> Path:
    """The kernel package's file. Effect: as root, updates package lists that are outdated.

    Raises: NotAvailableError.
    """
    if shutil.which("apt-get") is None:
        raise NotAvailableError("missing: a Linux kernel image (apt-get is needed to download one)")
    try:
        return download_package(kernel_package(), directory)
    except NotAvailableError:
        if os.geteuid() != 0:
            raise
    apt("update")
    return download_package(kernel_package(), directory)


def download_package(name: str, directory: Path) -> Path:
    """The package's file in the directory. Raises: NotAvailableError."""
    apt("-o", "APT::Sandbox::User=root", "download", name, cwd=directory)
    (archive,) = directory.glob("*.deb")
    return archive


def kernel_package() -> str:
    """The image package that Debian's (or Ubuntu's) metapackage depends on today. Raises: NotAvailableError."""
    for metapackage in ("linux-image-amd64", "linux-image-generic"):
        command = ["apt-cache", "depends", metapackage]
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        found = re.search(r"Depends: (linux-image-\d\S+)", listing)
        if found:
            return found[1]
    raise NotAvailableError("no linux-image-amd64 or linux-image-generic in the package lists (apt-get update?)")


def modules_in_load_order(root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every module the boot needs, dependencies first; built-in ones are left out."""
    files = {module_name(path): path for path in root.rglob("*.ko*")}
    seen: set[str] = set()

    def visit(name: str) -> Iterator[tuple[str, bytes]]:
        if name in seen or name not in files:
            return
        seen.add(name)
        content = read_module(files[name])
        for dependency in module_dependencies(content):
            yield from visit(dependency)
        yield f"{name}.ko", content

    for required in MODULES:
        yield from visit(required)


def module_name(path: Path) -> str:
    """The name by which the kernel knows the module in a file."""
    return path.name.split(".")[0].replace("-", "_")


def module_dependencies(content: bytes) -> list[str]:
    """The modules that a module depends on: its `depends=` line (ELF section .modinfo)."""
    found = re.search(rb"\0depends=([^\0]*)\0", content)
    return [] if found is None else [name.replace("-", "_") for name in found[1].decode().split(",") if name]


def read_module(path: Path) -> bytes:
    """The module, decompressed (busybox's insmod reads plain files only)."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", path], capture_output=True, check=True).stdout
    return path.read_bytes()


def write_initramfs(target: Path, boot_files: Path) -> None:
    """Effect: writes a cpio archive with busybox, the modules and /init.

    Source: kernel, Documentation/driver-api/early-userspace/buffer-format.rst.
    """
    busybox = Path(shutil.which("busybox") or "")
    init = INIT.replace("@PYTHON@", os.path.realpath(sys.executable))
    entries = [("bin", stat.S_IFDIR | 0o755, b""), ("modules", stat.S_IFDIR | 0o755, b"")]
    entries += [("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes())]
    entries += [("init", stat.S_IFREG | 0o755, init.encode())]
    for module in sorted((boot_files / "modules").iterdir()):
        entries.append((f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes()))
    entries.append(("TRAILER!!!", 0, b""))
    target.write_bytes(b"".join(cpio_entry(i, *entry) for i, entry in enumerate(entries, start=1)))


def cpio_entry(inode: int, name: str, mode: int, content: bytes) -> bytes:
    """One file of a `newc` cpio archive."""
    fields = [inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return header + b"\0" * (-len(header) % 4) + content + b"\0" * (-len(content) % 4)
