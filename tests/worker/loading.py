"""Run by the tests through cpulaunch: forked and spawned DataLoader workers, and other children, report their CPUs.

Prints one JSON object: how a process was started -> its CPUs, and what LD_PRELOAD it has.
"""

import json
import multiprocessing
import os
import subprocess
import sys

import torch
from torch.utils.data import DataLoader, Dataset

REPORT = "import json, os; print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ.get('LD_PRELOAD')]))"
EXECUTED = """
import json, os, sys
reported = json.load(open(sys.argv[1]))
reported["successor"] = [sorted(os.sched_getaffinity(0)), os.environ.get("LD_PRELOAD")]
json.dump(reported, open(sys.argv[1], "w"))
"""


class Cpus(Dataset):
    """Each sample is the mask of the process that loads it, one truth value for each CPU."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        mask = os.sched_getaffinity(0)
        return torch.tensor([cpu in mask for cpu in range(os.cpu_count())])


def loaded(method, *, workers=2):
    loader = DataLoader(Cpus(), batch_size=2, num_workers=workers, multiprocessing_context=method)
    return [[cpu for cpu, there in enumerate(sample) if there] for batch in loader for sample in batch]


def by_multiprocessing(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=report, args=(queue,))
    child.start()
    reported = queue.get()
    child.join()
    return reported


def report(queue):
    queue.put([sorted(os.sched_getaffinity(0)), os.environ.get("LD_PRELOAD"), preloaded()])


def preloaded():
    return [name for name in ("tcmalloc", "jemalloc", "libiomp5") if name in open("/proc/self/maps").read()]


def by_program(*argv, **options):
    result = subprocess.run([*argv, "-c", REPORT], capture_output=True, text=True, check=True, **options)
    return json.loads(result.stdout)


def main():
    torch.randn(300, 300) @ torch.randn(300, 300)  # The first parallel region: here OpenMP pins.
    link = os.path.join(os.path.dirname(sys.argv[0]), "another-python")
    loads = "loaders" in sys.argv[2:]
    reported = {
        "main": sorted(os.sched_getaffinity(0)),
        "fork": loaded("fork") if loads else None,
        "spawn": loaded("spawn", workers=1) if loads else None,
        "forked child": by_multiprocessing("fork"),
        "this python": by_program(sys.executable),
        "this python by posix_spawn": by_program(sys.executable, close_fds=False),
        "another program": by_program(link),
        "posix_spawn": by_program(link, close_fds=False),
        "main afterwards": sorted(os.sched_getaffinity(0)),
        "preload": os.environ.get("LD_PRELOAD"),
        "preloaded": preloaded(),
    }
    if "preloads" in sys.argv[2:]:
        reported["spawned child"] = by_multiprocessing("spawn")
    with open(sys.argv[1], "w") as file:
        json.dump(reported, file)
    os.execl(sys.executable, sys.executable, "-c", EXECUTED, sys.argv[1])


if __name__ == "__main__":
    main()
