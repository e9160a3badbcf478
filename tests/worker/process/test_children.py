"""Child processes of a worker: on the planned CPUs under every --affinity, and with the user's LD_PRELOAD."""

import json
import os
import sys
from ctypes.util import find_library
from importlib import metadata

import pytest

from cpulaunch.records.cpulist import parse_cpulist
from tests import json_output
from tests.worker.applying import HERE, case, run_cases, run_python

ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs to tell masks apart"),
]
AFFINITIES = ("mask", "close", "spread", "explicit", "none")
CPULAUNCH = (sys.executable, "-m", "cpulaunch")


PINNING = ("close", "spread", "explicit")
PYTHONS = ("this python", "this python by posix_spawn", "successor")
"""Ways to start this interpreter again: subprocess by either call, and exec in place of the program."""


@pytest.fixture
def children(tmp_path):
    """A function that runs loading.py and returns what its processes reported, its planned worker and its outcome."""

    def run(*options, what, env=None):
        program, reported, link = (tmp_path / name for name in ("loading.py", "reported.json", "another-python"))
        program.write_text((HERE / "loading.py").read_text())
        link.symlink_to(sys.executable)
        outcome = run_python(*options, program, reported, what, argv=CPULAUNCH, env=env)
        assert outcome.code == 0, outcome.err
        plan = run_python("plan", "--json", *options, program, argv=CPULAUNCH, env=env)
        (worker,) = json_output.read("plan", plan.out)["workers"]
        return json.loads(reported.read_text()), worker, outcome

    return run


def check_masks(children, affinity, openmp):
    reported, worker, outcome = children("--affinity", affinity, "--openmp", openmp, what="loaders")
    planned = sorted(parse_cpulist(worker["cpus"]))
    assert planned == ALLOWED
    assert reported["fork"] == [planned] * 4
    assert reported["spawn"] == [planned] * 4
    for name in (*PYTHONS, "forked child", "another program", "posix_spawn"):
        assert reported[name][0] == planned, name
    assert reported["main afterwards"] == reported["main"], "starting children does not change the mask of this thread"
    assert len(reported["main"]) == (1 if affinity in PINNING else len(planned)), (
        "OpenMP must pin threads, or this test shows nothing"
    )
    assert not outcome.cpulaunch_lines
    assert "suggested max number of worker" not in outcome.err


@pytest.mark.parametrize("affinity", AFFINITIES)
def test_children_run_on_the_planned_cpus(children, affinity):
    check_masks(children, affinity, "default")


@pytest.mark.slow
@pytest.mark.parametrize("affinity", AFFINITIES)
def test_children_run_on_the_planned_cpus_with_intel_openmp(children, affinity):
    try:
        metadata.version("intel-openmp")
    except metadata.PackageNotFoundError:
        pytest.skip("intel-openmp is not installed here")
    check_masks(children, affinity, "intel")


def test_loader_workers_run_on_the_cpus_reserved_for_them(tmp_path):
    program = """
        from torch.utils.data import DataLoader

        class Masks(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                return sorted(os.sched_getaffinity(0))

        def choose(worker):
            os.sched_setaffinity(0, {first})

        for chosen in (None, choose):
            loader = DataLoader(Masks(), None, num_workers=2, worker_init_fn=chosen)
            print(*loader, sorted(os.sched_getaffinity(0)))
        """.replace("{first}", f"{{{ALLOWED[0]}}}")
    settings = {"cpus": ",".join(map(str, ALLOWED)), "loader_cpus": str(ALLOWED[-1])}
    (outcome,) = run_cases({"": case(program, **settings)}, tmp_path).values()
    assert outcome.code == 0, outcome.err
    first, last = [ALLOWED[0]], [ALLOWED[-1]]
    assert outcome.out.splitlines() == [f"{last} {last} {ALLOWED}", f"{first} {first} {ALLOWED}"]


@pytest.mark.skipif(not find_library("tcmalloc_minimal"), reason="libtcmalloc_minimal is not installed here")
@pytest.mark.parametrize("user_preload", [None, "libm.so.6"], ids=["nothing preloaded before", "the user's preload"])
def test_only_this_interpreter_keeps_the_preloads(children, user_preload):
    env = {} if user_preload is None else {"LD_PRELOAD": user_preload}
    reported, worker, _ = children("--allocator", "tcmalloc", "--openmp", "default", what="preloads", env=env)
    assert "tcmalloc" in worker["env"]["LD_PRELOAD"]
    assert reported["preload"] == user_preload
    assert reported["another program"][1] == reported["posix_spawn"][1] == user_preload
    for name in PYTHONS:
        assert reported[name][1] == worker["env"]["LD_PRELOAD"], name
    assert reported["preloaded"] == ["tcmalloc"]
    assert reported["forked child"][1:] == [user_preload, ["tcmalloc"]]
    assert reported["spawned child"][1:] == [user_preload, ["tcmalloc"]]
