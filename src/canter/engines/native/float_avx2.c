/* The mathematics in float, for x86 processors with AVX2 and FMA. The pragma comes first: vectors are as wide as the
 * instructions enabled when the compiler reads their type. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#define REAL float
#define REAL_IS_DOUBLE 0
#include "mathematics.h"

const Real REAL_FLOAT_AVX2 = REAL_TABLE;
#else
typedef int nothing_here;
#endif
