"""torch's own tests of collectives, DistributedTest, on the CPU: `ccl_distributed_tests.py BACKEND FOLDER [NAME…]`.

Each test runs in two ranks that are forked from this process. BACKEND is gloo, or ccl, which then takes gloo's place as
`--dist-backend ccl` would. Prints one JSON object: name -> "ok", "skipped", "cannot run here", whatever the backend is,
or how its ranks ended.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

RANKS, SECONDS = 2, 60
CANNOT_RUN = "cannot run here"
OF_MACHINES = ("no_cuda", "no_accelerator", "nccl", "small_worldsize", "odd_worldsize", "multi-gpu-")
"""Beginnings of the names of what torch's tests need whatever the backend is: GPUs, NCCL, or a number of ranks."""
BARRIER_SECONDS, SOONER_SECONDS = 0.1, 0.01
"""Between two looks of the barrier around each test whether the other rank has come; and how long it is here."""


def load(folder):
    """The class with the tests. Effect: sets the variables that its module reads."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(RANKS), TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/store", MASTER_PORT="0"
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    from torch.testing._internal.distributed import distributed_test

    class OnTheCpu(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    for name in ("barrier", "test_dir"):
        Path(folder, name).mkdir(exist_ok=True)
    OnTheCpu.reset_barrier = distributed_test.Barrier.init
    distributed_test.time = SimpleNamespace(**vars(time) | {"sleep": sleep_or_look_sooner})
    return OnTheCpu


def sleep_or_look_sooner(seconds):
    time.sleep(SOONER_SECONDS if seconds == BARRIER_SECONDS else seconds)


def codes_of_machines():
    """The exit codes of tests that this machine, or the number of ranks, cannot run."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return {skip.exit_code for name, skip in TEST_SKIPS.items() if name.startswith(OF_MACHINES)}


def in_ranks(tests, name, folder):
    """How the ranks ended: "ok" if all exited with 0."""
    file = Path(folder, f"store-{name}")
    tests.reset_barrier()  # Files of the test before would count as ranks.
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with open(os.path.join(folder, f"output-{rank}"), "a") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                _ours, theirs = multiprocessing.Pipe()  # A thread of the test reads until the end of this process.
                tests._run(rank, name, str(file), theirs)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:  # noqa: BLE001 - the output says what any error is
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [waited_for(pid, time.monotonic() + SECONDS) for pid in pids]
    file.unlink(missing_ok=True)
    if codes == [0] * RANKS:
        return "ok"
    if set(codes) <= codes_of_machines():
        return CANNOT_RUN
    return "skipped" if min(codes) >= 70 else f"exit codes {codes}"


def waited_for(pid, deadline):
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(backend, folder, *names):
    tests = load(folder)
    if backend == "ccl":
        from cpulaunch.records.torch_settings import TorchSettings
        from cpulaunch.worker.ccl.registration import choose, offer

        for apply in (offer, choose):
            apply(TorchSettings(dist_backend="ccl"))
    found = {}
    for name in names or sorted(name for name in dir(tests) if name.startswith("test_")):
        found[name] = in_ranks(tests, name, folder)
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
