/* The loss of blocks of a minibatch with its gradients. */
#ifndef CANTER_LEARN_H
#define CANTER_LEARN_H

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
    REAL *by_mean = d + stride, *by_log_std = by_mean + stride; /* of what squashing adds to the entropy */
    if (policy->squashed) {
        terms.log_prob -= log_squash_slopes(policy, action);
        terms.entropy += (REAL)policy->log_volume;
        for (long j = 0; j < n; j++)
            terms.entropy += mean_squash_slope(policy, mean[j], ONE / precision[j], &by_mean[j], &by_log_std[j]);
    }
    add_terms(job, w, row, &terms);
    for (long j = 0; j < n && policy->squashed; j++)
        d[j] += terms.d_entropy * by_mean[j];
    if (model->loss.bound)
        w->sums[BOUND_SUM] += bound_error(model, mean, (REAL)model->loss.bound_coef * job->weight, d);
    REAL *d_log_std = w->d_log_std;
    for (long j = 0; j < n; j++) {
        REAL z = (action[j] - mean[j]) * precision[j];
        REAL d_std = terms.d_log_prob * (z * z - ONE) + terms.d_entropy * (policy->squashed ? ONE + by_log_std[j] : ONE);
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

/* Replaces raw concentrations [2 A] by their gradient. */
static void beta_gradient(const Job *job, Workspace *w, int64_t row, REAL *raw)
{
    const Policy *policy = &job->model->policy;
    const long n = policy->outputs / 2;
    const REAL *action = (const REAL *)job->samples->action + row * n;
    const REAL *old = (const REAL *)job->samples->dist_params + row * 2 * n;
    REAL *d_log_prob = w->row, *d_entropy = d_log_prob + padded(2 * n); /* by the concentrations */
    double entropy = policy->log_volume, kl = 0;
    for (long j = 0; j < n; j++) {
        const Concentrations c = concentrations(policy, raw, j), o = concentrations(policy, old, j);
        const double sum = c.of_sum.digamma, old_sum = o.of_sum.digamma, x = action[j];
        entropy += c.log_beta + (c.alpha - 1) * (sum - c.of_alpha.digamma) + (c.beta - 1) * (sum - c.of_beta.digamma);
        kl += c.log_beta - o.log_beta + (o.alpha - c.alpha) * (o.of_alpha.digamma - old_sum) +
              (o.beta - c.beta) * (o.of_beta.digamma - old_sum);
        const double common = (c.alpha + c.beta - 2) * c.of_sum.trigamma;
        d_log_prob[j] = (REAL)(log(x) - c.of_alpha.digamma + sum);
        d_log_prob[n + j] = (REAL)(log1p(-x) - c.of_beta.digamma + sum);
        d_entropy[j] = (REAL)(common - (c.alpha - 1) * c.of_alpha.trigamma);
        d_entropy[n + j] = (REAL)(common - (c.beta - 1) * c.of_beta.trigamma);
    }
    Terms terms = {.log_prob = beta_log_prob(policy, raw, action), .entropy = (REAL)entropy, .kl = (REAL)kl};
    add_terms(job, w, row, &terms);
    for (long j = 0; j < 2 * n; j++) {
        const REAL slope = ONE / (ONE + real_exp(-raw[j]));
        raw[j] = slope * (terms.d_log_prob * d_log_prob[j] + terms.d_entropy * d_entropy[j]);
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

/* Gradients of the loss by the outputs of a block, in their place; 0 for samples that are not valid. */
static void loss_gradients(const Job *job, Workspace *w, const int64_t *index, long count)
{
    const Model *model = job->model;
    const Loss *loss = &model->loss;
    const unsigned char *valid = job->samples->valid;
    const long n = model->policy.outputs, stride = padded(n);
    const REAL value_weight = (REAL)loss->value_coef * job->weight;
    REAL *output = head_output(model, w, OUTPUT_HEAD), *raw = head_output(model, w, STD_HEAD);
    REAL *value = head_output(model, w, VALUE_HEAD);
    for (long r = 0; r < count && loss->surrogate; r++) {
        REAL *raw_row = raw ? raw + r * stride : NULL;
        if (!valid[index[r]]) {
            memset(output + r * stride, 0, n * sizeof *output);
            if (raw)
                memset(raw_row, 0, n * sizeof *raw);
        } else if (model->policy.family == GAUSSIAN)
            gaussian_gradient(job, w, index[r], output + r * stride, raw_row);
        else if (model->policy.family == BETA)
            beta_gradient(job, w, index[r], output + r * stride);
        else
            categorical_gradient(job, w, index[r], output + r * stride);
    }
    for (long r = 0; r < count && loss->value; r++, value += padded(1)) {
        if (!valid[index[r]]) {
            *value = 0;
            continue;
        }
        const REAL old = ((const REAL *)job->samples->value)[index[r]];
        const REAL target = ((const REAL *)job->samples->return_)[index[r]];
        w->sums[VALUE_SUM] += value_error(loss, *value, old, target, value);
        *value *= value_weight;
    }
}

static void learn_blocks(void *context, int thread, int threads)
{
    const Job *job = context;
    const Model *model = job->model;
    Workspace *w = &model->workspace[thread];
    const long steps = job->samples->steps;
    memset(w->gradients, 0, w->gradient_bytes);
    memset(w->sums, 0, sizeof w->sums);
    FOR_BLOCKS(first, count, job->count, job->block) {
        const int64_t *index = model->length ? w->block.row : job->index + first;
        if (model->length)
            begin_block(model, w, job->parts, job->samples, job->index, first / steps, count / steps, 0, steps);
        run_towers(model, w, job->parts, job->samples, index, 0, count);
        loss_gradients(job, w, index, count);
        for (int t = 0; t < model->towers; t++)
            if (parts_of(&model->tower[t]) & job->parts)
                tower_backward(model, t, w, job->parts, NULL, 0, count);
    }
}

#endif
