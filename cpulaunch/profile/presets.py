"""The presets of profiles/*.toml, so that a launch parses none of them. Written by scripts/generate-presets."""

# ruff: noqa: E501
# fmt: off
from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# name, kind, summary, not_for, applies, settings and env (name, value, reason, source, date)
PRESETS: tuple[tuple[str, str, str, str, Any, Any, Any], ...] = (
    (
        'ampere',
        'server',
        'Ampere Altra, Altra Max and AmpereOne',
        "Ampere's own build of PyTorch, which chooses its settings itself",
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3340, 3340),)), ('platforms_absent', ('Amazon EC2',))), (('arch', ('aarch64',)), ('vendor', ('Ampere',)), ('models', ((2755, 2757),)))),
        (
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "no SMT: the worker's CPU mask is enough, and forked DataLoader workers keep all of it", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', 'keeps oneDNN primitives for Arm instead of making them anew (the same torch wheel as on Graviton)', 'https://docs.pytorch.org/tutorials/recipes/inference_tuning_on_aws_graviton.html', '2026-11-21'),
        ),
    ),
    (
        'container',
        'situation',
        'A container or cgroup with a CPU quota',
        'a quota as large as the machine that exists for accounting only: give --wait-policy auto',
        ((('quota', True),),),
        (
            ('wait_policy', 'passive', 'threads that spin while they wait use up the quota, and the kernel then stops all of them', 'measured: quota of 1 CPU on 2 CPUs, BERT, torch 2.13.0: 6.2-7.3 samples/s spinning (throttled in 197 of 482 periods), 7.6 passive', '2026-11-21'),
            ('affinity', 'mask', "a quota gives no right to particular CPUs: threads pinned to the same first CPUs as a neighbour's queue there", 'https://github.com/uxlfoundation/oneTBB/issues/190', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen2',
        'server',
        'AMD EPYC 7002, Rome (Zen 2)',
        'desktop and mobile parts of the same generation, which have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((23, 23),)), ('models', ((48, 63),)), ('features', ('avx2',))),),
        (
            ('strategy', 'spread', 'instances are dealt over the NUMA nodes and kept inside one L3 where they fit: a CCX does not share its cache with its neighbours', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch takes a slow path on AMD; its fast kernels made fp32 products 2.2 times faster', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of LLVM's OpenMP where it is installed: AMD recommends LLVM's for all but recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto does it only on cores nobody shares', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen3',
        'server',
        'AMD EPYC 7003, Milan and Trento (Zen 3)',
        'desktop and mobile parts of the same generation, which have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((25, 25),)), ('models', ((0, 15), (48, 63))), ('features', ('avx2',))),),
        (
            ('strategy', 'spread', 'instances are dealt over the NUMA nodes and kept inside one L3 where they fit: a CCX does not share its cache with its neighbours', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch takes a slow path on AMD; its fast kernels made fp32 products 2.2 times faster', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of LLVM's OpenMP where it is installed: AMD recommends LLVM's for all but recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto does it only on cores nobody shares', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen4',
        'server',
        'AMD EPYC 9004 and 8004, Genoa, Bergamo and Siena (Zen 4)',
        'desktop and mobile parts of the same generation, which have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((25, 25),)), ('models', ((16, 31), (160, 175))), ('features', ('avx512f',))),),
        (
            ('strategy', 'spread', 'instances are dealt over the NUMA nodes and kept inside one L3 where they fit: a CCX does not share its cache with its neighbours', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch takes a slow path on AMD; its fast kernels made fp32 products 2.2 times faster', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of LLVM's OpenMP where it is installed: AMD recommends LLVM's for all but recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto does it only on cores nobody shares', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen5',
        'server',
        'AMD EPYC 9005, Turin (Zen 5)',
        'desktop and mobile parts of the same generation, which have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((26, 26),)), ('models', ((0, 31),)), ('features', ('avx512f',))),),
        (
            ('strategy', 'spread', 'instances are dealt over the NUMA nodes and kept inside one L3 where they fit: a CCX does not share its cache with its neighbours', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch takes a slow path on AMD; its fast kernels made fp32 products 2.2 times faster', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of LLVM's OpenMP where it is installed: AMD recommends LLVM's for all but recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto does it only on cores nobody shares', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'gpu-node',
        'situation',
        'A machine with GPUs',
        'CPU inference on a machine whose GPUs are idle: nothing here hurts it, nothing helps it',
        ((('gpus', True),),),
        (
            ('affinity', 'mask', "the worker's CPU mask alone: the threads that feed the GPU and forked DataLoader workers keep every core of it", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
            ('grace', 60.0, 'saving what is on the GPUs after SIGTERM takes longer than the usual 30 seconds', 'https://github.com/pytorch/pytorch/issues/119856', '2026-11-21'),
        ),
        (),
    ),
    (
        'grace',
        'server',
        'NVIDIA Grace (Grace CPU Superchip, GH200, GB200)',
        'kernels with 4 KiB pages: transparent huge pages pay there, give --huge-pages',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3407, 3407),)), ('platforms_absent', ('Amazon EC2', 'Google'))),),
        (
            ('huge_pages', False, 'with the recommended 64 KiB pages a transparent huge page is 512 MiB, too large for tensors', 'https://docs.nvidia.com/grace-perf-tuning-guide/os-settings.html', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', 'keeps oneDNN primitives for Arm instead of making them anew (the same torch wheel as on Graviton)', 'https://docs.pytorch.org/tutorials/recipes/inference_tuning_on_aws_graviton.html', '2026-11-21'),
        ),
    ),
    (
        'graviton2',
        'server',
        'AWS Graviton 2 (Neoverse N1)',
        'models whose memory use is the limit: both the primitive cache and huge pages take more of it',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3340, 3340),)), ('platforms', ('Amazon EC2',))),),
        (
            ('huge_pages', True, "torch's allocator asks for transparent huge pages: large tensors cost fewer page faults", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "OMP_PROC_BIND stays off, as AWS recommends: the worker's CPU mask is enough", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', 'keeps oneDNN primitives for Arm instead of making them anew; costs some memory', 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
    ),
    (
        'graviton3',
        'server',
        'AWS Graviton 3 and 3E (Neoverse V1)',
        'models whose memory use is the limit: both the primitive cache and huge pages take more of it',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3392, 3392),)), ('platforms', ('Amazon EC2',))),),
        (
            ('huge_pages', True, "torch's allocator asks for transparent huge pages: large tensors cost fewer page faults", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "OMP_PROC_BIND stays off, as AWS recommends: the worker's CPU mask is enough", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', 'keeps oneDNN primitives for Arm instead of making them anew; costs some memory', 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
    ),
    (
        'graviton4',
        'server',
        'AWS Graviton 4 (Neoverse V2)',
        'models whose memory use is the limit: both the primitive cache and huge pages take more of it',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3407, 3407),)), ('platforms', ('Amazon EC2',))),),
        (
            ('huge_pages', True, "torch's allocator asks for transparent huge pages: large tensors cost fewer page faults", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "OMP_PROC_BIND stays off, as AWS recommends: the worker's CPU mask is enough", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', 'keeps oneDNN primitives for Arm instead of making them anew; costs some memory', 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
    ),
    (
        'hybrid-desktop',
        'situation',
        'A CPU with performance and efficiency cores',
        'batch jobs of many independent single-threaded workers: give --e-cores there',
        ((('hybrid', True),),),
        (
            ('e_cores', False, 'the slowest thread gates every parallel region: efficiency cores make the fast ones wait', 'https://github.com/ggml-org/llama.cpp/issues/842', '2026-11-21'),
            ('smt', False, "one thread per performance core: siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
        ),
        (),
    ),
    (
        'latency',
        'intent',
        'Answer single requests as soon as possible, on cores of your own',
        'shared machines and CPU quotas: waiting threads spin, and take the time of whoever else runs there; programs that need gradients of a model in eval mode',
        (),
        (
            ('wait_policy', 'active', 'a thread that spins starts the next parallel region at once; one that sleeps must be woken', 'https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html', '2026-11-21'),
            ('smt', False, "a sibling's work delays the thread that the request waits for", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('graph', 'onednn', 'fused oneDNN graphs for modules in eval mode: fewer passes over memory, less Python; results differ by rounding, the first call is slower', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('inference_mode', True, 'where the program forgot no_grad, every call would record a graph for gradients, and fused graphs would not apply', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
        ),
        (
            ('ONEDNN_PRIMITIVE_CACHE_CAPACITY', '4096', 'requests of many shapes find their primitive instead of compiling it anew (default 1024); costs memory', 'https://intel.github.io/intel-extension-for-pytorch/cpu/latest/tutorials/performance_tuning/tuning_guide.html', '2026-11-21'),
        ),
    ),
    (
        'throughput',
        'intent',
        'As many samples per second as the machine gives, memory to spare',
        'small memory: freed memory is kept for reuse and huge pages round up; programs that need gradients of a model in eval mode',
        (),
        (
            ('strategy', 'spread', 'instances are dealt over the NUMA nodes, so that every memory controller works', 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('smt', False, "matrix products keep a core's vector units busy with one thread", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('huge_pages', True, 'large activations cost fewer page faults and TLB misses', 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('graph', 'onednn', 'fused oneDNN graphs for modules in eval mode: fewer passes over memory; results differ by rounding, memory for a frozen copy of the weights', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('inference_mode', True, 'where the program forgot no_grad, every call would record a graph for gradients, and fused graphs would not apply', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
        ),
        (
            ('MALLOC_CONF', 'oversize_threshold:1,background_thread:true,metadata_thp:always,thp:always,dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000', 'where jemalloc is the allocator: huge pages, and freed memory is kept for the next batch instead of returned to the kernel', 'https://intel.github.io/intel-extension-for-pytorch/cpu/latest/tutorials/performance_tuning/tuning_guide.html', '2026-11-21'),
        ),
    ),
    (
        'training',
        'intent',
        'Training: DataLoader workers beside the compute threads, checkpoints at the end',
        'inference without data loading, where latency or throughput fits better',
        (),
        (
            ('affinity', 'mask', 'DataLoader workers are forked: with pinned compute threads they have one CPU unless the plugin inside torch runs', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
            ('grace', 120.0, 'a checkpoint after SIGTERM takes longer than the usual 30 seconds', 'https://github.com/pytorch/pytorch/issues/119856', '2026-11-21'),
            ('e_cores', False, 'every step ends when the slowest thread does', 'https://github.com/ggml-org/llama.cpp/issues/842', '2026-11-21'),
            ('pin_memory', True, 'with a GPU, batches are copied to it from pinned memory while it computes; without one nothing is pinned', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('fused_optimizers', True, "one pass over each parameter instead of a dozen, in optimizers left to torch's default; differs by rounding", 'https://docs.pytorch.org/docs/stable/optim.html', '2026-11-22'),
            ('dist_backend', 'auto', 'ranks exchange gradients in every step: the faster of gloo and ccl, measured once on this host', 'https://docs.pytorch.org/docs/stable/distributed.html', '2026-11-22'),
        ),
        (),
    ),
    (
        'xeon-amx',
        'server',
        'Intel Xeon Sapphire, Emerald and Granite Rapids with AMX (4th to 6th generation)',
        'a virtual machine that hides AMX: it is then an AVX-512 machine and needs no profile',
        ((('arch', ('x86_64',)), ('vendor', ('GenuineIntel',)), ('family', ((6, 6),)), ('models', ((143, 143), (207, 207), (173, 173), (174, 174))), ('features', ('amx_tile',))),),
        (
            ('smt', False, "matrix products keep a core's vector units busy with one thread; SMT siblings would only share them", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('openmp', 'auto', "Intel's OpenMP runtime where it is installed, as PyTorch's tuning guide recommends for Xeon", 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'xeon-icelake',
        'server',
        'Intel Xeon Ice Lake (3rd generation Scalable, Xeon D)',
        'client Ice Lake',
        ((('arch', ('x86_64',)), ('vendor', ('GenuineIntel',)), ('family', ((6, 6),)), ('models', ((106, 106), (108, 108))), ('features', ('avx512f', 'avx512_vnni'))),),
        (
            ('smt', False, "matrix products keep a core's vector units busy with one thread; SMT siblings would only share them", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('openmp', 'auto', "Intel's OpenMP runtime where it is installed, as PyTorch's tuning guide recommends for Xeon", 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'xeon-skylake',
        'server',
        'Intel Xeon Skylake, Cascade Lake and Cooper Lake (1st to 3rd generation Scalable)',
        'client CPUs of the same generations, which have no AVX-512',
        ((('arch', ('x86_64',)), ('vendor', ('GenuineIntel',)), ('family', ((6, 6),)), ('models', ((85, 85),)), ('features', ('avx512f',))),),
        (
            ('smt', False, "matrix products keep a core's vector units busy with one thread; SMT siblings would only share them", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('openmp', 'auto', "Intel's OpenMP runtime where it is installed, as PyTorch's tuning guide recommends for Xeon", 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('affinity', 'mask', "the worker's CPU mask alone: with pinned threads, forked DataLoader workers have one CPU unless the plugin inside torch runs", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
)
