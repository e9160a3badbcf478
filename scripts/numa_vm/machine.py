"""The emulated machine: its command line, its start, and the frames that it sends about the command."""

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
STARTED, OUTPUT, ERRORS, STATUS, CLOSED = (
    b"S",
    b"1",
    b"2",
    b"X",
    b"",
)  # Frame kinds as in runner.py; CLOSED: no more frames.
MESSAGE_CHARACTERS = 2000


def run_guest(options: argparse.Namespace, boot_files: Path, control: Path) -> int:
    """Exit code of the command. A machine that ends or hangs before the command starts is replaced by another.

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
    raise NotAvailableError(f"{ATTEMPTS} machines failed to boot; the last one {reason}")


class Machine:
    """A running emulator, killed on exit. A thread copies the command's output to this process's output."""

    def __init__(self, options: argparse.Namespace, boot_files: Path, control: Path) -> None:
        self.options, self.boot_files, self.control = options, boot_files, control
        self.frames: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()

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
        threading.Thread(target=listen, args=(read_end, self.frames), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.emulator.kill()
        self.emulator.wait()

    def wait_for_start(self, deadline: float, boot_seconds: float) -> None:
        """Effect: waits until the command starts.

        Raises: TimedOutError after the deadline; NotBootedError if the boot takes longer or the machine ends.
        """
        left = deadline - time.monotonic()
        try:
            kind, _ = self.frames.get(timeout=max(0.0, min(left, boot_seconds)))
        except Empty:
            if left <= boot_seconds:
                raise TimedOutError(f" (the command had not started){self.last_messages()}") from None
            raise NotBootedError(f"had not started the command after {boot_seconds:g} s") from None
        if kind == CLOSED:
            raise NotBootedError(f"ended ({self.exit_code()}) before it started the command")

    def wait_for_status(self, deadline: float) -> int:
        """Exit code of the command, after all its output has been copied. Raises: TimedOutError, NotAvailableError."""
        try:
            kind, content = self.frames.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimedOutError("") from None
        if kind == CLOSED:
            raise NotAvailableError(
                f"the machine ended ({self.exit_code()}) while the command ran{self.last_messages()}"
            )
        return int(content)

    def exit_code(self) -> str:
        """The exit code of the emulator, as text for messages. Effect: waits for the emulator."""
        return f"exit code {self.emulator.wait()} of QEMU"

    def messages(self) -> str:
        """The messages of the emulator and of the guest's kernel."""
        logs = (self.control / "qemu.log", self.control / "console.log")
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def last_messages(self) -> str:
        """The last messages, after a colon and a line break; empty without messages."""
        last = self.messages()[-MESSAGE_CHARACTERS:].rstrip()
        return f":\n{last}" if last else ""


def die_with_parent() -> Callable[[], None]:
    """A function for a child process: the kernel kills the child when this process ends, for whatever reason."""
    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_parent_death_signal, signal.SIGKILL)


def listen(source: int, frames: SimpleQueue[tuple[bytes, bytes]]) -> None:
    """Effect: copies the command's output, puts every other frame into CLOSED at the end."""
    targets = {OUTPUT: 1, ERRORS: 2}
    with os.fdopen(source, "rb") as stream:
        while len(header := stream.read(5)) == 5:
            kind, length = struct.unpack(">cI", header)
            content = stream.read(length)
            if kind not in targets:
                frames.put((kind, content))
            elif not write_all(content, targets[kind]):
                targets[kind] = os.open(os.devnull, os.O_WRONLY)
    frames.put((CLOSED, b""))


def write_all(content: bytes, target: int) -> bool:
    """Whether everything was written; False if the reader has closed its end. Effect: writes to the descriptor."""
    while content:
        try:
            content = content[os.write(target, content) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:
            return False
    return True


def qemu_command(options: argparse.Namespace, boot_files: Path, control: Path, port: int) -> list[str]:
    """The command line of the emulator. The guest's only virtio port is connected to the descriptor `port`."""
    command = ["qemu-system-x86_64", "-accel", options.accel, "-machine", "q35", "-cpu", options.cpu]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    for device in ("virtio-9p-pci", "virtio-serial-pci"):
        # No MSI-X: with several emulated CPUs, QEMU 7.2 sometimes aborts in msix_table_mmio_write.
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
    """QEMU options for CPUs and memory: one NUMA node per socket, at distance 21, then any memory-only node, at 31."""
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
    """QEMU options that share a host directory as a 9p file system."""
    options = f"local,path={path.replace(',', ',,')},mount_tag={tag},security_model=none,multidevs=remap"
    return ["-virtfs", options + (",readonly=on" if readonly else "")]


def mount_lines(writable: Sequence[str]) -> str:
    """Shell lines that mount the writable directories at the same paths as on the host."""
    mount = "/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000"
    places = ["/root" + os.path.abspath(directory) for directory in writable]
    return "".join(f"{mount} writable{index} {shlex.quote(place)}\n" for index, place in enumerate(places))
