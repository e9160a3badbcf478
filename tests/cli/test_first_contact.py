"""First contact as a table: what a new user types -> the exit code, and what is said or what runs.

Everything is what a user gets, but for three things that would make 150 rows slow: the machine is a synthetic one,
preloads are not tried, and `launch` prints what it would run.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from cpulaunch.cli import run as run_module
from cpulaunch.cli.corrections.programs import HEAD_BYTES, _head
from cpulaunch.cli.main import run_command_line
from cpulaunch.launch.supervision.result import LaunchResult
from cpulaunch.probe import Root
from tests import json_output
from tests.roots import RootSpec, write_root
from tests.strangers import UID, needs_root

HELP = "Usage: cpulaunch [OPTIONS] SCRIPT"
SCRIPT_OPTIONS = "options for your script go after the script name"
RUNS = 0
"""Rows with this code and "runs" start the program."""

COMMANDS = [
    # What people type before they have read anything.
    ("", 0, HELP),
    ("help", 0, HELP),
    ("-h", 0, HELP),
    ("--help", 0, HELP),
    ("version", 0, "cpulaunch 0"),
    ("--version", 0, "cpulaunch 0"),
    ("help plan", 0, "Usage: cpulaunch plan [OPTIONS] SCRIPT"),
    ("help run", 0, "Usage: cpulaunch"),
    ("help help", 0, HELP),
    ("help version", 0, HELP),
    ("help doctor", 0, "Usage: cpulaunch doctor"),
    ("help profile", 0, "Usage: cpulaunch profiles"),
    ("help profiles show", 0, "Usage: cpulaunch profiles show"),
    ("help docter", 127, "no command or topic named 'docter'", "did you mean cpulaunch help doctor?"),
    ("help translate", 0, "Usage: cpulaunch translate"),
    ("translat x", 127, "did you mean cpulaunch translate x?"),
    ("help frobnicate", 127, "no command or topic named 'frobnicate'", "the commands are run", "the topics are all"),
    ("help all", 0, "Distributed:", "--rdzv-endpoint"),
    ("--help all", 0, "Distributed:", "--rdzv-endpoint"),
    ("--help=all", 0, "Distributed:"),
    ("help torch", 0, "Inside torch:\n", "--weights"),
    ("--help placement", 0, "Placement:\n", "--strategy"),
    ("--help threads", 0, "Threads and memory:\n", "--wait-policy"),
    ("--help output", 0, "Run and output:\n", "-q"),
    ("plan --help memory", 0, "Threads and memory:\n"),
    ("help plan torch", 0, "Inside torch:\n"),
    ("help --membind", 0, "  --membind preferred|bind"),
    ("help numa_nodes", 0, "  --numa-nodes LIST"),
    ("--help --membind", 0, "  --membind preferred|bind"),
    ("--help -O", 0, "  -O 0-4, --optimize 0-4"),
    ("help no-smt", 0, "  --smt, --no-smt"),
    ("--help plan", 0, "Usage: cpulaunch plan"),
    ("--help doctor", 0, "Usage: cpulaunch doctor"),
    ("--help --frob a.py", 127, "no command or topic named '--frob'", "the commands are"),
    (
        "--help distr",
        127,
        "no command or topic named 'distr'",
        "did you mean cpulaunch help distributed? the topics are",
    ),
    ("help ''", 127, "no command or topic named ''", "the commands are"),
    ("--help placment", 127, "did you mean cpulaunch help placement?"),
    ("--help a.py", 127, "no command or topic named 'a.py'", "cpulaunch a.py --help shows the help of the script"),
    ("--help nosuch.py", 127, "cpulaunch nosuch.py --help shows the help of the script"),
    ("--instances 2 --help", 0, HELP),
    ("help completion", 0, "Usage: cpulaunch completion bash|zsh|fish"),
    ("completion -h", 0, "Usage: cpulaunch completion bash|zsh|fish"),
    ("completion bash", 0, "complete -F _cpulaunch cpulaunch"),
    ("completion zsh", 0, "#compdef cpulaunch"),
    ("completion fish", 0, "complete -c cpulaunch"),
    ("completion", 2, "no shell given", "cpulaunch completion bash|zsh|fish"),
    ("completion tcsh", 2, "no completion for tcsh", "cpulaunch completion bash|zsh|fish"),
    ("completon bash", 127, "did you mean cpulaunch completion bash?"),
    ("run -h", 0, HELP),
    ("plan -h", 0, "Usage: cpulaunch plan [OPTIONS] SCRIPT"),
    ("torchrun -h", 0, "Usage: cpulaunch torchrun [OPTIONS] SCRIPT"),
    ("probe -h", 0, "Usage: cpulaunch probe"),
    ("doctor -h", 0, "Usage: cpulaunch doctor"),
    ("profiles -h", 0, "Usage: cpulaunch profiles"),
    ("profiles list -h", 0, "Usage: cpulaunch profiles list"),
    ("profiles validate -h", 0, "Usage: cpulaunch profiles validate"),
    ("profile list", 0, "throughput"),
    ("profile show throughput", 0, "throughput"),
    ("--json profile list", 0, '"throughput"'),
    ("doctr", 127, "no command or script named 'doctr'", "did you mean cpulaunch doctor?"),
    ("Doctor", 127, "did you mean cpulaunch doctor?"),
    ("plna a.py", 127, "no command or script named 'plna'", "did you mean cpulaunch plan a.py?"),
    ("prob", 127, "did you mean cpulaunch probe?"),
    ("profles list", 127, "did you mean cpulaunch profiles list?"),
    ("lint", 127, "did you mean cpulaunch check?"),
    ("info", 127, "did you mean cpulaunch probe?"),
    ("explain a.py", 127, "did you mean cpulaunch plan a.py?"),
    ("autotune a.py", 127, "did you mean cpulaunch tune a.py?"),
    ("hypertune --trials 5 a.py", 127, "did you mean cpulaunch tune --trials 5 a.py?"),
    ("sweep a.py", 127, "did you mean cpulaunch tune a.py?"),
    ("tuner a.py", 127, "did you mean cpulaunch tune a.py?"),
    ("bench a.py", 127, "no command or script named 'bench'", "did you mean cpulaunch compare a.py?"),
    ("benchmark a.py", 127, "did you mean cpulaunch compare a.py?"),
    ("comapre a.py", 127, "did you mean cpulaunch compare a.py?"),
    ("profile a.py", 127, "no command or script named 'profile'", "did you mean cpulaunch diagnose a.py?"),
    ("profile -m pkg.mod", 127, "did you mean cpulaunch diagnose -m pkg.mod?"),
    ("profiler a.py", 127, "did you mean cpulaunch diagnose a.py?"),
    ("trace a.py", 127, "did you mean cpulaunch diagnose a.py?"),
    ("profile", 0, "Usage: cpulaunch profiles"),
    ("profiling a.py", 127, "did you mean cpulaunch diagnose a.py?"),
    ("calibration", 127, "did you mean cpulaunch calibrate?"),
    ("launch --instances 2 a.py", 127, "did you mean cpulaunch run --instances 2 a.py?"),
    ("frobnicate", 127, "no command or script named 'frobnicate'", "see cpulaunch --help"),
    ("--instances 2 plan a.py", 0, "2 instances"),
    ("--instances 2 run a.py", RUNS, "runs 2", "a.py"),
    ("plan run a.py", 0, "1 worker"),
    ("plan torchrun a.py", 0, "1 rank on one host"),
    ("torchrun plan a.py", 0, "1 rank on one host"),
    ("--cpus 0 torchrun a.py", RUNS, "runs 1", "a.py"),
    ("--dry-run run a.py", 0, "1 worker"),
    ("--json doctor --sysroot nowhere", 2, "directory not found"),
    ("--instances 2 probe", 2, "probe takes no --instances", "hint: cpulaunch probe"),
    ("--cpus=0 doctor", 2, "doctor takes no --cpus", "hint: cpulaunch doctor"),
    ("--instances 2 completion zsh", 2, "completion takes no --instances", "hint: cpulaunch completion zsh\n"),
    ("-q translate 'numactl -C 0 a'", 2, "translate takes no -q", "hint: cpulaunch translate 'numactl -C 0 a'\n"),
    ("--instances 2 completon zsh", 127, "did you mean cpulaunch completion zsh?"),
    ("plan completion zsh", 0, "#compdef cpulaunch"),
    ("-- plan", 127, "no command or script named 'plan'"),
    ("plan nosuch.py", 0, "warning: script not found: nosuch.py"),
    ("plan --strict nosuch.py", 125, "script not found: nosuch.py"),
    ("plan --json nosuch.py", 0, '"script not found: nosuch.py'),
]

PROGRAMS = [
    ("a.py --instances 2", RUNS, "runs 1", "a.py --instances 2"),
    ("a.py -h", RUNS, "a.py -h"),
    ("zzz.py", 127, "script not found: zzz.py", "searched in"),
    ("ab.py", 127, "script not found: ab.py", "did you mean a.py?"),
    ("a", 127, "no command or script named 'a'", "did you mean a.py?"),
    ("deep/a.py", 127, "script not found: deep/a.py", "there is no directory deep"),
    ("python a.py x", RUNS, "bin/python a.py x"),
    ("python3 a.py", RUNS, "bin/python3 a.py"),
    ("python -u a.py x", RUNS, "bin/python a.py x"),
    ("python -m pkg.mod x", RUNS, "bin/python -m pkg.mod x"),
    ("python -c pass", RUNS, "bin/python -c pass"),
    ("python -X dev a.py", RUNS, "bin/python -X dev a.py"),
    ("python nosuch.py", 127, "script not found: nosuch.py"),
    ("--instances 2 python a.py", RUNS, "runs 2", "bin/python -u a.py"),
    ("plan python a.py", 0, "bin/python a.py"),
    ("bin/python a.py", RUNS, "bin/python a.py"),
    ("uvicorn app:app", RUNS, "bin/python bin/uvicorn app:app"),
    ("plan uvicorn app:app", 0, "bin/uvicorn app:app"),
    ("gunicorn app:app", 127, "no command or script named 'gunicorn'"),
    ("s.sh 1", RUNS, "./s.sh 1"),
    ("./s.sh 1", RUNS, "./s.sh 1"),
    ("plain.sh", 126, "not a Python script: plain.sh", "hint: cpulaunch --no-python sh plain.sh"),
    ("closed.sh", 126, "command is not executable: ./closed.sh", "chmod +x ./closed.sh"),
    ("bin/tool -l", RUNS, "bin/tool -l"),
    ("tool -l", 127, "no script named 'tool'", "is a command", "hint: cpulaunch --no-python tool -l"),
    ("perl.pl", RUNS, "./perl.pl"),
    ("train x", RUNS, "train x"),
    ("--no-python tool", RUNS, "tool"),
    ("--no-python nosuch", 127, "command not found: nosuch"),
    ("-m pkg.mod", RUNS, "-m pkg.mod"),
    ("-", RUNS, "-"),
    (".", 126, "script is a directory"),
    ("--instances 2", 2, "no script given"),
]

SLIPS = [
    ("--instanses 2 a.py", 2, "unknown option: --instanses", f"did you mean --instances? {SCRIPT_OPTIONS}"),
    ("--instance 2 a.py", 2, "did you mean --instance-index or --instances?"),
    ("--thread 2 a.py", 2, "did you mean --threads?"),
    ("--alocator tcmalloc a.py", 2, "did you mean --allocator?"),
    ("--allocater=tcmalloc a.py", 2, "did you mean --allocator?"),
    ("--no-hugepages a.py", 2, "did you mean --no-huge-pages?"),
    ("--epochs 3 a.py", 2, "unknown option: --epochs", "cpulaunch --help all lists", SCRIPT_OPTIONS),
    ("--lr 0.1 --epochs 3 a.py", 2, "unknown options: --lr, --epochs", SCRIPT_OPTIONS),
    ("--instanses 2 --foo a.py --bar", 2, "unknown options: --instanses, --foo\n", "did you mean --instances for"),
    ("--no-cpus a.py", 2, "unknown option: --no-cpus", "cpulaunch --help all lists"),
    ("-z a.py", 2, "unknown option: -z", "cpulaunch --help all lists"),
    ("--t 2 a.py", 2, "unknown option: --t", "cpulaunch --help all lists"),
    ("--instances two a.py", 2, "invalid value 'two' for --instances", "--instances N|auto"),
    ("--instances numa a.py", 2, "invalid value 'numa'", "hint: --instances auto"),
    ("--cpus", 2, "--cpus needs a value", "--cpus LIST"),
    ("--precision bfloat16 a.py", 2, "invalid value 'bfloat16'", "hint: --precision bf16"),
    ("--precision BF16 a.py", 2, "hint: --precision bf16"),
    ("--allocator glibc a.py", 2, "hint: --allocator default"),
    ("--openmp libiomp5 a.py", 2, "hint: --openmp intel"),
    ("--openmp gomp a.py", 2, "hint: --openmp default"),
    ("--graph compile a.py", 2, "hint: --graph inductor"),
    ("--wait-policy PASSIVE a.py", 2, "hint: --wait-policy passive"),
    ("--dist-backend oneccl a.py", 2, "hint: --dist-backend ccl"),
    ("--scheduler openmpi a.py", 2, "hint: --scheduler mpi"),
    ("--cpus 0-999 a.py", 2, "999"),
]

FROM_IPEXRUN_AND_RUN_CPU = [
    ("--ninstances 2 --ncores-per-instance 4 a.py", 2, "--ninstances 2 is --instances 2; --ncores-per-instance 4 is"),
    ("--ncore_per_instance=4 a.py", 2, "--ncore_per_instance 4 is --cores-per-instance 4"),
    ("--multi_instance a.py", 2, "--multi_instance is --instances auto"),
    ("--enable-tcmalloc a.py", 2, "--enable-tcmalloc is --allocator tcmalloc"),
    ("--enable_jemalloc a.py", 2, "--enable_jemalloc is --allocator jemalloc"),
    ("--use-default-allocator a.py", 2, "is --allocator default"),
    ("--disable-iomp a.py", 2, "is --openmp default"),
    ("--disable_numactl a.py", 2, "--disable_numactl is not needed: system calls bind"),
    ("--disable-taskset a.py", 2, "is not needed"),
    ("--throughput-mode a.py", 2, "is --instances auto"),
    ("--throughput_mode a.py", 2, "is --instances auto"),
    ("--latency-mode a.py", 2, "is --cores-per-instance 4"),
    ("--node-id 1 a.py", 2, "--node-id 1 is --numa-nodes 1"),
    ("--nodes-list 0,1 a.py", 2, "--nodes-list 0,1 is --numa-nodes 0,1"),
    ("--core-list 0,1,2 a.py", 2, "is --cpus 0,1,2"),
    ("--cores-list=0-3 a.py", 2, "is --cpus 0-3"),
    ("--use-logical-core a.py", 2, "is --smt"),
    ("--use-logical-cores a.py", 2, "is --smt"),
    ("--use-e-cores a.py", 2, "is --e-cores"),
    ("--instance-idx 0 a.py", 2, "is --instance-index 0"),
    ("--rank 0 a.py", 2, "is --instance-index 0 (of a host in a job: --node-rank 0)"),
    ("--strategy scatter a.py", 2, "invalid value 'scatter'", "hint: --strategy spread"),
    ("--strategy close a.py", 2, "hint: --strategy compact"),
    ("--memory-allocator jemalloc a.py", 2, "is --allocator jemalloc"),
    ("--omp-runtime intel a.py", 2, "is --openmp intel"),
    ("--multi-task-manager numactl a.py", 2, "is --binder numactl"),
    ("--multi-task-manager auto a.py", 2, "is --binder native"),
    ("--bind-numa-node a.py", 2, "is not needed"),
    ("--skip-cross-node-cores a.py", 2, "is not needed: an instance stays in one NUMA node"),
    ("--benchmark a.py", 2, "is --allocator jemalloc"),
    ("--auto-ipex a.py", 2, "unknown option: --auto-ipex", "--auto-ipex is -O2"),
    ("--auto-ipex --dtype bfloat16 a.py", 2, "hint: --auto-ipex --dtype bfloat16 is -O3\n"),
    ("--auto_ipex --dtype=float32 a.py", 2, "--auto_ipex --dtype float32 is -O2"),
    ("--dtype bfloat16 a.py", 2, "--dtype bfloat16 is -O3"),
    ("--disable-ipex-graph-mode a.py", 2, "is --graph off"),
    ("--nprocs-per-node 2 a.py", 2, "is --nproc-per-node 2"),
    ("--ccl-worker-count 4 a.py", 2, "is --ccl-workers 4"),
    ("--logical-cores-for-ccl a.py", 2, "is --ccl-worker-siblings"),
    ("--hostfile hosts a.py", 2, "--hostfile hosts: start cpulaunch on each host"),
    ("--log-path logs a.py", 2, "is --log-dir logs"),
    ("--log-file-prefix x a.py", 2, "is not needed"),
]

FROM_NUMACTL_AND_TASKSET = [
    ("-C 0-3 a.py", 2, "unknown option: -C", "-C 0-3 is --cpus 0-3"),
    ("-C 0-3 -m 0 python a.py", 2, "unknown options: -C, -m", "-m 0 is --numa-nodes 0 --membind bind"),
    ("-m 0 a.py", 2, "unknown option: -m", "-m 0 is --numa-nodes 0 --membind bind"),
    ("-N 0 -m 0 a.py", 2, "-N 0 is --numa-nodes 0; -m 0 is"),
    ("--cpunodebind=0 --membind=0 a.py", 2, "--cpunodebind 0 is --numa-nodes 0"),
    (
        "--membind=0 a.py",
        2,
        "invalid value '0' for --membind",
        "--membind 0 is --numa-nodes 0 --membind bind",
    ),
    ("--physcpubind=0-3 a.py", 2, "is --cpus 0-3"),
    ("--interleave=all a.py", 2, "--interleave all is --membind interleave"),
    ("-i 0,1 a.py", 2, "-i 0,1 is --numa-nodes 0,1 --membind interleave"),
    ("-l a.py", 2, "-l is --membind none"),
    ("--localalloc a.py", 2, "is --membind none"),
    ("-p 0 a.py", 2, "-p 0 is --numa-nodes 0 (memory prefers"),
    ("--preferred=0 a.py", 2, "--preferred 0 is --numa-nodes 0"),
    ("-c 0-3 a.py", 2, "-c 0-3 is --cpus 0-3"),
    ("--cpu-list 0-3 a.py", 2, "is --cpus 0-3"),
    ("-c 'print(1)'", 2, "python's -c CODE is --no-python python -c CODE"),
    ("-H", 2, "unknown option: -H", "cpulaunch probe shows this machine"),
    ("--hardware", 2, "cpulaunch probe shows this machine"),
]

FROM_LAUNCHERS_OF_RANKS = [
    ("-n 4 a.py", 2, "unknown option: -n", "--nproc-per-node 4 for the ranks of a job, --instances 4 for independent"),
    ("-np 4 a.py", 2, "unknown option: -np", "--nproc-per-node 4"),
    ("--nproc_per_node=2 a.py", RUNS, "runs 2"),
    ("--nproc-per-node=2 --nnodes=1 --node_rank=0 a.py", RUNS, "runs 2"),
    ("--standalone --nproc_per_node=2 a.py", RUNS, "runs 2"),
    ("--nproc_per=2 a.py", RUNS, "runs 2"),
    ("--nproc_per=2 --redirect=3 --log-dir logs a.py", RUNS, "runs 2"),
    ("--stand --nproc-per 2 a.py", RUNS, "runs 2"),
    ("--rdzv_end=localhost:0 a.py", RUNS, "runs 1"),
    ("--max-rest 2 a.py", RUNS, "runs 1"),
    ("torchrun --nproc=2 a.py", RUNS, "runs 2"),
    ("--nproc 2 a.py", RUNS, "runs 2"),
    ("--n 2 a.py", 2, "unknown option: --n"),
    ("--re 3 a.py", 2, "unknown option: --re"),
    ("--use_env --nproc_per_node 2 a.py", 2, "--use_env is not needed: LOCAL_RANK"),
    ("--nprocs 2 a.py", 2, "--nprocs 2 is --nproc-per-node 2"),
    ("--cpu --num_processes 2 a.py", 2, "--cpu is --device cpu; --num_processes 2 is --nproc-per-node 2"),
    ("--num_machines 2 --machine_rank 0 a.py", 2, "is --nnodes 2; --machine_rank 0 is --node-rank 0"),
    ("--main_process_ip h --main_process_port 1 a.py", 2, "is --master-addr h; --main_process_port 1 is --master-port"),
    ("--num_cpu_threads_per_process 4 a.py", 2, "is --threads 4"),
    ("--enable_cpu_affinity a.py", 2, "is not needed: every worker has cores of its own"),
    ("--mixed_precision bf16 a.py", 2, "is --precision bf16"),
    ("--mixed_precision no a.py", 2, "--mixed_precision no is not needed\n"),
    ("--dynamo_backend inductor a.py", 2, "is --graph inductor"),
    ("--multi_gpu a.py", 2, "is --nproc-per-node gpu"),
    ("--config_file c.yaml a.py", 2, "cpulaunch reads its own profiles"),
    ("--bind_cores_to_rank a.py", 2, "is not needed"),
    ("--bind_core_list 0-3 a.py", 2, "is --cpus 0-3"),
    ("--num_gpus 2 a.py", 2, "is --nproc-per-node 2"),
    ("--enable_each_rank_log logs a.py", 2, "is --log-dir logs"),
    ("--bind-to core -n 2 a.py", 2, "unknown options: --bind-to, -n", "--bind-to core is not needed"),
    ("-x A=1 a.py", 2, "-x NAME=VALUE is --env NAME=VALUE"),
    ("--report-bindings a.py", 2, "is --report r.json"),
    ("--allow-run-as-root -np 2 a.py", 2, "--allow-run-as-root is not needed"),
]

WORDS = [
    ("-v a.py", 2, "-v is --verbose"),
    ("-V", 2, "-V is --version"),
    ("-u a.py", 2, "-u is not needed"),
    ("--num-threads 4 a.py", 2, "is --threads 4"),
    ("--num_workers 4 a.py", 2, "is --dataloader-workers 4"),
    ("--cores 4 a.py", 2, "--cores-per-instance N for how many, --cpus LIST for which"),
    ("--numa 0 a.py", 2, "is --numa-nodes 0"),
    ("--bf16 a.py", 2, "is -O3"),
    ("--compile a.py", 2, "is --graph inductor"),
    ("--no-graph a.py", 2, "--no-graph is --graph off"),
    ("--no-bind a.py", 2, "--no-bind is --binder none"),
    ("--hyperthreading a.py", 2, "is --smt"),
    ("--stdin 1 --instances 2 a.py", RUNS, "runs 2"),
    ("--stdin 2 --instances 2 a.py", 2, "no such worker: 2 (--stdin)"),
    ("--stdin some a.py", 2, "expected the number of a worker, all or none"),
    ("plan --instances 3 --cores-per-instance 5 a.py", 0, "1 idle (CPUs 15)"),
    ("--show none a.py", RUNS, "runs 1"),
    ("-q a.py", RUNS, "runs 1"),
    ("--quiet --instances 2 a.py", RUNS, "runs 2"),
    ("-q --verbose a.py", 2, "--verbose and --quiet exclude each other"),
    ("plan --brief --instances 2 a.py", 0, "2 instances", "w1", "wN: worker N"),
    ("--brief a.py", 0, "1 worker", "wN: worker N"),
    ("--brief --verbose a.py", RUNS, "runs 1", "wN: worker N"),
    ("plan --brief nosuch.py", 0, "warning: script not found: nosuch.py"),
    ("--brief --json a.py", 2, "--json and --brief exclude each other"),
    ("--brief --emit sh a.py", 2, "--brief and --emit exclude each other"),
    ("--instances 2 a.py --port {port:8000}", RUNS, "runs 2", "--port 8000"),
    ("--instances 2 a.py {{instance}}", RUNS, "runs 2", "a.py {instance}"),
    ("a.py {instance}", RUNS, "a.py {instance}"),
    ("--instances 2 --env P={port:65535} a.py", 2, "no such port: 65536"),
    ("-O2 a.py", RUNS, "runs 1"),
    ("-O9 a.py", 2, "invalid value '9' for --optimize"),
    ("-t3 --nproc-per-node 2 --log-dir logs a.py", RUNS, "runs 2"),
]

TRANSLATIONS = [
    ("-h", 0, "Usage: cpulaunch translate"),
    ("'accelerate launch -q a.py'", 0, "cpulaunch --quiet a.py\n"),
    ("'mpirun --quiet -n 2 python a.py'", 0, "cpulaunch --quiet --nproc-per-node 2 a.py\n"),
    ("", 2, "no command line to translate"),
    ("numactl", 2, "nothing to translate: numactl"),
    ("ipexrun cpu a.py", 0, "cpulaunch a.py\n"),
    ("ipexrun xpu a.py", 0, "cpulaunch a.py\n", "your program chooses the GPU"),
    ("'numactl -C 0-3 -m 0 python a.py'", 0, "cpulaunch --cpus 0-3 --membind bind a.py\n", "not to 0"),
    ("numactl -N0 -m0 python a.py x", 0, "cpulaunch --numa-nodes 0 --membind bind a.py x\n"),
    ("'numactl --cpunodebind=1 --membind=1 ./a.py'", 0, "cpulaunch --numa-nodes 1 --membind bind ./a.py\n"),
    ("'numactl --interleave=all python -u -m pkg'", 0, "cpulaunch --membind interleave -m pkg\n"),
    ("'numactl -l ls'", 0, "cpulaunch --membind none --no-python ls\n"),
    ("'numactl --touch a.py'", 2, "numactl option without counterpart: --touch"),
    ("'taskset -c 0-3 python a.py'", 0, "cpulaunch --cpus 0-3 a.py\n"),
    ("'taskset 0xf0 python a.py'", 0, "cpulaunch --cpus 4-7 a.py\n"),
    ("'taskset zz python a.py'", 2, "not a CPU mask: zz"),
    ("'OMP_NUM_THREADS=4 A=1 python a.py'", 0, "cpulaunch --threads 4 --env A=1 a.py\n"),
    ("'python -c pass'", 0, "cpulaunch --no-python python -c pass\n"),
    ("'torchrun --nproc_per_node 2 a.py'", 0, "cpulaunch torchrun --nproc_per_node 2 a.py\n"),
    ("'python -m torch.distributed.launch --use_env a.py'", 0, "cpulaunch torchrun a.py\n"),
    ("'numactl -N 0 torchrun --nproc-per-node 2 a.py'", 0, "cpulaunch torchrun --numa-nodes 0 --nproc-per-node 2 a.py"),
    ("'mpirun -n 2 -x A=1 --bind-to core python a.py'", 0, "cpulaunch --nproc-per-node 2 --env A=1 a.py\n"),
    ("'mpiexec -np 2 --hostfile h python a.py'", 0, "cpulaunch --nproc-per-node 2 a.py\n", "on each host"),
    ("'accelerate launch --cpu --num_processes 2 a.py'", 0, "cpulaunch --device cpu --nproc-per-node 2 a.py\n"),
    ("'deepspeed --bind_cores_to_rank --num_gpus 2 a.py'", 0, "cpulaunch --nproc-per-node 2 a.py\n"),
    ("'ipexrun --ninstances 2 --strategy close a.py --x'", 0, "cpulaunch --instances 2 --strategy compact a.py --x\n"),
    ("'ipexrun cpu --auto-ipex --dtype bfloat16 a.py'", 0, "cpulaunch -O3 a.py\n"),
    ("'run_cpu --throughput_mode --enable_tcmalloc -m pkg'", 0, "--instances auto --allocator tcmalloc --module pkg\n"),
    (
        "'python -m torch.backends.xeon.run_cpu --multi-instance --ninstances 2 --node-id 0 a.py'",
        *(0, "cpulaunch --instances 2 --numa-nodes 0 a.py\n"),
    ),
    ("'run_cpu --log_path logs --no-python ls'", 0, "cpulaunch --log-dir logs --no-python ls\n"),
    ("'run_cpu --nonsense a.py'", 2, "run_cpu option without counterpart: --nonsense"),
    # taskset's argument is a mask unless -c stands before it.
    ("'taskset 3 python a.py'", 0, "cpulaunch --cpus 0-1 a.py\n"),
    ("'taskset 10 python a.py'", 0, "cpulaunch --cpus 4 a.py\n"),
    ("'taskset -ac 0-6:2 python a.py'", 0, "cpulaunch --cpus 0,2,4,6 a.py\n"),
    ("'taskset -c 0x3 python a.py'", 2, "not a CPU list: 0x3"),
    ("'taskset 0 python a.py'", 2, "not a CPU mask: 0"),
    ("'taskset -p 3 1234'", 2, "taskset option without counterpart: -p"),
    # numactl: CPUs stay where they were, and memory elsewhere is named.
    ("'numactl -N 0 -m 1 python a.py'", 0, "cpulaunch --numa-nodes 0 --membind bind a.py\n", "-m 1", "not to 1"),
    ("'numactl -m 1 -N 0 python a.py'", 0, "cpulaunch --numa-nodes 0 --membind bind a.py\n", "not to 1"),
    ("'numactl -N 0 -i all python a.py'", 0, "--numa-nodes 0 --membind interleave a.py\n", "not to all"),
    ("'numactl -N 1 -p 1 python a.py'", 0, "cpulaunch --numa-nodes 1 a.py\n"),
    ("'numactl -m 1 python a.py'", 0, "--numa-nodes 1 --membind bind a.py\n", "CPUs are those of NUMA nodes 1 too"),
    ("'numactl -C all -m all python a.py'", 0, "cpulaunch a.py\n"),
    ("'numactl -C +0-3 python a.py'", 2, "numactl list without counterpart: -C +0-3"),
    ("'numactl -N !0 python a.py'", 2, "numactl list without counterpart: -N !0"),
    ("'numactl --phys=0-3 --mem=0 python a.py'", 0, "cpulaunch --cpus 0-3 --membind bind a.py\n"),
    ("'numactl --cpu=0 python a.py'", 2, "ambiguous option: --cpu", "--cpunodebind, --cpubind"),
    # A value with spaces is one word.
    ("'run_cpu --log-path \"my logs\" a.py'", 0, "cpulaunch --log-dir 'my logs' a.py\n"),
    ("'mpirun -n 2 -x \"A=b -c\" python a.py'", 0, "cpulaunch --nproc-per-node 2 --env 'A=b -c' a.py\n"),
    # Options that concern one another, in any order.
    ("'ipexrun --dtype bfloat16 --auto-ipex a.py'", 0, "cpulaunch -O3 a.py\n"),
    ("'ipexrun --dtype bfloat16 a.py'", 0, "cpulaunch a.py\n", "ipexrun reads it with --auto-ipex only"),
    ("'run_cpu --ninstances 2 --multi-instance a.py'", 0, "cpulaunch --instances 2 a.py\n"),
    ("'run_cpu --multi-instance --ncores-per-instance 4 a.py'", 0, "cpulaunch --cores-per-instance 4 a.py\n"),
    ("'run_cpu --ninstances 2 --latency-mode a.py'", 0, "cpulaunch --cores-per-instance 4 a.py\n", "has no effect"),
    ("'ipexrun --throughput-mode --ncores-per-instance 2 a.py'", 0, "cpulaunch --instances auto a.py\n"),
    ("'run_cpu --rank -1 --node-id -1 --ninstances 2 a.py'", 0, "cpulaunch --instances 2 a.py\n"),
    ("'ipexrun --nnodes 1 a.py'", 0, "cpulaunch --nproc-per-node numa --nnodes 1 a.py\n"),
    ("'ipexrun --nnodes 2 --nprocs-per-node 1 a.py'", 0, "--nnodes 2 --nproc-per-node 1 a.py\n", "on each host"),
    ("'ipexrun --nproc_per_node 2 --distributed a.py'", 0, "cpulaunch --nproc-per-node 2 a.py\n"),
    ("'ipexrun --memory-allocator tcmalloc --benchmark a.py'", 0, "cpulaunch --allocator tcmalloc a.py\n"),
    ("'ipexrun --ninst 2 --ncore 4 a.py'", 0, "cpulaunch --instances 2 --cores-per-instance 4 a.py\n"),
    ("'ipexrun --cores 0-3 a.py'", 0, "cpulaunch --cpus 0-3 a.py\n"),
    ("'run_cpu --n 2 a.py'", 2, "ambiguous option: --n"),
    ("'accelerate launch --num_machines 2 --num_processes 8 a.py'", 0, "--nproc-per-node 4 --nnodes 2 a.py\n"),
    ("'accelerate launch --num_machines 3 --num_processes 8 a.py'", 2, "cannot be divided among the machines"),
    ("'mpirun -np 8 -ppn 4 python a.py'", 0, "cpulaunch --nproc-per-node 4 a.py\n", "on each host"),
    ("'deepspeed a.py'", 0, "cpulaunch --nproc-per-node numa a.py\n", "NUMA node, or GPU"),
    # One letter means something else in each launcher.
    ("'mpiexec -l -genv A 1 -n 2 python a.py'", 0, "cpulaunch --env A=1 --nproc-per-node 2 a.py\n"),
    ("'mpirun --mca btl tcp -bind-to core -np 2 a.py'", 0, "cpulaunch --nproc-per-node 2 a.py\n"),
    ("'deepspeed -i localhost:0 a.py'", 2, "deepspeed option without counterpart: -i"),
    ("'mpirun -rankfile f -np 2 a.py'", 2, "mpirun option without counterpart: -rankfile"),
    ("'mpirun -n 1 python a.py : -n 1 python b.py'", 2, "one launch starts one program"),
    # A script's options are its own.
    ("'torchrun a.py --use-env'", 0, "cpulaunch torchrun a.py --use-env\n"),
    ("'python -u -m torch.distributed.launch --nproc_per_node 2 --use-env a.py'", 0, "--nproc_per_node 2 a.py\n"),
    ("'python -m torch.distributed.launch a.py --use-env'", 0, "a.py --use-env\n", "no argument --local-rank"),
    ("torchrun --nproc_per 2 --use-env a.py", 0, "cpulaunch torchrun --nproc_per 2 a.py\n"),
    ("torchrun -- --use-env", 0, "cpulaunch torchrun -- --use-env\n"),
    ("'torchrun --zz \"\" a.py'", 0, "cpulaunch torchrun --zz '' a.py\n"),
    ("numactl -N 0 --weighted-interleave all a.py", 0, "--membind interleave a.py\n", "have the same weight"),
    ("'OMP_NUM_THREADS=4,2 python a.py'", 0, "cpulaunch --env OMP_NUM_THREADS=4,2 a.py\n"),
    # What only a shell can do.
    ("'taskset -c 0-3 \\\n  python a.py \\\n --x'", 0, "cpulaunch --cpus 0-3 a.py --x\n"),
    ("'python a.py > log'", 2, "what only a shell can do", "> log"),
    ("'python a.py & python b.py'", 2, "& python b.py"),
    ("'python a.py\npython b.py'", 2, "a second line"),
    ("'python a.py # fast'", 2, "# fast"),
    ("'python a.py --x $DATA/x'", 0, "cpulaunch a.py --x '$DATA/x'\n", "$DATA/x is left as it is"),
    ("'python a.py *.txt'", 0, "cpulaunch a.py '*.txt'\n", "*.txt is left as it is"),
    ("'python a.py \"a; b\" C#'", 0, "cpulaunch a.py 'a; b' 'C#'\n"),
]

ROWS = [
    *((f"translate {line}".strip(), *said) for line, *said in TRANSLATIONS),
    *(COMMANDS + PROGRAMS + SLIPS + WORDS),
    *(FROM_IPEXRUN_AND_RUN_CPU + FROM_NUMACTL_AND_TASKSET + FROM_LAUNCHERS_OF_RANKS),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return write_root(tmp_path_factory.mktemp("machine"), RootSpec(sockets=2, cores_per_l3=8, smt=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: scripts of several kinds, and bin/ with a Python and what is installed beside it."""
    path = tmp_path_factory.mktemp("home")
    (path / "bin").mkdir()
    for name in ("python", "python3"):
        (path / "bin" / name).symlink_to(sys.executable)
    (path / "a.py").write_text("pass\n")
    (path / "train").write_text("pass\n")
    files = {
        "bin/uvicorn": (f"#!{path}/bin/python\n", 0o755),
        "bin/tool": ("\x7fELF", 0o755),
        "s.sh": ("#!/bin/sh\n", 0o755),
        "closed.sh": ("#!/usr/bin/env -S bash -e\n", 0o644),
        "plain.sh": ("echo\n", 0o644),
        "perl.pl": ("#!/usr/bin/perl -w\n", 0o755),
    }
    for name, (text, mode) in files.items():
        (path / name).write_text(text)
        (path / name).chmod(mode)
    return path


def print_launch(plan, **_):
    print("runs", len(plan.workers), *plan.workers[0].argv)
    return LaunchResult(exit_code=0, host="here", workers=())


@pytest.fixture
def typed(machine, folder, monkeypatch, capfd):
    """Type a command line; returns its exit code, and what is said with the user's folder left out."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "environ", {"PATH": f"{folder}/bin", "HOME": str(folder)})
    monkeypatch.setattr(run_module, "_root", lambda line: Root(machine))
    monkeypatch.setattr(run_module, "launch", print_launch)

    def run(line: str) -> tuple[int, str]:
        code = run_command_line(shlex.split(line))
        captured = capfd.readouterr()
        return code, (captured.out + captured.err).replace(f"{folder}/", "")

    return run


@pytest.mark.parametrize(("line", "code", "parts"), [(row[0], row[1], row[2:]) for row in ROWS], ids=lambda each: None)
def test_a_new_user_types(typed, line, code, parts):
    result, said = typed(line)
    assert [part for part in parts if part not in said] == [], said
    assert result == code, said
    if code != 0 and "--json" in line:
        json_output.read_messages(said)
    elif code != 0:
        assert len(said.splitlines()) == 2, said
        assert said.startswith("cpulaunch: error: ")


STRANGERS = [
    ("python a.py", RUNS, "bin/python a.py"),
    ("-- python a.py", RUNS, "bin/python a.py"),
    ("uvicorn app:app", RUNS, "bin/python bin/uvicorn app:app"),
    ("--instances 2 plan a.py", 0, "2 instances"),
    ("plan --python python3 a.py", 0, "bin/python3"),
    ("plna a.py", 127, "command not found: plna (PATH)", "that of the current folder, in which others", "./plna"),
    ("--python venv a.py", 127, "Python interpreter not found: venv (PATH)", "hint: to use that of", "write ./venv"),
    ("./plna a.py", RUNS, "./plna a.py"),
    ("--python ./venv a.py", RUNS, "runs 1 venv/bin/python a.py"),
    ("plan nosuch", 0, "warning: no command or script named 'nosuch'"),
]


@needs_root
@pytest.mark.parametrize(("line", "code", "parts"), [(row[0], row[1], row[2:]) for row in STRANGERS])
def test_a_name_is_none_that_another_user_put_into_the_current_folder(typed, folder, monkeypatch, line, code, parts):
    """As anyone may do in /tmp. A path, and what who owns the folder put there, are as the user's own."""
    shared = folder / "shared"
    shutil.rmtree(shared, ignore_errors=True)
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "a.py").write_text("pass\n")
    for name in ("python", "uvicorn", "plan", "plna"):
        (shared / name).write_text("#!/bin/sh\n")
        (shared / name).chmod(0o755)
        os.chown(shared / name, UID, UID)
    for name in ("python3", "venv"):
        (shared / name / "bin").mkdir(parents=True)
        (shared / name / "bin/python").symlink_to(sys.executable)
        os.chown(shared / name, UID, UID)
    monkeypatch.chdir(shared)
    result, said = typed(line)
    said = said.replace("shared/", "")
    assert [part for part in parts if part not in said] == [], said
    assert result == code, said


@pytest.mark.parametrize(("line", "runs"), [("python a.py", "./python a.py"), ("--instances 2 plan", "runs 2")])
@needs_root
@pytest.mark.parametrize("owner", [0, UID])
def test_the_users_own_file_and_that_of_the_folders_owner_come_first(typed, tmp_path, monkeypatch, line, runs, owner):
    for name in ("python", "plan"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        os.chown(tmp_path / name, owner, owner)
    os.chown(tmp_path, owner, owner)
    monkeypatch.chdir(tmp_path)
    code, said = typed(line)
    assert (code, runs in said) == (0, True), said


def test_a_pipe_that_replaces_a_program_is_not_read(tmp_path, monkeypatch):
    """Without a writer, its open would wait for ever."""
    (tmp_path / "file").touch()
    found = os.stat(tmp_path / "file")
    os.mkfifo(tmp_path / "train")
    pipe = os.open(tmp_path / "train", os.O_RDWR)
    os.write(pipe, b"#!/bin/sh\n".ljust(HEAD_BYTES))
    monkeypatch.setattr(os, "stat", lambda *arguments, **options: found)
    assert _head(str(tmp_path / "train")) == b""
    os.close(pipe)


def test_a_quiet_launch_has_no_notes_but_its_warnings(typed, monkeypatch):
    for name, value in {"PET_NPROC_PER_NODE": "3", "OMP_DYNAMIC": "true"}.items():
        monkeypatch.setitem(os.environ, name, value)
    line = "--nproc-per-node 2 --report report.json a.py"
    notes = ("report: report.json", "PET_NPROC_PER_NODE")
    _, loud = typed(line)
    assert [note for note in notes if note not in loud] == []
    code, quiet = typed(f"-q {line}")
    assert code == 0
    assert [note for note in notes if note in quiet] == []
    assert "warning: OMP_DYNAMIC" in loud
    assert "warning: OMP_DYNAMIC" in quiet


def test_a_number_with_more_digits_than_python_reads_is_refused(typed):
    code, said = typed(f"translate 'accelerate launch --num_machines 2 --num_processes {'8' * 5000} a.py'")
    assert code == 2
    assert "cannot be divided among the machines" in said


def test_a_brief_plan_is_the_beginning_of_the_whole_one(typed):
    _, whole = typed("plan --instances 2 a.py")
    _, brief = typed("plan --instances 2 --brief a.py")
    assert whole.startswith(brief.rstrip())
    assert brief.splitlines()[-1].startswith("wN: worker N")
    assert "settings" in whole
    assert "settings" not in brief


def test_the_table_is_long_enough():
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 150


def test_no_equivalent_is_an_option_that_does_not_exist():
    """Every option that the tables name is one, with a value of its type."""
    from cpulaunch.cli.arguments import parse_command_line
    from cpulaunch.cli.corrections.foreign_options import EQUIVALENTS, VALUES
    from cpulaunch.records.settings import setting_specs

    texts = [text for each in EQUIVALENTS.values() for text in (each.options, *(each.by_value or {}).values()) if text]
    for text in texts:
        value = {"--env": "A=1", "--allocator": "auto", "--openmp": "intel", "--compile-mode": "default"}
        words = text.format(value=value.get(text.split()[0], "1")).split()
        parse_command_line([*words, "a.py"], interpreter="python")
    for name, words in VALUES.items():
        for word in words.values():
            setting_specs()[name].value_type.from_text(word)


def test_no_equivalent_is_an_option_of_cpulaunch():
    """A row for an option that cpulaunch has would never be read."""
    from cpulaunch.cli.arguments import SHORT, SWITCHES, TEXT_OPTIONS, canonical
    from cpulaunch.cli.corrections.foreign_options import EQUIVALENTS
    from cpulaunch.records.settings import setting_specs

    ours = {spec.flag for spec in setting_specs().values()} | {*SHORT, *SWITCHES, *TEXT_OPTIONS}
    assert not ours & set(EQUIVALENTS)
    assert all(canonical(name) == name for name in EQUIVALENTS)


def test_a_launch_that_is_understood_imports_no_correction(folder):
    import subprocess

    code = (
        "import sys; from cpulaunch.cli.run import run; run(['--instances', '1', 'a.py'], {}, only_plan=True);"
        "print([name for name in sys.modules if 'corrections' in name])"
    )
    package = str(Path(run_module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
