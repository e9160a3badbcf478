"""Limits of a process: affinity, cpuset, quota and memory, as kernels and containers present them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.probe.cgroups import MAX_HIERARCHIES, read_cgroups
from cpulaunch.probe.limits import free_memory
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import ProbeError
from cpulaunch.records.host import Limits
from tests.roots import MemoryRoot, RootSpec, host_of, write_root


def limits_with(files: dict[str, str], **spec: object) -> Limits:
    return host_of(RootSpec(**{"cores_per_l3": 8, **spec, "files": files}), detail="launch").limits  # type: ignore[arg-type]


def budget(limits: Limits) -> tuple[str, int, str]:
    return format_cpulist(limits.budget.cpus), limits.budget.threads, limits.budget.limited_by


def test_no_limits() -> None:
    limits = limits_with({})
    assert budget(limits) == ("0-7", 8, "all 8 online logical CPUs")
    assert (limits.cpuset, limits.quota, limits.memory_bytes, limits.memory_nodes) == (None,) * 4


def test_inherited_affinity() -> None:
    limits = limits_with({}, affinity="2-3,6", mems_allowed="0")
    assert limits.affinity == {2, 3, 6}
    assert limits.memory_nodes == {0}
    assert budget(limits) == ("2-3,6", 3, "CPU affinity 2-3,6")


def test_affinity_as_a_mask() -> None:
    assert limits_with({"proc/self/status": "Cpus_allowed:\t0000000c\n"}).affinity == {2, 3}


def test_affinity_of_this_process() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system has no CPU affinity")
    assert probe_host(Root(), detail="launch").limits.affinity == os.sched_getaffinity(0)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cpuset(version: str) -> None:
    limits = limits_with({}, cgroup=version, cpuset="4-7", offline="7", affinity="0-7")
    assert limits.cpuset == {4, 5, 6, 7}
    file = {"v1": "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus", "v2": "sys/fs/cgroup/job/cpuset.cpus.effective"}
    assert budget(limits) == ("4-6", 3, f"cpuset 4-7 ({file[version]})")


def test_affinity_inside_a_cpuset() -> None:
    limits = limits_with({}, cgroup="v2", cpuset="4-7", affinity="5-6")
    assert budget(limits) == ("5-6", 2, "CPU affinity 5-6")


def test_a_cgroup_without_cpuset_takes_its_ancestors() -> None:
    limits = limits_with(
        {"sys/fs/cgroup/a/cpuset.cpus.effective": "0-3", "sys/fs/cgroup/a/b/cpu.max": "max 100000"},
        cgroup="v2",
        cgroup_path="/a/b",
    )
    assert limits.cpuset == {0, 1, 2, 3}


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("quota", "threads"), [(4.0, 4), (2.5, 3), (0.25, 1), (100.0, 8)])
def test_quota(version: str, quota: float, threads: int) -> None:
    limits = limits_with({}, cgroup=version, quota_cpus=quota)
    assert limits.quota is not None
    assert limits.quota.cpus == quota
    assert limits.budget.threads == threads
    assert len(limits.budget.cpus) == 8
    file = {"v1": "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "v2": "sys/fs/cgroup/job/cpu.max"}[version]
    expected = f"cgroup CPU quota {quota} ({file})" if threads < 8 else "all 8 online logical CPUs"
    assert limits.budget.limited_by == expected


@pytest.mark.parametrize(
    "files",
    [
        {
            "sys/fs/cgroup/a/cpu.max": "150000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
            "sys/fs/cgroup/a/b/c/cpu.max": "max 100000",
        },
        {"sys/fs/cgroup/a/b/c/cpu.max": "75000 50000", "sys/fs/cgroup/a/cpu.max": "200000 100000"},
    ],
)
def test_the_lowest_quota_of_all_ancestors_applies(files: dict[str, str]) -> None:
    limits = limits_with(files, cgroup="v2", cgroup_path="/a/b/c")
    assert limits.quota is not None
    assert limits.quota.cpus == 1.5
    assert limits.budget.threads == 2


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_memory_limit(version: str) -> None:
    limits = limits_with({}, cgroup=version, memory_limit_bytes=3 << 30)
    name = {"v1": "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "v2": "sys/fs/cgroup/job/memory.max"}[version]
    assert (limits.memory_bytes, limits.memory_source) == (3 << 30, name)
    assert limits_with({}, cgroup=version).memory_bytes is None


def test_memory_limit_of_an_ancestor() -> None:
    files = {"sys/fs/cgroup/a/memory.max": str(1 << 30), "sys/fs/cgroup/a/b/memory.max": str(2 << 30)}
    limits = limits_with(files, cgroup="v2", cgroup_path="/a/b", memory_limit_bytes=2 << 30)
    assert (limits.memory_bytes, limits.memory_source) == (1 << 30, "sys/fs/cgroup/a/memory.max")


@pytest.mark.parametrize(("version", "free"), [("v1", 1500), ("v2", 1500), (None, 8000)])
def test_free_memory(tmp_path: Path, version: str | None, free: int) -> None:
    """The limit less what is used, to which page cache that can be dropped does not count."""
    folder = {"v1": "sys/fs/cgroup/memory/job", "v2": "sys/fs/cgroup/job", None: "sys/fs/cgroup/other"}[version]
    used = "memory.usage_in_bytes" if version == "v1" else "memory.current"
    files = {
        "proc/meminfo": "MemTotal: 16000 kB\nMemAvailable:    8000 kB\n",
        f"{folder}/{used}": str(2000 << 10),
        f"{folder}/memory.stat": f"inactive_file {500 << 10}\ntotal_inactive_file {500 << 10}\n",
    }
    limit = {} if version is None else {"cgroup": version, "memory_limit_bytes": 3000 << 10}
    write_root(tmp_path, RootSpec(files=files, **limit))  # type: ignore[arg-type]
    root = Root(str(tmp_path))
    assert free_memory(root, read_cgroups(root)) == free << 10


def cgroup(lines: str, mounts: str, **files: str) -> dict[str, str]:
    return {"proc/self/cgroup": lines, "proc/self/mountinfo": mounts, **files}


def test_a_container_of_version_1_sees_its_own_folder_as_the_mount() -> None:
    files = cgroup(
        "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc",
        "50 40 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "51 40 0:31 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory",
    )
    files["sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "200000"
    files["sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us"] = "100000"
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = str(1 << 30)
    limits = limits_with(files)
    assert limits.quota is not None
    assert (limits.quota.cpus, limits.quota.source) == (2.0, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us")
    assert limits.memory_bytes == 1 << 30


def test_a_sub_cgroup_inside_a_container_of_version_1() -> None:
    files = cgroup("4:cpu:/docker/abc/inner", "50 40 0:30 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu")
    files["sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us"] = "300000"
    files["sys/fs/cgroup/cpu/inner/cpu.cfs_period_us"] = "100000"
    quota = limits_with(files).quota
    assert quota is not None
    assert quota.source == "sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us"


@pytest.mark.parametrize("path", ["/", "/../outside", "/system.slice/not-visible-here", "/a" * 60_000], ids=len)
def test_a_cgroup_namespace_shows_the_mount_only(path: str) -> None:
    files = cgroup(f"0::{path}", "30 24 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw")
    files["sys/fs/cgroup/cpu.max"] = "100000 100000"
    quota = limits_with(files).quota
    assert quota is not None
    assert (quota.cpus, quota.source) == (1.0, "sys/fs/cgroup/cpu.max")


def test_both_versions_at_once() -> None:
    files = cgroup(
        "3:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/job",
        "30 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "31 24 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
        "32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
    )
    files["sys/fs/cgroup/unified/job/memory.max"] = "5000000"
    files["sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us"] = "100000"
    files["sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us"] = "50000"
    limits = limits_with(files)
    assert limits.quota is not None
    assert (limits.quota.cpus, limits.memory_bytes) == (2.0, 5_000_000)


@pytest.mark.parametrize("name", ["x\x0c", "x\x1fy", "x\x85", "x\xa0y", "x\u2028", "x\r"])
def test_a_mount_point_with_what_unicode_takes_for_space_is_found(name: str) -> None:
    files = cgroup("0::/", f"30 24 0:26 / /{name} rw - cgroup2 cgroup2 rw")
    files[f"{name}/cpu.max"] = "100000 100000"
    assert limits_with(files).quota is not None


def test_a_mount_point_with_a_space() -> None:
    files = cgroup("0::/", "30 24 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw")
    files["my groups/cpu.max"] = "100000 100000"
    assert limits_with(files).quota is not None


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/job"},
        {"proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"},
        {"proc/self/cgroup": "garbage", "proc/self/mountinfo": "garbage\n1 2 3\n - cgroup2"},
    ],
)
def test_missing_mounts_and_paths_mean_no_limit(files: dict[str, str]) -> None:
    limits = limits_with(files)
    assert (limits.quota, limits.cpuset, limits.memory_bytes) == (None,) * 3


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        ("v2", "sys/fs/cgroup/job/cpu.max", "plenty 100000"),
        ("v2", "sys/fs/cgroup/job/cpu.max", "100000 0"),
        ("v2", "sys/fs/cgroup/job/cpu.max", f"{'9' * 60} 1"),
        ("v2", "sys/fs/cgroup/job/cpu.max", "-5 100000"),
        ("v2", "sys/fs/cgroup/job/cpu.max", "100000"),
        ("v2", "sys/fs/cgroup/job/memory.max", "much"),
        ("v2", "sys/fs/cgroup/job/cpuset.cpus.effective", "a-b"),
        ("v1", "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "many"),
        ("v1", "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "-x"),
        ("v2", "proc/self/status", "Cpus_allowed_list:\t0-"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, version: str, name: str, text: str) -> None:
    root = write_root(tmp_path, RootSpec(cgroup=version, files={name: text}))  # type: ignore[arg-type]
    with pytest.raises(ProbeError) as caught:
        probe_host(Root(str(root)), detail="launch")
    assert caught.value.source == str(root / name)
    assert text.split()[-1] in str(caught.value.value)


def test_disjoint_affinity_and_cpuset_leave_a_budget() -> None:
    limits = limits_with({}, cgroup="v2", cpuset="6-7", affinity="0-1")
    assert limits.budget.cpus == {0, 1}
    assert limits_with({}, affinity="100-101").budget.cpus == set(range(8))


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({".dockerenv": ""}, True),
        ({"run/.containerenv": ""}, True),
        ({"proc/self/cgroup": "0::/kubepods/pod1"}, True),
        ({"proc/self/cgroup": "0::/user.slice"}, False),
    ],
)
def test_containers_are_recognised(files: dict[str, str], container: bool) -> None:
    assert host_of(RootSpec(files=files)).container is container


def test_mounts_beyond_those_of_any_machine_are_not_looked_at() -> None:
    """Each folder above the process's own is read once for each of them."""
    mount = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    root = MemoryRoot({"proc/self/cgroup": "0::/", "proc/self/mountinfo": mount * (MAX_HIERARCHIES + 1)})
    assert len(read_cgroups(root).hierarchies) == MAX_HIERARCHIES


@pytest.mark.root
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(("size", "low", "high"), [("64k", 0, 65536), ("0", None, None)])
def test_free_space_is_what_is_left_of_a_file_system_with_a_limit(
    tmp_path: Path, size: str, low: int | None, high: int | None
) -> None:
    """Before and after it is filled."""
    code = """if True:
        import sys
        from cpulaunch.probe.host import read_free_space
        print(read_free_space(sys.argv[1]))
        with open(sys.argv[1] + "/file", "wb") as file:
            file.write(bytes(65536))
        print(read_free_space(sys.argv[1]))
    """
    mounted = f'mount -t tmpfs -o size={size} tmpfs {tmp_path} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(high), str(low)]
