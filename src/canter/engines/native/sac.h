/* SAC: the gradients of the critics and of the policy for one batch.
 *
 * Threads share blocks of samples in the forward and backward pass, and then rows of each weight's gradient. Every
 * number is computed in one order by whichever thread, so results do not depend on the number of threads. */
#ifndef CANTER_SAC_H
#define CANTER_SAC_H

#define LOG_TWO ((REAL)0.69314718055994531)

typedef struct {
    Model *model;
    SACBatch *batch;
    int policy;  /* compute the policy's gradients, otherwise those of the critics */
    REAL weight; /* of a sample in the mean */
} SACJob;

static REAL *sample_values(const Model *model, int which)
{
    return (REAL *)model->sample_values + which * model->batch_size;
}

static REAL *sample_std(const Model *model, long row)
{
    return sample_values(model, SAMPLE_VALUES) + row * model->policy.outputs;
}

static void pack_layers(void *context, int thread, int threads)
{
    const SACJob *job = context;
    const Model *model = job->model;
    int number = 0;
    for (int t = 0; t < (job->policy ? 1 + model->critics : model->towers); t++)
        for (int i = 0; i < model->tower[t].hidden + model->tower[t].heads; i++)
            if (number++ % threads == thread) {
                pack(&model->tower[t].layer[i]);
                if (t <= model->critics)
                    pack_back(&model->tower[t].layer[i]);
            }
}

/* Samples the policy's actions for a block into the critics' input, and computes their log-probabilities. */
static void sample_actions(const SACJob *job, const Workspace *w, const Samples *samples, long first, long count)
{
    const Model *model = job->model;
    const long n = model->policy.outputs, stride = padded(n), inputs = model->tower[1].inputs;
    gather(model, 0, samples, NULL, first, count, w->input[0]);
    gather(model, 1, samples, NULL, first, count, w->input[1]);
    tower_forward(model, 0, w, POLICY, count);
    const Trace *heads = &w->trace[0][model->tower[0].hidden];
    for (long r = 0; r < count; r++) {
        const REAL *noise = (const REAL *)job->batch->noise + (first + r) * n;
        const REAL *mean = (REAL *)heads[0].after + r * stride;
        REAL *action = (REAL *)w->input[1] + r * padded(inputs) + inputs - n, *std = sample_std(model, first + r);
        REAL log_prob = 0;
        std_form(&model->policy, (REAL *)heads[1].after + r * stride, std, NULL, n);
        for (long j = 0; j < n; j++) {
            const REAL log_std = std[j];
            std[j] = real_exp(log_std);
            const REAL raw = mean[j] + std[j] * noise[j];
            log_prob += (REAL)-0.5 * noise[j] * noise[j] - log_std - HALF_LOG_TWO_PI;
            log_prob -= 2 * (LOG_TWO - raw - softplus(-2 * raw)); /* log(1 - tanh(raw)^2), accurate for large values too */
            action[j] = real_tanh(raw);
        }
        sample_values(model, LOG_PROB)[first + r] = log_prob;
    }
}

static REAL *critic_value(const Model *model, const Workspace *w, int tower, long r)
{
    return (REAL *)w->trace[tower][model->tower[tower].hidden].after + r * padded(1);
}

/* Returns the minimum or the mean of the critics from tower `from` on, and how many critics have the minimum. */
static REAL reduce_critics(const Model *model, const Workspace *w, int from, long r, int *equal)
{
    REAL value = *critic_value(model, w, from, r), sum = value;
    for (int t = from + 1; t < from + model->critics; t++) {
        const REAL other = *critic_value(model, w, t, r);
        sum += other;
        value = other < value || other != other ? other : value;
    }
    *equal = 0;
    for (int t = from; t < from + model->critics; t++)
        *equal += *critic_value(model, w, t, r) == value;
    return model->lowest ? value : sum / model->critics;
}

static void critic_blocks(void *context, int thread, int threads)
{
    const SACJob *job = context;
    const Model *model = job->model;
    const SACBatch *batch = job->batch;
    const REAL *reward = batch->reward, *discount = batch->discount, temperature = (REAL)batch->temperature;
    REAL *target = sample_values(model, TARGET), *errors = sample_values(model, ERROR);
    FOR_BLOCKS(first, count, model->batch_size, BLOCK) {
        const Workspace *w = &model->workspace[first / BLOCK];
        int equal;
        sample_actions(job, w, &batch->next, first, count);
        for (int t = 1 + model->critics; t < model->towers; t++)
            tower_forward(model, t, w, VALUE, count);
        for (long r = 0; r < count; r++) {
            const REAL value = reduce_critics(model, w, 1 + model->critics, r, &equal);
            const REAL log_prob = sample_values(model, LOG_PROB)[first + r];
            target[first + r] = reward[first + r] + discount[first + r] * (value - temperature * log_prob);
            errors[first + r] = 0;
        }
        gather(model, 1, &batch->now, NULL, first, count, w->input[1]);
        for (int t = 1; t <= model->critics; t++) {
            tower_forward(model, t, w, VALUE, count);
            for (long r = 0; r < count; r++) {
                REAL *value = critic_value(model, w, t, r), error = *value - target[first + r];
                const int valid = ((const unsigned char *)batch->valid)[first + r];
                errors[first + r] += valid ? (REAL)0.5 * error * error : 0;
                *value = (valid ? job->weight : 0) * error; /* NaN stays NaN, as with autograd */
            }
            tower_backward(model, t, w, VALUE, NULL, 0, count);
        }
    }
}

/* Turns the gradients of actions into those of the policy's heads, which overwrite their outputs. */
static void policy_heads_back(const SACJob *job, const Workspace *w, const REAL *d_input, long first, long count)
{
    const Model *model = job->model;
    const long n = model->policy.outputs, stride = padded(n), inputs = model->tower[1].inputs;
    const REAL of_entropy = (REAL)job->batch->temperature * job->weight;
    const Trace *heads = &w->trace[0][model->tower[0].hidden];
    for (long r = 0; r < count; r++) {
        const REAL *noise = (const REAL *)job->batch->noise + (first + r) * n, *std = sample_std(model, first + r);
        const REAL *action = (REAL *)w->input[1] + r * padded(inputs) + inputs - n;
        const REAL *d_action = d_input + r * padded(inputs) + inputs - n;
        REAL *mean = (REAL *)heads[0].after + r * stride, *raw_std = (REAL *)heads[1].after + r * stride, *d = w->row;
        for (long j = 0; j < n; j++) {
            mean[j] = 2 * of_entropy * action[j] + d_action[j] * (ONE - action[j] * action[j]);
            d[j] = mean[j] * std[j] * noise[j] - of_entropy;
        }
        std_form(&model->policy, raw_std, NULL, d, n);
        memcpy(raw_std, d, n * sizeof *d);
    }
}

static void policy_blocks(void *context, int thread, int threads)
{
    const SACJob *job = context;
    const Model *model = job->model;
    FOR_BLOCKS(first, count, model->batch_size, BLOCK) {
        const Workspace *w = &model->workspace[first / BLOCK];
        REAL *d_input = w->d[0];
        sample_actions(job, w, &job->batch->now, first, count);
        for (int t = 1; t <= model->critics; t++)
            tower_forward(model, t, w, VALUE, count);
        for (long r = 0; r < count; r++) {
            int equal;
            const REAL reduced = reduce_critics(model, w, 1, r, &equal);
            sample_values(model, VALUE_OF_SAMPLE)[first + r] = reduced;
            for (int t = 1; t <= model->critics; t++) { /* critics with the same minimum share the gradient */
                REAL *value = critic_value(model, w, t, r), share = (REAL)(*value == reduced) / equal;
                *value = -job->weight * (model->lowest ? share : ONE / model->critics);
            }
        }
        for (int t = 1; t <= model->critics; t++)
            tower_backward(model, t, w, VALUE, d_input, t > 1, count);
        policy_heads_back(job, w, d_input, first, count);
        tower_backward(model, 0, w, POLICY, NULL, 0, count);
    }
}

enum { ROWS_AT_ONCE = 48 }; /* of a weight's gradient: they stay in the cache until they are copied to the parameter's gradient */

/* Rows of the gradient of one layer's weight, and with the first that of its bias, over all samples of the batch. */
static void gradient_rows(const Model *model, int t, int i, long from, long to)
{
    const Layer *layer = &model->tower[t].layer[i];
    const Trace *sums = &model->workspace[0].trace[t][i];
    const long columns = weight_columns(layer), stride = padded(columns);
    REAL *sum = (REAL *)sums->d_weight + from * stride, *weight = layer->weight.gradient;
    memset(sum, 0, (to - from) * stride * sizeof *sum);
    if (from == 0)
        memset(sums->d_bias, 0, padded(layer->outputs) * sizeof *sum);
    for (int b = 0; b < model->workspaces; b++) {
        const Workspace *w = &model->workspace[b];
        const long left = model->batch_size - (long)b * BLOCK, count = left < BLOCK ? left : BLOCK;
        layer_gradients(layer, sums, layer_input(model, t, i, w), w->trace[t][i].d, from, to, count);
    }
    for (long row = from; row < to; row++, sum += stride)
        memcpy(weight + row * columns, sum, columns * sizeof *sum);
    if (from == 0)
        memcpy(layer->bias.gradient, sums->d_bias, layer->outputs * sizeof *sum);
}

static void gradient_parts(void *context, int thread, int threads)
{
    const SACJob *job = context;
    int number = 0;
    for (int t = job->policy ? 0 : 1; t <= (job->policy ? 0 : job->model->critics); t++)
        for (int i = 0; i < job->model->tower[t].hidden + job->model->tower[t].heads; i++) {
            const long rows = weight_rows(&job->model->tower[t].layer[i]);
            for (long from = 0; from < rows; from += ROWS_AT_ONCE)
                if (number++ % threads == thread)
                    gradient_rows(job->model, t, i, from, from + ROWS_AT_ONCE < rows ? from + ROWS_AT_ONCE : rows);
        }
}

static void make_gradients(SACJob *job)
{
    const int threads = threads_for(job->model, job->model->batch_size, 1, POLICY | VALUE, 3);
    run_in_threads(pack_layers, job, threads);
    run_in_threads(job->policy ? policy_blocks : critic_blocks, job, threads);
    run_in_threads(gradient_parts, job, threads);
}

static double mean_of(const REAL *x, long n)
{
    double sum = 0.0;
    for (long j = 0; j < n; j++)
        sum += x[j];
    return sum / n;
}

static void sac_gradients(Model *model, SACBatch *batch, int policy)
{
    const long rows = model->batch_size;
    const REAL *target = sample_values(model, TARGET);
    double *means = batch->means, counted = policy ? rows : 0.0, square = 0.0;
    for (long r = 0; r < rows && !policy; r++)
        counted += ((const unsigned char *)batch->valid)[r] != 0;
    SACJob job = {model, batch, policy, (REAL)(1.0 / (counted < 1.0 ? 1.0 : counted))};
    make_gradients(&job);
    if (policy) {
        means[1] = mean_of(sample_values(model, LOG_PROB), rows);
        means[2] = mean_of(sample_std(model, 0), rows * model->policy.outputs);
        means[3] = mean_of(sample_values(model, VALUE_OF_SAMPLE), rows);
        means[0] = batch->temperature * means[1] - means[3];
        return;
    }
    const double mean = mean_of(target, rows);
    for (long r = 0; r < rows; r++)
        square += (target[r] - mean) * (target[r] - mean);
    means[0] = mean_of(sample_values(model, ERROR), rows) * rows * job.weight;
    means[1] = sqrt(square / (rows - 1));
}

#endif
