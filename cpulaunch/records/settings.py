"""Every setting, one spec each: the same spec is a flag of run and plan, a key of profiles and a line of the help.

A spec's flag is its name with dashes (`cores_per_instance` is `--cores-per-instance`, also accepted with underscores).
"""

from __future__ import annotations

from cpulaunch.records import value_types as types
from cpulaunch.records.record import field, fields, record
from cpulaunch.records.value_types import ValueType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeAlias

Count: TypeAlias = 'int | Literal["auto"]'
Unit: TypeAlias = 'Literal["auto", "cpu", "gpu", "xpu", "numa", "socket", "l3"]'
Streams: TypeAlias = "int | tuple[tuple[int, int], ...]"
"""Which of a rank's streams (1 stdout, 2 stderr, 3 both): one number for all, or (local rank, number) pairs."""
Group: TypeAlias = str
"""The heading of the help that a setting stands under."""


@record
class SettingSpec:
    """How one setting is written and explained."""

    name: str
    value_type: ValueType
    default: Any
    group: Group
    help: str
    in_profile: bool

    @property
    def flag(self) -> str:
        """The setting's long option."""
        return "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str:
        """The option that switches a switch off, such as `--no-smt`."""
        return "--no-" + self.flag[2:]

    def arguments(self, value: Any) -> list[str]:
        """The words of a command line that give the setting this value."""
        if self.value_type.flag:
            return [self.flag if value else self.negative_flag]
        parts = [(part,) for part in value] if self.value_type.repeatable else [value]
        return [word for part in parts for word in (self.flag, self.value_type.to_text(part))]


def _setting(default: Any, value_type: ValueType, group: Group, help: str) -> Any:  # noqa: A002
    return field(default=default, value_type=value_type, group=group, help=help, in_profile=True)


def _cli_setting(default: Any, value_type: ValueType, group: Group, help: str) -> Any:  # noqa: A002
    return field(default=default, value_type=value_type, group=group, help=help, in_profile=False)


@record
class Settings:
    """The merged value of every setting; None where nobody chose and the planner decides."""

    instances: Count | None = _cli_setting(
        None, types.count("auto"), "Placement", "independent copies of the program; auto: one per NUMA node"
    )
    cores_per_instance: int | None = _cli_setting(None, types.integer(minimum=1), "Placement", "cores of each instance")
    cpus: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Placement", "use these logical CPUs only, e.g. 0-3,8"
    )
    numa_nodes: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Placement", "use these NUMA nodes only, e.g. 0,1"
    )
    smt: bool = _setting(
        False, types.FLAG, "Placement", "give out SMT siblings too (default: one logical CPU per core)"
    )
    e_cores: bool = _setting(False, types.FLAG, "Placement", "use efficiency cores too")
    reserve: int = _setting(
        0, types.integer(minimum=0), "Placement", "cores of each instance kept free of compute threads"
    )
    strategy: Literal["spread", "compact"] = _setting(
        "spread",
        types.choice("spread", "compact"),
        "Placement",
        "spread: deal instances evenly over NUMA nodes; compact: fill in order",
    )
    instance_index: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Placement", "start only these instances of the plan, e.g. 0,2"
    )
    oversubscribe: bool = _cli_setting(False, types.FLAG, "Placement", "allow more instances than cores")

    membind: Literal["preferred", "bind", "interleave", "none"] | None = _setting(
        None,
        types.choice("preferred", "bind", "interleave", "none"),
        "Memory and threads",
        "memory policy of each worker (default: preferred; interleave across several NUMA nodes)",
    )
    binder: Literal["native", "numactl", "taskset", "none"] = _setting(
        "native",
        types.choice("native", "numactl", "taskset", "none"),
        "Memory and threads",
        "who binds: system calls, the named program, or nobody",
    )
    threads: int | None = _setting(
        None, types.integer(minimum=1), "Memory and threads", "compute threads of each worker (default: its cores)"
    )
    openmp: Literal["auto", "default", "intel", "llvm"] = _setting(
        "auto",
        types.choice("auto", "default", "intel", "llvm"),
        "Memory and threads",
        "OpenMP runtime to preload; default: the one torch brings",
    )
    affinity: Literal["mask", "close", "spread", "explicit", "none"] = _setting(
        "mask",
        types.choice("mask", "close", "spread", "explicit", "none"),
        "Memory and threads",
        "per-thread OpenMP pinning inside the worker's CPUs; mask: none, the worker's mask only",
    )
    wait_policy: Literal["auto", "active", "passive"] = _setting(
        "auto",
        types.choice("auto", "active", "passive"),
        "Memory and threads",
        "what idle OpenMP threads do; active spins: only on cores nobody shares, without a quota",
    )

    allocator: Literal["auto", "default", "tcmalloc", "jemalloc", "mimalloc"] = _setting(
        "auto",
        types.choice("auto", "default", "tcmalloc", "jemalloc", "mimalloc"),
        "Preloads",
        "memory allocator to preload",
    )
    huge_pages: bool = _setting(False, types.FLAG, "Preloads", "ask for transparent huge pages (allocator and torch)")
    mkl_dispatch: Literal["auto", "on", "off"] = _setting(
        "auto",
        types.choice("auto", "on", "off"),
        "Preloads",
        "on AMD, let MKL choose its fast kernels (same precision)",
    )

    graph: Literal["off", "onednn", "inductor", "zentorch"] = _setting(
        "off",
        types.choice("off", "onednn", "inductor", "zentorch"),
        "Inside torch",
        "capture modules in eval mode: fused oneDNN graphs, torch.compile with freezing, or AMD's zentorch",
    )
    graph_signatures: int = _setting(
        8,
        types.integer(minimum=1),
        "Inside torch",
        "input signatures captured for each module; further ones run eagerly",
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = _setting(
        None,
        types.choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        "Inside torch",
        "torch.compile's mode for --graph inductor",
    )
    precision: Literal["fp32", "tf32", "medium", "bf16", "fp16"] | None = _setting(
        None,
        types.choice("fp32", "tf32", "medium", "bf16", "fp16"),
        "Inside torch",
        "bf16, fp16: autocast around modules; tf32, medium, fp32: precision of fp32 matrix products",
    )
    channels_last: bool = _setting(False, types.FLAG, "Inside torch", "convolution weights in channels_last order")
    inference_mode: bool = _setting(
        False, types.FLAG, "Inside torch", "no gradients for modules in eval mode, where the program forgot no_grad"
    )
    debug_apis: bool = _setting(
        True, types.FLAG, "Inside torch", "let anomaly detection, emit_nvtx and gradcheck do nothing"
    )
    flush_denormal: bool = _setting(
        False, types.FLAG, "Inside torch", "numbers too small for full precision become zero"
    )
    interop_threads: int | None = _setting(
        None, types.integer(minimum=1), "Inside torch", "threads for operations that run side by side"
    )
    cudnn_benchmark: bool = _setting(
        False, types.FLAG, "Inside torch", "cuDNN times its algorithms for each shape (GPU)"
    )
    mmap_weights: bool = _setting(
        False, types.FLAG, "Inside torch", "torch.load maps checkpoints: instances share one copy in the page cache"
    )
    fused_optimizers: bool = _setting(
        False, types.FLAG, "Inside torch", "Adam, AdamW, SGD, Adagrad in one pass over each parameter, where left open"
    )
    ipex: bool = _setting(
        False, types.FLAG, "Inside torch", "ipex.optimize, as ipexrun --auto-ipex (torch 2.8 or older)"
    )

    dataloader_workers: Count | None = _setting(
        None,
        types.count("auto"),
        "Data loading",
        "DataLoader workers where the program asks for none, on cores of their own",
    )
    pin_memory: bool = _setting(False, types.FLAG, "Data loading", "DataLoaders pin memory for copies to a GPU")
    prefetch: int | None = _setting(
        None, types.integer(minimum=1), "Data loading", "batches each DataLoader worker loads ahead"
    )
    persistent_workers: bool = _setting(
        False, types.FLAG, "Data loading", "DataLoader workers live on from epoch to epoch"
    )

    nproc_per_node: int | Unit | None = _cli_setting(
        None,
        types.count("auto", "cpu", "gpu", "xpu", "numa", "socket", "l3"),
        "Distributed",
        "ranks on this host; numa, socket, l3: one for each; gpu, xpu: one for each GPU",
    )
    nnodes: tuple[int, int] | None = _cli_setting(
        None, types.RANGE, "Distributed", "hosts of the job, or MIN:MAX for an elastic one"
    )
    node_rank: int | None = _cli_setting(
        None, types.integer(minimum=0), "Distributed", "this host's number (static rendezvous)"
    )
    master_addr: str | None = _cli_setting(None, types.WORD, "Distributed", "host of rank 0 (static rendezvous)")
    master_port: int | None = _cli_setting(
        None, types.PORT, "Distributed", "port of rank 0's store (default: a free one on one host)"
    )
    standalone: bool = _cli_setting(False, types.FLAG, "Distributed", "one host, rendezvous chosen automatically")
    rdzv_backend: str | None = _cli_setting(
        None, types.WORD, "Distributed", "rendezvous of several hosts: static, c10d, etcd-v2, ..."
    )
    rdzv_endpoint: str | None = _cli_setting(None, types.WORD, "Distributed", "rendezvous address, HOST[:PORT]")
    rdzv_id: str | None = _cli_setting(None, types.WORD, "Distributed", "name of the job at the rendezvous")
    rdzv_conf: tuple[tuple[str, str], ...] = _cli_setting(
        (), types.PAIRS, "Distributed", "further rendezvous settings, K=V,..."
    )
    local_addr: str | None = _cli_setting(None, types.WORD, "Distributed", "this host's address as the others see it")
    max_restarts: int = _cli_setting(
        0, types.integer(minimum=0), "Distributed", "restarts of all ranks after a failure"
    )
    monitor_interval: float = _cli_setting(
        0.1, types.number(minimum=0.0), "Distributed", "seconds between looks at the ranks (several hosts)"
    )
    role: str = _cli_setting("default", types.WORD, "Distributed", "role of the ranks, in their variables and prefixes")
    run_path: bool = _cli_setting(
        False, types.FLAG, "Distributed", "run SCRIPT with runpy, as torchrun --run-path does"
    )
    redirects: Streams = _cli_setting(
        0, types.STREAMS, "Distributed", "write output to files: 1 stdout, 2 stderr, 3 both, or RANK:N,... (also -r)"
    )
    tee: Streams = _cli_setting(
        0, types.STREAMS, "Distributed", "write it to files and show it, numbers as for --redirects (also -t)"
    )
    local_ranks_filter: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Distributed", "local ranks whose output reaches the terminal"
    )
    duplicate_stdout_filters: tuple[str, ...] = _cli_setting(
        (), types.FILTERS, "Distributed", "copy stdout lines with one of these words to one file"
    )
    duplicate_stderr_filters: tuple[str, ...] = _cli_setting(
        (), types.FILTERS, "Distributed", "copy stderr lines with one of these words to one file"
    )
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = _cli_setting(
        None,
        types.choice("node", "socket", "exclusive", "core-complex"),
        "Distributed",
        "bind each rank to all of its NUMA node or socket, to its share of it, or to one L3 (default: equal shares)",
    )
    device: Literal["auto", "cpu", "gpu"] = _cli_setting(
        "auto",
        types.choice("auto", "cpu", "gpu"),
        "Distributed",
        "what ranks compute on: bind them to cores, or next to GPUs",
    )
    virtual_local_rank: bool = _cli_setting(
        False, types.FLAG, "Distributed", "every rank sees its own GPU alone, as LOCAL_RANK 0"
    )
    signals_to_handle: tuple[str, ...] = _cli_setting(
        ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), types.WORDS, "Distributed", "signals that end the job"
    )
    shutdown_timeout: int | None = _cli_setting(
        None, types.integer(minimum=0), "Distributed", "seconds between SIGTERM and SIGKILL (torchrun's --grace)"
    )
    start_method: Literal["spawn", "fork", "forkserver"] = _cli_setting(
        "spawn", types.choice("spawn", "fork", "forkserver"), "Distributed", "torchrun's, without effect on programs"
    )
    event_log_handler: str = _cli_setting("null", types.WORD, "Distributed", "torch elastic's handler of events")
    logs_specs: str | None = _cli_setting(
        None, types.WORD, "Distributed", "a torchrun.logs_specs entry point, carried out by torch elastic"
    )
    scheduler: Literal["auto", "none", "slurm", "mpi", "pbs"] = _cli_setting(
        "auto",
        types.choice("auto", "none", "slurm", "mpi", "pbs"),
        "Distributed",
        "whose variables say which host or rank this is (mpi: also --from-mpi)",
    )
    dist_backend: Literal["auto", "gloo", "ccl", "mpi"] | None = _setting(
        None,
        types.choice("auto", "gloo", "ccl", "mpi"),
        "Distributed",
        "what CPU collectives run on where the program asks for gloo or nothing; auto: measured once on this host",
    )
    ccl_workers: int = _setting(
        0, types.integer(minimum=0), "Distributed", "threads of oneCCL's for each rank, on cores of their own"
    )
    ccl_worker_siblings: bool = _setting(
        False, types.FLAG, "Distributed", "let them run on SMT siblings of the rank's cores instead"
    )
    ccl_path: Literal["auto", "memory", "oneccl"] | None = _setting(
        None,
        types.choice("auto", "memory", "oneccl"),
        "Distributed",
        "how ccl moves data: through the ranks' own memory on one host, or by oneCCL (default: auto)",
    )

    profile: tuple[str, ...] = _cli_setting(
        ("auto",), types.NAMES, "Profile", "preset: NAME, FILE.toml, auto or none; several separated by commas"
    )
    env: tuple[tuple[str, str], ...] = _cli_setting(
        (), types.ASSIGNMENTS, "Profile", "set K=V in every worker; may be repeated"
    )
    strict: bool = _cli_setting(False, types.FLAG, "Profile", "turn every degradation into an error")

    grace: float = _setting(30.0, types.number(minimum=0.0), "Launch", "seconds between SIGTERM and SIGKILL")
    log_dir: str | None = _cli_setting(None, types.TEXT, "Launch", "write each worker's output to DIR/worker-N.log")
    show: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Launch", "workers whose output reaches the terminal (default: all)"
    )
    buffered: bool = _setting(
        False, types.FLAG, "Launch", "let Python workers buffer their output (default: -u behind a pipe)"
    )
    report: str | None = _cli_setting(
        None, types.TEXT, "Launch", "write what took effect in every worker to FILE.json (-: stdout)"
    )
    metric: str | None = _cli_setting(
        None,
        types.PATTERN,
        "Launch",
        "read a figure from the output, e.g. 'samples/s: ([0-9.]+)'; the last one counts, summed over workers",
    )
    start_barrier: bool = _cli_setting(
        False, types.FLAG, "Launch", "release all workers together, at cpulaunch.ready() or their first forward"
    )


_SPECS = {
    name: SettingSpec(name=name, default=spec.default, **spec.metadata) for name, spec in fields(Settings).items()
}


def setting_specs() -> dict[str, SettingSpec]:
    """Every setting's spec by name, in the order of the help."""
    return _SPECS


COLLECTIVE = ("dist_backend", "ccl_workers", "ccl_worker_siblings", "ccl_path")
"""Rows of the group Distributed on the collectives of ranks, whoever starts those."""
NOT_JOBS = ("device", "scheduler", *COLLECTIVE)
"""Rows of the group Distributed that alone do not make a launch a job of ranks."""

JOB_SETTINGS = tuple(name for name, spec in _SPECS.items() if spec.group == "Distributed" and name not in NOT_JOBS)
