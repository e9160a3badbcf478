"""Each check with the facts that determine its finding."""

from dataclasses import replace

import pytest

from cpulaunch.doctor.facts import SharedMemory, Swap
from cpulaunch.doctor.report import CHECKS, run_checks
from cpulaunch.doctor.torch_report import BrokenTorch
from cpulaunch.records.host import CpuInfo, MigInstance, Torch
from cpulaunch.records.request import WorkerPython
from tests.doctor.facts import GIB, MIB, PLUGIN, TORCH, facts, gpu, kernel, library, machine

AMD = CpuInfo(vendor="AuthenticAMD", family=25, model=17, isa=frozenset({"avx2"}))
MKL_TORCH = Torch(version="2.13.0+cpu", path="/env/site-packages/torch", mkl_dispatch_symbol=True)
ACTIVE = WorkerPython(path="/b/bin/python", origin="environment", reason="the active virtual environment")
WRITABLE = "/opt may be written by everyone"

TABLE = {
    # name: (check, facts, status, part of the finding, part of the fix)
    "files that agree": ("CPU topology", facts(), "ok", "the kernel's files agree", None),
    "files that contradict one another": (
        "CPU topology",
        facts(contradictions=("one: the list counts", *(f"number {n}" for n in range(5)))),
        "advice",
        "one: the list counts; number 0; number 1; number 2; 2 more",
        "lscpu -e",
    ),
    "an environment of one's own": ("other users", facts(), "ok", "only you and root can change", None),
    "an environment that others can change": (
        "other users",
        facts(untrusted_code=(WRITABLE,)),
        "advice",
        WRITABLE,
        "chmod go-w PATH",
    ),
    "the environment of a captured machine": ("other users", facts(live=False), "skipped", "captured machine", None),
    "tcmalloc": ("allocator", facts(), "ok", "tcmalloc (/usr/lib/libtcmalloc.so.4)", None),
    "no allocator": ("allocator", facts(machine(libraries=())), "advice", "C library", "apt-get install"),
    "no allocator, Ubuntu": (
        "allocator",
        facts(machine(libraries=()), distribution="ubuntu debian"),
        "advice",
        "C library",
        "apt-get install libtcmalloc-minimal4",
    ),
    "no allocator, Rocky": (
        "allocator",
        facts(machine(libraries=()), distribution="rocky rhel centos fedora"),
        "advice",
        "C library",
        "dnf install gperftools-libs",
    ),
    "no allocator, unknown": (
        "allocator",
        facts(machine(libraries=()), distribution=""),
        "advice",
        "C library",
        "conda install",
    ),
    "allocator writable by others": (
        "allocator",
        facts(machine(libraries=(library("allocator", "jemalloc", "/opt/libjemalloc.so", WRITABLE),))),
        "advice",
        "/opt/libjemalloc.so is not preloaded",
        "apt-get",
    ),
    "collectives": ("collectives", facts(), "ok", "oneCCL 2022.1.2 (it can be loaded) between hosts", None),
    "a oneCCL that cannot be loaded": (
        "collectives",
        facts(oneccl_problem="libhwloc.so.15: cannot open shared object file"),
        "advice",
        "not between hosts: oneCCL 2022.1.2 cannot be loaded",
        "cpulaunch[ccl]",
    ),
    "collectives without oneCCL": ("collectives", facts(oneccl=None), "ok", "one host only, without oneCCL", None),
    "collectives in Python": (
        "collectives",
        facts(missing_library_reason="none"),
        "advice",
        "shared memory",
        "C compiler",
    ),
    "no shared memory": ("collectives", facts(is_linux=False), "skipped", "Linux", None),
    "collectives on Arm": ("collectives", facts(machine(arch="aarch64")), "skipped", "x86-64 Linux", None),
    "collectives of a captured machine": ("collectives", facts(live=False), "skipped", "captured", None),
    "collectives without torch": ("collectives", facts(torch=None), "skipped", "torch", None),
    "OpenMP": ("OpenMP runtime", facts(), "ok", "intel", None),
    "no OpenMP": ("OpenMP runtime", facts(machine(libraries=())), "advice", "libgomp", "pip install intel-openmp"),
    "LLVM's OpenMP": (
        "OpenMP runtime",
        facts(machine(libraries=(library("openmp", "llvm", "/usr/lib/libomp.so.5"),))),
        "ok",
        "--openmp llvm",
        None,
    ),
    "OpenMP of conda's torch": (
        "OpenMP runtime",
        facts(machine(libraries=(), torch=Torch(version="2", path="/t", bundled_openmp="/t/libiomp5.so"))),
        "ok",
        "torch includes",
        None,
    ),
    "no OpenMP on Arm": ("OpenMP runtime", facts(machine(libraries=(), arch="aarch64")), "ok", "torch's own", None),
    "OpenMP writable by others": (
        "OpenMP runtime",
        facts(machine(libraries=(library("openmp", "intel", "/opt/libiomp5.so", WRITABLE),))),
        "advice",
        "not preloaded",
        "pip install intel-openmp",
    ),
    "two runtimes preloaded": (
        "OpenMP in wheels",
        facts(environ={"LD_PRELOAD": "/a/libiomp5.so:/b/libtcmalloc.so.4 /c/libgomp.so.1"}),
        "problem",
        "/a/libiomp5.so and /c/libgomp.so.1",
        "unset LD_PRELOAD",
    ),
    "one runtime preloaded": ("OpenMP in wheels", facts(environ={"LD_PRELOAD": "/a/libiomp5.so"}), "ok", "one", None),
    "runtime in a wheel": (
        "OpenMP in wheels",
        facts(bundled_openmp=(("scikit_learn.libs", "/env/scikit_learn.libs/libgomp-a34b3233.so.1.0.0"),)),
        "advice",
        "scikit_learn",
        "python -m threadpoolctl -i torch sklearn",
    ),
    "no GPU": ("GPUs", facts(), "ok", "no GPUs", None),
    "GPUs": ("GPUs", facts(machine(gpus=(gpu(0, model="H100"), gpu(1, model="H100")))), "ok", "2 GPUs: H100", None),
    "GPU without a driver": (
        "GPUs",
        facts(machine(gpus=(gpu(0), gpu(1, driver=None, accessible=False)))),
        "problem",
        "GPU 1 (nvidia): no driver",
        "modprobe nvidia",
    ),
    "container with some GPUs": (
        "GPUs",
        facts(machine(container=True, gpus=(gpu(0, accessible=False), gpu(1)))),
        "ok",
        "has 1 of the machine's 2 GPUs",
        None,
    ),
    "no device file": (
        "GPUs",
        facts(machine(gpus=(gpu(0, accessible=False),))),
        "problem",
        "no device file",
        "--gpus all",
    ),
    "no MIG": ("MIG devices", facts(machine(gpus=(gpu(0),))), "ok", "no MIG", None),
    "MIG on AMD": ("MIG devices", facts(machine(gpus=(gpu(0, vendor="amd"),))), "ok", "no NVIDIA", None),
    "MIG named": (
        "MIG devices",
        facts(machine(gpus=(gpu(0, mig=(MigInstance(gpu_instance=7, compute_instance=0, uuid="MIG-1"),)),))),
        "ok",
        "1 MIG device on GPU 0",
        None,
    ),
    "MIG without names": (
        "MIG devices",
        facts(machine(gpus=(gpu(0, mig=(MigInstance(gpu_instance=7, compute_instance=0),)),))),
        "advice",
        "unknown UUIDs",
        "cpulaunch[gpu]",
    ),
    "locality without GPUs": ("GPU neighbours", facts(machine(nodes=2)), "ok", "no GPUs", None),
    "locality of an inaccessible GPU": (
        "GPU neighbours",
        facts(machine(nodes=2, gpus=(gpu(0, accessible=False),))),
        "skipped",
        "is available to this process",
        None,
    ),
    "GPU on one NUMA node": ("GPU neighbours", facts(machine(gpus=(gpu(0),))), "ok", "single NUMA node", None),
    "near GPU": ("GPU neighbours", facts(machine(nodes=2, gpus=(gpu(0, numa_node=1),))), "ok", "every GPU", None),
    "GPU without a NUMA node": (
        "GPU neighbours",
        facts(machine(nodes=2, gpus=(gpu(0),))),
        "advice",
        "GPU 0: NUMA node",
        "pxb-pcie",
    ),
    "far GPU": (
        "GPU neighbours",
        facts(machine(nodes=2, allowed=frozenset({0, 1}), gpus=(gpu(0, numa_node=1), gpu(1, numa_node=0)))),
        "advice",
        "GPU 0: none of the CPUs of this process (affinity)",
        "NUMA node 1 as well",
    ),
    "THP": ("huge pages", facts(), "ok", "madvise", None),
    "THP never": ("huge pages", facts(machine(kernel=kernel(transparent_hugepage="never"))), "advice", "never", "echo"),
    "THP unknown": ("huge pages", facts(machine(kernel=kernel(transparent_hugepage=None))), "ok", "not report", None),
    "balancing": (
        "NUMA balancing",
        facts(machine(nodes=2, kernel=kernel(numa_balancing=True))),
        "advice",
        "on",
        "kernel.numa_balancing=0",
    ),
    "balancing off": ("NUMA balancing", facts(machine(nodes=2)), "ok", "off", None),
    "balancing, one NUMA node": (
        "NUMA balancing",
        facts(machine(kernel=kernel(numa_balancing=True))),
        "ok",
        "no effect",
        None,
    ),
    "governor": ("governor", facts(), "ok", "performance", None),
    "governor powersave": (
        "governor",
        facts(machine(kernel=kernel(governor="powersave"))),
        "advice",
        "powersave",
        "cpupower",
    ),
    "no governor": ("governor", facts(machine(kernel=kernel(governor=None))), "ok", "not adjustable", None),
    "whole cores": ("SMT siblings", facts(machine(smt=2)), "ok", "all SMT siblings", None),
    "half cores": (
        "SMT siblings",
        facts(machine(smt=2, allowed=frozenset({0, 1, 4}))),
        "advice",
        "1 of 2 cores",
        "full-pcpus-only",
    ),
    "shm": ("/dev/shm", facts(), "ok", "8 GiB, 8 GiB free", None),
    "shm of Docker": (
        "/dev/shm",
        facts(shm=SharedMemory(total_bytes=64 * MIB, free_bytes=64 * MIB)),
        "problem",
        "64 MiB",
        "--shm-size",
    ),
    "shm small": (
        "/dev/shm",
        facts(shm=SharedMemory(total_bytes=512 * MIB, free_bytes=512 * MIB)),
        "advice",
        "512 MiB",
        "--shm-size",
    ),
    "shm full": (
        "/dev/shm",
        facts(shm=SharedMemory(total_bytes=8 * GIB, free_bytes=MIB)),
        "problem",
        "1 MiB free",
        "ls -l /dev/shm",
    ),
    "no shm": ("/dev/shm", facts(shm=None), "skipped", "no /dev/shm", None),
    "shm of a captured machine": ("/dev/shm", facts(live=False), "skipped", "captured", None),
    "policy, one NUMA node": ("memory policy", facts(), "ok", "not needed", None),
    "policy permitted": (
        "memory policy",
        facts(machine(nodes=2, kernel=kernel(mempolicy="permitted"))),
        "ok",
        "permitted",
        None,
    ),
    "policy denied": (
        "memory policy",
        facts(machine(nodes=2, kernel=kernel(mempolicy="denied"))),
        "advice",
        "not permitted",
        "SYS_NICE",
    ),
    "policy unknown": ("memory policy", facts(machine(nodes=2)), "skipped", "unknown for a captured", None),
    "no quota": ("CPU quota", facts(), "ok", "none", None),
    "quota": ("CPU quota", facts(machine(cores=64, quota=7.5)), "advice", "quota of 7.5 CPUs on 64 CPUs", "cpuset"),
    "quota as large as the cpuset": ("CPU quota", facts(machine(cores=4, quota=4.0)), "ok", "quota of 4 CPUs", None),
    "no swap": ("swap", facts(), "ok", "none", None),
    "swap unused": ("swap", facts(swap=Swap(total_bytes=8 * GIB, free_bytes=8 * GIB)), "ok", "0 B of 8 GiB", None),
    "swap used": ("swap", facts(swap=Swap(total_bytes=8 * GIB, free_bytes=5 * GIB)), "advice", "3 GiB of 8", "swapoff"),
    "swap unknown": ("swap", facts(swap=None), "ok", "not report", None),
    "environment": ("environment", facts(environ={"OMP_NUM_THREADS": "4", "OMP_PROC_BIND": "false"}), "ok", "no", None),
    "OMP_DYNAMIC": ("environment", facts(environ={"OMP_DYNAMIC": "TRUE"}), "problem", "=TRUE", "unset OMP_DYNAMIC"),
    "OMP_DYNAMIC off": ("environment", facts(environ={"OMP_DYNAMIC": "false"}), "ok", "no harmful variables", None),
    "thread limit": (
        "environment",
        facts(environ={"OMP_THREAD_LIMIT": "2"}),
        "problem",
        "=2",
        "unset OMP_THREAD_LIMIT",
    ),
    "thread limit high enough": (
        "environment",
        facts(environ={"OMP_THREAD_LIMIT": "4"}),
        "ok",
        "no harmful variables",
        None,
    ),
    "duplicate libraries": (
        "environment",
        facts(environ={"KMP_DUPLICATE_LIB_OK": "True"}),
        "problem",
        "KMP_DUPLICATE_LIB_OK",
        "unset",
    ),
    "too many threads": ("environment", facts(environ={"OMP_NUM_THREADS": "64,1"}), "advice", "=64,1", "unset"),
    "no number": ("environment", facts(environ={"OMP_NUM_THREADS": "9" * 5000}), "advice", "=99", "unset"),
    "no number of threads": ("environment", facts(environ={"MKL_NUM_THREADS": "all"}), "advice", "=all", "unset"),
    "GOMP_CPU_AFFINITY": ("environment", facts(environ={"GOMP_CPU_AFFINITY": "0-3"}), "advice", "0-3", "unset"),
    "KMP_AFFINITY": (
        "environment",
        facts(environ={"KMP_AFFINITY": "granularity=fine,compact,1,0"}),
        "advice",
        "KMP_AFFINITY",
        "unset",
    ),
    "OMP_PROC_BIND": ("environment", facts(environ={"OMP_PROC_BIND": "close"}), "advice", "close", "unset"),
    "ATEN_CPU_CAPABILITY": (
        "environment",
        facts(environ={"ATEN_CPU_CAPABILITY": "default"}),
        "advice",
        "=def",
        "unset",
    ),
    "environment of a captured machine": ("environment", facts(live=False), "skipped", "captured", None),
    "Python": ("Python", facts(python=ACTIVE), "ok", "/b/bin/python (the active virtual environment)", None),
    "Python instead of the active one": (
        "Python",
        facts(python=replace(ACTIVE, notice="the active environment has no torch")),
        "advice",
        "/b/bin/python",
        "activate",
    ),
    "Python of a captured machine": ("Python", facts(python=None), "skipped", "captured", None),
    "plugin": ("plugin", facts(), "ok", "loaded by torch", None),
    "plugin of a cpulaunch in another environment": (
        "plugin",
        facts(machine(torch=replace(PLUGIN, plugin=False), plugin_path="/a/cpulaunch/on_path")),
        "ok",
        "loaded by torch",
        None,
    ),
    "plugin without torch": ("plugin", facts(machine(torch=None)), "skipped", "no torch", None),
    "plugin of an old torch": (
        "plugin",
        facts(machine(torch=replace(PLUGIN, version="2.4.0"))),
        "advice",
        "cannot load plugins",
        "pip install torch",
    ),
    "no plugin": (
        "plugin",
        facts(machine(torch=replace(PLUGIN, plugin=False))),
        "advice",
        "cpulaunch is not installed",
        "pip install cpulaunch",
    ),
    "plugin disabled": (
        "plugin",
        facts(machine(torch=PLUGIN), environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        "advice",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
    ),
    "torch": ("torch", facts(), "ok", "2.13.0+cpu, AVX512, oneDNN, MKL, OpenMP, 4 threads", None),
    "no torch": (
        "torch",
        facts(torch=None),
        "advice",
        "not installed",
        "pip install torch --index-url https://download.pytorch.org/whl/cpu",
    ),
    "no torch in the active environment": (
        "torch",
        facts(torch=None, python=ACTIVE),
        "advice",
        "not installed",
        "/b/bin/python -m pip install torch",
    ),
    "broken torch": (
        "torch",
        facts(torch=BrokenTorch(reason="ImportError: libtorch_cpu.so: cannot open")),
        "problem",
        "ImportError",
        "--force-reinstall",
    ),
    "torch without oneDNN": (
        "torch",
        facts(torch=replace(TORCH, onednn=False)),
        "problem",
        "AVX512, MKL",
        "pip install torch",
    ),
    "torch without vectors": (
        "torch",
        facts(torch=replace(TORCH, capability="DEFAULT")),
        "problem",
        "DEFAULT",
        "unset ATEN_CPU_CAPABILITY",
    ),
    "torch on an old CPU": (
        "torch",
        facts(machine(cpu=CpuInfo()), torch=replace(TORCH, capability="DEFAULT")),
        "ok",
        "DEFAULT",
        None,
    ),
    "torch of a captured machine": ("torch", facts(live=False, torch=None), "skipped", "cannot be queried", None),
    "torch with one runtime": ("torch's OpenMP", facts(), "ok", "libgomp.so.1", None),
    "torch with two runtimes": (
        "torch's OpenMP",
        facts(torch=replace(TORCH, openmp_files=("/a/libgomp.so.1", "/b/libiomp5.so"))),
        "advice",
        "libgomp.so.1 and libiomp5.so",
        "one source",
    ),
    "torch with a preloaded runtime": (
        "torch's OpenMP",
        facts(
            environ={"LD_PRELOAD": "/b/libiomp5.so"},
            torch=replace(TORCH, openmp_files=("/a/libgomp.so.1", "/b/libiomp5.so")),
        ),
        "ok",
        "replaces",
        None,
    ),
    "torch that could not be queried": (
        "torch's OpenMP",
        facts(torch=None),
        "skipped",
        "could not be queried",
        None,
    ),
    "MKL on Intel": ("MKL on AMD", facts(machine(torch=MKL_TORCH)), "ok", "not an AMD CPU", None),
    "MKL on AMD": ("MKL on AMD", facts(machine(cpu=AMD, torch=MKL_TORCH)), "advice", "missing", "C compiler"),
    "MKL on AMD with the library": (
        "MKL on AMD",
        facts(machine(cpu=AMD, torch=MKL_TORCH, libraries=(library("mkl-dispatch", "mkl-dispatch"),))),
        "ok",
        "dispatch library",
        None,
    ),
    "torch without MKL on AMD": ("MKL on AMD", facts(machine(cpu=AMD)), "ok", "torch has no MKL", None),
    "AMX": ("AMX", facts(), "ok", "available", None),
    "AMX of a CPU that reports another model": (
        "AMX",
        facts(machine(cpu=CpuInfo(vendor="GenuineIntel", family=6, model=0xA7, isa=frozenset({"amx_tile"})))),
        "ok",
        "available",
        None,
    ),
    "hidden AMX": (
        "AMX",
        facts(machine(cpu=CpuInfo(vendor="GenuineIntel", family=6, model=0xCF, isa=frozenset({"avx2"})))),
        "advice",
        "hidden",
        "Linux 5.16",
    ),
    "all CPU features": ("CPU features", facts(), "ok", "2 of those that torch uses", None),
    "a CPU feature hidden by the kernel": (
        "CPU features",
        facts(cpuid_features=frozenset({"avx2", "amx_tile", "avx512_bf16"})),
        "advice",
        "the kernel hides avx512_bf16",
        "clearcpuid",
    ),
    "CPU features of a captured machine": ("CPU features", facts(cpuid_features=None), "skipped", "this machine", None),
    "no AMX to hide": ("AMX", facts(machine(cpu=AMD)), "ok", "not a CPU with AMX", None),
}


@pytest.mark.parametrize("name", TABLE)
def test_check(name):
    check, machine_facts, status, found, fix = TABLE[name]
    (finding,) = CHECKS[check](machine_facts)
    assert finding.status == status
    assert found in finding.found
    if fix is None:
        assert (finding.why, finding.fix) == (None, None)
    else:
        assert finding.why
        assert fix in str(finding.fix)


def test_every_check_is_in_the_table():
    assert {row[0] for row in TABLE.values()} == set(CHECKS)


def test_each_harmful_variable_is_a_finding_of_its_own():
    findings = CHECKS["environment"](facts(environ={"OMP_DYNAMIC": "1", "KMP_AFFINITY": "compact", "HOME": "/"}))
    assert [finding.found for finding in findings] == ["OMP_DYNAMIC=1", "KMP_AFFINITY=compact"]


def test_a_sound_machine_has_no_findings_but_ok():
    report = run_checks(facts())
    assert {finding.status for _, finding in report.findings} == {"ok"}
    assert report.exit_code == 0
