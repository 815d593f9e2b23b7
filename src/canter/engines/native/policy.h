/* Distributions: samples, log-probabilities, and the loss of one sample with its gradients. A components, P parameters. */
#ifndef CANTER_POLICY_H
#define CANTER_POLICY_H

#define HALF_LOG_TWO_PI ((REAL)0.91893853320467274)
#define LOG_TWO ((REAL)0.69314718055994531)
#define MASKED_LOGIT ((REAL)-1e8)
#define LEAST_STD ((REAL)1e-6)

/* Name, the log-std of a raw number x, and its slope; mid and half are settings. One line each. */
#define STD_FORMS(X)                                                                                                   \
    X(bounded, mid + half * (x / half) / real_sqrt(ONE + x / half * (x / half)), cubed(ONE + x / half * (x / half)))   \
    X(log, x, ONE)                                                                                                     \
    X(scalar, real_log(x < LEAST_STD ? LEAST_STD : x), x < LEAST_STD ? 0 : ONE / x)                                    \
    X(softplus, real_log(softplus(x)), ONE / ((ONE + real_exp(-x)) * softplus(x)))

/* x^-1.5 */
INLINE REAL cubed(REAL x)
{
    return ONE / (x * real_sqrt(x));
}

INLINE REAL softplus(REAL x)
{
    return x > 20 ? x : (REAL)log1p(exp(x));
}

#define STD_CASE(NAME, LOG_STD, SLOPE)                                                                                 \
    case STD_##NAME:                                                                                                   \
        for (long j = 0; j < n; j++) {                                                                                 \
            const REAL x = raw[j];                                                                                     \
            if (log_std)                                                                                               \
                log_std[j] = LOG_STD;                                                                                  \
            if (d)                                                                                                     \
                d[j] *= SLOPE;                                                                                         \
        }                                                                                                              \
        break;
#define STD_ENUM(NAME, ...) STD_##NAME,
enum { STD_FORMS(STD_ENUM) STD_COUNT };
#ifdef DEFINES_NAMES
const char *const STD_NAMES[] = {STD_FORMS(NAME_OF) NULL};
#endif

/* Computes the log-std of raw numbers [n], and turns the gradient `d` of it into that of the raw numbers; either may be
 * NULL. */
ONCE void std_form(const Policy *policy, const REAL *raw, REAL *log_std, REAL *d, long n)
{
    const REAL mid = (REAL)policy->std_mid, half = (REAL)policy->std_half;
    switch (policy->std_form) { STD_FORMS(STD_CASE) }
}

ONCE void precisions(const REAL *log_std, REAL *precision, long n)
{
    for (long j = 0; j < n; j++)
        precision[j] = real_exp(-log_std[j]);
}

ONCE REAL gaussian_log_prob(const REAL *mean, const REAL *log_std, const REAL *precision, const REAL *action, long n)
{
    REAL sum = 0;
    for (long j = 0; j < n; j++) {
        REAL z = (action[j] - mean[j]) * precision[j];
        sum += (REAL)-0.5 * z * z - log_std[j] - HALF_LOG_TWO_PI;
    }
    return sum;
}

/* log((1 - tanh(u)^2) / 2): the log-slope of squashing u into an interval of length 1. */
INLINE REAL log_squash_slope(REAL u)
{
    const REAL size = u < 0 ? -u : u;
    return LOG_TWO - 2 * size - 2 * real_log(ONE + real_exp(-2 * size));
}

/* What squashing takes from the log-probability of a sample. */
ONCE REAL log_squash_slopes(const Policy *policy, const REAL *sample)
{
    REAL sum = (REAL)policy->log_volume;
    for (long j = 0; j < policy->outputs; j++)
        sum += log_squash_slope(sample[j]);
    return sum;
}

/* Returns the mean of the log-slope over samples of a normal, which squashing adds to the entropy, and its derivatives by
 * mean and log-std. */
static REAL mean_squash_slope(const Policy *policy, REAL mean, REAL std, REAL *by_mean, REAL *by_log_std)
{
    const REAL *node = policy->nodes, *weight = policy->node_weights;
    REAL value = 0, first = 0, second = 0;
    for (int i = 0; i < NODES; i++) {
        const REAL u = mean + std * node[i], slope = -2 * real_tanh(u) * weight[i];
        value += log_squash_slope(u) * weight[i];
        first += slope;
        second += slope * std * node[i];
    }
    *by_mean = first;
    *by_log_std = second;
    return value;
}

/* Of each discrete component. */
ONCE void log_softmax(const Policy *policy, const REAL *logits, REAL *log_prob)
{
    for (long c = 0; c < policy->components; c++) {
        const long n = policy->options[c];
        REAL most = logits[0], sum = 0;
        for (long j = 1; j < n; j++)
            most = logits[j] > most ? logits[j] : most;
        for (long j = 0; j < n; j++)
            sum += real_exp(logits[j] - most);
        const REAL log_sum = real_log(sum);
        for (long j = 0; j < n; j++)
            log_prob[j] = (logits[j] - most) - log_sum;
        logits += n, log_prob += n;
    }
}

/* Of the options `action` [components], which `action_exists` has checked. */
ONCE REAL categorical_log_prob(const Policy *policy, const REAL *log_prob, const int64_t *action)
{
    REAL sum = 0;
    for (long c = 0; c < policy->components; log_prob += policy->options[c++])
        sum += log_prob[action[c]];
    return sum;
}

typedef struct {
    double log_gamma, digamma, trigamma;
} Gammas;

/* For x >= 1: moved up to 10 by the recurrences, then by the asymptotic series. */
static Gammas gammas(double x)
{
    double product = 1, first = 0, second = 0;
    for (; x < 10; x += 1) {
        product *= x;
        first += 1 / x;
        second += 1 / (x * x);
    }
    const double i = 1 / x, s = i * i, log_x = log(x);
    const double log_series = i * (1 / 12. - s * (1 / 360. - s * (1 / 1260. - s * (1 / 1680. - s / 1188))));
    const double first_series = s * (1 / 12. - s * (1 / 120. - s * (1 / 252. - s * (1 / 240. - s / 132))));
    const double second_series = s * i * (1 / 6. - s * (1 / 30. - s * (1 / 42. - s * (1 / 30. - s * 5 / 66))));
    return (Gammas){
        .log_gamma = (x - 0.5) * log_x - x + 0.91893853320467274 + log_series - log(product),
        .digamma = log_x - 0.5 * i - first_series - first,
        .trigamma = i + 0.5 * s + second_series + second,
    };
}

/* Concentrations of one component, which are 1 + softplus of the raw parameters, and the functions of them and of their
 * sum. In double: differences of log-gammas of large arguments have no correct digits left in float. */
typedef struct {
    double alpha, beta, log_beta;
    Gammas of_alpha, of_beta, of_sum;
} Concentrations;

static Concentrations concentrations(const Policy *policy, const REAL *params, long j)
{
    const double raw[] = {params[j], params[policy->outputs / 2 + j]};
    Concentrations c = {.alpha = 1 + (raw[0] > 20 ? raw[0] : log1p(exp(raw[0]))),
                        .beta = 1 + (raw[1] > 20 ? raw[1] : log1p(exp(raw[1])))};
    c.of_alpha = gammas(c.alpha);
    c.of_beta = gammas(c.beta);
    c.of_sum = gammas(c.alpha + c.beta);
    c.log_beta = c.of_alpha.log_gamma + c.of_beta.log_gamma - c.of_sum.log_gamma;
    return c;
}

/* Log-density of a fraction x of the interval, before its length. */
INLINE double beta_log_density(const Concentrations *c, double x)
{
    return (c->alpha - 1) * log(x) + (c->beta - 1) * log1p(-x) - c->log_beta;
}

ONCE REAL beta_log_prob(const Policy *policy, const REAL *params, const REAL *action)
{
    double sum = -policy->log_volume;
    for (long j = 0; j < policy->outputs / 2; j++) {
        const Concentrations c = concentrations(policy, params, j);
        sum += beta_log_density(&c, action[j]);
    }
    return (REAL)sum;
}

/* Returns 1 if the discrete action of a sample is within range; always for continuous actions. */
static int action_exists(const Policy *policy, const Samples *samples, int64_t row)
{
    const int64_t *action = (const int64_t *)samples->action + row * policy->components;
    for (long c = 0; c < policy->components && policy->family == CATEGORICAL; c++)
        if (action[c] < 0 || action[c] >= policy->options[c])
            return 0;
    return 1;
}

INLINE void mask_logits(REAL *logits, const unsigned char *mask, long n)
{
    for (long j = 0; j < n; j++)
        logits[j] = mask[j] ? logits[j] : MASKED_LOGIT;
}

/* Samples from standard normal noise [A]; `for_env` receives the sample within the bounds. */
static void draw_gaussian(const Policy *policy, const REAL *params, const REAL *noise, REAL *action, REAL *for_env)
{
    const long n = policy->outputs;
    const REAL *scale = policy->scale, *centre = policy->centre, *low = policy->low, *high = policy->high;
    for (long j = 0; j < n; j++) {
        action[j] = params[j] + real_exp(params[n + j]) * noise[j];
        if (!for_env)
            continue;
        REAL x = (policy->squashed ? real_tanh(action[j]) : action[j]) * scale[j] + centre[j];
        x = x < low[j] ? low[j] : x; /* clipped last: rounding must stay within the bounds */
        for_env[j] = x > high[j] ? high[j] : x;
    }
}

/* Samples the option with the largest logit plus Gumbel noise, from uniform numbers [P], moved into the open interval
 * 0..1; NaN counts as the largest. */
static void draw_categorical(const Policy *policy, const REAL *logits, const REAL *uniform, int64_t *action)
{
    const REAL top = ONE - (REAL)0.5 * real_eps;
    for (long c = 0; c < policy->components; c++) {
        const long n = policy->options[c];
        REAL best = 0;
        action[c] = 0;
        for (long j = 0; j < n; j++) {
            REAL u = uniform[j] < real_tiny ? real_tiny : uniform[j] > top ? top : uniform[j];
            REAL value = logits[j] - real_log(-real_log(u));
            if (j == 0 || value > best || (value != value && best == best))
                best = value, action[c] = j;
        }
        logits += n, uniform += n;
    }
}

/* A maximum shares its gradient between equal arguments, and passes it to both if one is NaN, as in torch. */
INLINE REAL share_of_maximum(REAL own, REAL other)
{
    return own == other ? (REAL)0.5 : own < other ? 0 : ONE;
}

INLINE REAL maximum(REAL a, REAL b)
{
    return a != a ? a : b != b ? b : a > b ? a : b;
}

/* Policy loss of a sample, and its derivative by the log-probability. Products are those of autograd, so that NaN and
 * infinity appear in the same places. */
static REAL surrogate(const Loss *loss, REAL log_prob, REAL ratio, REAL advantage, REAL *slope)
{
    if (loss->surrogate == VANILLA) {
        *slope = -advantage;
        return -advantage * log_prob;
    }
    const REAL clip = (REAL)loss->clip_ratio;
    REAL gain = -advantage * ratio, limited, d_limited = 0;
    if (loss->surrogate == CLIPPED) {
        REAL low = (REAL)(1.0 - loss->clip_ratio), high = (REAL)(1.0 + loss->clip_ratio);
        limited = ratio < low ? low : ratio > high ? high : ratio;
        if (ratio >= low && ratio <= high) /* not times 0 or 1: beyond, infinity has no gradient either */
            d_limited = share_of_maximum(-advantage * limited, gain) * -advantage;
    } else {
        REAL t = real_tanh((ratio - ONE) / clip);
        limited = ONE + clip * t;
        d_limited = share_of_maximum(-advantage * limited, gain) * -advantage * (ONE - t * t);
    }
    REAL limited_gain = -advantage * limited;
    *slope = (share_of_maximum(gain, limited_gain) * -advantage + d_limited) * ratio;
    return maximum(gain, limited_gain);
}

static REAL value_error(const Loss *loss, REAL value, REAL old_value, REAL return_, REAL *slope)
{
    const REAL error = value - return_, clip = (REAL)loss->value_clip;
    if (loss->value == HUBER) {
        REAL size = error < 0 ? -error : error;
        *slope = error < -ONE ? -ONE : error > ONE ? ONE : error;
        return size > ONE ? size - (REAL)0.5 : (REAL)0.5 * error * error;
    }
    *slope = error;
    if (loss->value == MSE)
        return (REAL)0.5 * error * error;
    REAL moved = value - old_value;
    REAL limited_gain = old_value + (moved < -clip ? -clip : moved > clip ? clip : moved) - return_;
    REAL square = error * error, limited_square = limited_gain * limited_gain;
    *slope = share_of_maximum(square, limited_square) * error;
    if (moved >= -clip && moved <= clip)
        *slope += share_of_maximum(limited_square, square) * limited_gain;
    return (REAL)0.5 * maximum(square, limited_square);
}

/* Bound loss of means [A]; adds its gradient, times `weight`, to `d`. */
static REAL bound_error(const Model *model, const REAL *mean, REAL weight, REAL *d)
{
    const REAL *centre = model->policy.bound_centre, *half = model->policy.bound_half;
    const REAL limit = (REAL)model->loss.bound_limit;
    REAL sum = 0;
    for (long j = 0; j < model->policy.outputs; j++) {
        REAL x = (mean[j] - centre[j]) / half[j], above = x, below = 0;
        if (model->loss.bound == SOFT) {
            above = x - limit < 0 ? 0 : x - limit;
            below = x + limit > 0 ? 0 : x + limit;
        }
        sum += above * above + below * below;
        d[j] += weight * 2 * (above + below) / half[j];
    }
    return sum;
}

#endif
