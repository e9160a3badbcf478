"""A differential stress test: random collectives over ccl, whose results are compared with those of gloo.

    python -m tests.worker.ccl.stress --calls 20000 --ranks 4 --seed 1 [--gloo-every 4] [--fault stops|kill|timeout]

All ranks draw the same calls from the seed: kinds, types, sizes near the limits of the library, strides, buffers that
share memory, sub-groups, callbacks. gloo gets plain copies of the same inputs. Results must be equal to the bit where
the order of the arithmetic is defined, and otherwise within the rounding of their type. With a fault, ranks compute
what they must get, as gloo would not survive it: every result until the error must be right, and the error must come
in time. Prints one line for each rank; the exit code is 0 if all is well.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.worker.ccl.stress_calls import Call

LIMIT_SECONDS, STOP_SECONDS, SLACK_SECONDS = 2.0, 5.0, 10.0
"""The group's timeout in runs with the fault "timeout"; how long a rank is stopped; what a loaded machine adds."""


class Rank:
    """One rank of the test."""

    def __init__(self, options):
        self.options, self.compared, self.issued = options, 0, 0
        self.born = self.started = time.monotonic()
        self.delays = random.Random(f"{options.seed} {os.environ['RANK']}")
        dist.init_process_group("ccl", timeout=timedelta(seconds=120))
        size = dist.get_world_size()
        everyone = list(range(size))
        self.groups = []
        for members in (everyone, [0, 1], list(range(size // 2, size)), everyone):
            ccl = dist.new_group(members) if self.groups else dist.group.WORLD
            gloo = None if options.fault else dist.new_group(members, backend="gloo")
            self.groups.append((members, ccl, gloo))
        self.pending = []

    def main(self):
        """Issues the calls. When which results are awaited is alike in all ranks, or gloo would wait for ccl."""
        for number in range(self.options.calls):
            shared = random.Random(f"{self.options.seed} {number} order")
            members, ccl, gloo = shared.choice(self.groups)
            lag = shared.choice((0, 0, 1, 4))
            if number == self.options.calls // 2 and dist.get_rank() == dist.get_world_size() - 1:
                self.fail()
            self.started = time.monotonic()
            if number % 100 == 99 and self.is_time_up():
                break
            if dist.get_rank() in members:
                self.issue(Call(number, self.options.seed, members), ccl, gloo)
            while self.pending and self.pending[0][0].number <= number - lag:
                self.finish(*self.pending.pop(0))
            if self.delays.random() < 0.02:
                time.sleep(self.delays.random() * 0.005)
        while self.pending:
            self.finish(*self.pending.pop(0))
        dist.barrier()

    def is_time_up(self):
        """Whether the first rank has run for longer than asked."""
        limit = self.options.end_after
        is_over = torch.tensor([limit is not None and time.monotonic() - self.born > limit])
        dist.broadcast(is_over, 0)
        return bool(is_over)

    def issue(self, call, ccl, gloo):
        work, results = call.run(ccl, plain=False, is_async=call.is_async)
        chained = later = None
        if call.calls_back and work is not None:
            later = torch.full((33,), 1.0 + call.me)
            chained = work.get_future().then(lambda _: dist.all_reduce(later, group=ccl, async_op=True))
        self.pending.append((call, work, results, chained, later, gloo))
        self.issued += 1

    def finish(self, call, work, results, chained, later, gloo):
        self.started = time.monotonic()
        if work is not None:
            self.wait(work)
        if chained is not None:
            chained.wait().wait()
            assert later.tolist() == [sum(range(1, call.size + 1))] * 33, f"wrong result of a callback: {call}"
        by_gloo = gloo is not None and call.number % self.options.gloo_every == 0
        expected = call.run(gloo, plain=True, is_async=False)[1] if by_gloo else call.known()
        call.check(results, expected)
        self.compared += 1

    def wait(self, work):
        """Effect: waits in one of the ways that programs do."""
        way = self.delays.randrange(3)
        if way == 0:
            work.get_future().wait()
        while way == 1 and not work.is_completed():
            time.sleep(0.0005)
        work.wait()

    def fail(self):
        """Effect: a child kills or stops this process soon."""
        fault, process = self.options.fault, os.getpid()
        if fault in ("kill", "timeout") and os.fork() == 0:
            time.sleep(self.delays.random() * 0.03)
            os.kill(process, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if fault == "timeout":
                time.sleep(STOP_SECONDS)
                os.kill(process, signal.SIGCONT)
            os._exit(0)

    def set_up_fault(self):
        dist.barrier()
        if self.options.fault == "timeout":
            for _, group, _ in self.groups:
                if group != dist.GroupMember.NON_GROUP_MEMBER:
                    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_SECONDS), group)
        if self.options.fault == "stops":
            stop_at_random(os.getpid(), self.delays)


def stop_at_random(process, draw):
    """Effect: a child stops and continues this process until it exits."""
    if os.fork():
        return
    try:
        while os.getppid() == process:
            time.sleep(draw.random() * 0.05)
            os.kill(process, signal.SIGSTOP)
            time.sleep(draw.random() * 0.03)
            os.kill(process, signal.SIGCONT)
    finally:
        os._exit(0)


def run_rank(options):
    """The exit code of a rank: 0, or 3 after an error of a collective. A wrong result is an AssertionError."""
    torch.set_num_threads(1)
    rank, error = Rank(options), ""
    rank.set_up_fault()
    try:
        rank.main()
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    took = time.monotonic() - rank.started
    print(json.dumps({"issued": rank.issued, "compared": rank.compared, "error": error, "seconds": took}), flush=True)
    if error:
        os._exit(3)
    dist.destroy_process_group()
    return 0


def problems(options, results):
    """What is wrong with the ranks' exit codes and what they printed."""
    found = []
    for rank, (code, out, err) in enumerate(results):
        report = json.loads(out.splitlines()[-1]) if out.strip() else {}
        print(f"rank {rank}: exit code {code}, {report}", flush=True)
        is_last = rank == options.ranks - 1
        wanted = (
            (0,) if options.fault in (None, "stops") else (3,) if options.fault == "timeout" or not is_last else (-9,)
        )
        if code not in wanted:
            found.append(f"rank {rank}: exit code {code}, not {wanted[0]}\n{err[-3000:]}")
        most = SLACK_SECONDS + (3 * LIMIT_SECONDS if options.fault == "timeout" else 0)
        most += STOP_SECONDS if options.fault == "timeout" and is_last else 0
        if code == 3 and report["seconds"] > most:
            found.append(f"rank {rank} got its error after {report['seconds']:.1f} s")
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="longest time of the run")
    parser.add_argument(
        "--gloo-every",
        type=int,
        default=1,
        help="compare only every N-th call with gloo, which is slow, and others with their inputs",
    )
    parser.add_argument("--end-after", type=float, help="seconds after which no more calls are made")
    parser.add_argument("--fault", choices=["stops", "kill", "timeout"])
    options = parser.parse_args(arguments)
    if arguments is None and "RANK" in os.environ:
        return run_rank(options)
    from tests.worker.ccl.ccl_ranks import finish, start

    given = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items() if value is not None]
    found = problems(options, finish(start(options.ranks, ["-m", "tests.worker.ccl.stress", *given]), options.seconds))
    print("\n".join(found) or "ok", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    import cpulaunch.ccl  # noqa: F401 - registers the backend

    sys.exit(main())
