"""A worker on NUMA hardware: touches memory, then prints its allowed CPUs, memory policy and page placement."""

import ctypes
import json
import mmap
import os
import re
import threading

PAGES = 4096
PAGE_BYTES = 4096


def cpus_allowed(task: str) -> str:
    """The CPU list of one thread, as the kernel writes it."""
    with open(f"/proc/{task}/status") as file:
        return re.search(r"Cpus_allowed_list:\s*(\S+)", file.read())[1]


def placement(address: int) -> tuple[str, dict[str, int]]:
    """(policy, pages by NUMA node) of the mapping at an address."""
    with open("/proc/self/numa_maps") as file:
        line = next(line for line in file if int(line.split()[0], 16) == address)
    return line.split()[1], {node: int(pages) for node, pages in re.findall(r" N(\d+)=(\d+)", line)}


def main() -> None:
    """Effect: touches the memory and prints the report as JSON."""
    memory = mmap.mmap(-1, PAGES * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(PAGES):
        memory[page * PAGE_BYTES] = 1
    policy, pages = placement(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    thread_cpus: list[str] = []
    thread = threading.Thread(target=lambda: thread_cpus.append(cpus_allowed("thread-self")))
    thread.start()
    thread.join()
    report = {
        "cpus": cpus_allowed("self"),
        "thread_cpus": thread_cpus[0],
        "policy": policy,
        "pages": pages,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "uid": os.getuid(),
    }
    os.write(1, (json.dumps(report) + "\n").encode())


if __name__ == "__main__":
    main()
