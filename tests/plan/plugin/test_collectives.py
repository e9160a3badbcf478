"""Which backend ranks are told, what oneCCL is told, which cores its threads get, and what is refused."""

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
from tests.plan.machines import TORCH, ask, lines, machine, plan, replace

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


def told(made: LaunchPlan) -> TorchSettings:
    return decode_settings(env(made)[VARIABLE] or "")


def note(made: LaunchPlan, setting: str) -> Note:
    (found,) = [entry for entry in made.notes if entry.setting == setting]
    return found


def ccl(made: LaunchPlan, index: int = 0) -> dict[str, str | None]:
    return {name: value for name, value in env(made, index).items() if name.startswith(("CCL_", "CPULAUNCH_CCL"))}


def measured_plan(
    measurement: CollectiveMeasurement, flags: str = f"{RANKS} --dist-backend auto", host=TWO
) -> LaunchPlan:
    return make_plan(host, ask(flags), measurement=measurement)


# Who is told what


def test_without_these_settings_nothing_is_told() -> None:
    made = plan(TWO, RANKS)
    assert ccl(made) == {}
    assert told(made).dist_backend is None
    assert not made.unmeasured


def test_a_job_over_ccl_tells_each_rank_its_place_and_what_oneccl_needs() -> None:
    made = plan(TWO, f"{RANKS} --dist-backend ccl")
    assert told(made).dist_backend == "ccl"
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
def test_other_backends_need_no_variable(backend: str) -> None:
    made = plan(TWO, f"{RANKS} --dist-backend {backend}")
    assert (told(made).dist_backend, ccl(made)) == (backend, {})


def test_what_the_user_has_set_stays_but_for_a_place_that_is_anothers() -> None:
    users = {"CCL_LOG_LEVEL": "debug", "CCL_ATL_SHM": "0", "CCL_LOCAL_RANK": "7", "CCL_LOCAL_SIZE": "9"}
    made = plan(TWO, f"{RANKS} --dist-backend ccl --env CCL_WORKER_OFFLOAD=1", environ=users)
    assert not {"CCL_LOG_LEVEL", "CCL_ATL_SHM"} & env(made).keys()
    assert note(made, "CCL_LOG_LEVEL").origin == "environment"
    assert (env(made)["CCL_WORKER_OFFLOAD"], env(made, 1)["CCL_LOCAL_RANK"]) == ("1", "1")
    assert env(made)["CCL_LOCAL_SIZE"] == "2"


def test_every_rank_that_believes_to_be_the_first_has_a_place_of_its_own() -> None:
    made = plan(TWO, f"{RANKS} --dist-backend ccl --virtual-local-rank")
    assert [(env(made, r)["LOCAL_RANK"], env(made, r)["CCL_LOCAL_RANK"]) for r in (0, 1)] == [("0", "0"), ("0", "1")]


def test_ranks_of_several_hosts_are_told_too() -> None:
    made = plan(TWO, f"{RANKS} --nnodes 2 --node-rank 1 --master-addr a --dist-backend ccl")
    assert (told(made).dist_backend, ccl(made, 1)["CCL_LOCAL_RANK"]) == ("ccl", "1")


def test_a_rank_that_a_scheduler_started_knows_its_place() -> None:
    scheduled_rank = SchedulerRank(rank=3, world_size=4, local_rank=1, local_world_size=2, host_rank=1)
    request = replace(
        ask("--nnodes 2 --master-addr a --dist-backend ccl --ccl-workers 1"), scheduled_rank=scheduled_rank
    )
    (worker,) = make_plan(TWO, request).workers
    variables = dict(worker.env)
    assert (variables["CCL_LOCAL_RANK"], variables["CCL_WORKER_AFFINITY"]) == ("1", "3,7")
    assert worker.cpus == frozenset((4, 5, 6))


def test_a_rank_of_intel_mpis_launcher_talks_mpi_between_hosts() -> None:
    scheduled_rank = SchedulerRank(rank=3, world_size=4, local_rank=1, local_world_size=2, host_rank=1)
    mpi = {"I_MPI_HYDRA_UUID": "x", "PMI_RANK": "3", "PMI_SIZE": "4"}
    flags = "--nnodes 2 --master-addr a --dist-backend ccl"
    made = make_plan(TWO, replace(ask(flags, environ=mpi), scheduled_rank=scheduled_rank))
    assert env(made)["CCL_ATL_TRANSPORT"] == "mpi"
    assert env(plan(TWO, f"{RANKS} {flags}"))["CCL_ATL_TRANSPORT"] == "ofi"


def test_a_process_without_ranks_gets_the_backend_for_those_it_starts() -> None:
    made = plan(TWO, "--dist-backend ccl")
    assert (made.mode, told(made).dist_backend, ccl(made)) == ("single", "ccl", {})
    assert plan(TWO, "--ccl-path oneccl").mode == "single"


def test_without_the_plugin_nothing_is_promised() -> None:
    old = replace(TWO, torch=Torch(version="2.4.0", path="/t", plugin=True))
    made = plan(old, f"{RANKS} --dist-backend ccl")
    assert made.warnings == (
        "torch 2.4.0 loads no plugins (2.5 is the first that does); not applied: --dist-backend ccl",
    )
    assert told(made).dist_backend is None
    assert not plan(old, f"{RANKS} --dist-backend auto").unmeasured
    assert plan(old, RANKS, profile={"dist_backend": "auto"}).warnings == ()


ARM = replace(machine(cores=4, arch="aarch64"), torch=TORCH)
MAC = replace(TWO, can_bind=False)


@pytest.mark.parametrize("host", [ARM, MAC])
@pytest.mark.parametrize("flags", ["--dist-backend ccl", "--ccl-workers 1", "--ccl-path memory"])
def test_other_machines_have_no_ccl(host, flags: str) -> None:
    with pytest.raises(UsageError, match="for x86-64 Linux") as caught:
        plan(host, f"{RANKS} {flags}")
    assert flags.split()[0] in str(caught.value)


@pytest.mark.parametrize("host", [ARM, MAC])
def test_other_machines_measure_nothing_and_follow_a_profile_as_far_as_they_can(host) -> None:
    wanted = {"dist_backend": "ccl", "ccl_workers": 1, "ccl_path": "memory"}
    made = plan(host, RANKS, profile=wanted)
    assert (told(made).dist_backend, ccl(made), lines(made)) == (None, {}, lines(plan(host, RANKS)))
    assert "x86-64" in note(made, "dist_backend").reason
    assert not plan(host, f"{RANKS} --dist-backend auto").unmeasured
    assert told(plan(host, f"{RANKS} --dist-backend mpi")).dist_backend == "mpi"


# auto


def test_auto_is_open_until_somebody_measures() -> None:
    made = plan(TWO, f"{RANKS} --dist-backend auto")
    assert made.unmeasured
    assert (told(made).dist_backend, ccl(made)) == (None, {})
    assert "`run` measures once" in note(made, "dist_backend").reason


@pytest.mark.parametrize(
    ("measurement", "backend", "reason"),
    [
        (FASTER, "ccl", "1 MB in 0.5, over gloo in 2 ms; of 25 MB in 10, over gloo in 30 ms; measured just now"),
        (MIXED, None, "not faster at every size"),
        (FAILED, None, "could not be measured (CclError: oneCCL is not installed)"),
        (CollectiveMeasurement(), None, "not faster"),
    ],
)
def test_auto_follows_the_measurement(measurement: CollectiveMeasurement, backend: str, reason: str) -> None:
    made = measured_plan(measurement)
    assert told(made).dist_backend == backend
    assert reason in note(made, "dist_backend").reason
    assert bool(ccl(made)) is (backend == "ccl")
    assert not made.unmeasured
    assert not made.warnings


@pytest.mark.parametrize(
    ("host", "flags", "why"),
    [
        (TWO, "--nproc-per-node 1", "one rank"),
        (TWO, f"{RANKS} --nnodes 2 --node-rank 0 --master-addr a", "several hosts"),
        (TWO, f"{RANKS} --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a", "several hosts"),
        (TWO, "", "no ranks to start"),
        (TWO, "--instances 2", "no ranks to start"),
        (GPUS, "--nproc-per-node gpu", "GPUs"),
    ],
)
def test_auto_leaves_programs_alone_where_a_measurement_says_nothing(host, flags: str, why: str) -> None:
    made = make_plan(host, ask(f"{flags} --dist-backend auto"), measurement=FASTER)
    assert told(made).dist_backend is None
    assert why in note(made, "dist_backend").reason
    assert not plan(host, f"{flags} --dist-backend auto").unmeasured


def test_a_command_whose_torch_nobody_knows_is_left_alone() -> None:
    command = Program(kind="command", target="train", interpreter="")
    request = replace(ask(f"{RANKS} --dist-backend auto"), program=command)
    made = make_plan(replace(TWO, torch=None), request, measurement=FASTER)
    assert (told(made).dist_backend, made.unmeasured, made.warnings) == (None, False, ())
    assert "is not known" in note(made, "dist_backend").reason


def test_ranks_that_start_one_by_one_do_not_measure() -> None:
    scheduled_rank = SchedulerRank(rank=1, world_size=2, local_rank=1, local_world_size=2, host_rank=0)
    made = make_plan(
        TWO, replace(ask("--standalone --dist-backend auto"), scheduled_rank=scheduled_rank), measurement=FASTER
    )
    assert "launch of its own" in note(made, "dist_backend").reason
    assert not made.unmeasured


def test_a_profiles_auto_does_not_complain_of_a_plain_process() -> None:
    made = plan(TWO, profile={"dist_backend": "auto", "ccl_workers": 1})
    assert (made.mode, made.warnings, ccl(made)) == ("single", (), {})
    assert lines(made) == lines(plan(TWO))
    assert note(made, "ccl_workers").reason == "no effect: this launch has no ranks"


@pytest.mark.parametrize("text", [None, "", "x", "1:2", "1:0.5:x", "0:1:1", "1:-1:1", "1:nan:1"])
def test_what_is_no_measurement_is_none(text: str | None) -> None:
    assert decode(text) is None


def test_a_measurement_is_remembered_as_it_was() -> None:
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
def test_the_path_is_the_users_and_with_threads_oneccls(flags: str, path: str, origin: str) -> None:
    made = plan(TWO, f"{RANKS} {flags}")
    assert env(made)["CPULAUNCH_CCL_PATH"] == path
    assert note(made, "CPULAUNCH_CCL_PATH").origin == origin


def test_ranks_in_one_anothers_memory_need_no_word_to_oneccl() -> None:
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


def test_the_plan_for_a_person_says_it() -> None:
    text = plan_text(measured_plan(FASTER), TWO, width=200, color=False)
    assert "auto: an all-reduce over ccl of 1 MB in 0.5" in text
    assert "CCL_WORKER_OFFLOAD" in text


def test_the_map_shows_the_cores_of_oneccls_threads_but_no_siblings() -> None:
    text = plan_text(plan(TWO, f"{RANKS} --ccl-workers 1"), TWO, width=200, color=False)
    assert "cN: for worker N's oneCCL" in text
    assert "w0 w0 w0 c0" in " ".join(text.split())
    assert "oneCCL CPUs" in text
    beside = plan_text(plan(SMT, f"{RANKS} --ccl-workers 1 --ccl-worker-siblings"), SMT, width=200, color=False)
    assert "oneCCL CPUs" in beside
    assert "c0" not in beside
