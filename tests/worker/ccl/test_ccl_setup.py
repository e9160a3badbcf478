"""Ranks join a group: they verify each other, all agree on a path, and a failure in one is an error in all."""

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent import futures
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch
import torch.distributed as dist
from ccl_filter import forbid_reading_others
from torch.distributed import distributed_c10d

from cpulaunch.worker.ccl import group_setup
from cpulaunch.worker.ccl.backend import CclGroup
from cpulaunch.worker.ccl.group_setup import open_gloo
from cpulaunch.worker.ccl.memory import setup
from cpulaunch.worker.ccl.memory.library import LIBRARY, bytes_needed, load
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.methods import split_elements
from cpulaunch.worker.ccl.wire.agreement import FAILURE_KEY
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, UnavailableError
from tests.strangers import in_container, in_user_namespace

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not os.path.isfile(LIBRARY), reason="cpulaunch was installed without a C compiler"),
]
SECONDS = 20.0


def joined(size, *, store=None, seconds=SECONDS, before=lambda rank: None):
    """What each of `size` ranks, threads of this process, gets: its view of the group, or its error."""
    store, results = store or dist.HashStore(), [None] * size

    def run(rank):
        try:
            before(rank)
            results[rank] = setup.join_memory(store, rank=rank, size=size, seconds=seconds)
        except CclError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_join(size):
    groups = joined(size)
    assert [type(group) for group in groups] == [MemoryPath] * size
    assert groups[0].processes == [os.getpid()] * size
    for group in groups:
        group.close()


def as_nobody(lines):
    """A process of another user that runs these lines."""
    code = f"import fcntl, os; os.setuid(65534); {lines}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)


needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to be two users")


def as_root(test):
    return pytest.mark.root(needs_root(test))


LIKE_OURS = (
    f"fd = os.memfd_create('cpulaunch-ccl', os.MFD_ALLOW_SEALING); os.ftruncate(fd, {bytes_needed(2)}); "
    f"fcntl.fcntl(fd, fcntl.F_ADD_SEALS, {setup._SEALS}); print(fd, flush=True); input()"
)


def with_first(store, process, descriptor):
    """Effect: the store says that this process is rank 0 and that the memory is its descriptor."""
    host = setup._introduced(1, 2, None).split()[0]
    store.set(f"{setup.KEY}/hosts/0", f"{host} {process} {descriptor}")
    store.set(f"{setup.KEY}/opened/0", str(descriptor))


@as_root
def test_memory_of_another_user_in_the_store_is_not_believed():
    """Anyone who reaches the store may write to it."""
    stranger, store = as_nobody(LIKE_OURS), dist.HashStore()
    with_first(store, stranger.pid, int(stranger.stdout.readline()))
    with pytest.raises(UnavailableError, match="the kernel does not permit"):
        setup.join_memory(store, rank=1, size=2, seconds=SECONDS)
    stranger.communicate("\n")


@pytest.mark.parametrize("kind", ["device", "file", "memory of another size", "memory without seals"])
def test_what_is_no_memory_of_a_group_is_not_used(tmp_path, kind):
    """Not even opened, unless it may be: to open a device may have an effect."""
    file = tmp_path / "file"
    file.write_bytes(bytes(bytes_needed(2)))
    if kind.startswith("memory"):
        descriptor = os.memfd_create("cpulaunch-ccl", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, bytes_needed(2) + (kind == "memory of another size"))
    else:
        descriptor = os.open(os.devnull if kind == "device" else file, os.O_RDWR)
    store = dist.HashStore()
    with_first(store, os.getpid(), descriptor)
    with pytest.raises(UnavailableError, match=r"the kernel does not permit|Invalid argument"):
        setup.join_memory(store, rank=1, size=2, seconds=SECONDS)
    os.close(descriptor)


MFD_NOEXEC_SEAL = 8
"""Source: memfd_create(2)."""


def test_memory_that_the_kernel_has_sealed_against_execution_is_used():
    """As where the sysctl vm.memfd_noexec is set."""
    try:
        descriptor = os.memfd_create("cpulaunch-ccl", os.MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL)
    except OSError:
        pytest.skip("Linux before 6.3 does not seal memory against execution")
    os.ftruncate(descriptor, bytes_needed(2))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, setup._SEALS)
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != setup._SEALS
    with contextlib.ExitStack() as resources:
        opened = setup._opened(os.getpid(), descriptor, 2, resources)
        assert os.path.samestat(os.fstat(opened), os.fstat(descriptor))
    os.close(descriptor)


@pytest.mark.parametrize("failing", ["check_hosts", "loading"])
def test_no_socket_is_left_of_a_group_that_cannot_join_over_oneccl(monkeypatch, failing):
    """Once the group has them, it asks them which rank is lost before it closes them."""

    class Peers(group_setup.PeerConnections):
        def close(self):
            closed.append(self)
            super().close()

    def fails(*_):
        raise CclError("oneCCL cannot be loaded")

    closed, owned = [], []
    monkeypatch.setattr(group_setup, "PeerConnections", Peers)
    monkeypatch.setattr(group_setup.library, "folder", lambda: "")
    monkeypatch.setattr(group_setup, "check_space", lambda size: None)
    monkeypatch.setattr(group_setup.library, "unique_id", lambda: pytest.fail("oneCCL listens from now on"))
    monkeypatch.setattr(group_setup.library, "version", fails)
    if failing == "check_hosts":
        monkeypatch.setattr(group_setup, "check_hosts", fails)
    with pytest.raises(CclError, match="cannot be loaded"):
        group_setup.join_oneccl(dist.HashStore(), 0, 1, SECONDS, on_connect=owned.append)
    assert (len(closed), len(owned)) == ((1, 0) if failing == "check_hosts" else (0, 1))


NAMESPACES = {"no number": partial(in_user_namespace, inside=None), "65534": in_container}
"""As after `unshare --user` alone, where all users and root show the same one, and of user 65534 where others do."""


@as_root
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_users_whose_number_strangers_show_share_no_memory(rank, namespace):
    def join():
        store = dist.HashStore()
        store.set(f"{setup.KEY}/hosts/{1 - rank}", "of a stranger")
        with pytest.raises(UnavailableError, match=f"rank {rank}: users without a number in this user namespace"):
            setup.join_memory(store, rank=rank, size=2, seconds=2)

    NAMESPACES[namespace](join)


def forked(action):
    """What the action returns in a forked child, as text; exceptions too."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(action())
        except BaseException as error:  # noqa: BLE001 - the text of any error is the result
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return text


def test_ranks_that_may_not_read_each_other_all_get_the_reason():
    def ranks():
        forbid_reading_others()
        return [str(result) for result in joined(3)]

    assert forked(ranks) == str([setup.FORBIDDEN] * 3)


def test_no_descriptors_for_rank_0_is_a_reason_for_all():
    assert load() is not None  # It needs a descriptor too.

    def ranks():
        store = dist.HashStore()
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with contextlib.suppress(OSError):  # Some numbers below the limit may be free.
            while True:
                os.dup(0)
        return [str(result) for result in joined(2, store=store)]

    assert forked(ranks) == str(["rank 0: [Errno 24] Too many open files"] * 2)


def test_a_rank_in_another_network_namespace_or_since_another_boot_is_on_another_host():
    store = dist.HashStore()
    store.set(f"{setup.KEY}/hosts/0", f"another {os.getpid()} 3")
    with pytest.raises(UnavailableError, match=setup.ELSEWHERE):
        setup.join_memory(store, rank=1, size=2, seconds=SECONDS)


def test_a_rank_that_never_joins_is_named_as_a_timeout():
    with pytest.raises(PeerLostError, match="Timed out waiting for all ranks"):
        setup.join_memory(dist.HashStore(), rank=0, size=2, seconds=0.2)


def test_a_failed_set_up_of_one_rank_is_an_error_in_the_others_long_before_the_timeout(tmp_path):
    """Otherwise they would wait for it until gloo's timeout."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    threading.Timer(0.2, lambda: dist.FileStore(str(tmp_path / "store"), 2).set(FAILURE_KEY, "rank 1: no")).start()
    started = time.monotonic()
    with pytest.raises(CclError, match="the group cannot be created: rank 1: no"):
        open_gloo(store, 0, 2, timedelta(seconds=4 * SECONDS))
    assert time.monotonic() - started < 2 * SECONDS
    # A thread that still waited in gloo ended the process with SIGABRT if it woke while the interpreter shut down.
    assert "gloo set-up" not in [thread.name for thread in threading.enumerate()]


def test_a_rank_that_does_not_create_gloos_group_is_named_as_a_timeout():
    with pytest.raises(PeerLostError, match="Timed out waiting for all ranks"):
        open_gloo(dist.HashStore(), 0, 2, timedelta(seconds=0.05))


def test_a_missing_library_is_a_reason_for_all(monkeypatch):
    monkeypatch.setattr(setup, "load", lambda: None)
    assert [str(each) for each in joined(2)] == ["rank 0: cpulaunch was installed without a C compiler"] * 2


def test_an_error_is_raised_although_another_thread_waits_for_the_store():
    """Calls of one store wait for each other: the error came at the timeout only, by default after 30 minutes."""
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, 1, is_master=False)

    def fail(pool):
        with group_setup.shared_fate(store, 0) as fresh:
            waiting.append(pool.submit(fresh.wait, ["hosts/1"], timedelta(seconds=SECONDS)))
            futures.wait(waiting, 0.5)
            raise CclError("rank 1 is lost")

    waiting = []
    with futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(CclError, match="rank 1 is lost"):
            fail(pool)
        dist.PrefixStore("time 1", server).set("hosts/1", "")
        waiting[0].result(SECONDS)  # It has not timed out before.


def test_rank_zero_serves_the_store_as_long_as_others_need_it_to_join():
    """It may leave its group, and exit, as soon as it has joined; a slower rank then found no store."""
    port = futures.Future()

    def serve():
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        port.set_result(store.port)
        open_gloo(store, 0, 2, timedelta(seconds=SECONDS))

    class SlowStore(dist.TCPStore):
        def wait(self, *arguments):
            futures.wait([served], 0.5)
            super().wait(*arguments)

    with futures.ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        store = SlowStore("127.0.0.1", port.result(SECONDS), 2, is_master=False)
        assert open_gloo(store, 1, 2, timedelta(seconds=SECONDS)).size() == 2
        served.result(SECONDS)


def test_a_root_must_be_a_rank_of_the_group():
    group = CclGroup(dist.HashStore(), 0, 1, timedelta(seconds=SECONDS))
    for root in (1, -1, -2):
        for call in (group.broadcast, group.reduce):
            with pytest.raises(ValueError, match="invalid root rank"):
                call(torch.ones(2), root=root)
        for call in (group.gather, group.scatter):
            with pytest.raises(ValueError, match="invalid root rank"):
                call([], torch.ones(2), root=root) if call == group.gather else call(torch.ones(2), [], root=root)
    group.shutdown()


def test_splits_must_not_be_negative():
    with pytest.raises(ValueError, match="do not add up"):
        split_elements(torch.ones(2), [-1, 3], 2)


def test_a_timeout_that_torch_sets_later_is_that_of_all_collectives():
    """torch sets it on gloo's backend."""
    group = CclGroup(dist.HashStore(), 0, 1, timedelta(seconds=SECONDS))
    distributed_c10d._set_pg_timeout(timedelta(seconds=7), group)
    group.barrier().wait()
    assert (group._seconds, group._ops.seconds) == (7, 7)
    group.shutdown()


def test_a_timeout_that_a_program_sets_is_also_that_of_gloo():
    """torch's groups have `set_timeout` too."""
    group = CclGroup(dist.HashStore(), 0, 1, timedelta(seconds=SECONDS))
    backend = group._get_backend(torch.device("cpu"))
    group.set_timeout(timedelta(seconds=7))
    group.barrier().wait()
    assert (group._seconds, backend.options._timeout) == (7, timedelta(seconds=7))
    group.shutdown()


def test_gloos_backend_is_of_torchs_own_class():
    """One of a class written in Python, kept until the exit, made ranks hang that did not destroy their group."""
    group = CclGroup(dist.HashStore(), 0, 1, timedelta(seconds=SECONDS))
    assert type(group.gloo._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
    group.shutdown()


def test_ranks_that_may_not_read_each_other_use_gloo():
    assert group_setup.join_oneccl_or_not(pytest.fail, setup.FORBIDDEN, "auto", rank=0) is None


def test_ranks_of_several_hosts_use_gloo_if_one_cannot_load_oneccl(capfd):
    def join():
        raise UnavailableError("rank 1: oneCCL is not installed\nhint: pip install it")

    assert group_setup.join_oneccl_or_not(join, setup.ELSEWHERE, "auto", rank=0) is None
    assert "ccl uses gloo: ranks are on several hosts; rank 1: oneCCL is not installed\n" in capfd.readouterr().err
    with pytest.raises(UnavailableError, match="rank 1: oneCCL is not installed"):
        group_setup.join_oneccl_or_not(join, "oneCCL is requested", "oneccl", rank=0)


@pytest.mark.parametrize(("given", "used"), [(None, 5), (timedelta(0), 0), (2.0, 2), (timedelta(seconds=3), 3)])
def test_a_monitored_barrier_has_the_timeout_that_it_is_given(given, used):
    calls = []
    group = SimpleNamespace(
        gloo=SimpleNamespace(monitored_barrier=lambda *arguments: calls.append(arguments)), _seconds=5
    )
    CclGroup.monitored_barrier(group, given)
    assert calls == [(timedelta(seconds=used), False)]


def test_the_library_is_loaded_once():
    assert load() is load()


def test_the_time_that_joining_took_is_not_taken_off_the_timeout():
    groups = joined(2, before=lambda rank: time.sleep(0.3 * rank))
    assert [group.seconds for group in groups] == [SECONDS] * 2
    for group in groups:
        group.close()


def pidfds():
    folder = "/proc/self/fd"
    return sum(
        "pidfd" in os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.islink(f"{folder}/{name}")
    )


def test_a_rank_that_exits_during_set_up_is_named():
    store, before, child = dist.HashStore(), pidfds(), os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # It keeps its number.
    host = setup._introduced(1, 2, None).split()[0]
    store.set(f"{setup.KEY}/hosts/1", f"{host} {child} -1")
    with pytest.raises(PeerLostError, match="rank 1 of the group exited during set-up"):
        setup.join_memory(store, rank=0, size=2, seconds=SECONDS)
    os.waitpid(child, 0)
    gc.collect()
    assert pidfds() == before


def test_a_process_that_has_not_opened_the_memory_is_no_rank():
    """Its number may be that of a process in another namespace."""
    store, before, child = dist.HashStore(), pidfds(), subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    host = setup._introduced(1, 2, None).split()[0]
    store.set(f"{setup.KEY}/hosts/1", f"{host} {child.pid} -1")
    store.set(f"{setup.KEY}/opened/1", "0")
    store.set(f"{setup.KEY}/verified/1", "")
    with pytest.raises(UnavailableError, match="the kernel does not permit"):
        setup.join_memory(store, rank=0, size=2, seconds=SECONDS)
    child.communicate()
    gc.collect()
    assert pidfds() == before


def test_a_rank_that_cannot_map_the_memory_is_a_reason_for_all(monkeypatch):
    """As with a limit on its address space. It had an error, and the others waited for it."""

    def fail(descriptor, length):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(setup.mmap, "mmap", fail)
    assert [str(each).split(":", 1)[1] for each in joined(2)] == [" [Errno 12] Cannot allocate memory"] * 2


def test_a_rank_whose_set_up_fails_at_its_end_leaves_the_group():
    """One that had finished its own waited for it until the group's timeout."""
    store = dist.HashStore()

    class Failing(CclGroup):
        def set_timeout(self, timeout):
            raise CclError("rank 1 fails")

    def join(rank):
        group = (Failing if rank else CclGroup)(store, rank, 2, timedelta(seconds=SECONDS))
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 1 of the group .* left the group"):
            group.barrier().wait()
        group.abort()
        return time.monotonic() - started

    with futures.ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(join, rank) for rank in (0, 1))
        with pytest.raises(CclError, match="rank 1 fails"):
            second.result(SECONDS)
        assert first.result(SECONDS) < SECONDS / 2


def test_a_rank_that_exits_before_gloo_begins_is_named():
    child = os.fork()
    if child == 0:
        os._exit(0)
    pidfd = os.pidfd_open(child)
    os.waitpid(child, 0)
    memory = mmap.mmap(-1, bytes_needed(2))
    path = MemoryPath(memory, rank=0, processes=[os.getpid(), child], pidfds=[-1, pidfd], seconds=SECONDS)
    with pytest.raises(PeerLostError, match="rank 1 of the group exited during set-up"):
        open_gloo(dist.HashStore(), 0, 2, timedelta(seconds=SECONDS), path)
    path.close()
