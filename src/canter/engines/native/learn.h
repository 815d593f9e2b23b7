/* Acting, values, log-probabilities, and the loss of blocks of a minibatch with its gradients. */
#ifndef CANTER_LEARN_H
#define CANTER_LEARN_H

/* Multiplications that make another thread worthwhile: waking it takes as long as some hundred thousand of them. */
#define WORTH_A_THREAD (1L << 21)

/* Returns the number of threads; it follows from sizes alone, because it decides how sums are rounded. */
static int threads_for(const Model *model, long rows, int parts, int passes)
{
    long weights = 0, blocks = (rows + BLOCK - 1) / BLOCK;
    for (int t = 0; t < model->towers; t++)
        for (int i = 0; parts_of(&model->tower[t]) & parts && i < model->tower[t].hidden + model->tower[t].heads; i++)
            weights += model->tower[t].layer[i].weight.size;
    long most = passes * rows * weights / WORTH_A_THREAD;
    most = most < blocks ? most : blocks;
    most = most < model->threads ? most : model->threads;
    return most > 1 ? (int)most : 1;
}

static void pack_tower(const Tower *tower, int parts, int back)
{
    for (int i = 0; parts_of(tower) & parts && i < tower->hidden + tower->heads; i++)
        if (i < tower->hidden || part_of(&tower->layer[i]) & parts) {
            pack(&tower->layer[i]);
            if (back)
                pack_back(&tower->layer[i]);
        }
}

/* Packs the weights, in every call, because they change between calls. */
static void pack_model(Model *model, int parts, int back)
{
    for (int t = 0; t < model->towers; t++)
        pack_tower(&model->tower[t], parts, back);
    Policy *policy = &model->policy;
    if (parts & POLICY && policy->raw_std.value) {
        REAL *log_std = model->log_std;
        std_form(policy, policy->raw_std.value, log_std, NULL, policy->outputs);
        precisions(log_std, log_std + padded(policy->outputs), policy->outputs);
    }
}

/* Concatenates and normalises the observation groups of samples; `index` NULL: those from `first` on. */
static void gather(const Model *model, int number, const Samples *samples, const int64_t *index, long first, long count,
                   REAL *x)
{
    const Tower *tower = &model->tower[number];
    const long stride = padded(tower->inputs);
    for (int g = 0; g < tower->groups; g++) {
        const Group *group = &tower->group[g];
        const REAL *shift = group->shift, *inverse = group->inverse_scale, clip = (REAL)group->clip;
        for (long r = 0; r < count; r++) {
            const REAL *from = (const REAL *)samples->obs[number][g] + (index ? index[r] : first + r) * group->width;
            REAL *to = x + r * stride;
            for (long j = 0; !shift && j < group->width; j++)
                to[j] = from[j];
            for (long j = 0; shift && j < group->width; j++) {
                REAL y = (from[j] - shift[j]) * inverse[j];
                y = y < -clip ? -clip : y;
                to[j] = y > clip ? clip : y;
            }
        }
        x += group->width;
    }
}

static void run_towers(const Model *model, const Workspace *w, int parts, const Samples *samples, const int64_t *index,
                       long first, long count)
{
    for (int t = 0; t < model->towers; t++)
        if (parts_of(&model->tower[t]) & parts) {
            gather(model, t, samples, index, first, count, w->input[t]);
            tower_forward(model, t, w, parts, count);
        }
}

/* Returns the output of the head of a role, [BLOCK, padded]; NULL if there is none. */
static REAL *head_output(const Model *model, const Workspace *w, int role)
{
    for (int t = 0; t < model->towers; t++)
        for (int i = model->tower[t].hidden; i < model->tower[t].hidden + model->tower[t].heads; i++)
            if (model->tower[t].layer[i].role == role)
                return w->trace[t][i].after;
    return NULL;
}

typedef struct {
    Model *model;
    const Samples *samples;
    const int64_t *index;
    long count;
    const REAL *noise;
    REAL *params, *for_env, *value;
    void *action;
    Coefs coefs;
    REAL weight;
    int parts;
} Job;

/* First block of a thread; each thread has about as many consecutive blocks. */
static long first_block(long rows, int thread, int threads)
{
    return (rows + BLOCK - 1) / BLOCK * thread / threads;
}

#define FOR_BLOCKS(FIRST, COUNT, ROWS)                                                                                 \
    for (long FIRST = first_block(ROWS, thread, threads) * BLOCK,                                                      \
              after_ = first_block(ROWS, thread + 1, threads) * BLOCK, stop_ = after_ < ROWS ? after_ : ROWS, COUNT;   \
         FIRST < stop_ && (COUNT = stop_ - FIRST < BLOCK ? stop_ - FIRST : BLOCK, 1); FIRST += BLOCK)

static void act_blocks(void *context, int thread, int threads)
{
    const Job *job = context;
    const Model *model = job->model;
    const Policy *policy = &model->policy;
    const Workspace *w = &model->workspace[thread];
    const long n = policy->outputs, stride = padded(n);
    FOR_BLOCKS(first, count, job->samples->count) {
        run_towers(model, w, POLICY, job->samples, NULL, first, count);
        const REAL *output = head_output(model, w, OUTPUT_HEAD), *raw = head_output(model, w, STD_HEAD);
        for (long r = first; r < first + count; r++, output += stride) {
            REAL *params = job->params + r * policy->params;
            memcpy(params, output, n * sizeof *params);
            if (policy->family == GAUSSIAN) {
                if (raw)
                    std_form(policy, raw + (r - first) * stride, params + n, NULL, n);
                else
                    memcpy(params + n, model->log_std, n * sizeof *params);
                draw_gaussian(policy, params, job->noise + r * n, (REAL *)job->action + r * n,
                              job->for_env ? job->for_env + r * n : NULL);
            } else {
                if (policy->masked)
                    mask_logits(params, (const unsigned char *)job->samples->mask + r * n, n);
                draw_categorical(policy, params, job->noise + r * n, (int64_t *)job->action + r * policy->components);
            }
        }
    }
}

static void act(Model *model, const Samples *samples, const void *noise, void *params, void *action, void *for_env)
{
    pack_model(model, POLICY, 0);
    Job job = {.model = model, .samples = samples, .noise = noise, .params = params, .action = action, .for_env = for_env};
    run_in_threads(act_blocks, &job, threads_for(model, samples->count, POLICY, 1));
}

static void value_blocks(void *context, int thread, int threads)
{
    const Job *job = context;
    const Workspace *w = &job->model->workspace[thread];
    FOR_BLOCKS(first, count, job->count) {
        run_towers(job->model, w, VALUE, job->samples, job->index ? job->index + first : NULL, first, count);
        const REAL *output = head_output(job->model, w, VALUE_HEAD);
        for (long r = 0; r < count; r++)
            job->value[first + r] = output[r * padded(1)];
    }
}

static void values(Model *model, const Samples *samples, const int64_t *index, long count, void *value)
{
    pack_model(model, VALUE, 0);
    Job job = {.model = model, .samples = samples, .index = index, .count = count, .value = value};
    run_in_threads(value_blocks, &job, threads_for(model, count, VALUE, 1));
}

static int log_prob(const Model *model, const Samples *samples, void *result)
{
    const Policy *policy = &model->policy;
    REAL *row = model->workspace[0].row;
    for (long r = 0; r < samples->count; r++) {
        const REAL *params = (const REAL *)samples->dist_params + r * policy->params;
        if (!action_exists(policy, samples, r))
            return 0;
        if (policy->family == GAUSSIAN) {
            const long n = policy->outputs;
            precisions(params + n, row, n);
            ((REAL *)result)[r] =
                gaussian_log_prob(params, params + n, row, (const REAL *)samples->action + r * n, n);
        } else {
            log_softmax(policy, params, row);
            ((REAL *)result)[r] = categorical_log_prob(policy, row, (const int64_t *)samples->action + r * policy->components);
        }
    }
    return 1;
}

/* Terms of the loss of one sample; `d` are derivatives of the sum over samples. */
typedef struct {
    REAL log_prob, entropy, kl, d_log_prob, d_entropy;
} Terms;

/* Adds surrogate, entropy and KL of a sample to the sums, and computes their derivatives. */
static void add_terms(const Job *job, Workspace *w, int64_t row, Terms *terms)
{
    const Loss *loss = &job->model->loss;
    REAL advantage = ((const REAL *)job->samples->advantage)[row], old = ((const REAL *)job->samples->log_prob)[row], slope;
    if (loss->standardize) /* 0 if all are equal */
        advantage = job->coefs.adv_divisor > 0
                        ? (REAL)((advantage - job->coefs.adv_mean) / job->coefs.adv_divisor) : 0;
    REAL ratio = real_exp(terms->log_prob - old);
    w->sums[POLICY_SUM] += surrogate(loss, terms->log_prob, ratio, advantage, &slope);
    w->sums[CLIPPED_SUM] += (ratio - ONE < 0 ? ONE - ratio : ratio - ONE) > (REAL)loss->clip_ratio;
    w->sums[ENTROPY_SUM] += terms->entropy;
    w->sums[KL_SUM] += terms->kl;
    terms->d_log_prob = slope * job->weight;
    terms->d_entropy = (REAL)-job->coefs.entropy_coef * job->weight;
}

/* Replaces mean [A] by its gradient, and raw too if the std depends on the observation. */
static void gaussian_gradient(const Job *job, Workspace *w, int64_t row, REAL *mean, REAL *raw)
{
    const Model *model = job->model;
    const Policy *policy = &model->policy;
    const long n = policy->outputs, stride = padded(n);
    const REAL *action = (const REAL *)job->samples->action + row * n;
    const REAL *old = (const REAL *)job->samples->dist_params + row * 2 * n;
    REAL *log_std = raw ? w->row : model->log_std, *precision = log_std + stride, *d = (REAL *)w->row + 2 * stride;
    if (raw) {
        std_form(policy, raw, log_std, NULL, n);
        precisions(log_std, precision, n);
    }
    Terms terms = {.log_prob = gaussian_log_prob(mean, log_std, precision, action, n)};
    for (long j = 0; j < n; j++) {
        REAL log_ratio = old[n + j] - log_std[j], shift = (old[j] - mean[j]) * precision[j];
        /* expm1 keeps the second-order difference that is left when the two are close. */
        terms.kl += (REAL)0.5 * real_expm1(2 * log_ratio) - log_ratio + (REAL)0.5 * shift * shift;
        terms.entropy += log_std[j] + (HALF_LOG_TWO_PI + (REAL)0.5);
        d[j] = 0;
    }
    add_terms(job, w, row, &terms);
    if (model->loss.bound)
        w->sums[BOUND_SUM] += bound_error(model, mean, (REAL)model->loss.bound_coef * job->weight, d);
    REAL *d_log_std = w->d_log_std;
    for (long j = 0; j < n; j++) {
        REAL z = (action[j] - mean[j]) * precision[j];
        REAL d_std = terms.d_log_prob * (z * z - ONE) + terms.d_entropy;
        mean[j] = terms.d_log_prob * z * precision[j] + d[j];
        if (raw)
            log_std[j] = d_std;
        else
            d_log_std[j] += d_std;
    }
    if (raw) {
        std_form(policy, raw, NULL, log_std, n);
        memcpy(raw, log_std, n * sizeof *raw);
    }
}

/* Replaces logits [P] by their gradient. */
static void categorical_gradient(const Job *job, Workspace *w, int64_t row, REAL *logits)
{
    const Policy *policy = &job->model->policy;
    const long total = policy->outputs;
    const int64_t *action = (const int64_t *)job->samples->action + row * policy->components;
    const unsigned char *mask = policy->masked ? (const unsigned char *)job->samples->mask + row * total : NULL;
    REAL *now = w->row, *old = now + padded(total);
    if (mask)
        mask_logits(logits, mask, total);
    log_softmax(policy, logits, now);
    log_softmax(policy, (const REAL *)job->samples->dist_params + row * total, old);
    Terms terms = {.log_prob = categorical_log_prob(policy, now, action)};
    for (long j = 0; j < total; j++) {
        terms.entropy -= real_exp(now[j]) * now[j];
        terms.kl += real_exp(old[j]) * (old[j] - now[j]);
    }
    add_terms(job, w, row, &terms);
    for (long c = 0, first = 0; c < policy->components; first += policy->options[c++]) {
        REAL entropy = 0;
        for (long j = first; j < first + policy->options[c]; j++)
            entropy -= real_exp(now[j]) * now[j];
        for (long j = first; j < first + policy->options[c]; j++) {
            /* d entropy / d logit = -p (log p + entropy), d log p(action) / d logit = [logit is the action's] - p */
            REAL d = -real_exp(now[j]) * ((now[j] + entropy) * terms.d_entropy + terms.d_log_prob);
            d += j - first == action[c] ? terms.d_log_prob : 0;
            logits[j] = mask && !mask[j] ? 0 : d;
        }
    }
}

static void learn_blocks(void *context, int thread, int threads)
{
    const Job *job = context;
    const Model *model = job->model;
    const Loss *loss = &model->loss;
    Workspace *w = &model->workspace[thread];
    const REAL value_weight = (REAL)loss->value_coef * job->weight;
    memset(w->gradients, 0, w->gradient_bytes);
    memset(w->sums, 0, sizeof w->sums);
    FOR_BLOCKS(first, count, job->count) {
        const int64_t *index = job->index + first;
        run_towers(model, w, job->parts, job->samples, index, first, count);
        REAL *output = head_output(model, w, OUTPUT_HEAD), *raw = head_output(model, w, STD_HEAD);
        REAL *value = head_output(model, w, VALUE_HEAD);
        const long stride = padded(model->policy.outputs);
        for (long r = 0; r < count && loss->surrogate; r++)
            if (model->policy.family == GAUSSIAN)
                gaussian_gradient(job, w, index[r], output + r * stride, raw ? raw + r * stride : NULL);
            else
                categorical_gradient(job, w, index[r], output + r * stride);
        for (long r = 0; r < count && loss->value; r++, value += padded(1)) {
            const REAL old = ((const REAL *)job->samples->value)[index[r]];
            const REAL target = ((const REAL *)job->samples->return_)[index[r]];
            w->sums[VALUE_SUM] += value_error(loss, *value, old, target, value);
            *value *= value_weight;
        }
        for (int t = 0; t < model->towers; t++)
            if (parts_of(&model->tower[t]) & job->parts)
                tower_backward(model, t, w, job->parts, NULL, 0, count);
    }
}

#endif
