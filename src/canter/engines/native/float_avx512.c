/* The mathematics in float, for x86 processors with AVX-512. The pragmas come first: vectors are as wide as the
 * instructions enabled when the compiler reads their type. A tile whose loop is versioned for adjacent rows would write its sums to
 * memory in every step of either version. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
#pragma GCC optimize("no-version-loops-for-strides")
#define REAL float
#define REAL_IS_DOUBLE 0
#include "mathematics.h"

const Real REAL_FLOAT_AVX512 = REAL_TABLE;
#else
typedef int nothing_here;
#endif
