"""The backend of collectives, the variables for oneCCL, and the errors about both."""

import pytest

from cpulaunch.plan.planner import make_plan
from cpulaunch.plan.plugin.timings import CollectiveMeasurement, Timing, decode, encode
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Gpu, Torch
from cpulaunch.records.plan import LaunchPlan, Note
from cpulaunch.records.request import Program, SchedulerRank
from cpulaunch.records.torch_settings import VARIABLE, TorchSettings
from cpulaunch.records.torch_settings import decode as decode_settings
from cpulaunch.view.plan_view import plan_text
from tests.plan.machines import TORCH, lines, machine, plan, replace, request_of

TWO = replace(machine(sockets=2, cores=4), torch=TORCH)
SMT = replace(machine(sockets=2, cores=2, smt=2), torch=TORCH)
ONE = replace(machine(cores=1), torch=TORCH)
CARDS = tuple(Gpu(index=i, vendor="nvidia", pci=f"0000:0{i}:00.0", driver="nvidia", numa_node=i) for i in (0, 1))
GPUS = replace(TWO, gpus=CARDS)
MB = 1 << 20
FASTER = CollectiveMeasurement(timings=(Timing(MB, 0.002, 0.0005), Timing(25 * MB, 0.03, 0.01)), fresh=True)
MIXED = CollectiveMeasurement(timings=(Timing(MB, 0.002, 0.0005), Timing(25 * MB, 0.03, 0.03)))
FAILED = CollectiveMeasurement(failure="CclError: oneCCL is not installed", fresh=True)
RANKS = "--nproc-per-node 2"


def env(made: LaunchPlan, index: int = 0) -> dict[str, str | None]:
    return dict(made.workers[index].env)


def settings_of(made: LaunchPlan) -> TorchSettings:
    return decode_settings(env(made)[VARIABLE] or "")


def note(made: LaunchPlan, setting: str) -> Note:
    (found,) = [entry for entry in made.notes if entry.setting == setting]
    return found


def ccl(made: LaunchPlan, index: int = 0) -> dict[str, str | None]:
    return {name: value for name, value in env(made, index).items() if name.startswith(("CCL_", "CPULAUNCH_CCL"))}


def measured_plan(
    measurement: CollectiveMeasurement, flags: str = f"{RANKS} --dist-backend auto", host=TWO
) -> LaunchPlan:
    return make_plan(host, request_of(flags), measurement=measurement)


# Variables of the ranks


def test_without_these_settings_there_are_no_variables() -> None:
    made = plan(TWO, RANKS)
    assert ccl(made) == {}
    assert settings_of(made).dist_backend is None
    assert not made.unmeasured


def test_a_job_over_ccl_sets_local_ranks_and_the_variables_of_oneccl() -> None:
    made = plan(TWO, f"{RANKS} --dist-backend ccl")
    assert settings_of(made).dist_backend == "ccl"
    assert [ccl(made, rank)["CCL_LOCAL_RANK"] for rank in (0, 1)] == ["0", "1"]
    kept = {name: ccl(made)[name] for name in ("CCL_PLUGIN", "CCL_ATL_SHM", "CCL_WORKER_OFFLOAD", "CCL_LOCAL_SIZE")}
    assert kept == {
        "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
        "CCL_ATL_SHM": "1",
        "CCL_WORKER_OFFLOAD": "0",
        "CCL_LOCAL_SIZE": "2",
    }
    assert made.launch.plugin
    assert note(made, "dist_backend").origin == "cli"
    assert all(note(made, name).reason for name in ccl(made))


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_other_backends_need_no_variables(backend: str) -> None:
    made = plan(TWO, f"{RANKS} --dist-backend {backend}")
    assert (settings_of(made).dist_backend, ccl(made)) == (backend, {})


def test_user_variables_win_except_for_an_inherited_local_rank() -> None:
    users = {"CCL_LOG_LEVEL": "debug", "CCL_ATL_SHM": "0", "CCL_LOCAL_RANK": "7", "CCL_LOCAL_SIZE": "9"}
    made = plan(TWO, f"{RANKS} --dist-backend ccl --env CCL_WORKER_OFFLOAD=1", environ=users)
    assert not {"CCL_LOG_LEVEL", "CCL_ATL_SHM"} & env(made).keys()
    assert note(made, "CCL_LOG_LEVEL").origin == "environment"
    assert (env(made)["CCL_WORKER_OFFLOAD"], env(made, 1)["CCL_LOCAL_RANK"]) == ("1", "1")
    assert env(made)["CCL_LOCAL_SIZE"] == "2"


def test_local_ranks_for_oneccl_differ_even_if_every_local_rank_is_0() -> None:
    made = plan(TWO, f"{RANKS} --dist-backend ccl --virtual-local-rank")
    assert [(env(made, r)["LOCAL_RANK"], env(made, r)["CCL_LOCAL_RANK"]) for r in (0, 1)] == [("0", "0"), ("0", "1")]


def test_ranks_of_several_hosts_get_the_variables_too() -> None:
    made = plan(TWO, f"{RANKS} --nnodes 2 --node-rank 1 --master-addr a --dist-backend ccl")
    assert (settings_of(made).dist_backend, ccl(made, 1)["CCL_LOCAL_RANK"]) == ("ccl", "1")


def test_a_scheduled_rank_gets_its_local_rank_and_affinity() -> None:
    scheduled_rank = SchedulerRank(rank=3, world_size=4, local_rank=1, local_world_size=2, host_rank=1)
    request = replace(
        request_of("--nnodes 2 --master-addr a --dist-backend ccl --ccl-workers 1"), scheduled_rank=scheduled_rank
    )
    (worker,) = make_plan(TWO, request).workers
    variables = dict(worker.env)
    assert (variables["CCL_LOCAL_RANK"], variables["CCL_WORKER_AFFINITY"]) == ("1", "3,7")
    assert worker.cpus == frozenset((4, 5, 6))


def test_a_single_process_gets_the_backend_for_ranks_it_starts_itself() -> None:
    made = plan(TWO, "--dist-backend ccl")
    assert (made.mode, settings_of(made).dist_backend, ccl(made)) == ("single", "ccl", {})
    assert plan(TWO, "--ccl-path oneccl").mode == "single"


def test_without_the_plugin_the_backend_is_not_applied() -> None:
    old = replace(TWO, torch=Torch(version="2.4.0", path="/t", plugin=True))
    made = plan(old, f"{RANKS} --dist-backend ccl")
    assert made.warnings == ("torch 2.4.0 cannot load plugins (2.5 or newer can); not applied: --dist-backend ccl",)
    assert settings_of(made).dist_backend is None
    assert not plan(old, f"{RANKS} --dist-backend auto").unmeasured
    assert plan(old, RANKS, profile={"dist_backend": "auto"}).warnings == ()


ARM = replace(machine(cores=4, arch="aarch64"), torch=TORCH)
MAC = replace(TWO, can_bind=False)


@pytest.mark.parametrize("host", [ARM, MAC])
@pytest.mark.parametrize("flags", ["--dist-backend ccl", "--ccl-workers 1", "--ccl-path memory"])
def test_ccl_is_an_error_on_other_machines(host, flags: str) -> None:
    with pytest.raises(UsageError, match="supports x86-64 Linux only") as caught:
        plan(host, f"{RANKS} {flags}")
    assert flags.split()[0] in str(caught.value)


@pytest.mark.parametrize("host", [ARM, MAC])
def test_other_machines_ignore_ccl_of_a_profile_and_do_not_measure(host) -> None:
    wanted = {"dist_backend": "ccl", "ccl_workers": 1, "ccl_path": "memory"}
    made = plan(host, RANKS, profile=wanted)
    assert (settings_of(made).dist_backend, ccl(made), lines(made)) == (None, {}, lines(plan(host, RANKS)))
    assert "x86-64" in note(made, "dist_backend").reason
    assert not plan(host, f"{RANKS} --dist-backend auto").unmeasured
    assert settings_of(plan(host, f"{RANKS} --dist-backend mpi")).dist_backend == "mpi"


# auto


def test_auto_waits_for_a_measurement() -> None:
    made = plan(TWO, f"{RANKS} --dist-backend auto")
    assert made.unmeasured
    assert (settings_of(made).dist_backend, ccl(made)) == (None, {})
    assert "the first `cpulaunch run` measures it" in note(made, "dist_backend").reason


@pytest.mark.parametrize(
    ("measurement", "backend", "reason"),
    [
        (FASTER, "ccl", "1 MiB in 0.5 ms (gloo: 2 ms), 25 MiB in 10 ms (gloo: 30 ms); measured just now"),
        (MIXED, None, "not faster at every size"),
        (FAILED, None, "the measurement failed (CclError: oneCCL is not installed)"),
        (CollectiveMeasurement(), None, "not faster"),
    ],
)
def test_auto_follows_the_measurement(measurement: CollectiveMeasurement, backend: str, reason: str) -> None:
    made = measured_plan(measurement)
    assert settings_of(made).dist_backend == backend
    assert reason in note(made, "dist_backend").reason
    assert bool(ccl(made)) is (backend == "ccl")
    assert not made.unmeasured
    assert not made.warnings


@pytest.mark.parametrize(
    ("host", "flags", "why"),
    [
        (TWO, "--nproc-per-node 1", "single rank"),
        (TWO, f"{RANKS} --nnodes 2 --node-rank 0 --master-addr a", "several hosts"),
        (TWO, f"{RANKS} --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a", "several hosts"),
        (TWO, "", "no ranks to start"),
        (TWO, "--instances 2", "no ranks to start"),
        (GPUS, "--nproc-per-node gpu", "GPUs"),
    ],
)
def test_auto_keeps_the_backend_where_a_measurement_does_not_apply(host, flags: str, why: str) -> None:
    made = make_plan(host, request_of(f"{flags} --dist-backend auto"), measurement=FASTER)
    assert settings_of(made).dist_backend is None
    assert why in note(made, "dist_backend").reason
    assert not plan(host, f"{flags} --dist-backend auto").unmeasured


def test_auto_keeps_the_backend_of_a_command_with_unknown_torch() -> None:
    command = Program(kind="command", target="train", interpreter="")
    request = replace(request_of(f"{RANKS} --dist-backend auto"), program=command)
    made = make_plan(replace(TWO, torch=None), request, measurement=FASTER)
    assert (settings_of(made).dist_backend, made.unmeasured, made.warnings) == (None, False, ())
    assert "cannot determine which torch" in note(made, "dist_backend").reason


def test_scheduled_ranks_do_not_measure() -> None:
    scheduled_rank = SchedulerRank(rank=1, world_size=2, local_rank=1, local_world_size=2, host_rank=0)
    made = make_plan(
        TWO, replace(request_of("--standalone --dist-backend auto"), scheduled_rank=scheduled_rank), measurement=FASTER
    )
    assert "launch of its own" in note(made, "dist_backend").reason
    assert not made.unmeasured


def test_a_profile_with_auto_does_not_warn_about_a_single_process() -> None:
    made = plan(TWO, profile={"dist_backend": "auto", "ccl_workers": 1})
    assert (made.mode, made.warnings, ccl(made)) == ("single", (), {})
    assert lines(made) == lines(plan(TWO))
    assert note(made, "ccl_workers").reason == "no effect: this launch has no ranks"


@pytest.mark.parametrize(
    "text", [None, "", "x", "1:2", "1:0.5:x", "0:1:1", "1:-1:1", "1:nan:1", f"{10**400}:1:1", "1:inf:1", "1:1e300:1"]
)
def test_malformed_measurements_decode_to_none(text: str | None) -> None:
    assert decode(text) is None


def test_encoded_timings_decode_unchanged() -> None:
    again = decode(encode(FASTER.timings))
    assert again is not None
    assert (again.timings, again.fresh) == (FASTER.timings, False)


# Paths


@pytest.mark.parametrize(
    ("flags", "path", "origin"),
    [
        ("--ccl-path memory", "memory", "cli"),
        ("--ccl-path oneccl", "oneccl", "cli"),
        ("--ccl-path auto --ccl-workers 1", "auto", "cli"),
        ("--ccl-path memory --ccl-workers 1", "memory", "cli"),
        ("--ccl-workers 1", "oneccl", "cli"),
    ],
)
def test_the_path_is_the_one_requested_or_oneccl_with_threads(flags: str, path: str, origin: str) -> None:
    made = plan(TWO, f"{RANKS} {flags}")
    assert env(made)["CPULAUNCH_CCL_PATH"] == path
    assert note(made, "CPULAUNCH_CCL_PATH").origin == origin


def test_the_memory_path_needs_no_variables_of_oneccl() -> None:
    made = plan(TWO, f"{RANKS} --ccl-path memory")
    assert ccl(made) == {"CPULAUNCH_CCL_PATH": "memory"}
    with_threads = ccl(plan(TWO, f"{RANKS} --ccl-path memory --ccl-workers 1"), 1)
    assert with_threads == {
        "CPULAUNCH_CCL_PATH": "memory",
        "CCL_WORKER_COUNT": "1",
        "CCL_WORKER_AFFINITY": "3,7",
        "CCL_LOCAL_RANK": "1",
        "CCL_LOCAL_SIZE": "2",
    }


def test_the_text_of_a_plan_shows_backend_and_variables() -> None:
    text = plan_text(measured_plan(FASTER), TWO, width=200, color=False)
    assert "auto: all-reduce over ccl: 1 MiB in 0.5 ms" in text
    assert "CCL_WORKER_OFFLOAD" in text


def test_the_map_shows_the_cores_of_oneccls_threads_but_no_siblings() -> None:
    text = plan_text(plan(TWO, f"{RANKS} --ccl-workers 1"), TWO, width=200, color=False)
    assert "oneCCL threads of worker N" in text
    assert "w0 w0 w0 c0" in " ".join(text.split())
    assert "oneCCL CPUs" in text
    beside = plan_text(plan(SMT, f"{RANKS} --ccl-workers 1 --ccl-worker-siblings"), SMT, width=200, color=False)
    assert "oneCCL CPUs" in beside
    assert "c0" not in beside
