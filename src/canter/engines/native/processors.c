/* Choice of the version of the mathematics for this processor. */
#include "native.h"

const Real *real_of(int is_double)
{
    if (is_double)
        return &REAL_DOUBLE;
#ifdef HAS_X86_VERSIONS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        return &REAL_FLOAT_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &REAL_FLOAT_AVX2;
#endif
    return &REAL_FLOAT;
}
