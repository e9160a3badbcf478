"""Options of other launchers and of Python, each with what it is in cpulaunch.

Sources: ipexrun of IPEX 2.8, run_cpu and torchrun of torch 2.13 and torch.distributed.launch, numactl(8), taskset(1),
mpirun(1) of Open MPI and MPICH, accelerate launch 1.x, deepspeed 0.18, hwloc-bind(1).
"""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

EACH_HOST = "start cpulaunch on each host, with srun, or under mpirun with --from-mpi"
OWN_CORES = "every worker has cores of its own"
OWN_NODE = "an instance stays in one NUMA node where it fits"
SYSTEM_CALLS = "system calls bind, without numactl or taskset; --binder none binds nothing"
ALLOWED_CPUS = "cpulaunch uses the CPUs that it may use; see cpulaunch probe"
PROBE = "cpulaunch probe shows this machine"
COPIES_OR_RANKS = "--nproc-per-node {value} for the ranks of a job, --instances {value} for independent copies"


@record(kw_only=False)
class Equivalent:
    """What an option of another tool is in cpulaunch.

    `options`: the options to type, with {value} for the option's value; None if there is no single answer, and then
    `remark` says what to do; empty if nothing has to be typed, and `remark` says why. `by_value` has precedence.
    """

    values: int
    options: str | None
    remark: str = ""
    by_value: Mapping[str, str] | None = None


def _same(options: str) -> Equivalent:
    return Equivalent(1 if "{value}" in options else 0, options)


def _not_needed(why: str, *, values: int = 0) -> Equivalent:
    return Equivalent(values, "", why)


def _advice(what: str, *, values: int = 0) -> Equivalent:
    return Equivalent(values, None, what)


_LEVELS = {
    "float32": "-O2",
    "fp32": "-O2",
    "bfloat16": "-O3",
    "bf16": "-O3",
    "float16": "--precision fp16",
    "fp16": "--precision fp16",
    "int8": "-O4",
}
_MIXED = {"no": "", "bf16": "--precision bf16", "fp16": "--precision fp16"}
_MANAGERS = {
    "auto": "--binder native",
    "none": "--binder native",
    "numactl": "--binder numactl",
    "taskset": "--binder taskset",
}
_POLICIES = {
    "bind": "--membind bind",
    "interleave": "--membind interleave",
    "firsttouch": "--membind none",
    "default": "--membind none",
}
_PYTHON_CODE = "taskset's -c LIST is --cpus LIST; python's -c CODE is --no-python python -c CODE"

INSTANCES = {
    "--ninstances": _same("--instances {value}"),
    "--multi-instance": _same("--instances auto"),
    "--num-instances": _same("--instances {value}"),
    "--ncores-per-instance": _same("--cores-per-instance {value}"),
    "--ncore-per-instance": _same("--cores-per-instance {value}"),
    "--nodes-list": _same("--numa-nodes {value}"),
    "--node-id": _same("--numa-nodes {value}"),
    "--cores-list": _same("--cpus {value}"),
    "--core-list": _same("--cpus {value}"),
    "--instance-idx": _same("--instance-index {value}"),
    "--rank": Equivalent(1, "--instance-index {value}", "of a host in a job: --node-rank {value}"),
    "--use-logical-cores": _same("--smt"),
    "--use-logical-core": _same("--smt"),
    "--use-e-cores": _same("--e-cores"),
    "--latency-mode": _same("--cores-per-instance 4"),
    "--throughput-mode": _same("--instances auto"),
    "--bind-numa-node": _not_needed(OWN_NODE),
    "--skip-cross-node-cores": _not_needed(OWN_NODE),
    "--memory-allocator": _same("--allocator {value}"),
    "--enable-tcmalloc": _same("--allocator tcmalloc"),
    "--enable-jemalloc": _same("--allocator jemalloc"),
    "--use-default-allocator": _same("--allocator default"),
    "--benchmark": _same("--allocator jemalloc"),
    "--omp-runtime": _same("--openmp {value}"),
    "--disable-iomp": _same("--openmp default"),
    "--multi-task-manager": Equivalent(1, None, "--binder native|numactl|taskset", _MANAGERS),
    "--disable-numactl": _not_needed(SYSTEM_CALLS),
    "--disable-taskset": _not_needed(SYSTEM_CALLS),
    "--log-path": _same("--log-dir {value}"),
    "--log-file-prefix": _not_needed("--log-dir DIR writes DIR/worker-0.log and so on", values=1),
    "--nprocs-per-node": _same("--nproc-per-node {value}"),
    "--distributed": _same("--nproc-per-node numa"),
    "--ccl-worker-count": _same("--ccl-workers {value}"),
    "--logical-cores-for-ccl": _same("--ccl-worker-siblings"),
    "--extra-mpi-params": _advice(EACH_HOST, values=1),
    "--auto-ipex": Equivalent(0, "-O2", "with torch 2.8 and IPEX, --ipex"),
    "--dtype": Equivalent(1, None, "-O2 for fp32, -O3 for bf16", _LEVELS),
    "--auto-ipex-verbose": _same("--report r.json"),
    "--disable-ipex-graph-mode": _same("--graph off"),
    "--convert-fp64-to-fp32": _advice("cpulaunch sets nothing for Intel GPUs"),
}
"""ipexrun and run_cpu, their older spellings included."""

BINDING = {
    "--physcpubind": _same("--cpus {value}"),
    "--cpunodebind": _same("--numa-nodes {value}"),
    "--cpubind": _same("--numa-nodes {value}"),
    "--preferred": Equivalent(1, "--numa-nodes {value}", "memory prefers a worker's NUMA nodes by default"),
    "--preferred-many": Equivalent(1, "--numa-nodes {value}", "memory prefers a worker's NUMA nodes by default"),
    "--interleave": Equivalent(1, "--numa-nodes {value} --membind interleave", "", {"all": "--membind interleave"}),
    "--weighted-interleave": Equivalent(
        1, "--numa-nodes {value} --membind interleave", "without weights", {"all": "--membind interleave"}
    ),
    "--localalloc": _same("--membind none"),
    "--balancing": _advice("cpulaunch does not change automatic NUMA balancing; see cpulaunch doctor"),
    "--all": _not_needed(ALLOWED_CPUS),
    "--hardware": _advice(PROBE),
    "--cpu-list": _same("--cpus {value}"),
    "--pid": _advice("cpulaunch binds what it starts, and no running process", values=1),
    "--mempolicy": Equivalent(1, None, "--membind preferred|bind|interleave|none", _POLICIES),
    "-C": _same("--cpus {value}"),
    "-N": _same("--numa-nodes {value}"),
    "-c": Equivalent(1, None, _PYTHON_CODE),
    "-p": Equivalent(1, "--numa-nodes {value}", "memory prefers a worker's NUMA nodes by default"),
    "-P": Equivalent(1, "--numa-nodes {value}", "memory prefers a worker's NUMA nodes by default"),
    "-i": Equivalent(1, "--numa-nodes {value} --membind interleave", "", {"all": "--membind interleave"}),
    "-l": _same("--membind none"),
    "-a": _not_needed(ALLOWED_CPUS),
    "-H": _advice(PROBE),
    "-s": _advice("cpulaunch plan shows what would be bound, cpulaunch probe the machine"),
}
"""numactl, taskset and hwloc-bind."""

RANKS = {
    "-n": Equivalent(1, None, COPIES_OR_RANKS),
    "-np": Equivalent(1, None, COPIES_OR_RANKS),
    "--np": Equivalent(1, None, COPIES_OR_RANKS),
    "--nprocs": _same("--nproc-per-node {value}"),
    "--num-processes": _same("--nproc-per-node {value}"),
    "--num-procs": _same("--nproc-per-node {value}"),
    "--num-machines": _same("--nnodes {value}"),
    "--num-nodes": _same("--nnodes {value}"),
    "--machine-rank": _same("--node-rank {value}"),
    "--main-process-ip": _same("--master-addr {value}"),
    "--main-process-port": _same("--master-port {value}"),
    "--num-cpu-threads-per-process": _same("--threads {value}"),
    "--enable-cpu-affinity": _not_needed(OWN_CORES),
    "--bind-cores-to-rank": _not_needed(OWN_CORES),
    "--bind-core-list": _same("--cpus {value}"),
    "--bind-to": _not_needed(OWN_CORES, values=1),
    "--map-by": Equivalent(1, None, "--nproc-per-node numa|socket|l3 places one rank in each"),
    "--report-bindings": _same("--report r.json"),
    "--allow-run-as-root": _not_needed("cpulaunch runs as any user"),
    "--hostfile": _advice(EACH_HOST, values=1),
    "--host": _advice(EACH_HOST, values=1),
    "--mpirun-hostfile": _advice(EACH_HOST, values=1),
    "--mpirun-ccl": _same("--ccl-workers {value}"),
    "--use-env": _not_needed("LOCAL_RANK is always in a rank's environment"),
    "--no-local-rank": _not_needed("LOCAL_RANK is in a rank's environment, and no argument is added"),
    "--cpu": _same("--device cpu"),
    "--use-cpu": _same("--device cpu"),
    "--multi-gpu": _same("--nproc-per-node gpu"),
    "--num-gpus": _same("--nproc-per-node {value}"),
    "--num-accelerators": _same("--nproc-per-node {value}"),
    "--gpu-ids": _advice("export CUDA_VISIBLE_DEVICES={value}", values=1),
    "--use-ipex": _same("--ipex"),
    "--mixed-precision": Equivalent(1, None, "--precision bf16|fp16", _MIXED),
    "--dynamo-backend": Equivalent(
        1, None, "--graph inductor is torch.compile", {"inductor": "--graph inductor", "no": "", "ipex": "--ipex"}
    ),
    "--dynamo-mode": _same("--compile-mode {value}"),
    "--same-network": _not_needed("the rendezvous finds the other hosts"),
    "--config-file": _advice("cpulaunch reads its own profiles: --profile FILE.toml", values=1),
    "--enable-each-rank-log": _same("--log-dir {value}"),
    "--launcher": _advice(EACH_HOST, values=1),
    "--ssh-port": _advice(EACH_HOST, values=1),
    "-x": _same("--env {value}"),
    "-genv": _advice("--env NAME=VALUE", values=2),
}
"""mpirun, torch.distributed.launch, accelerate and deepspeed."""

WORDS = {
    "-v": _same("--verbose"),
    "-V": _same("--version"),
    "-u": _not_needed("a worker's output is not buffered where it is a pipe or a file"),
    "-j": Equivalent(1, None, COPIES_OR_RANKS),
    "-e": _same("--env {value}"),
    "-o": _same("--log-dir {value}"),
    "--num-threads": _same("--threads {value}"),
    "--nthreads": _same("--threads {value}"),
    "--omp-num-threads": _same("--threads {value}"),
    "--num-workers": _same("--dataloader-workers {value}"),
    "--workers": Equivalent(1, None, "--instances {value} for copies, --dataloader-workers {value} for DataLoader"),
    "--copies": _same("--instances {value}"),
    "--cores": Equivalent(1, None, "--cores-per-instance N for how many, --cpus LIST for which"),
    "--numa": _same("--numa-nodes {value}"),
    "--numa-node": _same("--numa-nodes {value}"),
    "--nodes": Equivalent(1, None, "--numa-nodes {value} of this machine, --nnodes {value} for the hosts of a job"),
    "--hyperthreading": _same("--smt"),
    "--bf16": _same("-O3"),
    "--int8": _same("-O4"),
    "--compile": _same("--graph inductor"),
    "--malloc": _same("--allocator {value}"),
    "--logdir": _same("--log-dir {value}"),
    "--log": _same("--log-dir {value}"),
    "--output": _same("--log-dir {value}"),
    "--no-graph": _same("--graph off"),
    "--no-profile": _same("--profile none"),
    "--no-bind": _same("--binder none"),
    "--no-binding": _same("--binder none"),
    "--no-numa": _same("--binder none"),
    "--no-allocator": _same("--allocator default"),
    "--no-openmp": _same("--openmp default"),
}
"""Words that people try."""

EQUIVALENTS = {**WORDS, **RANKS, **BINDING, **INSTANCES}

VALUES = {
    "strategy": {"scatter": "spread", "close": "compact"},
    "precision": {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "half": "fp16", "float": "fp32"},
    "weights": {"bfloat16": "bf16", "float32": "fp32"},
    "binder": {"auto": "native", "off": "none"},
    "openmp": {"iomp": "intel", "libiomp5": "intel", "gomp": "default", "libgomp": "default", "libomp": "llvm"},
    "allocator": {"glibc": "default", "system": "default", "malloc": "default", "none": "default"},
    "membind": {"local": "none", "localalloc": "none", "firsttouch": "none", "strict": "bind"},
    "affinity": {"compact": "close", "scatter": "spread", "true": "close", "false": "none"},
    "graph": {"compile": "inductor", "none": "off", "default": "off"},
    "dist_backend": {"oneccl": "ccl", "torch-ccl": "ccl"},
    "scheduler": {"openmpi": "mpi", "mpich": "mpi", "intelmpi": "mpi", "torque": "pbs"},
    "instances": {"numa": "auto", "all": "auto", "max": "auto"},
}
"""Setting -> a word of another tool for a value -> cpulaunch's word."""
