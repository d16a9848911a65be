/* Whether this machine has the instructions that the kernels use. Compiled for the plain machine. */
__attribute__((visibility("default"))) int noria_runs_here(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}
