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
        "Ampere's own build of PyTorch, which chooses its own settings",
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3340, 3340),)), ('platforms_absent', ('Amazon EC2',))), (('arch', ('aarch64',)), ('vendor', ('Ampere',)), ('models', ((2755, 2757),)))),
        (
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "no SMT: the worker's CPU mask is sufficient, and forked DataLoader workers can use all of it", 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', "caches oneDNN's Arm primitives instead of creating them again (same torch wheel as on Graviton)", 'https://docs.pytorch.org/tutorials/recipes/inference_tuning_on_aws_graviton.html', '2026-11-21'),
        ),
    ),
    (
        'container',
        'situation',
        'A container or cgroup with a CPU quota',
        'quotas as large as the machine, set for accounting only: use --wait-policy auto',
        ((('quota', True),),),
        (
            ('wait_policy', 'passive', 'spinning threads use up the quota, and the kernel then throttles all threads', 'measured: quota of 1 CPU on 2 CPUs, BERT, torch 2.13.0: 6.2-7.3 samples/s spinning (throttled in 197 of 482 periods), 7.6 passive', '2026-11-21'),
            ('affinity', 'mask', 'a quota does not reserve CPUs: threads pinned to the first CPUs compete with those of other containers', 'https://github.com/uxlfoundation/oneTBB/issues/190', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen2',
        'server',
        'AMD EPYC 7002, Rome (Zen 2)',
        'desktop and mobile CPUs of the same generation: they have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((23, 23),)), ('models', ((48, 63),)), ('features', ('avx2',))),),
        (
            ('strategy', 'spread', 'instances are distributed over the NUMA nodes and kept inside one L3 where possible: a CCX shares its cache with no other', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: SMT siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch uses slow kernels on AMD; its fast kernels made fp32 products 2.2 times as fast', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of the LLVM OpenMP runtime if installed: AMD recommends LLVM OpenMP except for recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto uses it only on cores that are not shared', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen3',
        'server',
        'AMD EPYC 7003, Milan and Trento (Zen 3)',
        'desktop and mobile CPUs of the same generation: they have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((25, 25),)), ('models', ((0, 15), (48, 63))), ('features', ('avx2',))),),
        (
            ('strategy', 'spread', 'instances are distributed over the NUMA nodes and kept inside one L3 where possible: a CCX shares its cache with no other', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: SMT siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch uses slow kernels on AMD; its fast kernels made fp32 products 2.2 times as fast', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of the LLVM OpenMP runtime if installed: AMD recommends LLVM OpenMP except for recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto uses it only on cores that are not shared', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen4',
        'server',
        'AMD EPYC 9004 and 8004, Genoa, Bergamo and Siena (Zen 4)',
        'desktop and mobile CPUs of the same generation: they have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((25, 25),)), ('models', ((16, 31), (160, 175))), ('features', ('avx512f',))),),
        (
            ('strategy', 'spread', 'instances are distributed over the NUMA nodes and kept inside one L3 where possible: a CCX shares its cache with no other', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: SMT siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch uses slow kernels on AMD; its fast kernels made fp32 products 2.2 times as fast', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of the LLVM OpenMP runtime if installed: AMD recommends LLVM OpenMP except for recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto uses it only on cores that are not shared', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'epyc-zen5',
        'server',
        'AMD EPYC 9005, Turin (Zen 5)',
        'desktop and mobile CPUs of the same generation: they have other model numbers and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('AuthenticAMD',)), ('family', ((26, 26),)), ('models', ((0, 31),)), ('features', ('avx512f',))),),
        (
            ('strategy', 'spread', 'instances are distributed over the NUMA nodes and kept inside one L3 where possible: a CCX shares its cache with no other', 'https://github.com/kubernetes/enhancements/issues/4800', '2026-11-21'),
            ('smt', False, "one thread per core: SMT siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('mkl_dispatch', 'auto', 'MKL inside torch uses slow kernels on AMD; its fast kernels made fp32 products 2.2 times as fast', 'measured: EPYC Zen 5, 2 cores, torch 2.13.0, sgemm 200 to 454 GFLOP/s, interleaved runs', '2026-11-21'),
            ('openmp', 'auto', "Intel's build of the LLVM OpenMP runtime if installed: AMD recommends LLVM OpenMP except for recommendation models", 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Optimal-Environment-Variable-Settings-for-zentf', '2026-11-21'),
            ('wait_policy', 'auto', 'AMD recommends active waiting; auto uses it only on cores that are not shared', 'https://docs.amd.com/r/en-US/57300-ZenDNN-user-guide/Environment-Variables', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
    (
        'gpu-node',
        'situation',
        'A machine with GPUs',
        'CPU inference on a machine with idle GPUs: this profile neither helps nor hurts',
        ((('gpus', True),),),
        (
            ('affinity', 'mask', 'no pinning of threads, so that the threads that feed the GPU and forked DataLoader workers can use all cores', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
            ('grace', 60.0, 'saving a checkpoint from the GPUs after SIGTERM can take longer than the default 30 seconds', 'https://github.com/pytorch/pytorch/issues/119856', '2026-11-21'),
        ),
        (),
    ),
    (
        'grace',
        'server',
        'NVIDIA Grace (Grace CPU Superchip, GH200, GB200)',
        'kernels with 4 KiB pages, where --huge-pages helps',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3407, 3407),)), ('platforms_absent', ('Amazon EC2', 'Google'))),),
        (
            ('huge_pages', False, 'with the recommended 64 KiB pages, a transparent huge page is 512 MiB, too large for tensors', 'https://docs.nvidia.com/grace-perf-tuning-guide/os-settings.html', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', "caches oneDNN's Arm primitives instead of creating them again (same torch wheel as on Graviton)", 'https://docs.pytorch.org/tutorials/recipes/inference_tuning_on_aws_graviton.html', '2026-11-21'),
        ),
    ),
    (
        'graviton2',
        'server',
        'AWS Graviton 2 (Neoverse N1)',
        'workloads limited by memory: the primitive cache and huge pages need more of it',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3340, 3340),)), ('platforms', ('Amazon EC2',))),),
        (
            ('huge_pages', True, "torch's allocator requests transparent huge pages: large tensors cause fewer page faults", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "OMP_PROC_BIND stays off, as AWS recommends: the worker's CPU mask is sufficient", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', "caches oneDNN's Arm primitives instead of creating them again; uses some memory", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
    ),
    (
        'graviton3',
        'server',
        'AWS Graviton 3 and 3E (Neoverse V1)',
        'workloads limited by memory: the primitive cache and huge pages need more of it',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3392, 3392),)), ('platforms', ('Amazon EC2',))),),
        (
            ('huge_pages', True, "torch's allocator requests transparent huge pages: large tensors cause fewer page faults", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "OMP_PROC_BIND stays off, as AWS recommends: the worker's CPU mask is sufficient", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', "caches oneDNN's Arm primitives instead of creating them again; uses some memory", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
    ),
    (
        'graviton4',
        'server',
        'AWS Graviton 4 (Neoverse V2)',
        'workloads limited by memory: the primitive cache and huge pages need more of it',
        ((('arch', ('aarch64',)), ('vendor', ('ARM',)), ('models', ((3407, 3407),)), ('platforms', ('Amazon EC2',))),),
        (
            ('huge_pages', True, "torch's allocator requests transparent huge pages: large tensors cause fewer page faults", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('openmp', 'default', "torch's own libgomp: a second OpenMP runtime in the process is slow or crashes on Arm", 'https://github.com/pytorch/pytorch/issues/166087', '2026-11-21'),
            ('affinity', 'mask', "OMP_PROC_BIND stays off, as AWS recommends: the worker's CPU mask is sufficient", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
        (
            ('LRU_CACHE_CAPACITY', '1024', "caches oneDNN's Arm primitives instead of creating them again; uses some memory", 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
        ),
    ),
    (
        'hybrid-desktop',
        'situation',
        'A CPU with performance and efficiency cores',
        'batch jobs of many independent single-threaded workers: use --e-cores',
        ((('hybrid', True),),),
        (
            ('e_cores', False, 'a parallel region is as slow as its slowest thread, so efficiency cores would slow down the others', 'https://github.com/ggml-org/llama.cpp/issues/842', '2026-11-21'),
            ('smt', False, "one thread per performance core: SMT siblings share the core's vector units", 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
        ),
        (),
    ),
    (
        'latency',
        'intent',
        'Lowest latency for single requests, on dedicated cores',
        'shared machines and CPU quotas: waiting threads spin and take CPU time from other programs; programs that need gradients of a model in eval mode',
        (),
        (
            ('wait_policy', 'active', 'a spinning thread starts the next parallel region immediately, a sleeping one must first be woken', 'https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html', '2026-11-21'),
            ('smt', False, 'work on an SMT sibling delays the thread that handles the request', 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('graph', 'onednn', 'fused oneDNN graphs for modules in eval mode: fewer passes over memory, less Python; results differ by rounding, the second call of a kind captures', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('inference_mode', True, 'without torch.no_grad in the program, every call would record an autograd graph, and fused graphs could not be used', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
        ),
        (
            ('ONEDNN_PRIMITIVE_CACHE_CAPACITY', '4096', 'requests with many shapes reuse cached primitives instead of creating them again (default 1024); uses memory', 'https://intel.github.io/intel-extension-for-pytorch/cpu/latest/tutorials/performance_tuning/tuning_guide.html', '2026-11-21'),
        ),
    ),
    (
        'throughput',
        'intent',
        'Highest throughput, given enough memory',
        'machines with little memory: freed memory is kept for reuse, and huge pages round up; programs that need gradients of a model in eval mode',
        (),
        (
            ('strategy', 'spread', 'instances are distributed over the NUMA nodes, so that all memory controllers are used', 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('smt', False, 'one thread per core keeps the vector units busy in matrix products', 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('huge_pages', True, 'large activations cause fewer page faults and TLB misses', 'https://github.com/aws/aws-graviton-getting-started/blob/main/machinelearning/pytorch.md', '2026-11-21'),
            ('graph', 'onednn', 'fused oneDNN graphs for modules in eval mode: fewer passes over memory; results differ by rounding, a capture takes time and memory for a copy of the weights', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('inference_mode', True, 'without torch.no_grad in the program, every call would record an autograd graph, and fused graphs could not be used', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
        ),
        (
            ('MALLOC_CONF', 'oversize_threshold:1,background_thread:true,metadata_thp:always,thp:always,dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000', 'if jemalloc is the allocator: use huge pages, and keep freed memory for the next batch instead of returning it', 'https://intel.github.io/intel-extension-for-pytorch/cpu/latest/tutorials/performance_tuning/tuning_guide.html', '2026-11-21'),
        ),
    ),
    (
        'training',
        'intent',
        'Training with DataLoader workers and checkpoints',
        'inference without data loading: use latency or throughput',
        (),
        (
            ('affinity', 'mask', 'with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
            ('grace', 120.0, 'saving a checkpoint after SIGTERM can take longer than the default 30 seconds', 'https://github.com/pytorch/pytorch/issues/119856', '2026-11-21'),
            ('e_cores', False, 'a training step is as slow as its slowest thread', 'https://github.com/ggml-org/llama.cpp/issues/842', '2026-11-21'),
            ('pin_memory', True, 'with a GPU, batches are copied from pinned memory while it computes; no effect without a GPU', 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('fused_optimizers', True, 'fused optimizers update each parameter in one pass, unless the program chooses; results differ by rounding', 'https://docs.pytorch.org/docs/stable/optim.html', '2026-11-22'),
            ('dist_backend', 'auto', 'ranks exchange gradients in every step: the faster of gloo and ccl, measured once on this host', 'https://docs.pytorch.org/docs/stable/distributed.html', '2026-11-22'),
        ),
        (),
    ),
    (
        'xeon-amx',
        'server',
        'Intel Xeon with AMX: Sapphire, Emerald and Granite Rapids (4th to 6th generation), and later ones',
        'virtual machines that hide AMX: they are plain AVX-512 machines and need no profile',
        ((('arch', ('x86_64',)), ('vendor', ('GenuineIntel',)), ('features', ('amx_tile',))),),
        (
            ('smt', False, 'one thread per core keeps the vector units busy in matrix products; a second one would only compete for them', 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('openmp', 'auto', "Intel's OpenMP runtime if installed, as PyTorch's tuning guide recommends for Xeon", 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
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
            ('smt', False, 'one thread per core keeps the vector units busy in matrix products; a second one would only compete for them', 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('openmp', 'auto', "Intel's OpenMP runtime if installed, as PyTorch's tuning guide recommends for Xeon", 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
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
            ('smt', False, 'one thread per core keeps the vector units busy in matrix products; a second one would only compete for them', 'https://docs.pytorch.org/tutorials/intermediate/torchserve_with_ipex.html', '2026-11-21'),
            ('openmp', 'auto', "Intel's OpenMP runtime if installed, as PyTorch's tuning guide recommends for Xeon", 'https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html', '2026-11-21'),
            ('affinity', 'mask', 'no pinning of threads: with pinned threads, forked DataLoader workers inherit one CPU unless the plugin inside torch is loaded', 'https://github.com/pytorch/pytorch/issues/101850', '2026-11-21'),
        ),
        (),
    ),
)
