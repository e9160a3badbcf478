"""Real cgroups, version 1 or 2, made for one test and always removed."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
FILES = {
    ("cpu", 1): "cpu.cfs_quota_us",
    ("cpu", 2): "cpu.max",
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("cpuset", 1): "cpuset.cpus",
    ("cpuset", 2): "cpuset.cpus",
}
PERIOD = 100_000


class NoControllerError(Exception):
    """Why this machine's cgroups cannot be used."""


@dataclass(frozen=True)
class ControlGroup:
    """A directory of one cgroup hierarchy."""

    controller: str
    version: int
    path: Path

    @property
    def limit_file(self) -> Path:
        """The file that holds this controller's limit."""
        return self.path / FILES[self.controller, self.version]

    def limit_cpus(self, cpus: float) -> None:
        """Effect: sets a CPU bandwidth limit."""
        quota = str(int(cpus * PERIOD))
        self.limit_file.write_text(quota if self.version == 1 else f"{quota} {PERIOD}")

    def limit_memory(self, mebibytes: int) -> None:
        """Effect: sets a memory limit that swapping does not soften."""
        self.limit_file.write_text(str(mebibytes << 20))
        for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            if (self.path / name).exists():
                (self.path / name).write_text(str(mebibytes << 20) if self.version == 1 else "0")

    def run(self, command: Sequence[object], **options: object) -> subprocess.CompletedProcess[str]:
        """The result of a command that ran, with all its children, in this cgroup."""
        words = ["sh", "-c", ENTER, "sh", str(self.path), *map(str, command)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, **options)

    def child(self) -> "ControlGroup":
        """A new cgroup inside this one."""
        if self.version == 2:
            enable(self.path, self.controller)
        path = self.path / "inner"
        path.mkdir()
        return ControlGroup(self.controller, self.version, path)

    def remove(self) -> None:
        """Effect: kills what is left in the cgroup and its children, and removes them."""
        for inner in sorted(self.path.glob("*/")):
            ControlGroup(self.controller, self.version, inner).remove()
        for _ in range(100):
            for pid in (self.path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        self.path.rmdir()


@contextmanager
def control_group(controller: str) -> Iterator[ControlGroup]:
    """A new cgroup below this process's own. Raises: NoControllerError."""
    version, parent = own_group(controller)
    path = parent / f"cpulaunch-test-{uuid.uuid4().hex[:8]}"
    try:
        if version == 2:
            enable(parent, controller)
        path.mkdir()
    except OSError as error:
        raise NoControllerError(f"cannot make a cgroup for {controller}: {error}") from error
    group = ControlGroup(controller, version, path)
    try:
        if controller == "cpuset" and version == 1:
            for name in ("cpuset.cpus", "cpuset.mems"):
                (path / name).write_text((parent / name).read_text())
        yield group
    finally:
        group.remove()


def enable(parent: Path, controller: str) -> None:
    """Effect: children of a version 2 cgroup get the controller."""
    (parent / "cgroup.subtree_control").write_text(f"+{controller}")


def own_group(controller: str) -> tuple[int, Path]:
    """(version, directory) of this process's cgroup for a controller. Raises: NoControllerError.

    A process's path is relative to its cgroup namespace and may not exist below the mount: then the mount itself.
    """
    entries = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for mount, kind, options in hierarchies():
        if kind == "cgroup" and controller in options.split(","):
            own = next((path for names, path in entries if controller in names.split(",")), "/")
            version = 1
        elif kind == "cgroup2" and controller in (mount / "cgroup.controllers").read_text().split():
            own = next((path for names, path in entries if names == ""), "/")
            version = 2
        else:
            continue
        inside = mount / own.lstrip("/")
        return version, inside if inside.is_dir() else mount
    raise NoControllerError(f"no cgroup hierarchy with the {controller} controller is mounted")


def hierarchies() -> Iterator[tuple[Path, str, str]]:
    """(mount point, file system, options) of every mounted cgroup hierarchy."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind.startswith("cgroup"):
            yield Path(mount), kind, options
