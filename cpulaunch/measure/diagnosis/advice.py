"""What each bottleneck is called, how it shows, and the option or rule that addresses it. Pure."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@record
class Advice:
    """`name`: the bottleneck. `text`: what happens, with the detail in braces. `option`: what addresses it.

    `rule`: of `cpulaunch check`, which finds the line in the source; empty if there is none.
    """

    name: str
    text: str
    option: str
    rule: str = ""


ADVICE: Mapping[str, Advice] = {
    "data-wait": Advice(
        name="data wait",
        text="the program waits for its samples",
        option="--dataloader-workers auto, with --prefetch 4",
        rule="dataloader-workers",
    ),
    "decode": Advice(
        name="decoding of samples",
        text="samples are decoded where the program waits for them, in {detail}",
        option="--dataloader-workers auto, or decode them once and keep the tensors",
        rule="decode-per-item",
    ),
    "synchronization": Advice(
        name="synchronization",
        text="the program reads numbers out of tensors, {detail} times in a step (.item(), float(), if tensor)",
        option="keep results in tensors and read them once",
        rule="step-synchronization",
    ),
    "tiny-operations": Advice(
        name="tiny operations",
        text="calling {detail} tiny operations in a step takes longer than computing them",
        option="--graph inductor (inference), torch.compile, or larger batches",
    ),
    "python-loop": Advice(
        name="Python loop over elements",
        text="a Python loop calls {detail} tiny operations in a step, element by element, as in a loss",
        option="write the loop as operations on whole tensors",
        rule="tensor-element-loop",
    ),
    "python-code": Advice(
        name="Python code",
        text="the program computes in Python between operations of torch",
        option="move the work into tensors, or into DataLoader workers (--dataloader-workers auto)",
    ),
    "waiting": Advice(
        name="waiting outside torch",
        text="the program waits for something that is not torch: a file, a network, a lock or a sleep",
        option="do it in another thread, or in DataLoader workers (--dataloader-workers auto)",
    ),
    "slow-collective": Advice(
        name="slow collective",
        text="all ranks wait for collectives, whose data take long to move",
        option="--dist-backend ccl, gradient accumulation with no_sync(), or fewer and smaller tensors",
        rule="accumulation-sync",
    ),
    "straggler": Advice(
        name="straggler",
        text="rank {detail} has more to do in a step than the others, which wait for it",
        option="give all ranks equal work: a DistributedSampler, batches of equal length, equal CPUs",
    ),
    "wrong-binding": Advice(
        name="wrong binding",
        text="its threads may run on {detail} CPUs that it was given",
        option="leave binding to cpulaunch: remove sched_setaffinity, taskset and *_AFFINITY; --affinity mask",
    ),
    "oversubscribed": Advice(
        name="oversubscribed threads",
        text="threads take CPUs from one another: {detail}",
        option="--threads, or leave the number of threads to cpulaunch",
        rule="threads-in-program",
    ),
    "python-threads": Advice(
        name="Python threads beside the steps",
        text="threads of Python that call no modules, such as readers of samples, and torch's take CPUs from one "
        "another: {detail}",
        option="fewer of either (--threads), or samples that are decoded once",
    ),
    "allocator": Advice(
        name="memory allocator",
        text="memory is given back and mapped again, {detail} page faults in a step",
        option="--allocator tcmalloc or jemalloc, which keep it; --huge-pages; or write into tensors that exist",
    ),
    "growing-memory": Advice(
        name="growing memory",
        text="every step takes new memory, {detail} page faults in a step, and keeps it",
        option="keep no tensors of past steps: loss.item() or detach() instead of the loss",
    ),
    "remote-memory": Advice(
        name="remote memory",
        text="{detail} of its memory is on NUMA nodes on which its threads do not run",
        option="--membind bind, or --instances numa",
    ),
    "low-precision": Advice(
        name="low-precision fallback",
        text="matrix products in {detail} run in slow reference kernels: this CPU has no instructions for them",
        option="--precision fp32, or no autocast on this machine",
        rule="cpu-autocast-float16",
    ),
    "memory-bound": Advice(
        name="memory-bound operations",
        text="operations that compute little for the bytes they move take most of the time",
        option="--graph inductor (inference) or torch.compile, which fuse them",
        rule="pointwise-chain",
    ),
}
