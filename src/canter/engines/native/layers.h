/* Activations, layer norm, and linear layers for one block of samples. */
#ifndef CANTER_LAYERS_H
#define CANTER_LAYERS_H

#define ROOT_HALF ((REAL)0.70710678118654752)
#define INVERSE_ROOT_TWO_PI ((REAL)0.39894228040143268)
#define ONE ((REAL)1)

INLINE REAL sigmoid(REAL x)
{
    return ONE / (ONE + fast_exp(-x));
}

INLINE REAL normal_cdf(REAL x)
{
    return (REAL)0.5 * (ONE + real_erf(x * ROOT_HALF));
}

INLINE REAL normal_density(REAL x)
{
    return INVERSE_ROOT_TWO_PI * fast_exp((REAL)-0.5 * x * x);
}

/* Name, 1 if the slope needs x, the value y of x, and the slope from x and y; NaN stays NaN. One line each. */
#define ACTIVATIONS(X)                                                                                                 \
    X(identity, 0, x, ONE)                                                                                             \
    X(tanh, 0, real_tanh(x), ONE - y * y)                                                                              \
    X(relu, 0, x < 0 ? 0 : x, y > 0 ? ONE : 0)                                                                         \
    X(elu, 0, x < 0 ? expm1_below_zero(x) : x, y < 0 ? ONE + y : ONE)                                                  \
    X(leaky_relu, 0, x < 0 ? (REAL)0.01 * x : x, y > 0 ? ONE : (REAL)0.01)                                             \
    X(silu, 1, x * sigmoid(x), sigmoid(x) * (ONE + x * (ONE - sigmoid(x))))                                            \
    X(gelu, 1, x * normal_cdf(x), normal_cdf(x) + x * normal_density(x))

#define LOOPS(NAME, NEEDS_X, VALUE_OF_X, SLOPE)                                                                        \
    static void activate_##NAME(const REAL *before, REAL *after, long n)                                \
    {                                                                                                                  \
        IN_PLACE for (long j = 0; j < n; j++) {                                                                        \
            const REAL x = before[j];                                                                                  \
            after[j] = VALUE_OF_X;                                                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    static void slope_##NAME(REAL *restrict d, const REAL *before, const REAL *after, long n)           \
    {                                                                                                                  \
        for (long j = 0; j < n; j++) {                                                                                 \
            const REAL x = before[j], y = after[j];                                                                    \
            (void)x, (void)y;                                                                                          \
            d[j] *= SLOPE;                                                                                             \
        }                                                                                                              \
    }
ACTIVATIONS(LOOPS)

#define ENTRY(NAME, NEEDS_X, VALUE_OF_X, SLOPE) {NEEDS_X, activate_##NAME, slope_##NAME},
static const struct {
    int needs_x;
    void (*activate)(const REAL *, REAL *, long);
    void (*slope)(REAL *, const REAL *, const REAL *, long);
} ACTIVATION[] = {ACTIVATIONS(ENTRY)};
enum { IDENTITY = 0 };

#ifdef DEFINES_NAMES
#define NAME_OF(NAME, ...) #NAME,
const char *const ACTIVATION_NAMES[] = {ACTIVATIONS(NAME_OF) NULL};
#endif

/* Sums over a row in as many accumulators as a vector has numbers; how they are added depends on n alone. */
INLINE REAL add_lanes(Vector sums)
{
    REAL sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

INLINE REAL row_sum(const REAL *x, long n)
{
    Vector sums = {0};
    long j = 0;
    for (; j + LANES <= n; j += LANES)
        sums += *(const Vector *)(x + j);
    REAL sum = add_lanes(sums);
    for (; j < n; j++)
        sum += x[j];
    return sum;
}

/* Of (x - shift) (y - shift). */
INLINE REAL row_dot(const REAL *x, const REAL *y, REAL shift, long n)
{
    Vector sums = {0};
    long j = 0;
    for (; j + LANES <= n; j += LANES)
        sums += (*(const Vector *)(x + j) - shift) * (*(const Vector *)(y + j) - shift);
    REAL sum = add_lanes(sums);
    for (; j < n; j++)
        sum += (x[j] - shift) * (y[j] - shift);
    return sum;
}

#define LAYER_NORM_EPS ((REAL)1e-5)

/* x becomes (x - mean) / std, y becomes gamma times that plus beta. */
static void normalize(const Layer *layer, REAL *x, REAL *y, REAL *inverse, long rows, long stride)
{
    const REAL *gamma = layer->gamma.value, *beta = layer->beta.value;
    const long n = layer->outputs;
    for (long r = 0; r < rows; r++, x += stride, y += stride) {
        REAL mean = row_sum(x, n) / n;
        inverse[r] = ONE / real_sqrt(row_dot(x, x, mean, n) / n + LAYER_NORM_EPS);
        IN_PLACE for (long j = 0; j < n; j++) {
            x[j] = (x[j] - mean) * inverse[r];
            y[j] = x[j] * gamma[j] + beta[j];
        }
    }
}

static void normalize_back(const Layer *layer, const Trace *t, REAL *d, long rows, long stride)
{
    const REAL *gamma = layer->gamma.value, *x = t->normal, *inverse = t->inverse;
    REAL *d_gamma = t->d_gamma, *d_beta = t->d_beta;
    const long n = layer->outputs;
    for (long r = 0; r < rows; r++, x += stride, d += stride) {
        IN_PLACE for (long j = 0; j < n; j++) {
            d_gamma[j] += d[j] * x[j];
            d_beta[j] += d[j];
            d[j] *= gamma[j];
        }
        REAL mean = row_sum(d, n) / n, along = row_dot(d, x, 0, n) / n;
        IN_PLACE for (long j = 0; j < n; j++)
            d[j] = inverse[r] * (d[j] - mean - x[j] * along);
    }
}

static void add_rows(REAL *restrict sums, const REAL *restrict d, long rows, long stride)
{
    for (long r = 0; r < rows; r++, d += stride)
        for (long j = 0; j < stride; j++)
            sums[j] += d[j];
}

/* x[rows, K] through one linear layer. */
static void linear_forward(const Layer *layer, const Trace *t, const REAL *x, long rows)
{
    const long stride = padded(layer->outputs), panel = (layer->inputs + 1) * PANEL;
    const REAL *packed = layer->packed;
    REAL *product = t->normal ? t->normal : t->before;
    multiply(&(Product){.a = x, .a_row = padded(layer->inputs), .a_step = 1,
                        .b = packed + PANEL, .b_step = PANEL, .b_panel = panel,
                        .start = packed, .start_row = 0, .start_panel = panel,
                        .c = product, .c_row = stride,
                        .rows = rows, .columns = layer->outputs, .depth = layer->inputs});
    if (t->normal)
        normalize(layer, product, t->before, t->inverse, rows, stride);
    if (layer->activation != IDENTITY)
        ACTIVATION[layer->activation].activate(t->before, t->after, rows * stride);
}

/* Rows of the gradient of a layer's weight, in its memory order. */
INLINE long weight_rows(const Layer *layer)
{
    return layer->transposed ? layer->inputs : layer->outputs;
}

INLINE long weight_columns(const Layer *layer)
{
    return layer->transposed ? layer->outputs : layer->inputs;
}

/* Adds the products of x and of the gradient `d` to rows `from` to `to` of the gradient of a layer's weight, and with
 * the first row to that of its bias. */
static void layer_gradients(const Layer *layer, const Trace *sums, const REAL *x, const REAL *d, long from, long to,
                            long rows)
{
    const long d_stride = padded(layer->outputs), x_stride = padded(layer->inputs);
    const REAL *left = layer->transposed ? x : d, *right = layer->transposed ? d : x;
    const long left_stride = layer->transposed ? x_stride : d_stride, stride = layer->transposed ? d_stride : x_stride;
    REAL *sum = (REAL *)sums->d_weight + from * stride;
    multiply(&(Product){.a = left + from, .a_row = 1, .a_step = left_stride,
                        .b = right, .b_step = stride, .b_panel = PANEL,
                        .start = sum, .start_row = stride, .start_panel = PANEL,
                        .c = sum, .c_row = stride,
                        .rows = to - from, .columns = weight_columns(layer), .depth = rows});
    if (from == 0)
        add_rows(sums->d_bias, d, rows, d_stride);
}

/* Writes the product of the gradient `d` of a layer's output and its weight to `back`, or adds it. */
static void input_gradient(const Model *model, const Layer *layer, const REAL *d, REAL *back, int add, long rows)
{
    const long stride = padded(layer->outputs), x_stride = padded(layer->inputs);
    multiply(&(Product){.a = d, .a_row = stride, .a_step = 1,
                        .b = layer->packed_back, .b_step = PANEL, .b_panel = layer->outputs * PANEL,
                        .start = add ? back : model->zeros, .start_row = add ? x_stride : 0, .start_panel = PANEL,
                        .c = back, .c_row = x_stride,
                        .rows = rows, .columns = layer->inputs, .depth = layer->outputs});
}

/* Multiplies the gradient `d` of a linear layer's output by the slope of its activation; unless `back` is NULL, writes
 * the gradient of its input there, or adds it. */
static void linear_backward(const Model *model, const Layer *layer, const Trace *t, REAL *back, int add, long rows)
{
    const long stride = padded(layer->outputs);
    REAL *d = t->d;
    if (layer->activation != IDENTITY)
        ACTIVATION[layer->activation].slope(d, t->before, t->after, rows * stride);
    if (t->normal)
        normalize_back(layer, t, d, rows, stride);
    if (back)
        input_gradient(model, layer, d, back, add, rows);
}

#endif
