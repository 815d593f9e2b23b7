/* The mathematics in float, for x86 processors with AVX-512. The pragma comes first: vectors are as wide as the
 * instructions that the compiler knows of when it reads their type. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
#define REAL float
#define REAL_IS_DOUBLE 0
#include "mathematics.h"

const Real REAL_FLOAT_AVX512 = REAL_TABLE;
#else
typedef int nothing_here;
#endif
