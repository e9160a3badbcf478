"""Children of a worker: on the plan's CPUs under every --affinity, with the user's LD_PRELOAD, whoever starts them."""

import json
import os
import sys
from ctypes.util import find_library
from importlib import metadata

import pytest

from cpulaunch.records.cpulist import parse_cpulist
from tests.worker.applying import HERE, case, run_cases, run_python

ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs for a mask to show"),
]
AFFINITIES = ("mask", "close", "spread", "explicit", "none")
CPULAUNCH = (sys.executable, "-m", "cpulaunch")


PINNING = ("close", "spread", "explicit")
PYTHONS = ("this python", "this python by posix_spawn", "successor")
"""How this interpreter is started again: subprocess does either, and a program may put it in its own place."""


@pytest.fixture
def children(tmp_path):
    """Runs the program and answers what its processes told, the settings that its plan gave it, and how it ended."""

    def run(*options, what, env=None):
        program, told, link = (tmp_path / name for name in ("loading.py", "told.json", "another-python"))
        program.write_text((HERE / "loading.py").read_text())
        link.symlink_to(sys.executable)
        outcome = run_python(*options, program, told, what, argv=CPULAUNCH, env=env)
        assert outcome.code == 0, outcome.err
        plan = run_python("plan", "--json", *options, program, argv=CPULAUNCH, env=env)
        (worker,) = json.loads(plan.out)["workers"]
        return json.loads(told.read_text()), worker, outcome

    return run


def check_masks(children, affinity, openmp):
    told, worker, outcome = children("--affinity", affinity, "--openmp", openmp, what="loaders")
    planned = sorted(parse_cpulist(worker["cpus"]))
    assert planned == ALLOWED
    assert told["fork"] == [planned] * 4
    assert told["spawn"] == [planned] * 4
    for name in (*PYTHONS, "forked child", "another program", "posix_spawn"):
        assert told[name][0] == planned, name
    assert told["still"] == told["main"], "starting children leaves this thread where it was"
    assert len(told["main"]) == (1 if affinity in PINNING else len(planned)), "OpenMP pins, or nothing is shown here"
    assert not outcome.ours
    assert "suggested max number of worker" not in outcome.err


@pytest.mark.parametrize("affinity", AFFINITIES)
def test_children_run_on_the_cpus_of_the_plan(children, affinity):
    check_masks(children, affinity, "default")


@pytest.mark.slow
@pytest.mark.parametrize("affinity", AFFINITIES)
def test_children_run_on_the_cpus_of_the_plan_with_intel_openmp(children, affinity):
    try:
        metadata.version("intel-openmp")
    except metadata.PackageNotFoundError:
        pytest.skip("intel-openmp is not installed here")
    check_masks(children, affinity, "intel")


def test_loader_workers_get_the_cpus_set_apart_for_them(tmp_path):
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
@pytest.mark.parametrize("users", [None, "libm.so.6"], ids=["nothing preloaded before", "the user's preload"])
def test_only_this_interpreter_keeps_the_preloads(children, users):
    env = {} if users is None else {"LD_PRELOAD": users}
    told, worker, _ = children("--allocator", "tcmalloc", "--openmp", "default", what="preloads", env=env)
    assert "tcmalloc" in worker["env"]["LD_PRELOAD"]
    assert told["preload"] == users
    assert told["another program"][1] == told["posix_spawn"][1] == users
    for name in PYTHONS:
        assert told[name][1] == worker["env"]["LD_PRELOAD"], name
    assert told["preloaded"] == ["tcmalloc"]
    assert told["forked child"][1:] == [users, ["tcmalloc"]]
    assert told["spawned child"][1:] == [users, ["tcmalloc"]]
