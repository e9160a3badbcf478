"""Requests that cannot be planned, warnings, and the command line of a worker."""

import pytest

from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.request import Program
from tests.plan.machines import GIB, cpuset, kernel, machine, memory, offline, plan, quota, replace

TWO = machine(sockets=2, cores=4, smt=2)
SMALL = machine(cores=4)
HBM = memory(TWO, 2, GIB)


@pytest.mark.parametrize(
    ("host", "flags", "parts"),
    [
        (SMALL, "--cpus 2-9", ["CPUs 4-9 do not exist (--cpus)", "CPUs 0-3"]),
        (offline(SMALL, "3"), "--cpus 2-3", ["CPU 3 is offline", "0-2"]),
        (cpuset(SMALL, "0-1"), "--cpus 1-2", ["CPU 2 is not available to this process", "0-1", "cpuset"]),
        (TWO, "--numa-nodes 7", ["NUMA node 7 does not exist", "0-1"]),
        (HBM, "--numa-nodes 2", ["NUMA node 2 has no CPUs", "0-1"]),
        (cpuset(TWO, "0-3"), "--numa-nodes 1", ["NUMA node 1 are not available", "cpuset"]),
        (TWO, "--numa-nodes 1 --cpus 0-3", ["--cpus 0-3 and --numa-nodes 1 have no CPU in common"]),
        (SMALL, "--instances 5", ["5 instances need 5 cores: 4 are available", "all online CPUs", "--oversubscribe"]),
        (SMALL, "--cpus 1-2 --instances 3", ["3 instances need 3 cores: 2 are available (CPUs 1-2: --cpus)"]),
        (SMALL, "--instances 2 --cores-per-instance 3", ["2 instances of 3 cores need 6 cores: 4 are available"]),
        (
            SMALL,
            "--cores-per-instance 5",
            ["exceeds the 4 cores available (CPUs 0-3: all online CPUs)"],
        ),
        (SMALL, "--cores-per-instance 5 --oversubscribe", ["--cores-per-instance 5 exceeds"]),
        (quota(SMALL, 2.0), "--cores-per-instance 3", ["--cores-per-instance 3 exceeds the CPU quota of 2"]),
        (
            SMALL,
            "--instances 2 --reserve 2",
            ["--reserve 2 leaves no core", "an instance has 2 cores", "use --reserve 1"],
        ),
        (SMALL, "--instances 2 --instance-index 0,2", ["no such worker: 2", "--instance-index", "0-1"]),
        (SMALL, "--instance-index 1", ["no such worker: 1"]),
        (SMALL, "--instances 2 --show 2-3", ["no such worker: 2-3", "--show"]),
        (SMALL, "--instances 2 --instance-index 1 --show 0", ["no such worker: 0", "--show may name 1"]),
        (SMALL, "--membind bind --binder none", ["--binder none", "--membind bind"]),
        (SMALL, "--membind interleave --binder taskset", ["--binder taskset"]),
    ],
)
def test_a_request_that_cannot_be_met_is_an_error_with_numbers(host: Host, flags: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        plan(host, flags)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.hint
    assert str(caught.value).count("\n") == 1


def test_a_budget_without_online_cpus_is_an_error() -> None:
    limits = replace(SMALL.limits, budget=replace(SMALL.limits.budget, cpus=frozenset((9,))))
    with pytest.raises(UsageError, match="online"):
        plan(replace(SMALL, limits=limits))


def test_a_profiles_reserve_leaves_at_least_one_thread() -> None:
    assert plan(SMALL, "--instances 4", profile={"reserve": 1}).workers[0].threads == 1


DENIED = kernel(TWO, mempolicy="denied")


@pytest.mark.parametrize(
    ("host", "flags", "warned"),
    [
        (DENIED, "", True),
        (DENIED, "--membind none", False),
        (DENIED, "--binder taskset", False),
        (kernel(SMALL, mempolicy="denied"), "", False),
        (kernel(SMALL, mempolicy="denied"), "--membind bind", True),
        (kernel(TWO, mempolicy="permitted"), "", False),
    ],
)
def test_a_denied_memory_policy_is_not_planned_and_gives_a_warning_where_it_matters(
    host: Host, flags: str, warned: bool
) -> None:
    made = plan(host, flags)
    assert any("set_mempolicy" in text or "memory policy" in text for text in made.warnings) == warned
    if host.kernel.mempolicy == "denied":
        assert made.workers[0].mempolicy == "none"


def test_a_requested_memory_policy_without_numa_is_a_warning() -> None:
    assert any("--membind bind" in text for text in plan(machine(numa=False), "--membind bind").warnings)


def test_a_worker_on_a_node_without_memory_uses_the_nearest() -> None:
    host = memory(machine(sockets=3, cores=2), 2, 0)
    (worker,) = plan(host, "--numa-nodes 2 --membind bind").workers
    assert (worker.mempolicy, worker.numa_nodes) == ("bind", frozenset((1,)))


def test_where_binding_is_impossible_threads_are_planned_and_a_warning_says_so() -> None:
    host = replace(SMALL, can_bind=False)
    made = plan(host, "--instances 2")
    assert [(worker.cpus, worker.mempolicy, worker.threads) for worker in made.workers] == [
        (frozenset(), "none", 2)
    ] * 2
    assert any("cannot be bound" in text for text in made.warnings)
    assert not plan(host, "--binder none").warnings


SCRIPT = Program(kind="script", target="my infer.py", args=("a b", "$x"), interpreter="py")


@pytest.mark.parametrize(
    ("program", "flags", "expected"),
    [
        (SCRIPT, "", ("py", "my infer.py", "a b", "$x")),
        (SCRIPT, "--instances 1", ("py", "my infer.py", "a b", "$x")),
        (SCRIPT, "--instances 2", ("py", "-u", "my infer.py", "a b", "$x")),
        (SCRIPT, "--instances 2 --instance-index 1", ("py", "-u", "my infer.py", "a b", "$x")),
        (SCRIPT, "--instances 2 --buffered", ("py", "my infer.py", "a b", "$x")),
        (SCRIPT, "--log-dir d", ("py", "-u", "my infer.py", "a b", "$x")),
        (SCRIPT, "--show 0", ("py", "-u", "my infer.py", "a b", "$x")),
        (replace(SCRIPT, kind="module", target="pkg.mod"), "--instances 2", ("py", "-u", "-m", "pkg.mod", "a b", "$x")),
        (replace(SCRIPT, kind="command", target="./run"), "--instances 2", ("./run", "a b", "$x")),
        (None, "--instances 2", ()),
    ],
)
def test_the_command_line_of_a_worker(program: Program | None, flags: str, expected: tuple[str, ...]) -> None:
    assert plan(SMALL, flags, program=program).workers[0].argv == expected


BARE = Program(kind="command", target="x")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--instances 2 --binder numactl", "numactl -C 4-7 -p 1 x"),
        ("--instances 2 --binder numactl --membind bind", "numactl -C 4-7 -m 1 x"),
        ("--instances 2 --binder numactl --membind none", "numactl -C 4-7 x"),
        ("--instances 2 --binder taskset", "taskset -c 4-7 x"),
        ("--instances 2 --binder none", "x"),
        ("--binder numactl", "numactl -C 0-7 -i 0-1 x"),
        ("--binder numactl --membind preferred", "numactl -C 0-7 -P 0-1 x"),
        ("--binder numactl --membind bind", "numactl -C 0-7 -m 0-1 x"),
    ],
)
def test_the_binder_comes_first_on_the_command_line(flags: str, expected: str) -> None:
    assert " ".join(plan(TWO, flags, program=BARE).workers[-1].argv) == expected


def settings_noted(made: LaunchPlan) -> dict[str, tuple[str | None, str]]:
    return {note.setting: (note.value, note.origin) for note in made.notes}


def test_every_chosen_setting_is_noted_with_its_origin() -> None:
    flags = (
        "--instances 2 --cpus 0-7 --smt --reserve 1 --strategy compact --affinity close --huge-pages --binder numactl"
    )
    noted = settings_noted(plan(TWO, flags, profile={"wait_policy": "passive", "grace": 5.0}))
    assert noted["instances"] == ("2", "cli")
    assert noted["pool"] == ("0-7", "cli")
    assert noted["smt"] == ("on", "cli")
    assert noted["reserve"] == ("1", "cli")
    assert noted["strategy"] == ("compact", "cli")
    assert noted["affinity"] == ("close", "cli")
    assert noted["binder"] == ("numactl", "cli")
    assert noted["wait_policy"] == ("passive", "profile:p")
    assert noted["grace"] == ("5", "profile:p")
    assert not {"smt", "reserve", "strategy", "affinity", "grace"} & settings_noted(plan(TWO)).keys()


def test_every_variable_of_every_worker_is_noted_and_every_note_has_a_reason() -> None:
    made = plan(TWO, "--instances 3 --affinity explicit --huge-pages --env A=1")
    noted = settings_noted(made)
    for worker in made.workers:
        assert {name for name, _ in worker.env} <= noted.keys()
    assert all(note.reason for note in made.notes)
    assert len(noted) == len(made.notes)


def test_launch_options_come_from_the_settings() -> None:
    launch = plan(SMALL, "--instances 2 --grace 2.5 --log-dir out --show 1 --buffered --strict --binder none").launch
    assert (launch.grace_seconds, launch.log_dir, launch.show) == (2.5, "out", frozenset((1,)))
    assert (launch.buffered, launch.strict, launch.binder) == (True, True, "none")


@pytest.mark.parametrize(
    ("flags", "mode", "world", "replaces"),
    [
        ("", "single", 1, True),
        ("--instances 1", "instances", 1, True),
        ("--log-dir d", "single", 1, False),
        ("--strict", "single", 1, True),
        ("--graph onednn", "single", 1, True),
        ("--strict --graph onednn", "single", 1, False),
        ("--instances 2", "instances", 2, False),
        ("--instances 2 --instance-index 0", "instances", 2, False),
        ("--cores-per-instance 4", "instances", 1, True),
    ],
)
def test_mode_and_world_size(flags: str, mode: str, world: int, replaces: bool) -> None:
    made = plan(SMALL, flags)
    assert (made.mode, made.world_size, made.replaces_launcher) == (mode, world, replaces)
