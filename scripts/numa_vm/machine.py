"""The emulated machine: its command line, its start, and what it tells of the command."""

import argparse
import ctypes
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from numa_vm.errors import NotAvailableError, NotBootedError, TimedOutError

ATTEMPTS = 3
STARTED, OUTPUT, ERRORS, STATUS, GONE = b"S", b"1", b"2", b"X", b""  # kinds of frames: runner.py; GONE ends them
MESSAGE_CHARACTERS = 2000


def run_guest(options: argparse.Namespace, boot_files: Path, control: Path) -> int:
    """The command's exit code. A machine that ends or hangs before the command starts is replaced by another.

    Raises: TimedOutError, NotAvailableError.
    """
    deadline = time.monotonic() + options.timeout
    for _ in range(ATTEMPTS):
        with Machine(options, boot_files, control) as machine:
            try:
                machine.wait_for_start(deadline, options.boot_timeout)
                return machine.wait_for_status(deadline)
            except NotBootedError as error:
                reason = f"{error}{machine.last_messages()}"
            finally:
                if options.console:
                    sys.stderr.write(machine.messages())
    raise NotAvailableError(f"{ATTEMPTS} machines did not come up; the last {reason}")


class Machine:
    """A running emulator, ended on leaving; it relays the command's output by itself."""

    def __init__(self, options: argparse.Namespace, boot_files: Path, control: Path) -> None:
        self.options, self.boot_files, self.control = options, boot_files, control
        self.told: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()

    def __enter__(self) -> Self:
        read_end, write_end = os.pipe()
        with (self.control / "qemu.log").open("w") as log:
            self.emulator = subprocess.Popen(
                qemu_command(self.options, self.boot_files, self.control, write_end),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                preexec_fn=die_with_parent(),
            )
        os.close(write_end)
        threading.Thread(target=listen, args=(read_end, self.told), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.emulator.kill()
        self.emulator.wait()

    def wait_for_start(self, deadline: float, boot_seconds: float) -> None:
        """Returns when the command starts. Raises: TimedOutError; NotBootedError, also after the limit for the boot."""
        left = deadline - time.monotonic()
        try:
            kind, _ = self.told.get(timeout=max(0.0, min(left, boot_seconds)))
        except Empty:
            if left <= boot_seconds:
                raise TimedOutError(f" (the command had not started){self.last_messages()}") from None
            raise NotBootedError(f"had not started the command after {boot_seconds:g} s") from None
        if kind == GONE:
            raise NotBootedError(f"ended ({self.exit_code()}) before it started the command")

    def wait_for_status(self, deadline: float) -> int:
        """The command's exit code; all its output has been passed on. Raises: TimedOutError, NotAvailableError."""
        try:
            kind, content = self.told.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimedOutError("") from None
        if kind == GONE:
            raise NotAvailableError(
                f"the machine ended ({self.exit_code()}) while the command ran{self.last_messages()}"
            )
        return int(content)

    def exit_code(self) -> str:
        """What the emulator ended with, in words."""
        return f"exit code {self.emulator.wait()} of QEMU"

    def messages(self) -> str:
        """What the emulator and the guest's kernel said."""
        logs = (self.control / "qemu.log", self.control / "console.log")
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def last_messages(self) -> str:
        """The end of that on lines of its own, empty if nothing was said."""
        said = self.messages()[-MESSAGE_CHARACTERS:].rstrip()
        return f":\n{said}" if said else ""


def die_with_parent() -> Callable[[], None]:
    """What a child calls so that the kernel ends it with this process, however that ends."""
    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_parent_death_signal, signal.SIGKILL)


def listen(source: int, told: SimpleQueue[tuple[bytes, bytes]]) -> None:
    """Effect: passes the command's output on, puts every other frame into the queue, and GONE when no more can come."""
    targets = {OUTPUT: 1, ERRORS: 2}
    with os.fdopen(source, "rb") as stream:
        while len(header := stream.read(5)) == 5:
            kind, length = struct.unpack(">cI", header)
            content = stream.read(length)
            if kind not in targets:
                told.put((kind, content))
            elif not passed_on(content, targets[kind]):
                targets[kind] = os.open(os.devnull, os.O_WRONLY)
    told.put((GONE, b""))


def passed_on(content: bytes, target: int) -> bool:
    """Whether all of it could be written; False if nobody reads any more."""
    while content:
        try:
            content = content[os.write(target, content) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:
            return False
    return True


def qemu_command(options: argparse.Namespace, boot_files: Path, control: Path, port: int) -> list[str]:
    """The emulator's whole command line; what the guest writes to its only port arrives at this descriptor."""
    command = ["qemu-system-x86_64", "-accel", options.accel, "-machine", "q35", "-cpu", options.cpu]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    for device in ("virtio-9p-pci", "virtio-serial-pci"):
        # Plain interrupts: under several emulated CPUs, QEMU 7.2 sometimes aborts in msix_table_mmio_write.
        command += ["-global", f"{device}.vectors=0"]
    command += ["-kernel", str(boot_files / "vmlinuz"), "-initrd", str(control / "initramfs")]
    command += ["-append", "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr random.trust_cpu=on"]
    command += ["-serial", f"file:{control}/console.log"]
    command += numa_options(options)
    command += shared_directory("host", "/", readonly=True)
    command += shared_directory("control", str(control), readonly=True)
    for index, directory in enumerate(options.writable):
        command += shared_directory(f"writable{index}", os.path.abspath(directory))
    command += ["-chardev", f"file,id=port,path=/dev/fd/{port}"]
    command += ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,name=numa-vm"]
    return command


def numa_options(options: argparse.Namespace) -> list[str]:
    """One NUMA node per socket, 21 apart; the memory-only node, if wanted, is last and 31 away."""
    found = re.search(r"sockets=(\d+)", options.smp)
    sockets = int(found[1]) if found else 1
    sizes = [options.memory] * sockets + ([512] if options.memory_only_node else [])
    arguments = ["-smp", options.smp, "-m", f"{sum(sizes)}M"]
    for node, mebibytes in enumerate(sizes):
        arguments += ["-object", f"memory-backend-ram,id=memory{node},size={mebibytes}M"]
        arguments += ["-numa", f"node,nodeid={node},memdev=memory{node}"]
        if node < sockets:
            arguments += ["-numa", f"cpu,node-id={node},socket-id={node}"]
        for other in range(node):
            distance = 21 if node < sockets else 31
            arguments += ["-numa", f"dist,src={other},dst={node},val={distance}"]
    return arguments


def shared_directory(tag: str, path: str, *, readonly: bool = False) -> list[str]:
    """A host directory as a 9p file system."""
    options = f"local,path={path.replace(',', ',,')},mount_tag={tag},security_model=none,multidevs=remap"
    return ["-virtfs", options + (",readonly=on" if readonly else "")]


def mount_lines(writable: Sequence[str]) -> str:
    """Shell lines that mount the writable directories where the host has them."""
    mount = "/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000"
    places = ["/root" + os.path.abspath(directory) for directory in writable]
    return "".join(f"{mount} writable{index} {shlex.quote(place)}\n" for index, place in enumerate(places))
