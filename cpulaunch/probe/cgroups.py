"""This process's cgroups: for each controller, the folders that limit it, from its own up to the mount.

Source: kernel, Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/; proc_pid_mountinfo(5), cgroups(7).
"""

from __future__ import annotations

from cpulaunch.records.host import Throttling
from cpulaunch.records.record import record
from cpulaunch.system.root import Root, natural


@record(kw_only=False)
class Hierarchy:
    """A mounted cgroup hierarchy and this process's path in it. `controllers` is empty for version 2."""

    version: int
    controllers: frozenset[str]
    mount: str
    mount_root: str
    path: str

    def folders(self, root: Root) -> tuple[str, ...]:
        """The process's own folder and its ancestors, up to what is mounted; names under the root.

        In a container the path may name a cgroup that is not visible here; then the mount itself is the limit.
        """
        path = self.path.rstrip("/")
        base = self.mount_root.rstrip("/")
        if base and (path == base or path.startswith(base + "/")):
            path = path[len(base) :]
        if "/.." in path or (path and not root.exists(self.mount + path)):
            path = ""
        parts = [part for part in path.split("/") if part]
        paths = ["/".join([self.mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
        return tuple(name.lstrip("/") for name in paths)


@record(kw_only=False)
class Cgroups:
    """All hierarchies this process is in, and whether their names look like a container's."""

    hierarchies: tuple[Hierarchy, ...]
    container: bool

    def folders(self, root: Root, controller: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(version, folders) of every hierarchy that may limit `controller`."""
        return tuple(
            (hierarchy.version, hierarchy.folders(root))
            for hierarchy in self.hierarchies
            if hierarchy.version == 2 or controller in hierarchy.controllers
        )


def throttling(root: Root) -> Throttling:
    """How often CPU quotas have held back this process's cgroup, or one above it: that with most periods.

    Source: kernel, cgroup-v2.rst, cpu.stat (nr_periods, nr_throttled); version 1 has the same names.
    """
    found = Throttling()
    for _, folders in read_cgroups(root).folders(root, "cpu"):
        for folder in folders:
            lines = (root.text(f"{folder}/cpu.stat") or "").split("\n")
            values = {name: natural(number) or 0 for name, _, number in (line.partition(" ") for line in lines)}
            if values.get("nr_periods", 0) > found.periods:
                found = Throttling(periods=values["nr_periods"], throttled=values.get("nr_throttled", 0))
    return found


CONTAINER_WORDS = ("docker", "kubepods", "containerd", "libpod", "lxc", "crio")


MAX_HIERARCHIES = 128
"""Mounted ones that are looked at; version 1 has one for each of some fifteen controllers."""


def read_cgroups(root: Root) -> Cgroups:
    """The hierarchies that /proc/self/cgroup names and /proc/self/mountinfo (or /proc/mounts) shows mounted."""
    text = root.text("proc/self/cgroup") or ""
    paths = _paths(text)
    legacy = root.text("proc/self/cpuset")
    if legacy is not None and not any("cpuset" in names for names in paths):
        paths[frozenset({"cpuset"})] = legacy
    hierarchies = []
    for version, controllers, mount, mount_root in _mounts(root):
        path = _path_of(paths, version, controllers)
        if path is not None:
            hierarchies.append(Hierarchy(version, controllers, mount, mount_root, path))
    return Cgroups(tuple(hierarchies[:MAX_HIERARCHIES]), container=any(word in text for word in CONTAINER_WORDS))


def _paths(text: str) -> dict[frozenset[str], str]:
    """Path by controllers, of lines "4:cpu,cpuacct:/path"; no controllers: version 2 ("0::/path")."""
    paths = {}
    for line in text.split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            paths[frozenset(filter(None, controllers.split(",")))] = path
    return paths


def _path_of(paths: dict[frozenset[str], str], version: int, controllers: frozenset[str]) -> str | None:
    if version == 2:
        return paths.get(frozenset())
    return next((path for names, path in paths.items() if names & controllers), None)


ESCAPED = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}
"""Source: proc(5), /proc/pid/mounts."""

Mount = tuple[int, frozenset[str], str, str]


def _mounts(root: Root) -> list[Mount]:
    """(version, controllers, mount point, mounted part) of every cgroup mount.

    Names have spaces, tabs and line ends escaped, and may have any other character that Unicode takes for one.
    """
    text = root.text("proc/self/mountinfo")
    if text is not None:
        return [mount for line in text.split("\n") if (mount := _mount_of(line))]
    return [mount for line in (root.text("proc/mounts") or "").split("\n") if (mount := _old_mount_of(line))]


def _mount_of(line: str) -> Mount | None:
    fields, dash, tail = line.partition(" - ")
    words, kind = fields.split(" "), tail.split(" ")
    if not dash or len(words) < 5 or len(kind) < 2:
        return None
    return _mount(kind[0], point=words[4], part=words[3], options=kind[-1])


def _old_mount_of(line: str) -> Mount | None:
    words = line.split(" ")
    return _mount(words[2], point=words[1], part="/", options=words[3]) if len(words) >= 4 else None


def _mount(kind: str, *, point: str, part: str, options: str) -> Mount | None:
    if kind == "cgroup2":
        return 2, frozenset(), _unescape(point), _unescape(part)
    if kind == "cgroup":
        return 1, frozenset(options.split(",")), _unescape(point), _unescape(part)
    return (1, frozenset({"cpuset"}), _unescape(point), "/") if kind == "cpuset" else None


def _unescape(text: str) -> str:
    for code, character in ESCAPED.items() if "\\" in text else ():
        text = text.replace(code, character)
    return text
