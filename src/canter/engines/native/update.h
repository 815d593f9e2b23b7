/* The gradients of a minibatch from its index, sums, and the step of Adam. */
#ifndef CANTER_UPDATE_H
#define CANTER_UPDATE_H

/* Parts of a layer with parameters of their own. */
enum { LAYER, CELL_INPUT, CELL_HIDDEN };

/* Sums over threads, in their order, the field `which` of their traces of a part of a layer. */
static void collect(const Model *model, int threads, int tower, int layer, int part, size_t which,
                    const Parameter *parameter, long rows, long columns)
{
    REAL *to = parameter->gradient;
    if (!parameter->value || !to)
        return;
    for (int thread = 0; thread < threads; thread++) {
        const Trace *trace = &model->workspace[thread].trace[tower][layer];
        if (part != LAYER)
            trace = part == CELL_INPUT ? &trace->cell->input : &trace->cell->hidden;
        const REAL *from = *(void *const *)((const char *)trace + which);
        for (long r = 0; r < rows; r++) {
            const REAL *row = from + r * padded(columns);
            for (long j = 0; j < columns; j++)
                to[r * columns + j] = thread ? to[r * columns + j] + row[j] : row[j];
        }
    }
}

static void collect_linear(const Model *model, int threads, int tower, int layer, int part, const Layer *linear)
{
    const long n = linear->outputs;
    collect(model, threads, tower, layer, part, offsetof(Trace, d_weight), &linear->weight, n, linear->inputs);
    collect(model, threads, tower, layer, part, offsetof(Trace, d_bias), &linear->bias, 1, n);
}

static void collect_all(const Model *model, int parts, int threads)
{
    for (int t = 0; t < model->towers; t++) {
        const Tower *tower = &model->tower[t];
        for (int i = 0; parts_of(tower) & parts && i < tower->hidden + tower->heads; i++) {
            const Layer *layer = &tower->layer[i];
            if (i >= tower->hidden && !(part_of(layer) & parts))
                continue;
            const long n = layer->outputs;
            if (layer->cell) {
                collect_linear(model, threads, t, i, CELL_INPUT, &layer->cell->input);
                collect_linear(model, threads, t, i, CELL_HIDDEN, &layer->cell->hidden);
            } else
                collect_linear(model, threads, t, i, LAYER, layer);
            collect(model, threads, t, i, LAYER, offsetof(Trace, d_gamma), &layer->gamma, 1, n);
            collect(model, threads, t, i, LAYER, offsetof(Trace, d_beta), &layer->beta, 1, n);
        }
    }
    const Policy *policy = &model->policy;
    REAL *to = policy->raw_std.gradient;
    if (!(parts & POLICY) || !policy->raw_std.value || !to)
        return;
    memset(to, 0, policy->outputs * sizeof *to);
    for (int thread = 0; thread < threads; thread++)
        for (long j = 0; j < policy->outputs; j++)
            to[j] += ((const REAL *)model->workspace[thread].d_log_std)[j];
    std_form(policy, policy->raw_std.value, NULL, to, policy->outputs);
}

/* Writes the valid samples of sequences to model->selected; returns their number, or -1 for an index or a discrete action
 * out of range. Of other samples only a recurrent network reads the observation, whatever they hold. */
static long select_valid(Model *model, const Samples *samples, const int64_t *index, long count)
{
    const long sequences = samples->count / samples->steps;
    long selected = 0;
    for (long r = 0; r < count; r++)
        if (index[r] < 0 || index[r] >= sequences)
            return -1;
    for (long t = 0; t < samples->steps; t++)
        for (long r = 0; r < count; r++) {
            const int64_t row = t * sequences + index[r];
            if (!((const unsigned char *)samples->valid)[row])
                continue;
            if (model->loss.surrogate && !action_exists(&model->policy, samples, row))
                return -1;
            model->selected[selected++] = row;
        }
    return selected;
}

/* Computes mean and divisor that standardise advantages; the divisor is 0 if they do not vary, up to rounding, or hold
 * NaN. */
static void advantage_moments(const REAL *advantage, const int64_t *row, long count, int unbiased, Coefs *coefs)
{
    double mean = 0.0, square = 0.0, n = count ? (double)count : 1.0;
    for (long r = 0; r < count; r++)
        mean += advantage[row[r]];
    mean /= n;
    for (long r = 0; r < count; r++)
        square += (advantage[row[r]] - mean) * (advantage[row[r]] - mean);
    const double std = sqrt(square / (unbiased && n > 1 ? n - 1 : n)), least = 64 * 2.220446049250313e-16;
    const double resolution = real_eps > least ? real_eps : least;
    coefs->adv_mean = mean;
    coefs->adv_divisor = std > resolution * fabs(mean) ? std + 1e-8 : 0.0;
}

enum { DONE, NO_MEMORY, NO_SUCH_ROW };

static int gradients(Model *model, const Samples *samples, const int64_t *index, long count, Coefs coefs, double *sums)
{
    const long steps = samples->steps;
    if (count * steps > model->selected_room) {
        int64_t *room = realloc(model->selected, count * steps * sizeof *room);
        if (!room)
            return NO_MEMORY;
        model->selected = room, model->selected_room = count * steps;
    }
    const long selected = select_valid(model, samples, index, count);
    if (selected < 0)
        return NO_SUCH_ROW;
    if (model->loss.standardize && coefs.adv_divisor < 0)
        advantage_moments(samples->advantage, model->selected, selected, model->loss.standardize == SAMPLE_STD, &coefs);
    coefs.count = (double)selected;
    const double weight = 1.0 / (coefs.count > 1e-9 ? coefs.count : 1e-9); /* without samples every sum is zero */
    const int parts = (model->loss.surrogate ? POLICY : 0) | (model->loss.value ? VALUE : 0);
    pack_model(model, parts, 1);
    Job job = {.model = model, .samples = samples, .index = model->selected, .count = selected, .coefs = coefs,
               .weight = (REAL)weight, .parts = parts, .block = BLOCK};
    const int threads = threads_for(model, model->length ? count * steps : selected, steps, parts, 3);
    if (model->length) { /* whole sequences: states pass through samples that are not valid */
        job.index = index, job.count = count * steps;
        job.block = steps * sequences_of_block(count, threads, model->sequences);
    }
    run_in_threads(learn_blocks, &job, threads);
    collect_all(model, parts, threads);
    for (int s = 0; s < SUMS; s++) {
        sums[s] = 0.0;
        for (int thread = 0; thread < threads; thread++)
            sums[s] += model->workspace[thread].sums[s];
        sums[s] *= weight;
    }
    return DONE;
}

/* Uses eight accumulators, added in their order. */
static double square_sum(const void *array, long n)
{
    const REAL *x = array;
    double sums[8] = {0}, sum = 0.0;
    long j = 0;
    for (; j + 8 <= n; j += 8)
        UNROLL for (int lane = 0; lane < 8; lane++)
            sums[lane] += (double)x[j + lane] * x[j + lane];
    for (; j < n; j++)
        sums[j % 8] += (double)x[j] * x[j];
    for (int lane = 0; lane < 8; lane++)
        sum += sums[lane];
    return sum;
}

/* x[t] += decay[t] * x[t + 1], rows of `columns` numbers, backwards from the last row but one. */
static void reverse_discounted_sum(void *array, const void *decays, long n, long columns)
{
    REAL *x = array;
    const REAL *decay = decays;
    for (long j = n - columns - 1; j >= 0; j--)
        x[j] += decay[j] * x[j + columns];
}

/* Sums over the rows where `mask` is true: of each column, or of its squared distance from `centre`. The rounding error
 * is added to the next number (Kahan), so that the mean of equal numbers is that number. */
static void column_sums(const void *array, const char *mask, long rows, long columns, const double *centre, double *sums)
{
    enum { WIDE = 64 };
    for (long first = 0; first < columns; first += WIDE) {
        const long wide = columns - first < WIDE ? columns - first : WIDE;
        double sum[WIDE] = {0}, lost[WIDE] = {0};
        for (long i = 0; i < rows; i++) {
            const REAL *x = (const REAL *)array + i * columns + first;
            for (long j = 0; mask[i] && j < wide; j++) {
                const double distance = centre ? x[j] - centre[first + j] : 1.0;
                const double next = (centre ? distance * distance : x[j]) - lost[j], higher = sum[j] + next;
                lost[j] = higher - sum[j] - next;
                sum[j] = higher;
            }
        }
        memcpy(sums + first, sum, wide * sizeof *sums);
    }
}

/* Adam on gradients times `scale`, as torch's fused ones: weight decay decoupled, or coupled as part of the gradient. */
static void adamw(void *flat, const void *gradient, void *mean, void *square, long n, AdamW a)
{
    const REAL *restrict g = gradient;
    REAL *restrict x = flat, *restrict m = mean, *restrict v = square;
    const REAL scale = (REAL)a.scale, keep = (REAL)(a.coupled ? 1.0 : 1.0 - a.learning_rate * a.weight_decay), eps = (REAL)a.eps;
    const REAL pull = (REAL)(a.coupled ? a.weight_decay : 0.0);
    const REAL toward = (REAL)(1.0 - a.beta1), beta2 = (REAL)a.beta2, rest = (REAL)(1.0 - a.beta2);
    const REAL rate = (REAL)(a.learning_rate / (1.0 - pow(a.beta1, a.step)));
    const REAL inverse_root = (REAL)(1.0 / sqrt(1.0 - pow(a.beta2, a.step))); /* a division takes as long as ten products */
    for (long j = 0; j < n; j++) {
        REAL d = g[j] * scale + pull * x[j];
        m[j] += toward * (d - m[j]);
        v[j] = beta2 * v[j] + rest * d * d;
        x[j] = x[j] * keep - rate * m[j] / (real_sqrt(v[j]) * inverse_root + eps);
    }
}

#endif
