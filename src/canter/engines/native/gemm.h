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

typedef REAL Four __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

/* How a tile reads its left factor: number by number, four adjacent rows at once, or four numbers of a row at once. ARM
 * multiplies by any number of a register, so that one load serves four products; x86 loads a number into all lanes at
 * once from any address. */
enum { SINGLY, ACROSS, ALONG, BY_FOURS = 4 };

/* A block of rows fills the first cache, so the next reads of a tile are prefetched this many steps ahead. */
enum { AHEAD = 8 };

INLINE void tile(const Product *p, long panel, long row, int rows, int vectors, int how)
{
    const REAL *a = p->a + row * p->a_row, *b = p->b + panel * p->b_panel;
    const REAL *start = p->start + row * p->start_row + panel * p->start_panel;
    const long a_row = p->a_row, a_step = p->a_step, b_step = p->b_step;
    Vector sum[TILE_ROWS][VECTORS];
    Four left[TILE_ROWS] = {0};
    long k = 0;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++)
            sum[i][v] = *(const Vector *)(start + i * p->start_row + v * LANES);
#define MULTIPLY_BY(LEFT)                                                                                              \
    do {                                                                                                               \
        Vector right[VECTORS];                                                                                         \
        UNROLL for (int v = 0; v < vectors; v++)                                                                       \
            right[v] = *(const Vector *)(b + v * LANES);                                                               \
        UNROLL for (int i = 0; i < rows; i++)                                                                          \
            UNROLL for (int v = 0; v < vectors; v++)                                                                   \
                sum[i][v] = fused(sum[i][v], LEFT, right[v]);                                                          \
        b += b_step;                                                                                                   \
        NEXT_STEP;                                                                                                     \
    } while (0)
    for (; how == ALONG && k + 4 <= p->depth; k += 4, a += 4) {
        UNROLL for (int i = 0; i < rows; i++) {
            left[i] = *(const Four *)(a + i * a_row);
            __builtin_prefetch(a + i * a_row + AHEAD * 4);
        }
        UNROLL for (int q = 0; q < 4; q++)
            MULTIPLY_BY(left[i][q]);
    }
    _Pragma("GCC unroll 4") for (; k < p->depth; k++, a += a_step) {
        if (how == ACROSS) {
            left[0] = *(const Four *)a;
            __builtin_prefetch(a + AHEAD * a_step);
            __builtin_prefetch(b + AHEAD * b_step);
        }
        MULTIPLY_BY(how == ACROSS ? left[0][i] : a[i * a_row]);
    }
    REAL *c = p->c + row * p->c_row + panel * PANEL;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++)
            *(Vector *)(c + i * p->c_row + v * LANES) = sum[i][v];
}

/* All rows of up to PANEL columns. */
INLINE void strip(const Product *p, long panel, int vectors, int how)
{
    long row = 0;
    for (; how != SINGLY && row + BY_FOURS <= p->rows; row += BY_FOURS)
        tile(p, panel, row, BY_FOURS, vectors, how);
    for (; row + TILE_ROWS <= p->rows; row += TILE_ROWS)
        tile(p, panel, row, TILE_ROWS, vectors, SINGLY);
    switch (p->rows - row) {
    case 1: tile(p, panel, row, 1, vectors, SINGLY); break;
    case 2: tile(p, panel, row, 2, vectors, SINGLY); break;
    case 3: tile(p, panel, row, 3, vectors, SINGLY); break;
    case 4: tile(p, panel, row, 4, vectors, SINGLY); break;
    case 5: tile(p, panel, row, 5, vectors, SINGLY); break;
    }
}

INLINE void strips(const Product *p, int how)
{
    for (long panel = 0; panel * PANEL < p->columns; panel++) {
        long vectors = (p->columns - panel * PANEL + LANES - 1) / LANES;
        switch (vectors < VECTORS ? vectors : VECTORS) {
        case 1: strip(p, panel, 1, how); break;
        case 2: strip(p, panel, 2, how); break;
        case 3: strip(p, panel, VECTORS < 3 ? VECTORS : 3, how); break;
        case 4: strip(p, panel, VECTORS < 4 ? VECTORS : 4, how); break;
        }
    }
}

static void multiply(const Product *p)
{
    if (READS_FOURS && p->a_row == 1)
        strips(p, ACROSS);
    else if (READS_FOURS && p->a_step == 1)
        strips(p, ALONG);
    else
        strips(p, SINGLY);
}

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

/* Packs from[columns, depth] as the right factor of products: panels of PANEL columns, each `depth` rows, and `step`
 * numbers from one to the next. Columns beyond the last one stay zero. */
static void pack_transposed(const REAL *from, long depth, long columns, REAL *panels, long step)
{
    for (long n = 0, rows; n < columns; n += rows, from += rows * depth) {
        REAL *to = panels + n / PANEL * step + n % PANEL;
        long k = 0;
        rows = columns - n < 4 ? 1 : 4;
        for (; rows == 4 && k + 4 <= depth; k += 4)
            transpose(from + k, depth, to + k * PANEL, PANEL);
        for (; k < depth; k++)
            for (long i = 0; i < rows; i++)
                to[k * PANEL + i] = from[i * depth + k];
    }
}

/* The same of from[depth, columns]. */
static void pack_rows(const REAL *from, long depth, long columns, REAL *panels, long step)
{
    for (long first = 0; first < columns; first += PANEL, panels += step) {
        const long width = columns - first < PANEL ? columns - first : PANEL;
        for (long k = 0; k < depth; k++)
            memcpy(panels + k * PANEL, from + k * columns + first, width * sizeof(REAL));
    }
}

/* A layer's weight for x[M, K] -> y[M, N]: panels of PANEL outputs, each the bias and then K rows. */
static void pack(const Layer *layer)
{
    const REAL *bias = layer->bias.value;
    const long step = PANEL * (layer->inputs + 1);
    REAL *packed = layer->packed;
    for (long n = 0; n < layer->outputs; n++)
        packed[n / PANEL * step + n % PANEL] = bias[n];
    (layer->transposed ? pack_rows : pack_transposed)(layer->weight.value, layer->inputs, layer->outputs, packed + PANEL,
                                                  step);
}

/* The same for dy[M, N] -> dx[M, K]: panels of PANEL inputs, each N rows. */
static void pack_back(const Layer *layer)
{
    (layer->transposed ? pack_transposed : pack_rows)(layer->weight.value, layer->outputs, layer->inputs, layer->packed_back,
                                              layer->outputs * PANEL);
}

#endif
