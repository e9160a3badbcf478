"""Every setting, one row each: the same row is a flag of run and plan, a key of profiles and a line of the help.

A row's flag is its name with dashes (`cores_per_instance` is `--cores-per-instance`, also accepted with underscores).
"""

from __future__ import annotations

from cpulaunch import kinds
from cpulaunch.kinds import Kind
from cpulaunch.record import field, fields, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeAlias

Count: TypeAlias = 'int | Literal["auto"]'
Group: TypeAlias = (
    'Literal["Placement", "Memory and threads", "Preloads", "Inside torch", "Data loading", "Profile", "Launch"]'
)


@record
class Row:
    """How one setting is written and explained."""

    name: str
    kind: Kind
    default: Any
    group: Group
    help: str
    in_profile: bool = True

    @property
    def flag(self) -> str:
        """The setting's long option."""
        return "--" + self.name.replace("_", "-")


def _row(default: Any, kind: Kind, group: Group, help: str, *, in_profile: bool = True) -> Any:  # noqa: A002
    return field(default=default, kind=kind, group=group, help=help, in_profile=in_profile)


@record
class Settings:
    """The merged value of every setting; None where nobody chose and the planner decides."""

    instances: Count | None = _row(
        None,
        kinds.count("auto"),
        "Placement",
        "independent copies of the program; auto: one per NUMA node",
        in_profile=False,
    )
    cores_per_instance: int | None = _row(
        None, kinds.integer(minimum=1), "Placement", "cores of each instance", in_profile=False
    )
    cpus: frozenset[int] | None = _row(
        None, kinds.CPULIST, "Placement", "use these logical CPUs only, e.g. 0-3,8", in_profile=False
    )
    numa_nodes: frozenset[int] | None = _row(
        None, kinds.CPULIST, "Placement", "use these NUMA nodes only, e.g. 0,1", in_profile=False
    )
    smt: bool = _row(False, kinds.FLAG, "Placement", "give out SMT siblings too (default: one logical CPU per core)")
    e_cores: bool = _row(False, kinds.FLAG, "Placement", "use efficiency cores too")
    reserve: int = _row(0, kinds.integer(minimum=0), "Placement", "cores of each instance kept free of compute threads")
    strategy: Literal["spread", "compact"] = _row(
        "spread",
        kinds.choice("spread", "compact"),
        "Placement",
        "spread: deal instances evenly over NUMA nodes; compact: fill in order",
    )
    instance_index: frozenset[int] | None = _row(
        None, kinds.CPULIST, "Placement", "start only these instances of the plan, e.g. 0,2", in_profile=False
    )
    oversubscribe: bool = _row(False, kinds.FLAG, "Placement", "allow more instances than cores", in_profile=False)

    membind: Literal["preferred", "bind", "interleave", "none"] | None = _row(
        None,
        kinds.choice("preferred", "bind", "interleave", "none"),
        "Memory and threads",
        "memory policy of each worker (default: preferred; interleave across several NUMA nodes)",
    )
    binder: Literal["native", "numactl", "taskset", "none"] = _row(
        "native",
        kinds.choice("native", "numactl", "taskset", "none"),
        "Memory and threads",
        "who binds: system calls, the named program, or nobody",
    )
    threads: int | None = _row(
        None, kinds.integer(minimum=1), "Memory and threads", "compute threads of each worker (default: its cores)"
    )
    openmp: Literal["auto", "default", "intel", "llvm"] = _row(
        "auto",
        kinds.choice("auto", "default", "intel", "llvm"),
        "Memory and threads",
        "OpenMP runtime to preload; default: the one torch brings",
    )
    affinity: Literal["mask", "close", "spread", "explicit", "none"] = _row(
        "mask",
        kinds.choice("mask", "close", "spread", "explicit", "none"),
        "Memory and threads",
        "per-thread OpenMP pinning inside the worker's CPUs; mask: none, the worker's mask only",
    )
    wait_policy: Literal["auto", "active", "passive"] = _row(
        "auto",
        kinds.choice("auto", "active", "passive"),
        "Memory and threads",
        "what idle OpenMP threads do; active spins: only on cores nobody shares, without a quota",
    )

    allocator: Literal["auto", "default", "tcmalloc", "jemalloc", "mimalloc"] = _row(
        "auto",
        kinds.choice("auto", "default", "tcmalloc", "jemalloc", "mimalloc"),
        "Preloads",
        "memory allocator to preload",
    )
    huge_pages: bool = _row(False, kinds.FLAG, "Preloads", "ask for transparent huge pages (allocator and torch)")
    mkl_dispatch: Literal["auto", "on", "off"] = _row(
        "auto",
        kinds.choice("auto", "on", "off"),
        "Preloads",
        "on AMD, let MKL choose its fast kernels (same precision)",
    )

    graph: Literal["off", "onednn", "inductor", "zentorch"] = _row(
        "off",
        kinds.choice("off", "onednn", "inductor", "zentorch"),
        "Inside torch",
        "capture modules in eval mode: fused oneDNN graphs, torch.compile with freezing, or AMD's zentorch",
    )
    graph_signatures: int = _row(
        8,
        kinds.integer(minimum=1),
        "Inside torch",
        "input signatures captured for each module; further ones run eagerly",
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = _row(
        None,
        kinds.choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        "Inside torch",
        "torch.compile's mode for --graph inductor",
    )
    precision: Literal["fp32", "tf32", "medium", "bf16", "fp16"] | None = _row(
        None,
        kinds.choice("fp32", "tf32", "medium", "bf16", "fp16"),
        "Inside torch",
        "bf16, fp16: autocast around modules; tf32, medium, fp32: precision of fp32 matrix products",
    )
    channels_last: bool = _row(False, kinds.FLAG, "Inside torch", "convolution weights in channels_last order")
    inference_mode: bool = _row(
        False, kinds.FLAG, "Inside torch", "no gradients for modules in eval mode, where the program forgot no_grad"
    )
    debug_apis: bool = _row(
        True, kinds.FLAG, "Inside torch", "let anomaly detection, emit_nvtx and gradcheck do nothing"
    )
    flush_denormal: bool = _row(False, kinds.FLAG, "Inside torch", "numbers too small for full precision become zero")
    interop_threads: int | None = _row(
        None, kinds.integer(minimum=1), "Inside torch", "threads for operations that run side by side"
    )
    cudnn_benchmark: bool = _row(False, kinds.FLAG, "Inside torch", "cuDNN times its algorithms for each shape (GPU)")
    mmap_weights: bool = _row(
        False, kinds.FLAG, "Inside torch", "torch.load maps checkpoints: instances share one copy in the page cache"
    )
    ipex: bool = _row(False, kinds.FLAG, "Inside torch", "ipex.optimize, as ipexrun --auto-ipex (torch 2.8 or older)")

    dataloader_workers: Count | None = _row(
        None,
        kinds.count("auto"),
        "Data loading",
        "DataLoader workers where the program asks for none, on cores of their own",
    )
    pin_memory: bool = _row(False, kinds.FLAG, "Data loading", "DataLoaders pin memory for copies to a GPU")
    prefetch: int | None = _row(
        None, kinds.integer(minimum=1), "Data loading", "batches each DataLoader worker loads ahead"
    )
    persistent_workers: bool = _row(False, kinds.FLAG, "Data loading", "DataLoader workers live on from epoch to epoch")

    profile: tuple[str, ...] = _row(
        ("auto",),
        kinds.NAMES,
        "Profile",
        "preset: NAME, FILE.toml, auto or none; several separated by commas",
        in_profile=False,
    )
    env: tuple[tuple[str, str], ...] = _row(
        (), kinds.ASSIGNMENTS, "Profile", "set K=V in every worker; may be repeated", in_profile=False
    )
    strict: bool = _row(False, kinds.FLAG, "Profile", "turn every degradation into an error", in_profile=False)

    grace: float = _row(30.0, kinds.number(minimum=0.0), "Launch", "seconds between SIGTERM and SIGKILL")
    log_dir: str | None = _row(
        None, kinds.TEXT, "Launch", "write each worker's output to DIR/worker-N.log", in_profile=False
    )
    show: frozenset[int] | None = _row(
        None, kinds.CPULIST, "Launch", "workers whose output reaches the terminal (default: all)", in_profile=False
    )
    buffered: bool = _row(
        False, kinds.FLAG, "Launch", "let Python workers buffer their output (default: -u behind a pipe)"
    )
    report: str | None = _row(
        None, kinds.TEXT, "Launch", "write what took effect in every worker to FILE.json (-: stdout)", in_profile=False
    )
    metric: str | None = _row(
        None,
        kinds.PATTERN,
        "Launch",
        "read a figure from the output, e.g. 'samples/s: ([0-9.]+)'; the last one counts, summed over workers",
        in_profile=False,
    )
    start_barrier: bool = _row(
        False,
        kinds.FLAG,
        "Launch",
        "release all workers together, at cpulaunch.ready() or their first forward",
        in_profile=False,
    )


_ROWS = {name: Row(name=name, default=row.default, **row.metadata) for name, row in fields(Settings).items()}


def rows() -> dict[str, Row]:
    """Every setting's row by name, in the order of the help."""
    return _ROWS
