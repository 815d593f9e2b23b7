/* Bias and activation of a layer on a CPU, forward and backward, in one pass each.
 *
 * M rows, N outputs; arrays are contiguous float32. NumPy has four passes over memory where this has one, and on some
 * processors an exponential of one number at a time. `host_layers.py` has the definition, which tests hold this against,
 * and goes without this module where it could not be built.
 *
 * Loops are plain: the compiler makes vectors of them, and on x86 a version for each generation of processors.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define EACH_PROCESSOR
#endif

enum { IDENTITY, ELU, RELU, TANH };

/* exp(x) - 1 for x <= 0, to 1e-7 of its value; anything for others, NaN included.
 *
 * exp(x) = 2^n exp(f) with |f| <= log(2) / 2. Adding 1.5 * 2^23 rounds to an integer, which then stands in the last
 * bits. Below -17 the result is -1 to the last bit. */
static inline float expm1_below_zero(float x)
{
    const float rounder = 12582912.0f;
    x = x > -17.0f ? x : -17.0f;
    float shifted = x * 1.44269504f + rounder;
    float f = x - (shifted - rounder) * 0.69314718f;
    float square = f * f;
    /* The polynomial of degree 6 with the smallest relative error, 1.4e-8, for exp(f) - 1. */
    float high = 8.366066868e-3f + f * 1.389823061e-3f, low = 1.666654852e-1f + f * 4.166685452e-2f;
    float rest = f + square * (0.5f + f * (low + square * high));
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3F800000u; /* 2^n */
    float power;
    memcpy(&power, &bits, sizeof power);
    return power * rest + (power - 1.0f);
}

static inline float activation(float x, int kind)
{
    if (kind == ELU)
        return x < 0.0f ? expm1_below_zero(x) : x;
    if (kind == RELU)
        return x < 0.0f ? 0.0f : x;
    if (kind == TANH) {
        float e = expm1_below_zero(x < 0.0f ? 2.0f * x : -2.0f * x);
        float size = -e / (e + 2.0f);
        return x < 0.0f ? -size : x >= 0.0f ? size : x; /* x is NaN */
    }
    return x;
}

/* The derivative of the activation, from its value. */
static inline float slope(float y, int kind)
{
    if (kind == ELU)
        return y < 0.0f ? 1.0f + y : 1.0f;
    if (kind == RELU)
        return y > 0.0f ? 1.0f : 0.0f;
    if (kind == TANH)
        return 1.0f - y * y;
    return 1.0f;
}

/* The kind is a constant in each of these, so that no element asks for it. */
#define LOOPS(NAME, KIND)                                                                                              \
    EACH_PROCESSOR static void activate_##NAME(float *restrict y, const float *restrict bias, size_t m, size_t n)      \
    {                                                                                                                  \
        for (; m > 0; m--, y += n)                                                                                     \
            for (size_t j = 0; j < n; j++)                                                                             \
                y[j] = activation(y[j] + bias[j], KIND);                                                               \
    }                                                                                                                  \
    EACH_PROCESSOR static void descend_##NAME(float *restrict d, const float *restrict y, float *restrict sums,        \
                                              size_t m, size_t n)                                                      \
    {                                                                                                                  \
        memset(sums, 0, n * sizeof *sums);                                                                             \
        for (; m > 0; m--, d += n, y += n)                                                                             \
            for (size_t j = 0; j < n; j++)                                                                             \
                sums[j] += d[j] *= slope(y[j], KIND);                                                                  \
    }

LOOPS(identity, IDENTITY)
LOOPS(elu, ELU)
LOOPS(relu, RELU)
LOOPS(tanh, TANH)

typedef void (*Activate)(float *, const float *, size_t, size_t);
typedef void (*Descend)(float *, const float *, float *, size_t, size_t);
static const Activate ACTIVATE[] = {activate_identity, activate_elu, activate_relu, activate_tanh};
static const Descend DESCEND[] = {descend_identity, descend_elu, descend_relu, descend_tanh};

/* Whether `all` is rows of as many numbers as `row` has, and the kind one of those above. */
static int fits(const Py_buffer *all, const Py_buffer *row, int kind)
{
    int fine = row->len > 0 && row->len % sizeof(float) == 0 && all->len % row->len == 0 && kind >= 0 && kind <= TANH;
    if (!fine)
        PyErr_Format(PyExc_ValueError, "%zd bytes are no rows of %zd bytes of float32, or %d is no activation",
                     all->len, row->len, kind);
    return fine;
}

static PyObject *activate(PyObject *self, PyObject *args)
{
    Py_buffer y, bias;
    int kind;
    if (!PyArg_ParseTuple(args, "w*y*i", &y, &bias, &kind))
        return NULL;
    int fine = fits(&y, &bias, kind);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        ACTIVATE[kind](y.buf, bias.buf, y.len / bias.len, bias.len / sizeof(float));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&y);
    PyBuffer_Release(&bias);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *descend(PyObject *self, PyObject *args)
{
    Py_buffer d, y, sums;
    int kind;
    if (!PyArg_ParseTuple(args, "w*y*w*i", &d, &y, &sums, &kind))
        return NULL;
    int fine = fits(&d, &sums, kind);
    if (fine && d.len != y.len) {
        PyErr_Format(PyExc_ValueError, "a gradient of %zd bytes for outputs of %zd", d.len, y.len);
        fine = 0;
    }
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        DESCEND[kind](d.buf, y.buf, sums.buf, d.len / sums.len, sums.len / sizeof(float));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&d);
    PyBuffer_Release(&y);
    PyBuffer_Release(&sums);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef METHODS[] = {
    {"activate", activate, METH_VARARGS, "activate(y, bias, kind): y[M, N] = act(y + bias[N]), in place."},
    {"descend", descend, METH_VARARGS, "descend(d, y, sums, kind): d[M, N] *= act'(y[M, N]); sums[N] = d.sum(0)."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_host", NULL, -1, METHODS};

PyMODINIT_FUNC PyInit__host(void)
{
    return PyModule_Create(&MODULE);
}
