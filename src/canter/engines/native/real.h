/* The number type, vectors of it, and its elementary functions. */
#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "native.h"

/* Inlined, so that sizes that are constants in the caller are constants here. */
#define INLINE static inline __attribute__((always_inline))
/* Not inlined: a formula used for acting and for learning must round in one way. */
#define ONCE static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 16")
/* Arrays of a loop are the same or do not overlap. */
#define IN_PLACE _Pragma("GCC ivdep")

/* Tiles of TILE_ROWS x VECTORS vectors fill the registers without spilling: 32 of 16 bytes (NEON) or of 64 (AVX-512), 16
 * of 16 or 32 bytes (SSE, AVX2). */
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, VECTORS = 4, TILE_ROWS = 6 };
#elif defined(__AVX2__)
enum { VECTOR_BYTES = 32, VECTORS = 2, TILE_ROWS = 6 };
#elif defined(__x86_64__)
enum { VECTOR_BYTES = 16, VECTORS = 2, TILE_ROWS = 6 };
#else
enum { VECTOR_BYTES = 16, VECTORS = 4, TILE_ROWS = 6 };
#endif
/* Between the steps of a tile: a compiler that reads ahead for the next one has no registers left for its sums. */
#if defined(__AVX512F__)
#define NEXT_STEP __asm__ volatile("" ::: "memory")
#else
#define NEXT_STEP (void)0
#endif
#if defined(__aarch64__) && !REAL_IS_DOUBLE
enum { READS_FOURS = 1 }; /* see gemm.h */
#else
enum { READS_FOURS = 0 };
#endif
enum { LANES = VECTOR_BYTES / sizeof(REAL), PANEL = LANES * VECTORS };
typedef REAL Vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* sum + a * b, rounded once wherever the processor can. Left to itself GCC 13 fuses products and sums of x86 in some
 * tiles and takes them apart in others, and a row would depend on the rows around it. */
INLINE Vector fused(Vector sum, REAL a, Vector b)
{
#if defined(__AVX512F__) && !REAL_IS_DOUBLE
    return (Vector)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && !REAL_IS_DOUBLE
    return (Vector)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* From one row of n numbers to the next: whole panels, and of wide rows an odd number of them. Rows that are a power of
 * two apart share a few cache sets and evict each other when a product walks down a column. */
INLINE long padded(long n)
{
    long panels = (n + PANEL - 1) / PANEL;
    return (panels < 8 ? panels : panels | 1) * PANEL;
}

#if REAL_IS_DOUBLE

#define real_exp exp
#define real_expm1 expm1
#define real_log log
#define real_tanh tanh
#define real_erf erf
#define real_sqrt sqrt
#define real_tiny 2.2250738585072014e-308
#define real_eps 2.220446049250313e-16
INLINE double expm1_below_zero(double x)
{
    return expm1(x);
}
INLINE double fast_exp(double x)
{
    return exp(x);
}

#else

#define real_exp expf
#define real_expm1 expm1f
#define real_log logf
#define real_sqrt sqrtf
#define real_tiny 1.17549435e-38f
#define real_eps 1.1920929e-7f

/* exp(x) = 2^n exp(f) with |f| <= log(2) / 2: returns 2^n and exp(f) - 1, for -87 <= x <= 87.
 *
 * Adding 1.5 * 2^23 rounds to an integer, which then stands in the last bits; log(2) comes in two parts, for the
 * product of n and the first is exact. */
INLINE float split_exp(float x, float *power)
{
    const float rounder = 12582912.0f;
    float shifted = x * 1.44269504f + rounder, n = shifted - rounder;
    float f = x - n * 0.693359375f + n * 2.12194440e-4f, square = f * f;
    /* The polynomial of degree 6 with the smallest relative error, 1.4e-8. */
    float high = 8.366066868e-3f + f * 1.389823061e-3f, low = 1.666654852e-1f + f * 4.166685452e-2f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3F800000u;
    memcpy(power, &bits, sizeof *power);
    return f + square * (0.5f + f * (low + square * high));
}

/* The smaller of |x| and a limit. As whole numbers, for a processor compares those in one instruction; NaN becomes the
 * limit, so callers see to it that NaN stays NaN. */
INLINE float size_up_to(float limit, float x)
{
    uint32_t size, most;
    memcpy(&size, &x, sizeof size);
    memcpy(&most, &limit, sizeof most);
    size &= 0x7FFFFFFFu;
    size = size < most ? size : most;
    memcpy(&x, &size, sizeof x);
    return x;
}

/* exp(x) - 1 for x <= 0 to 1e-7 of its value, and anything else for others. Below -17 it is -1 to the last bit. */
INLINE float expm1_below_zero(float x)
{
    float power, rest = split_exp(-size_up_to(17.0f, x), &power);
    return power * rest + (power - 1.0f);
}

/* exp(x) for -87 <= x <= 87, beyond that its value there; of NaN anything. */
INLINE float fast_exp(float x)
{
    float power, rest = split_exp(copysignf(size_up_to(87.0f, x), x), &power);
    return power + power * rest;
}

INLINE float real_tanh(float x)
{
    float e = expm1_below_zero(2.0f * x), y = copysignf(e / (e + 2.0f), x);
    return x == x ? y : x;
}

/* The error function to 1e-7: a polynomial near 0, and 1 - exp of one elsewhere; of NaN anything. */
INLINE float real_erf(float x)
{
    float u = size_up_to(4.0f, x), s = u * u; /* it is 1 at 4; the polynomial would turn back */
    float far = (-1.72853470e-5f * u + 3.83197126e-4f) * s + (-3.88396438e-3f * u + 2.42546219e-2f);
    far = ((far * u - 1.06777877e-1f) * u - 6.34846687e-1f) * u - 1.28717512e-1f;
    far = 1.0f - fast_exp(far * u - u);
    float near = ((-5.96761703e-4f * s + 4.99119423e-3f) * s - 2.67681349e-2f) * s + 1.12819925e-1f;
    near = ((near * s - 3.76125336e-1f) * s + 1.28379166e-1f) * u + u;
    return copysignf(u < 0.927734375f ? near : far, x);
}

#endif
