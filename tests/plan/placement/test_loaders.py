"""DataLoader workers: their number, the cores set apart for them, and the memory they need."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpulaunch.plan.placement.loaders import LOADER_BYTES, MIN_CORES
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.torch_settings import TorchSettings, decode
from tests.plan.machines import GIB, TORCH, machine, plan, quota, replace
from tests.plan.placement.test_properties import cores, hosts, pool_cores


def worker_settings(made: LaunchPlan, index: int = 0) -> TorchSettings:
    return decode(dict(made.workers[index].env)["CPULAUNCH_WORKER"] or "")


def with_torch(host: Host, memory_bytes: int | None = 256 * GIB) -> Host:
    return replace(host, torch=TORCH, memory_bytes=memory_bytes)


@given(hosts(), st.integers(1, 12), st.sampled_from(("", "--smt", "--reserve 1")), st.data())
@settings(max_examples=150, deadline=None)
def test_loader_cores_are_taken_from_the_instance(host: Host, wanted: int, more: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, max(1, pool_cores(host) // MIN_CORES)), label="instances")
    flags = f"--instances {count} {more}" if pool_cores(host) >= 2 * count else f"--instances {count}"
    whole, divided = plan(with_torch(host), flags), plan(with_torch(host), f"{flags} --dataloader-workers {wanted}")
    for before, after in zip(whole.workers, divided.workers, strict=True):
        assert after.cpus | after.loader_cpus == before.cpus
        assert not after.cpus & after.loader_cpus
        assert after.cpus
        size = cores(host, before)
        expected = min(wanted, size // 2) if size >= MIN_CORES else 0
        assert size - cores(host, after) == expected
        assert (after.numa_nodes, after.mempolicy) == (before.numa_nodes, before.mempolicy)


@given(hosts(), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_loader_cores_are_taken_evenly_from_all_numa_nodes(host: Host, wanted: int) -> None:
    (worker,) = plan(with_torch(host), f"--dataloader-workers {wanted}").workers
    by_id = {cpu.id: cpu for cpu in host.cpus}
    nodes = {(by_id[id_].socket, by_id[id_].numa_node) for id_ in worker.cpus | worker.loader_cpus}
    taken = {node: 0 for node in nodes}
    left = {node: 0 for node in nodes}
    for id_ in worker.loader_cpus:
        taken[by_id[id_].socket, by_id[id_].numa_node] += 1
    for id_ in worker.cpus:
        left[by_id[id_].socket, by_id[id_].numa_node] += 1
    # Fewer are taken only where all but one core is gone already.
    assert all(taken[node] >= max(taken.values()) - 1 or left[node] <= 1 for node in nodes)


@pytest.mark.parametrize(
    ("host", "flags", "expected"),
    [
        (machine(cores=3), "", None),
        (machine(cores=4), "", 1),
        (machine(cores=16), "", 4),
        (machine(cores=64), "", 8),
        (machine(cores=16), "--instances 4", 1),
        (machine(cores=16), "--instances 5", None),
        (quota(machine(cores=16), 8.0), "", 2),
        (quota(machine(cores=16), 3.0), "", None),
        (quota(machine(cores=16), 8.0), "--cpus 0-15", 2),
        (machine(cores=16), "--binder none", 4),
    ],
)
def test_auto_is_a_quarter_of_the_smallest_instance(host: Host, flags: str, expected: int | None) -> None:
    made = plan(with_torch(host), f"{flags} --dataloader-workers auto")
    assert worker_settings(made).dataloader_workers == expected
    assert not made.warnings


@pytest.mark.parametrize(
    ("host", "flags", "threads"),
    [
        (quota(machine(cores=16), 8.0), "--dataloader-workers 2", 6),
        (quota(machine(cores=16), 8.0), "--dataloader-workers 9", 4),
        (quota(machine(cores=16), 1.0), "--dataloader-workers 9", 1),
        (quota(machine(cores=16), 2.0), "--instances 2 --dataloader-workers 1", 1),
        (machine(cores=8), "--binder none --dataloader-workers 2", 6),
        (machine(cores=3), "--dataloader-workers 2", 3),
    ],
)
def test_without_cores_of_their_own_loaders_reduce_the_threads(host: Host, flags: str, threads: int) -> None:
    made = plan(with_torch(host), flags)
    assert {worker.threads for worker in made.workers} == {threads}
    assert not any(worker.loader_cpus for worker in made.workers)
    assert not made.warnings


def test_under_a_quota_reserved_loader_cores_reduce_the_threads_too() -> None:
    (worker,) = plan(with_torch(quota(machine(cores=8), 4.0)), "--cpus 0-7 --dataloader-workers 2").workers
    assert (worker.threads, len(worker.loader_cpus)) == (2, 2)


def test_pinned_threads_stay_off_the_loaders_cores() -> None:
    made = plan(with_torch(machine(cores=8)), "--dataloader-workers 2 --affinity explicit")
    assert dict(made.workers[0].env)["OMP_PLACES"] == ",".join(f"{{{id_}}}" for id_ in range(6))


@pytest.mark.parametrize("binder", ["numactl", "taskset"])
def test_binders_get_the_compute_cpus(binder: str) -> None:
    argv = plan(with_torch(machine(cores=8)), f"--dataloader-workers 2 --binder {binder}").workers[0].argv
    assert "0-5" in argv


def test_memory_limits_auto_and_gives_a_warning_for_a_number() -> None:
    tight = with_torch(machine(cores=16), memory_bytes=8 * LOADER_BYTES)
    assert worker_settings(plan(tight, "--dataloader-workers auto")).dataloader_workers == 2
    assert worker_settings(plan(tight, "--instances 2 --dataloader-workers auto")).dataloader_workers == 1
    assert worker_settings(plan(tight, "--instances 4 --dataloader-workers auto")).dataloader_workers is None
    (warning,) = plan(tight, "--instances 2 --dataloader-workers 4").warnings
    assert "8 DataLoader workers may use 2.3 GiB (300 MiB each)" in warning
    assert "2.3 GiB available" in warning
    assert not plan(tight, "--dataloader-workers 2").warnings
    assert not plan(with_torch(machine(cores=16), memory_bytes=None), "--dataloader-workers 900").warnings


def test_the_note_names_the_reserved_cpus() -> None:
    def note(host: Host, flags: str) -> tuple[str | None, str, str]:
        (found,) = [entry for entry in plan(with_torch(host), flags).notes if entry.setting == "dataloader_workers"]
        return found.value, found.origin, found.reason

    assert note(machine(cores=8), "--dataloader-workers 2")[:2] == ("2", "cli")
    assert "CPUs 6-7 are reserved for them" in note(machine(cores=8), "--dataloader-workers 2")[2]
    assert "fewer than 4" in note(machine(cores=3), "--dataloader-workers 2")[2]
    assert "an instance of fewer" in note(machine(cores=7), "--instances 2 --dataloader-workers 1")[2]
    assert note(machine(cores=2), "--dataloader-workers auto")[0] == "the program's own"
    assert not [entry for entry in plan(with_torch(machine(cores=8))).notes if entry.setting == "dataloader_workers"]


def test_no_cores_are_reserved_without_the_plugin() -> None:
    host = replace(machine(cores=8), torch=replace(TORCH, plugin=False))
    made = plan(host, "--dataloader-workers 2")
    (note,) = [entry for entry in made.notes if entry.setting == "dataloader_workers"]
    assert (made.workers[0].threads, made.workers[0].loader_cpus) == (8, frozenset())
    assert (note.value, worker_settings(made).dataloader_workers) == ("the program's own", None)
    assert note.reason.startswith("not applied: cpulaunch is not installed")
    assert "--dataloader-workers" in made.warnings[0]
