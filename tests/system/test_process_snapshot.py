"""Snapshots of a process from /proc: captured, unusual and missing files, and the test process itself."""

import os
import threading
import tracemalloc

import pytest

from cpulaunch.system import process_snapshot
from cpulaunch.system.process_snapshot import COMMAND_LETTERS, loaded_files, page_placement, snapshot, thread_masks

MAPS = """\
55e0-55e1 r--p 00000000 fe:00 1 /usr/bin/python3.11
55e1-55e2 r-xp 00001000 fe:00 1 /usr/bin/python3.11
7f00-7f01 r-xp 00000000 fe:00 2                          /opt/torch/lib/libgomp-98b21ff3.so.1
7f01-7f02 rw-p 00000000 fe:00 2 /opt/torch/lib/libgomp-98b21ff3.so.1
7f02-7f03 r-xp 00000000 fe:00 3 /opt/with space/libiomp5.so
7f03-7f04 r-xp 00000000 fe:00 4 /opt/libiompstubs5.so
7f04-7f05 r-xp 00000000 fe:00 5 /usr/lib/libtcmalloc_minimal.so.4.5.10 (deleted)
7f05-7f06 r--p 00000000 fe:00 6 /usr/lib/libomp.so.5
7ffc-7ffd rw-p 00000000 00:00 0                          [stack]
7ffd-7ffe r-xp 00000000 00:00 0                          [vdso]
7fff-8000 r-xp 00000000 00:00 0
"""
NUMA_MAPS = """\
55e1 default file=/usr/bin/N1=7 mapped=5 N0=3 N1=2 kernelpagesize_kB=4
7f02 bind:0-1 anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7ffc default stack anon=4 dirty=4 N12=4 kernelpagesize_kB=4
7ffd default
"""


def status(**fields):
    return "".join(f"{name}:\t{value}\n" for name, value in fields.items())


@pytest.fixture
def proc(tmp_path):
    """A root with one process, 42."""
    process = tmp_path / "42"
    for thread in (42, 43, 44):
        (process / "task" / str(thread)).mkdir(parents=True)
        mask = "3" if thread == 43 else "0-1,4"
        (process / "task" / str(thread) / "status").write_text(status(Name="python", Cpus_allowed_list=mask))
    (process / "status").write_text(status(Name="a:b", State="S (sleeping)", VmHWM="    2116 kB", VmRSS="  2000 kB"))
    (process / "cmdline").write_bytes(b"python\0-c\0print(1)\nprint(\xff)\0")
    (process / "maps").write_text(MAPS)
    (process / "numa_maps").write_text(NUMA_MAPS)
    return tmp_path


def test_of_very_many_threads_some_are_looked_at(proc, monkeypatch):
    monkeypatch.setattr(process_snapshot, "MAX_THREADS", 2)
    assert sum(each["count"] for each in snapshot(42, proc=str(proc))["threads"]) == 2


def test_a_process_is_described(proc):
    assert snapshot(42, proc=str(proc)) == {
        "pid": 42,
        "command": "python -c print(1) print(\ufffd)",
        "threads": [{"cpus": "0-1,4", "count": 2}, {"cpus": "3", "count": 1}],
        "pages": {"0": 3 * 4096, "1": 2 * 4096 + 2 * 2048 * 1024, "12": 4 * 4096},
        "openmp": ["/opt/torch/lib/libgomp-98b21ff3.so.1", "/opt/with space/libiomp5.so"],
        "openmp_runtime": None,
        "openmp_path": None,
        "allocator": "tcmalloc",
        "allocator_path": "/usr/lib/libtcmalloc_minimal.so.4.5.10",
        "peak_memory_bytes": 2116 * 1024,
        "rss_bytes": 2000 * 1024,
    }


def test_the_only_openmp_runtime_is_the_one_in_use(proc):
    (proc / "42/maps").write_text(MAPS.replace("libiomp5", "libother"))
    described = snapshot(42, proc=str(proc))
    assert (described["openmp_runtime"], described["openmp_path"]) == ("gnu", described["openmp"][0])


def test_of_very_many_openmp_runtimes_the_first_are_told(proc):
    paths = [f"/opt/libgomp-{number}.so.1" for number in range(1000)]
    (proc / "42/maps").write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 7 {path}\n" for path in paths))
    assert snapshot(42, proc=str(proc))["openmp"] == paths[: process_snapshot.MAX_OPENMP]


def test_pages_are_left_out_on_request(proc):
    assert snapshot(42, proc=str(proc), pages=False)["pages"] == {}


@pytest.mark.parametrize("name", ["status", "cmdline", "maps", "numa_maps"])
def test_missing_files_leave_fields_empty(proc, name):
    before = snapshot(42, proc=str(proc))
    (proc / "42" / name).unlink()
    after = snapshot(42, proc=str(proc))
    empty = {key for key in after if after[key] != before[key]}
    assert all(after[key] in ("", {}, [], None, "default") for key in empty)
    assert empty


@pytest.mark.parametrize("name", ["cmdline", "maps", "numa_maps", "status"])
def test_files_that_a_process_makes_huge_are_read_in_part(proc, name):
    """A command line is as long as its process says: what it does not use of it costs that process nothing."""
    before = snapshot(42, proc=str(proc))
    with open(proc / "42" / name, "r+b") as file:
        file.truncate(max(1 << 28, os.path.getsize(file.name)))
    tracemalloc.start()
    after = snapshot(42, proc=str(proc))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 27
    assert after["command"].startswith(before["command"])
    assert len(after["command"]) <= COMMAND_LETTERS
    assert {**after, "command": ""} == {**before, "command": ""}


def test_a_process_that_is_gone_has_nothing(tmp_path):
    gone = snapshot(42, proc=str(tmp_path))
    assert (gone["threads"], gone["rss_bytes"], gone["allocator"]) == ([], None, "default")


@pytest.mark.parametrize(
    ("file", "allocator"),
    [
        ("/lib/libjemalloc.so.2", "jemalloc"),
        ("/lib/libmimalloc-secure.so.2.1", "mimalloc"),
        ("/lib/libtcmalloc.so.4", "tcmalloc"),
        ("/lib/libc.so.6", "default"),
        ("/lib/tcmalloc.so", "default"),
    ],
)
def test_the_allocator_is_recognised_by_its_file_name(tmp_path, file, allocator):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "maps").write_text(f"7f00-7f01 r-xp 00000000 fe:00 2 {file}\n")
    assert snapshot(1, proc=str(tmp_path))["allocator"] == allocator


def test_masks_are_grouped_the_most_frequent_first():
    assert thread_masks(["10", "2", "2", "0"]) == [
        {"cpus": "2", "count": 2},
        {"cpus": "0", "count": 1},
        {"cpus": "10", "count": 1},
    ]


@pytest.mark.parametrize("line", ["", "garbage", "55e0 default N0=x kernelpagesize_kB=4", "55e0 default N0=3"])
def test_odd_lines_place_no_pages(line):
    assert sum(page_placement([line]).values()) == 0


@pytest.mark.parametrize("mark", ["\u2003", "\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_a_name_with_marks_of_python_is_one_name(proc, mark):
    name = f"/tmp/x{mark}N\u00b2{mark}N1=9"
    (proc / "42" / "numa_maps").write_text(f"55e0 default file={name} mapped=1 N0=1 kernelpagesize_kB=4\n")
    (proc / "42" / "maps").write_text(f"55e0-55e1 r-xp 00000000 fe:00 1 {name}{mark}libgomp.so.1\n")
    seen = snapshot(42, proc=str(proc))
    assert seen["pages"] == {"0": 4096}
    assert seen["openmp"] == []


def test_a_node_has_a_number_in_ascii_digits():
    assert page_placement(["55e0 default N\u00b2=1 N1=2 kernelpagesize_kB=4"]) == {"1": 2 * 4096}


LIBRARY = "7f00 default file={} mapped=9 N0=2 N1=7 kernelpagesize_kB=4"


@pytest.mark.parametrize("file", ["/lib/libc.so.6", "/a b/torch/lib/libtorch_cpu.so"])
def test_pages_of_libraries_are_no_memory_of_the_process(file):
    memory = "55e0 default anon=3 dirty=3 N0=3 kernelpagesize_kB=4"
    assert page_placement([LIBRARY.format(file.replace(" ", "\\040")), memory]) == {"0": 3 * 4096}


def test_pages_of_other_files_are_memory_of_the_process():
    assert page_placement([LIBRARY.format("/models/a.solo.safetensors")]) == {"0": 2 * 4096, "1": 7 * 4096}


@pytest.mark.parametrize("line", ["", "garbage", "7f00-7f01 r-xp 00000000 fe:00 2"])
def test_odd_lines_load_nothing(line):
    assert loaded_files([line]) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_this_process_sees_itself():
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    seen = snapshot()
    stop.set()
    assert seen["pid"] == os.getpid()
    assert sum(group["count"] for group in seen["threads"]) >= 4
    assert seen["peak_memory_bytes"] >= seen["rss_bytes"] > 0


def test_pipes_in_place_of_files_are_not_waited_for(proc):
    for name in ("status", "cmdline", "maps", "numa_maps"):
        (proc / "42" / name).unlink()
        os.mkfifo(proc / "42" / name)
    found = snapshot(42, proc=str(proc))
    assert (found["command"], found["rss_bytes"], found["openmp"], found["pages"]) == ("", None, [], {})
