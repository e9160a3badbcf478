"""Which jobs compute on GPUs, and the notes and warnings of their plans."""

import pytest

from cpulaunch.plan.gpus.assignment import may_use_gpus
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Gpu, Host, MigInstance
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.request import SchedulerRank
from tests.plan.machines import TORCH, machine, plan, replace, request_of

NVIDIA = Gpu(index=0, vendor="nvidia", pci="0000:17:00.0", numa_node=0, driver="nvidia")
AMD = Gpu(index=1, vendor="amd", pci="0000:4d:00.0", numa_node=1, driver="amdgpu")
HOST = replace(machine(sockets=2, cores=4), gpus=(NVIDIA, AMD))


def built_for(build: str, host: Host = HOST) -> Host:
    """The host with such a torch."""
    return replace(host, torch=replace(TORCH, version=f"2.13.0+{build}"))


@pytest.mark.parametrize(
    ("build", "flags", "gpus"),
    [
        ("cu130", "--nproc-per-node 1", [0]),
        ("rocm7.0", "--nproc-per-node 1", [1]),
        ("xpu", "--nproc-per-node 1", [0]),
        ("cpu", "--nproc-per-node 1", [None]),
        ("cpu", "--nproc-per-node gpu", [0]),
        ("cpu", "--nproc-per-node 1 --device gpu", [0]),
        ("cu130", "--nproc-per-node 1 --device cpu", [None]),
        ("cu130", "--nproc-per-node numa", [None, None]),
        ("rocm7.0", "--nproc-per-node gpu", [1]),
    ],
)
def test_the_gpu_of_each_rank(build: str, flags: str, gpus: list[int | None]) -> None:
    assert [worker.gpu for worker in plan(built_for(build), flags).workers] == gpus


@pytest.mark.parametrize(
    ("build", "flags", "reason"),
    [
        ("cpu", "--nproc-per-node 1", "a CPU-only build"),
        ("cu130", "--nproc-per-node 1 --device cpu", "leave the GPUs alone"),
        ("cu130", "--nproc-per-node numa", "--nproc-per-node numa counts CPUs"),
    ],
)
def test_a_job_on_cpus_says_why(build: str, flags: str, reason: str) -> None:
    (note,) = (note for note in plan(built_for(build), flags).notes if note.setting == "device")
    assert reason in note.reason


def test_a_hidden_gpu_is_why_a_job_runs_on_cpus() -> None:
    made = plan(built_for("cu130"), "--nproc-per-node 2", environ={"CUDA_VISIBLE_DEVICES": ""})
    (note,) = (note for note in made.notes if note.setting == "device")
    assert "CUDA_VISIBLE_DEVICES= hides them" in note.reason


def test_a_torch_built_for_cpus_is_warned_of() -> None:
    assert "is a CPU-only build" in plan(built_for("cpu"), "--nproc-per-node gpu").warnings[0]


def test_a_single_program_gets_no_gpu() -> None:
    made = plan(built_for("cu130"))
    assert [worker.gpu for worker in made.workers] == [None]
    assert not {"gpu", "device"} & {note.setting for note in made.notes}
    assert "CUDA_DEVICE_ORDER" not in dict(made.workers[0].env)


def test_devices_are_numbered_in_pci_order_unless_the_user_sets_the_order() -> None:
    host = built_for("cu130")
    assert dict(plan(host, "--nproc-per-node gpu").workers[0].env)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    own = plan(host, "--nproc-per-node gpu", environ={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert "CUDA_DEVICE_ORDER" not in dict(own.workers[0].env)


def test_all_devices_stay_visible() -> None:
    made = plan(built_for("cu130"), "--nproc-per-node gpu", environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert all("VISIBLE_DEVICES" not in name for worker in made.workers for name, _ in worker.env)


def test_each_rank_has_local_rank_0_of_its_own_device() -> None:
    env = dict(plan(built_for("cu130"), "--nproc-per-node gpu --virtual-local-rank").workers[0].env)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "0")


def test_env_and_virtual_local_rank_contradict() -> None:
    with pytest.raises(UsageError, match="--virtual-local-rank sets CUDA_VISIBLE_DEVICES"):
        plan(built_for("cu130"), "--nproc-per-node gpu --virtual-local-rank --env CUDA_VISIBLE_DEVICES=0")


def test_each_rank_gets_a_mig_device_named_by_nvml() -> None:
    cut = tuple(MigInstance(gpu_instance=7 + each, compute_instance=0, uuid=f"MIG-{each}") for each in range(2))
    host = replace(machine(cores=4), gpus=(replace(NVIDIA, uuid="GPU-1", mig=cut),))
    made = plan(host, "--nproc-per-node gpu --virtual-local-rank")
    assert [dict(worker.env)["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["MIG-0", "MIG-1"]
    assert made.warnings == ()
    listed = plan(host, "--nproc-per-node gpu --virtual-local-rank", environ={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert [dict(worker.env)["CUDA_VISIBLE_DEVICES"] for worker in listed.workers] == ["MIG-1"]


def test_a_mig_device_on_an_unknown_gpu_runs_on_the_whole_pool() -> None:
    host = replace(machine(sockets=2, cores=4), gpus=(NVIDIA, replace(NVIDIA, index=1, numa_node=1)))
    made = plan(host, "--nproc-per-node gpu", environ={"CUDA_VISIBLE_DEVICES": "MIG-c7384736"})
    assert [(worker.gpu, len(worker.cpus)) for worker in made.workers] == [(None, 8)]
    assert "cannot determine which GPU MIG-c7384736 is on" in made.warnings[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--device gpu", False),
        ("--nproc-per-node gpu", True),
        ("--nproc-per-node 2", True),
        ("--nproc-per-node 2 --device cpu", False),
        ("--nproc-per-node numa", False),
    ],
)
def test_jobs_that_may_use_gpus(flags: str, expected: bool) -> None:
    assert may_use_gpus(HOST, request_of(flags)) is expected


def as_scheduled_rank(local_rank: int, count: int, flags: str = "--virtual-local-rank", **environ: str) -> LaunchPlan:
    """The plan of one rank that a scheduler started, on the host with two NVIDIA GPUs."""
    host = replace(HOST, gpus=(NVIDIA, replace(NVIDIA, index=1, numa_node=1)))
    scheduled_rank = SchedulerRank(
        rank=local_rank, world_size=count, local_rank=local_rank, local_world_size=count, host_rank=0
    )
    request = request_of(f"--master-addr localhost --master-port 29500 {flags}", environ=environ)
    return make_plan(host, replace(request, scheduled_rank=scheduled_rank))


def test_a_scheduled_rank_gets_the_device_of_its_local_rank() -> None:
    (worker,) = as_scheduled_rank(1, 2).workers
    assert (worker.gpu, worker.cpus, dict(worker.env)["CUDA_VISIBLE_DEVICES"]) == (1, {4, 5, 6, 7}, "1")


def test_a_scheduled_rank_uses_the_gpu_that_the_scheduler_gave_it() -> None:
    made = as_scheduled_rank(1, 2, CUDA_VISIBLE_DEVICES="0")
    (worker,) = made.workers
    assert (worker.gpu, worker.cpus, dict(worker.env)["CUDA_VISIBLE_DEVICES"]) == (0, {2, 3}, "0")
    assert made.warnings == ()


def test_a_gpu_under_another_number_than_local_rank_is_warned_of() -> None:
    """srun --gpus-per-task=1 shows every rank its GPU as device 0, whatever its LOCAL_RANK."""
    (warning,) = as_scheduled_rank(1, 2, "", CUDA_VISIBLE_DEVICES="0").warnings
    assert "LOCAL_RANK (1) fails: use --virtual-local-rank" in warning
    assert as_scheduled_rank(0, 2, "", CUDA_VISIBLE_DEVICES="0").warnings == ()


def test_scheduled_ranks_share_gpus_in_turn() -> None:
    plans = [as_scheduled_rank(rank, 3) for rank in range(3)]
    assert [made.workers[0].gpu for made in plans] == [0, 1, 0]
    assert [made.workers[0].cpus for made in plans] == [{0, 1}, {4, 5}, {2, 3}]
    assert all("3 ranks share 2 visible GPUs" in warning for made in plans for warning in made.warnings)


@pytest.mark.parametrize("listed", ["\u00b2", "9" * 5000], ids=["no ASCII digit", "too long"])
def test_malformed_numbers_hide_all_devices(listed: str) -> None:
    """A malformed list of Slurm's own is ignored."""
    with pytest.raises(UsageError, match="no GPU for the ranks"):
        plan(HOST, "--device gpu --nproc-per-node 1", environ={"CUDA_VISIBLE_DEVICES": listed})
    two = replace(HOST, gpus=(NVIDIA, replace(NVIDIA, index=1)))
    made = plan(two, "--nproc-per-node gpu", environ={"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": listed})
    assert [worker.gpu for worker in made.workers] == [0]
