/*
 * Preloaded into workers on AMD CPUs, so that MKL chooses its kernels by what the CPU can do.
 *
 * MKL asks its own function mkl_serv_intel_cpu_true() whether the CPU is Intel's, and where the answer is 0 it takes
 * a generic path, whatever instruction sets the CPU has. torch's wheels link MKL statically and export the symbol, so
 * the dynamic linker lets a preloaded library answer in its place. The kernels chosen then still check the CPU's own
 * feature bits and compute in the same precision. The idea was published by Daniel de Kok in 2020; see
 * docs/mkl-dispatch.md, also for when not to use it.
 */
int mkl_serv_intel_cpu_true(void) {
    return 1;
}
