"""Every setting in one table: an entry is an option of run and plan, a key of profiles and a line of the help.

The option is the name with dashes: `cores_per_instance` is `--cores-per-instance`, underscores are accepted as well.
The type of a setting with a fixed choice of words lists them, and the check, the help and mypy all use that list.
"""

from __future__ import annotations

from cpulaunch.records import value_types as types
from cpulaunch.records.record import field, fields, record
from cpulaunch.records.value_types import SettingSpec, ValueType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeAlias

AutoCount: TypeAlias = 'int | Literal["auto"]'
RankCount: TypeAlias = 'int | Literal["auto", "cpu", "gpu", "xpu", "numa", "socket", "l3"]'
Streams: TypeAlias = "int | tuple[tuple[int, int], ...]"
"""Which of a rank's streams (1 stdout, 2 stderr, 3 both): one number for all, or (local rank, number) pairs."""
Strategy: TypeAlias = 'Literal["spread", "compact"]'
MemoryPolicy: TypeAlias = 'Literal["preferred", "bind", "interleave", "none"]'
Binder: TypeAlias = 'Literal["native", "numactl", "taskset", "none"]'
OpenmpChoice: TypeAlias = 'Literal["auto", "default", "intel", "llvm"]'
Affinity: TypeAlias = 'Literal["mask", "close", "spread", "explicit", "none"]'
WaitChoice: TypeAlias = 'Literal["auto", "active", "passive"]'
AllocatorChoice: TypeAlias = 'Literal["auto", "default", "tcmalloc", "jemalloc", "mimalloc"]'
AutoSwitch: TypeAlias = 'Literal["auto", "on", "off"]'
Graph: TypeAlias = 'Literal["off", "onednn", "inductor", "zentorch"]'
CompileMode: TypeAlias = 'Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]'
Precision: TypeAlias = 'Literal["fp32", "tf32", "medium", "bf16", "fp16"]'
WeightType: TypeAlias = 'Literal["fp32", "bf16", "int8", "int4"]'
NumaBinding: TypeAlias = 'Literal["node", "socket", "exclusive", "core-complex"]'
Device: TypeAlias = 'Literal["auto", "cpu", "gpu"]'
StartMethod: TypeAlias = 'Literal["spawn", "fork", "forkserver"]'
Scheduler: TypeAlias = 'Literal["auto", "none", "slurm", "mpi", "pbs"]'
DistBackend: TypeAlias = 'Literal["auto", "gloo", "ccl", "mpi"]'
CclPath: TypeAlias = 'Literal["auto", "memory", "oneccl"]'


def _setting(default: Any, value_type: ValueType, group: str, help: str) -> Any:  # noqa: A002
    return field(default=default, value_type=value_type, group=group, help=help, in_profile=True)


def _cli_setting(default: Any, value_type: ValueType, group: str, help: str) -> Any:  # noqa: A002
    return field(default=default, value_type=value_type, group=group, help=help, in_profile=False)


@record
class Settings:
    """The merged value of every setting; None: the planner decides."""

    optimize: int = _setting(
        1,
        types.integer(minimum=0, maximum=4),
        "Optimization level",
        "how much may change for speed (also -O2); other options override it\n"
        "0: only binding, memory and threads\n"
        "1: adds preloads and this machine's profile\n"
        "2: adds --graph onednn --weights fp32 --channels-last: results differ by rounding\n"
        "3: adds --precision bf16 --weights bf16 if the CPU has bf16 instructions\n"
        "4: adds --weights int8",
    )

    instances: AutoCount | None = _cli_setting(
        None, types.count(AutoCount), "Placement", "run N independent copies of the program; auto: one per NUMA node"
    )
    cores_per_instance: int | None = _cli_setting(None, types.size(minimum=1), "Placement", "cores per instance")
    cpus: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Placement", "use only these logical CPUs, e.g. 0-3,8"
    )
    numa_nodes: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Placement", "use only these NUMA nodes, e.g. 0,1"
    )
    smt: bool = _setting(False, types.FLAG, "Placement", "use SMT siblings as well (default: one logical CPU per core)")
    e_cores: bool = _setting(False, types.FLAG, "Placement", "use efficiency cores as well")
    reserve: int = _setting(0, types.size(minimum=0), "Placement", "cores per instance to keep free of compute threads")
    strategy: Strategy = _setting(
        "spread",
        types.choice(Strategy),
        "Placement",
        "how to place instances; spread: evenly over NUMA nodes; compact: fill one NUMA node after another",
    )
    instance_index: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Placement", "start only these instances of the plan, e.g. 0,2"
    )
    oversubscribe: bool = _cli_setting(False, types.FLAG, "Placement", "allow more instances than cores")

    threads: int | None = _setting(
        None, types.size(minimum=1), "Threads and memory", "compute threads of each worker (default: its cores)"
    )
    membind: MemoryPolicy | None = _setting(
        None,
        types.choice(MemoryPolicy),
        "Threads and memory",
        "memory policy of each worker (default: preferred, or interleave for a worker on several NUMA nodes)",
    )
    binder: Binder = _setting(
        "native",
        types.choice(Binder),
        "Threads and memory",
        "how to bind: by system calls (native), by numactl, by taskset, or not at all",
    )
    openmp: OpenmpChoice = _setting(
        "auto",
        types.choice(OpenmpChoice),
        "Threads and memory",
        'OpenMP runtime to preload; "default" keeps the one in torch',
    )
    affinity: Affinity = _setting(
        "mask",
        types.choice(Affinity),
        "Threads and memory",
        "pin each OpenMP thread to CPUs of its worker; mask: use all CPUs of the worker, without pinning",
    )
    wait_policy: WaitChoice = _setting(
        "auto",
        types.choice(WaitChoice),
        "Threads and memory",
        "what idle OpenMP threads do; active: spin, only on exclusive cores and without a CPU quota",
    )

    allocator: AllocatorChoice = _setting(
        "auto",
        types.choice(AllocatorChoice),
        "Preloads",
        'memory allocator to preload; "default" keeps the C library\'s',
    )
    huge_pages: bool = _setting(False, types.FLAG, "Preloads", "request transparent huge pages (allocator and torch)")
    mkl_dispatch: AutoSwitch = _setting(
        "auto", types.choice(AutoSwitch), "Preloads", "let MKL use its fast kernels on AMD CPUs (same precision)"
    )

    graph: Graph = _setting(
        "off",
        types.choice(Graph),
        "Inside torch",
        "compile modules in eval mode: fused oneDNN graphs, torch.compile with freezing, or AMD's zentorch",
    )
    graph_signatures: int = _setting(
        8, types.size(minimum=1), "Inside torch", "input signatures to compile per module; others run eagerly"
    )
    compile_mode: CompileMode | None = _setting(
        None, types.choice(CompileMode), "Inside torch", "mode of torch.compile for --graph inductor"
    )
    precision: Precision | None = _setting(
        None,
        types.choice(Precision),
        "Inside torch",
        "precision of products; bf16, fp16: autocast around modules; tf32, medium, fp32: of fp32 matrix products",
    )
    graph_budget: float = _setting(
        60.0, types.number(minimum=0.0), "Inside torch", "seconds that a worker may spend on capturing graphs"
    )
    weights: WeightType | None = _setting(
        None,
        types.choice(WeightType),
        "Inside torch",
        "keep the weights of modules in eval mode packed in this type; results stay in the program's own type",
    )
    release_weights: bool = _setting(
        False, types.FLAG, "Inside torch", "move the original weights that --weights replaces to a file mapping"
    )
    channels_last: bool = _setting(
        False, types.FLAG, "Inside torch", "store convolution weights in channels_last order"
    )
    inference_mode: bool = _setting(
        False, types.FLAG, "Inside torch", "disable gradients for modules in eval mode, as under torch.no_grad"
    )
    debug_apis: bool = _setting(True, types.FLAG, "Inside torch", "disable anomaly detection, emit_nvtx and gradcheck")
    flush_denormal: bool = _setting(False, types.FLAG, "Inside torch", "flush denormal numbers to zero")
    interop_threads: int | None = _setting(None, types.size(minimum=1), "Inside torch", "inter-op threads of torch")
    cudnn_benchmark: bool = _setting(
        False, types.FLAG, "Inside torch", "let cuDNN benchmark its algorithms for each input shape (GPU)"
    )
    mmap_weights: bool = _setting(
        False, types.FLAG, "Inside torch", "memory-map checkpoints in torch.load, so that instances share one copy"
    )
    fused_optimizers: bool = _setting(
        False, types.FLAG, "Inside torch", "use fused Adam, AdamW, SGD and Adagrad unless the program chooses otherwise"
    )
    ddp_bucket_mb: int | None = _setting(
        None, types.size(minimum=1), "Inside torch", "MB of gradients that DDP reduces at once (torch: 25)"
    )
    ipex: bool = _setting(
        False, types.FLAG, "Inside torch", "apply ipex.optimize, like ipexrun --auto-ipex (torch 2.8 or older)"
    )

    dataloader_workers: AutoCount | None = _setting(
        None,
        types.count(AutoCount),
        "Data loading",
        "DataLoader workers, on cores of their own, if the program requests none",
    )
    pin_memory: bool = _setting(
        False, types.FLAG, "Data loading", "pin the memory of DataLoader batches for copies to a GPU"
    )
    prefetch: int | None = _setting(
        None, types.size(minimum=1), "Data loading", "batches that each DataLoader worker loads ahead"
    )
    persistent_workers: bool = _setting(
        False, types.FLAG, "Data loading", "keep DataLoader workers alive between epochs"
    )

    nproc_per_node: RankCount | None = _cli_setting(
        None,
        types.count(RankCount),
        "Distributed",
        "ranks on this host; numa, socket, l3: one for each of these; gpu, xpu: one for each GPU",
    )
    nnodes: tuple[int, int] | None = _cli_setting(
        None, types.RANGE, "Distributed", "hosts of the job, or MIN:MAX for an elastic job"
    )
    node_rank: int | None = _cli_setting(
        None, types.integer(minimum=0, maximum=types.MAX_HOSTS), "Distributed", "rank of this host (static rendezvous)"
    )
    master_addr: str | None = _cli_setting(None, types.WORD, "Distributed", "host of rank 0 (static rendezvous)")
    master_port: int | None = _cli_setting(
        None, types.PORT, "Distributed", "port of rank 0's store (default: a free port, for a job on one host)"
    )
    standalone: bool = _cli_setting(
        False, types.FLAG, "Distributed", "run on one host; choose the rendezvous automatically"
    )
    rdzv_backend: str | None = _cli_setting(
        None, types.WORD, "Distributed", "rendezvous backend for several hosts: static, c10d, etcd-v2, ..."
    )
    rdzv_endpoint: str | None = _cli_setting(None, types.WORD, "Distributed", "rendezvous address, HOST[:PORT]")
    rdzv_id: str | None = _cli_setting(None, types.WORD, "Distributed", "name of the job at the rendezvous")
    rdzv_conf: tuple[tuple[str, str], ...] = _cli_setting(
        (), types.PAIRS, "Distributed", "further rendezvous options, K=V,..."
    )
    local_addr: str | None = _cli_setting(
        None, types.WORD, "Distributed", "address at which the other hosts reach this one"
    )
    max_restarts: int = _cli_setting(
        0, types.integer(minimum=0), "Distributed", "restarts of all ranks after a failure"
    )
    monitor_interval: float = _cli_setting(
        0.1, types.number(minimum=0.0), "Distributed", "seconds between checks of the ranks (several hosts)"
    )
    role: str = _cli_setting("default", types.WORD, "Distributed", "role of the ranks, for variables and log prefixes")
    run_path: bool = _cli_setting(False, types.FLAG, "Distributed", "run SCRIPT with runpy, like torchrun --run-path")
    redirects: Streams = _cli_setting(
        0,
        types.STREAMS,
        "Distributed",
        "write output to files: 1 stdout, 2 stderr, 3 both, or RANK:N,... (also -r)",
    )
    tee: Streams = _cli_setting(
        0, types.STREAMS, "Distributed", "write output to files and to the terminal, as for --redirects (also -t)"
    )
    log_line_prefix_template: str | None = _cli_setting(
        None,
        types.WORD,
        "Distributed",
        "prefix of lines that --tee shows: ${role_name}, ${local_rank}, ${rank}, ${hostname}",
    )
    local_ranks_filter: frozenset[int] | None = _cli_setting(
        None, types.CPULIST, "Distributed", "local ranks whose output is shown (default: all)"
    )
    duplicate_stdout_filters: tuple[str, ...] = _cli_setting(
        (), types.FILTERS, "Distributed", "copy stdout lines that contain one of these texts to one file"
    )
    duplicate_stderr_filters: tuple[str, ...] = _cli_setting(
        (), types.FILTERS, "Distributed", "copy stderr lines that contain one of these texts to one file"
    )
    numa_binding: NumaBinding | None = _cli_setting(
        None,
        types.choice(NumaBinding),
        "Distributed",
        "bind each rank to its whole NUMA node or socket, to its share of it, or to one L3 (default: equal shares)",
    )
    device: Device = _cli_setting(
        "auto",
        types.choice(Device),
        "Distributed",
        "device the ranks compute on: place them by cores, or near their GPUs",
    )
    virtual_local_rank: bool = _cli_setting(
        False, types.FLAG, "Distributed", "show each rank only its own GPU, as LOCAL_RANK 0"
    )
    signals_to_handle: tuple[str, ...] = _cli_setting(
        ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), types.WORDS, "Distributed", "signals that end the job"
    )
    shutdown_timeout: int | None = _cli_setting(
        None,
        types.integer(minimum=0, maximum=types.MAX_SECONDS),
        "Distributed",
        "seconds between SIGTERM and SIGKILL (torchrun's --grace)",
    )
    start_method: StartMethod = _cli_setting(
        "spawn", types.choice(StartMethod), "Distributed", "accepted for compatibility with torchrun; no effect"
    )
    event_log_handler: str = _cli_setting("null", types.WORD, "Distributed", "event handler of torch elastic")
    logs_specs: str | None = _cli_setting(
        None, types.WORD, "Distributed", "name of a torchrun.logs_specs entry point; runs torch elastic"
    )
    scheduler: Scheduler = _cli_setting(
        "auto",
        types.choice(Scheduler),
        "Distributed",
        "read this host's or rank's place from the scheduler's variables (mpi: also --from-mpi)",
    )

    dist_backend: DistBackend | None = _setting(
        None,
        types.choice(DistBackend),
        "Collectives",
        "backend of CPU collectives if the program requests gloo or none; auto: measured once on this host",
    )
    ccl_workers: int = _setting(
        0, types.size(minimum=0), "Collectives", "oneCCL threads of each rank, on cores of their own"
    )
    ccl_worker_siblings: bool = _setting(
        False, types.FLAG, "Collectives", "run oneCCL threads on SMT siblings of the rank's cores instead"
    )
    ccl_path: CclPath | None = _setting(
        None,
        types.choice(CclPath),
        "Collectives",
        "how ccl moves data: through memory that ranks share (one host) or by oneCCL (default: auto)",
    )

    profile: tuple[str, ...] = _cli_setting(
        ("auto",),
        types.NAMES,
        "Profile and environment",
        "profiles to use, separated by commas: a name, a .toml file, auto or none",
    )
    env: tuple[tuple[str, str], ...] = _cli_setting(
        (), types.ASSIGNMENTS, "Profile and environment", "set a variable in every worker; may be repeated"
    )

    python: str | None = _cli_setting(
        None,
        types.PYTHON,
        "Run and output",
        "Python, or environment, that runs the program (default: the active environment's)",
    )
    grace: float = _setting(30.0, types.number(minimum=0.0), "Run and output", "seconds between SIGTERM and SIGKILL")
    strict: bool = _cli_setting(False, types.FLAG, "Run and output", "treat warnings as errors")
    quiet: bool = _cli_setting(
        False, types.FLAG, "Run and output", "show errors, warnings and metrics only, no notes (also -q)"
    )
    log_dir: str | None = _cli_setting(
        None,
        types.DIRECTORY,
        "Run and output",
        "append the output of each worker to DIR/worker-N.log; SIGUSR1 opens the files again",
    )
    show: frozenset[int] | None = _cli_setting(
        None, types.SHOWN, "Run and output", "workers whose output is shown (default: all)"
    )
    stdin: str | None = _cli_setting(
        None, types.STDIN, "Run and output", "worker that reads standard input (default: one if it is the only one)"
    )
    buffered: bool = _setting(
        False, types.FLAG, "Run and output", "let Python buffer a worker's output (default: -u if piped)"
    )
    report: str | None = _cli_setting(
        None,
        types.FILE,
        "Run and output",
        "write a JSON report of what took effect in each worker (-: to stdout, and workers' output to stderr)",
    )
    html: str | None = _cli_setting(None, types.FILE, "Run and output", "write the report as a page for a browser")
    metric: str | None = _cli_setting(
        None,
        types.PATTERN,
        "Run and output",
        "extract a number from the output, e.g. 'samples/s: ([0-9.]+)'; each worker's last match, summed",
    )
    start_barrier: bool = _cli_setting(
        False,
        types.FLAG,
        "Run and output",
        "hold workers at cpulaunch.ready() or their first forward until all are ready",
    )


_SPECS = {
    name: SettingSpec(name=name, default=entry.default, **entry.metadata) for name, entry in fields(Settings).items()
}


def setting_specs() -> dict[str, SettingSpec]:
    """Every setting's spec by name, in the order of the help."""
    return _SPECS


def _names(*groups: str) -> tuple[str, ...]:
    return tuple(name for name, spec in _SPECS.items() if spec.group in groups)


COLLECTIVE_SETTINGS = _names("Collectives")
"""Settings of CPU collectives, whatever starts the ranks."""
PLUGIN_SETTINGS = _names("Inside torch", "Data loading")
"""Settings that the worker plugin applies."""
JOB_SETTINGS = tuple(name for name in _names("Distributed") if name not in ("device", "scheduler"))
"""Settings that make a launch a job of ranks."""
