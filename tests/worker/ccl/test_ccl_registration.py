"""The backend a program gets, by the name it uses and by --dist-backend: real groups of one rank, and a job of two."""

import sys
from types import SimpleNamespace

import pytest

from cpulaunch.worker.ccl import registration
from tests.worker.applying import case, run_cases, run_python

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the backend ccl is for Linux"),
]

SHOW = """
import torch.distributed as dist
def show(group=None):
    group = group or dist.group.WORLD
    print(dist.get_backend(group), type(group).__name__, end=" ")
def init(*names, **more):
    dist.init_process_group(*names, store=dist.HashStore(), rank=0, world_size=1, **more)
"""
BINDINGS = """
import sys, tempfile
folder = tempfile.mkdtemp()
open(folder + "/oneccl_bindings_for_pytorch.py", "w").write(BODY)
sys.path.insert(0, folder)
"""
REGISTERS = """
import torch.distributed as dist
def make(store, rank, size, timeout):
    print("Intel's", end=" ")
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
dist.Backend.register_backend("ccl", make, devices=["cpu"])
"""
CLEAN = "\nimport shutil; shutil.rmtree(folder)"


def named(call, backend=None, **more):
    return case(SHOW + f"{call}\nshow()\ndist.destroy_process_group()", dist_backend=backend, **more)


def with_bindings(body, backend=None):
    before = f"BODY = {body!r}" + BINDINGS
    return case(before + SHOW + "init('ccl')\nshow()\ndist.destroy_process_group()" + CLEAN, dist_backend=backend)


OWN_GROUP = "ccl CclGroup"
FAKE = "import torch.testing._internal.distributed.fake_pg"
GROUPS = {
    # name: (case, what it shows)
    "gloo stays": (named("init('gloo')"), "gloo ProcessGroup"),
    "the default stays": (named("init()"), "undefined ProcessGroup"),
    "ccl by name": (named("init('ccl')"), OWN_GROUP),
    "ccl by name, in capitals": (named("init('CCL')"), OWN_GROUP),
    "ccl by name, for the CPU": (named("init('cpu:ccl')"), "cpu:ccl CclGroup"),
    "gloo becomes ccl": (named("init('gloo')", "ccl"), OWN_GROUP),
    "gloo becomes ccl, by keyword": (named("init(backend='gloo')", "ccl"), OWN_GROUP),
    "gloo becomes ccl, in capitals": (named("init(dist.Backend.GLOO.upper())", "ccl"), OWN_GROUP),
    "the CPU's gloo becomes ccl": (named("init('cpu:gloo')", "ccl"), "cpu:ccl CclGroup"),
    "the backends of several devices stay": (
        named("init('cpu:gloo,cuda:gloo')", "ccl"),
        "cpu:gloo,cuda:gloo ProcessGroup",
    ),
    "ccl stays ccl": (named("init('ccl')", "ccl"), OWN_GROUP),
    "other names stay": (named(f"{FAKE}; init('fake')", "ccl"), "fake ProcessGroup"),
    "ccl becomes gloo": (named("init('ccl')", "gloo"), "gloo ProcessGroup"),
    "the CPU's ccl becomes gloo": (named("init('cpu:ccl,cuda:gloo')", "gloo"), "cpu:gloo,cuda:gloo ProcessGroup"),
    "gloo stays gloo": (named("init('gloo')", "gloo"), "gloo ProcessGroup"),
    "Intel's bindings, by name": (with_bindings(REGISTERS), "Intel's ccl ProcessGroup"),
    "Intel's bindings, chosen": (with_bindings(REGISTERS, "ccl"), "Intel's ccl ProcessGroup"),
    "Intel's bindings, broken": (with_bindings("raise ImportError('undefined symbol')"), OWN_GROUP),
}
SUBGROUP = "\nother = dist.new_group(backend='{}')\nshow(other)\ndist.destroy_process_group()"
TENSOR = "\nt = torch.ones(3); dist.all_reduce(t); print(t.tolist())\n"
PROGRAMS = {
    "the default becomes ccl": case(
        SHOW + "init()\nwork = dist.all_reduce(torch.ones(2), async_op=True); work.wait(); print(type(work).__name__)\n"
        "dist.destroy_process_group()",
        dist_backend="ccl",
    ),
    "new_group('gloo') stays": case(SHOW + "init('gloo')" + SUBGROUP.format("gloo"), dist_backend="ccl"),
    "new_group() follows": case(SHOW + "init('gloo')\nshow(dist.new_group())", dist_backend="ccl"),
    "new_group('ccl') becomes gloo": case(SHOW + "init('gloo')" + SUBGROUP.format("ccl"), dist_backend="gloo"),
    "a mesh": case(
        SHOW + "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1')\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (1,))\nshow(mesh.get_group())",
        dist_backend="ccl",
    ),
    "mpi without support in torch": named("init('gloo')", "mpi"),
    "mpi without support in torch, strict": named("init('gloo')", "mpi", strict=True),
    "mpi with support in torch": case(
        "import torch.distributed as dist\ntry:\n    dist.init_process_group('gloo')\n"
        "except Exception as error:\n    print('MPI' in str(error))",
        before="import torch.distributed.distributed_c10d as c; c.is_mpi_available = lambda: True",
        dist_backend="mpi",
    ),
    "beside a GPU": case(
        SHOW + "try:\n    init()\n    show()\nexcept Exception as error:\n    print(type(error).__name__)\n"
        "print(dist.Backend.default_device_backend_map['cpu'])",
        before="torch.cuda.is_available = lambda: True",
        dist_backend="ccl",
    ),
    "nothing of cpulaunch is imported by the set-up of a group": case(
        SHOW + "import cpulaunch.ccl\nbefore = set(sys.modules)\ninit('ccl')\n"
        "print([name for name in set(sys.modules) - before if name.startswith('cpulaunch')])",
    ),
    "not imported if unused": case(
        "print(any(name.startswith('cpulaunch.worker.ccl.') and 'registration' not in name for name in sys.modules),"
        " 'CCL' in torch.distributed.Backend._plugins)",
        dist_backend="ccl",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    cases = {name: row[0] for name, row in GROUPS.items()} | PROGRAMS
    return run_cases(cases, tmp_path_factory.mktemp("registration"))


@pytest.mark.parametrize("name", GROUPS)
def test_a_program_gets_the_group(outcomes, name):
    outcome = outcomes[name]
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == GROUPS[name][1]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("the default becomes ccl", "CclWork"),
        ("new_group('gloo') stays", "gloo ProcessGroup"),
        ("new_group() follows", OWN_GROUP),
        ("new_group('ccl') becomes gloo", "gloo ProcessGroup"),
        ("a mesh", "CclGroup"),
        ("mpi with support in torch", "True"),
        ("beside a GPU", "gloo"),
        ("nothing of cpulaunch is imported by the set-up of a group", "[]"),
        ("not imported if unused", "False False"),
    ],
)
def test_a_program_prints(outcomes, name, shown):
    outcome = outcomes[name]
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip().endswith(shown)


def test_bindings_that_cannot_be_imported_are_a_warning(outcomes):
    (line,) = outcomes["Intel's bindings, broken"].cpulaunch_lines
    assert "oneccl_bindings_for_pytorch cannot be imported (undefined symbol), so cpulaunch's own ccl" in line


def test_mpi_without_support_in_torch_is_a_warning_or_with_strict_an_error(outcomes):
    outcome = outcomes["mpi without support in torch"]
    assert (outcome.code, outcome.out.strip()) == (0, "gloo ProcessGroup")
    assert "--dist-backend: this torch is built without MPI" in outcome.cpulaunch_lines[0]
    assert outcomes["mpi without support in torch, strict"].code == 125


SHOW_AVAILABILITY = """
import torch.distributed as dist
print(dist.is_backend_available("ccl"), dist.is_backend_available("gloo"), end=" ")
print("CCL" in dist.Backend._plugins, "cpulaunch.worker.ccl.backend" in sys.modules)
"""
AVAILABILITY = {
    # name: (case, what it shows: ccl, gloo, ccl registered, its code imported)
    "available": (case(SHOW_AVAILABILITY), "True True False False"),
    "chosen": (case(SHOW_AVAILABILITY, dist_backend="ccl"), "True True False False"),
    "gloo chosen": (case("sys.platform = 'win32'" + SHOW_AVAILABILITY, dist_backend="gloo"), "True True False False"),
    "unsupported platform": (case("sys.platform = 'win32'" + SHOW_AVAILABILITY), "False True False False"),
    "registered": (case("import cpulaunch.ccl" + SHOW_AVAILABILITY), "True True True True"),
    "of Intel's bindings": (
        case(f"BODY = ''{BINDINGS}sys.platform = 'win32'{SHOW_AVAILABILITY}{CLEAN}"),
        "True True False False",
    ),
}


@pytest.fixture(scope="module")
def availability_outcomes(tmp_path_factory):
    return run_cases({name: row[0] for name, row in AVAILABILITY.items()}, tmp_path_factory.mktemp("availability"))


@pytest.mark.parametrize("name", AVAILABILITY)
def test_is_backend_available(availability_outcomes, name):
    outcome = availability_outcomes[name]
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == AVAILABILITY[name][1]


TWO_RANKS = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
dist.all_reduce(tensor, group=mesh.get_group())
assert tensor.eq(6.0).all(), tensor
dist.monitored_barrier()
print(dist.get_backend(), dist.get_backend(mesh.get_group()), os.environ["CCL_LOCAL_RANK"], flush=True)
dist.destroy_process_group()
"""


def test_an_unmodified_program_runs_over_ccl(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TWO_RANKS)
    done = run_python("-m", "cpulaunch", "--nproc-per-node", "2", "--dist-backend", "ccl", program)
    assert done.code == 0, done.err
    assert sorted(done.out.split()) == sorted(["ccl", "ccl", "0", "ccl", "ccl", "1"])


def test_the_flight_recorder_of_torch_skips_groups_of_ccl():
    """torch 2.15 attaches it to every group that names a device, but fails where the backend is written in Python."""
    attached = []
    c10d = SimpleNamespace(_maybe_attach_flight_recorder=lambda group, ranks: attached.append((group, ranks)))
    registration._skip_in_flight_recorder(c10d)
    other = SimpleNamespace()
    for group in (SimpleNamespace(barrier_by_gloo=None), other):
        c10d._maybe_attach_flight_recorder(group, [0, 1])
    assert attached == [(other, [0, 1])]
    registration._skip_in_flight_recorder(SimpleNamespace())
