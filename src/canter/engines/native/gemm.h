/* Matrix products.
 *
 * Every number of a result is one sum over k = 0, 1, ... in that order, in one accumulator, whatever the tile it falls
 * into: a row's result does not depend on the rows around it. So acting and learning give equal bits, and the first
 * ratio of PPO is exactly 1. */
#ifndef CANTER_GEMM_H
#define CANTER_GEMM_H

/* c[i, j] = start[i, j] + sum over k of a[i, k] b[k, j]; the same tile serves layers, their inputs' gradients and their
 * weights' gradients, which differ in steps only. */
typedef struct {
    const REAL *a;
    long a_row, a_step;
    const REAL *b;
    long b_step, b_panel; /* from k to k + 1, and from PANEL columns to the next */
    const REAL *start;
    long start_row, start_panel;
    REAL *c;
    long c_row;
    long rows, columns, depth;
} Product;

INLINE void tile(const Product *p, long panel, long row, int rows, int vectors)
{
    const REAL *a = p->a + row * p->a_row, *b = p->b + panel * p->b_panel;
    const REAL *start = p->start + row * p->start_row + panel * p->start_panel;
    const long a_row = p->a_row, a_step = p->a_step, b_step = p->b_step;
    Vector sum[TILE_ROWS][VECTORS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++)
            sum[i][v] = *(const Vector *)(start + i * p->start_row + v * LANES);
    _Pragma("GCC unroll 4") for (long k = p->depth; k > 0; k--, a += a_step, b += b_step) {
        Vector right[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++)
            right[v] = *(const Vector *)(b + v * LANES);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int v = 0; v < vectors; v++)
                sum[i][v] = fused(sum[i][v], a[i * a_row], right[v]);
    }
    REAL *c = p->c + row * p->c_row + panel * PANEL;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++)
            *(Vector *)(c + i * p->c_row + v * LANES) = sum[i][v];
}

/* All rows of up to PANEL columns. */
INLINE void strip(const Product *p, long panel, int vectors)
{
    long row = 0;
    for (; row + TILE_ROWS <= p->rows; row += TILE_ROWS)
        tile(p, panel, row, TILE_ROWS, vectors);
    switch (p->rows - row) {
    case 1: tile(p, panel, row, 1, vectors); break;
    case 2: tile(p, panel, row, 2, vectors); break;
    case 3: tile(p, panel, row, 3, vectors); break;
    case 4: tile(p, panel, row, 4, vectors); break;
    case 5: tile(p, panel, row, 5, vectors); break;
    }
}

static void multiply(const Product *p)
{
    for (long panel = 0; panel * PANEL < p->columns; panel++) {
        long vectors = (p->columns - panel * PANEL + LANES - 1) / LANES;
        switch (vectors < VECTORS ? vectors : VECTORS) {
        case 1: strip(p, panel, 1); break;
        case 2: strip(p, panel, 2); break;
        case 3: strip(p, panel, VECTORS < 3 ? VECTORS : 3); break;
        case 4: strip(p, panel, VECTORS < 4 ? VECTORS : 4); break;
        }
    }
}

typedef REAL Four __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#if defined(__clang__)
#define PICK(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#elif REAL_IS_DOUBLE
#define PICK(A, B, ...) __builtin_shuffle(A, B, (int64_t __attribute__((vector_size(32)))){__VA_ARGS__})
#else
#define PICK(A, B, ...) __builtin_shuffle(A, B, (int32_t __attribute__((vector_size(16)))){__VA_ARGS__})
#endif

/* Four rows of four numbers, `row` apart, to columns `step` apart. */
INLINE void transpose(const REAL *from, long row, REAL *to, long step)
{
    const Four a = *(const Four *)from, b = *(const Four *)(from + row);
    const Four c = *(const Four *)(from + 2 * row), d = *(const Four *)(from + 3 * row);
    const Four ab = PICK(a, b, 0, 4, 1, 5), cd = PICK(c, d, 0, 4, 1, 5);
    const Four ab_high = PICK(a, b, 2, 6, 3, 7), cd_high = PICK(c, d, 2, 6, 3, 7);
    *(Four *)to = PICK(ab, cd, 0, 1, 4, 5);
    *(Four *)(to + step) = PICK(ab, cd, 2, 3, 6, 7);
    *(Four *)(to + 2 * step) = PICK(ab_high, cd_high, 0, 1, 4, 5);
    *(Four *)(to + 3 * step) = PICK(ab_high, cd_high, 2, 3, 6, 7);
}

/* A layer's weight [N, K] for x[M, K] -> y[M, N]: panels of PANEL outputs, each the bias and then K rows. What is
 * beyond N stays as the zeros that the panel began with. */
static void pack(const Layer *layer)
{
    const REAL *weight = layer->weight.value, *bias = layer->bias.value;
    const long inputs = layer->inputs, outputs = layer->outputs;
    for (long n = 0; n < outputs;) {
        REAL *to = (REAL *)layer->packed + n / PANEL * PANEL * (inputs + 1) + n % PANEL;
        const REAL *from = weight + n * inputs;
        long rows = outputs - n < 4 ? 1 : 4, k = 0;
        for (long i = 0; i < rows; i++)
            to[i] = bias[n + i];
        for (to += PANEL; rows == 4 && k + 4 <= inputs; k += 4)
            transpose(from + k, inputs, to + k * PANEL, PANEL);
        for (; k < inputs; k++)
            for (long i = 0; i < rows; i++)
                to[k * PANEL + i] = from[i * inputs + k];
        n += rows;
    }
}

/* The same for dy[M, N] -> dx[M, K]: panels of PANEL inputs, each N rows. */
static void pack_back(const Layer *layer)
{
    const REAL *weight = layer->weight.value;
    const long inputs = layer->inputs, outputs = layer->outputs;
    REAL *panel = layer->packed_back;
    for (long first = 0; first < inputs; first += PANEL)
        for (long n = 0, width = inputs - first < PANEL ? inputs - first : PANEL; n < outputs; n++, panel += PANEL)
            memcpy(panel, weight + n * inputs + first, width * sizeof(REAL));
}

#endif
