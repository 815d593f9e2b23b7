/* What the files of this module share. Nothing here depends on the kind of number: the mathematics is in headers that
 * float.c and double.c compile once each, and arrays of numbers are `void *` until they arrive there.
 *
 * A model is one or two towers. A tower reads observation groups, passes them through hidden layers and ends in one or
 * more heads, which are linear layers that all read the same features: mean or logits, the raw std where it depends on
 * the state, and the value. With a shared trunk there is one tower, and the value is its last head.
 *
 * A model of SAC has a tower for the policy, one for each critic, whose last group is the action, and one for each slow
 * copy of a critic. */
#ifndef CANTER_NATIVE_H
#define CANTER_NATIVE_H

#include <stddef.h>
#include <stdint.h>

enum { POLICY = 1, VALUE = 2 };                                      /* parts of a model, as bits */
enum { OUTPUT_HEAD, STD_HEAD, VALUE_HEAD, HIDDEN };                  /* roles of layers */
enum { GAUSSIAN, CATEGORICAL };                                          /* families of distributions */
enum { NO_SURROGATE, CLIPPED, SMOOTH_CLIPPED, VANILLA };             /* policy losses */
enum { NO_VALUE_LOSS, MSE, CLIPPED_MSE, HUBER };                     /* value losses */
enum { NO_BOUND, SOFT, REGULARISATION };                             /* bound losses */
enum { GIVEN, POPULATION_STD, SAMPLE_STD };                          /* what advantages are divided by */
enum { LOG_PROB, TARGET, VALUE_OF_SAMPLE, ERROR, SAMPLE_VALUES };           /* what SAC keeps of each row */
enum { POLICY_SUM, VALUE_SUM, ENTROPY_SUM, KL_SUM, CLIPPED_SUM, BOUND_SUM, SUMS }; /* what a minibatch reports */

/* Samples that pass through a model together. Their activations stay in the cache from the first layer to the last and
 * back; threads take whole blocks. */
enum { BLOCK = 64, MAX_GROUPS = 16, MAX_CRITICS = 8, MAX_TOWERS = 1 + 2 * MAX_CRITICS };

typedef struct {
    void *value, *gradient; /* gradient: NULL where this model never learns it */
    long size;
} Parameter;

typedef struct {
    long width;
    void *shift, *inverse_scale; /* NULL: the group is read as it is */
    double clip;
} Group;

typedef struct {
    long inputs, outputs;
    int activation, role;             /* role: of a head */
    int transposed;                       /* the weight is [inputs, outputs], as in a stack, not [outputs, inputs] */
    Parameter weight, bias, gamma, beta; /* gamma and beta of a layer norm before the activation, or NULL */
    void *packed, *packed_back;       /* the weight as products with it and with its transpose want it */
} Layer;

typedef struct {
    int groups, hidden, heads;
    long inputs;
    Group *group;
    Layer *layer; /* hidden layers, then heads */
} Tower;

typedef struct {
    int family, std_form, masked;
    long outputs, params;   /* numbers that the output head gives, and parameters P of the distribution */
    long components;           /* how many choices an action consists of */
    const int64_t *options; /* and among how many options each is */
    Parameter raw_std;      /* of a Gaussian whose std is a parameter, or NULL */
    double std_mid, std_half;
    int to_env;                                      /* whether the environment gets something else than the sample */
    void *scale, *centre, *low, *high;               /* of that, [A] */
    void *bound_centre, *bound_half;                 /* units of the bound loss, [A] */
} Policy;

typedef struct {
    int surrogate, value, bound, standardize;
    double clip_ratio, value_clip, value_coef, bound_coef, bound_limit;
} Loss;

/* What one thread keeps of one layer for one block of rows, and its sums of gradients. Samples are padded to whole
 * vectors, so that no loop has a tail and no result depends on where in a row or in a call it stands. */
typedef struct {
    void *before, *after;   /* the activation, [BLOCK, outputs]; before == after where it needs no input to go back */
    void *normal, *inverse; /* of a layer norm: its output before gamma and beta, and 1 / std, [BLOCK] */
    void *d;                /* the gradient on its way back, [BLOCK, outputs]; a head's is in the place of its output */
    void *d_weight, *d_bias, *d_gamma, *d_beta;
} Trace;

typedef struct {
    void *input[MAX_TOWERS];  /* [BLOCK, inputs] of each tower; critics share one */
    Trace *trace[MAX_TOWERS]; /* of each layer of each tower */
    void *d[2];               /* gradients on their way back, [BLOCK, widest]; of SAC the first: of the critics' input */
    void *row;                /* a few rows of P numbers */
    void *d_log_std;
    void *gradients; /* where all d_... begin */
    size_t gradient_bytes;
    double sums[SUMS];
} Workspace;

typedef struct {
    int is_double, threads, towers;
    Tower tower[MAX_TOWERS];
    Policy policy;
    Loss loss;
    int critics, lowest;  /* of SAC: how many learn, and whether the lowest counts or their mean */
    long batch_size;            /* of SAC; 0 for PPO */
    void *sample_values;     /* of SAC: SAMPLE_VALUES columns [rows], and the policy's std [rows, A] */
    int workspaces;       /* one for each thread; of SAC one for each block of rows, the first with the sums of all */
    Workspace *workspace;
    void *log_std;        /* of a Gaussian whose std is a parameter: log-std and exp(-log-std), [2, A] */
    void *zeros;          /* as many as any row has */
    int64_t *selected;         /* the valid rows of a minibatch; grows to the largest that was seen */
    long selected_room;
    void *arena;
} Model;

/* Samples to learn from or to evaluate; fields that a call does not need are NULL. */
typedef struct {
    long count;
    const void *obs[2][MAX_GROUPS]; /* by tower and group, [count, width] */
    const void *mask, *valid, *action, *dist_params, *log_prob, *advantage, *value, *return_;
} Samples;

typedef struct {
    double entropy_coef;
    double count;                 /* valid rows of this minibatch, found by `gradients` */
    double adv_mean, adv_divisor; /* of standardised advantages; a negative divisor: find them */
} Coefs;

typedef struct {
    double step, learning_rate, beta1, beta2, eps, weight_decay, scale;
    int coupled; /* weight decay is added to the gradient */
} AdamW;

/* A batch for SAC: now and after the step, whose observations the critics share, and where the results go. */
typedef struct {
    Samples now, next;
    const void *reward, *discount, *valid, *noise; /* [rows], and [rows, A] */
    double temperature;
    double means[4]; /* of the critics: loss, std of the targets; of the policy: loss, log-probability, std, value */
} SACBatch;

/* The mathematics for one kind of number. */
typedef struct {
    size_t item;
    int (*prepare)(Model *); /* allocates what calls need; 0 where there is no memory */
    void (*act)(Model *, const Samples *, const void *noise, void *params, void *action, void *for_env);
    void (*values)(Model *, const Samples *, const int64_t *index, long count, void *value);
    int (*log_prob)(const Model *, const Samples *, void *log_prob); /* 0 for an action that does not exist */
    int (*gradients)(Model *, const Samples *, const int64_t *index, long count, Coefs, double *sums);
    double (*square_sum)(const void *x, long n);
    void (*trace_back)(void *x, const void *decay, long n, long columns);
    void (*column_sums)(const void *x, const char *mask, long rows, long columns, const double *centre, double *sums);
    void (*adamw)(void *flat, const void *gradient, void *mean, void *square, long n, AdamW);
    void (*sac_gradients)(Model *, SACBatch *, int policy); /* of the policy, or of the critics */
} Real;

extern const Real REAL_FLOAT, REAL_DOUBLE;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86_VERSIONS
extern const Real REAL_FLOAT_AVX2, REAL_FLOAT_AVX512;
#endif

/* The fastest that this processor has. */
const Real *real_of(int is_double);
extern const char *const ACTIVATION_NAMES[], *const STD_NAMES[];

/* Runs work(context, 0 .. threads - 1), each in a thread; returns when all are done. */
void run_in_threads(void (*work)(void *, int, int), void *context, int threads);

#endif
