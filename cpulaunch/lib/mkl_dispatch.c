/*
 * Preloaded into workers on AMD CPUs, so that MKL selects its kernels by the instruction sets of the CPU.
 *
 * MKL calls its own function mkl_serv_intel_cpu_true() to find out whether the CPU is made by Intel. If it returns 0,
 * MKL uses a generic code path, whatever the CPU supports. torch's wheels link MKL statically and export the symbol, so
 * the dynamic linker calls this function instead. The kernels selected then still check the CPU's feature bits, and
 * compute in the same precision. The method was published by Daniel de Kok in 2020; see docs/mkl-dispatch.md, also for
 * when not to use it.
 */
int mkl_serv_intel_cpu_true(void) {
    return 1;
}
