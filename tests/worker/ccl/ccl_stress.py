"""A rank of a stress test: `ccl_stress.py CALLS SEED [stops|kill]` runs random collectives and checks every result.

All ranks draw the same calls from the seed, and know each other's inputs, so each rank computes what it must get.
Prints the number of calls, and the error that ended them after a kill.
"""

import os
import random
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import cpulaunch.ccl  # noqa: F401 - registers the backend

TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.float16)
COUNTS = (0, 1, 7, 64, 1000, 8192, 16_384, 16_385, 40_000, 300_000)
OPERATIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
PENDING = 4


def values(rank, number, count, dtype):
    """A rank's input for a call: small integers, whose sums are exact in every type."""
    return ((torch.arange(count) * 7 + rank * 13 + number) % 5).to(dtype)


class Call:
    """A collective, drawn alike by all ranks of the group, and the check of its result."""

    def __init__(self, draw, number, members, group):
        self.number, self.members, self.group = number, members, group
        self.me = members.index(dist.get_rank())
        self.dtype, self.count = draw.choice(TYPES), draw.choice(COUNTS)
        self.kind = draw.choice(KINDS)
        self.operation = draw.choice(list(OPERATIONS))
        self.root = draw.randrange(len(members))
        self.row = draw.choice((None, self.me, draw.randrange(len(members))))
        self.splits = [[draw.choice((0, 1, 3, 9000)) for _ in members] for _ in members]
        self.is_async, self.calls_back = draw.random() < 0.5, draw.random() < 0.2

    def inputs(self, count):
        return [values(rank, self.number, count, self.dtype) for rank in self.members]

    def reduced(self, count):
        parts = self.inputs(count)
        total = parts[0]
        for part in parts[1:]:
            total = OPERATIONS[self.operation](total, part)
        return total

    def start(self):
        """The work, and pairs of a result and what it must be."""
        work, pairs = self.kind(self)
        if not self.calls_back or work is None:
            return [work], pairs
        later = values(dist.get_rank(), self.number, 33, torch.float32)
        expected = sum(values(rank, self.number, 33, torch.float32) for rank in self.members)
        chained = work.get_future().then(lambda _: dist.all_reduce(later, group=self.group, async_op=True))
        return [work, chained], [*pairs, (later, expected)]

    def all_reduce(self):
        tensor = self.inputs(self.count)[self.me]
        work = dist.all_reduce(tensor, self.operation, self.group, async_op=self.is_async)
        return work, [(tensor, self.reduced(self.count))]

    def reduce(self):
        tensor = self.inputs(self.count)[self.me]
        expected = self.reduced(self.count) if self.me == self.root else tensor.clone()
        root = self.members[self.root]
        return dist.reduce(tensor, root, self.operation, self.group, async_op=self.is_async), [(tensor, expected)]

    def broadcast(self):
        tensor = self.inputs(self.count)[self.me]
        work = dist.broadcast(tensor, self.members[self.root], self.group, async_op=self.is_async)
        return work, [(tensor, self.inputs(self.count)[self.root])]

    def all_gather(self):
        size = len(self.members)
        whole, mine = torch.empty(size * self.count, dtype=self.dtype), self.inputs(self.count)[self.me]
        if self.row is not None:  # The input lies in the output, perhaps in the place of another rank.
            part = whole[self.row * self.count : (self.row + 1) * self.count]
            part.copy_(mine)
            mine = part
        work = dist.all_gather_into_tensor(whole, mine, self.group, async_op=self.is_async)
        return work, [(whole, torch.cat(self.inputs(self.count)))]

    def reduce_scatter(self):
        size, count = len(self.members), self.count
        whole = self.inputs(size * count)[self.me]
        mine = torch.empty(count, dtype=self.dtype)
        if self.row is not None:
            mine = whole[self.row * count : (self.row + 1) * count]
        expected = self.reduced(size * count)[self.me * count : (self.me + 1) * count]
        work = dist.reduce_scatter_tensor(mine, whole, self.operation, self.group, async_op=self.is_async)
        return work, [(mine, expected)]

    def all_to_all(self):
        sent, taken = self.splits[self.me], [row[self.me] for row in self.splits]
        parts = [
            values(self.members[i], self.number, sum(row), self.dtype).split(row)[self.me]
            for i, row in enumerate(self.splits)
        ]
        target, source = torch.empty(sum(taken), dtype=self.dtype), self.inputs(sum(sent))[self.me]
        work = dist.all_to_all_single(target, source, taken, sent, self.group, async_op=self.is_async)
        return work, [(target, torch.cat(parts))]

    def gather_and_scatter(self):
        mine, root = self.inputs(self.count)[self.me], self.members[self.root]
        is_root = self.me == self.root
        parts = [torch.empty(self.count, dtype=self.dtype) for _ in self.members] if is_root else None
        dist.gather(mine, parts, root, self.group)
        back = torch.empty(self.count, dtype=self.dtype)
        work = dist.scatter(back, parts, root, self.group, async_op=self.is_async)
        return work, [(back, mine)]

    def barrier(self):
        return dist.barrier(self.group, async_op=self.is_async), []


KINDS = (
    *(Call.all_reduce, Call.reduce, Call.broadcast, Call.all_gather, Call.reduce_scatter),
    *(Call.all_to_all, Call.gather_and_scatter, Call.barrier),
)


def finish(number, works, pairs):
    for work in works:
        done = work.wait() if work is not None else None
        if hasattr(done, "wait"):  # The work that a callback returned.
            done.wait()
    for result, expected in pairs:
        assert torch.equal(result, expected), f"wrong result in call {number}"


def stop_at_random(process, seed):
    """Effect: a child stops and continues this process until it exits."""
    if os.fork():
        return
    draw = random.Random(seed)
    try:
        while os.getppid() == process:
            time.sleep(draw.random() * 0.05)
            os.kill(process, signal.SIGSTOP)
            time.sleep(draw.random() * 0.03)
            os.kill(process, signal.SIGCONT)
    finally:
        os._exit(0)


def main(calls, seed, fault):
    torch.set_num_threads(1)
    dist.init_process_group("ccl", timeout=timedelta(seconds=60))
    rank, size, draw = dist.get_rank(), dist.get_world_size(), random.Random(seed)
    groups = [(list(range(size)), dist.group.WORLD)]
    for members in ([0, 1], list(range(size // 2, size)), list(range(size))):
        group = dist.new_group(members)
        groups.append((members, group))
    if fault == "stops":
        stop_at_random(os.getpid(), rank)
    pending = []
    for number in range(calls):
        chosen = random.Random(f"{seed} {number}")
        members, group = chosen.choice(groups)
        if fault == "kill" and number == calls // 2 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank in members:
            pending.append((number, *Call(chosen, number, members, group).start()))
        while len(pending) > PENDING or (pending and draw.random() < 0.3):
            finish(*pending.pop(0))
    for each in pending:
        finish(*each)
    print(calls, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), (*sys.argv, "")[3])
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
        os._exit(1)
