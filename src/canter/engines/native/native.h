/* Types that all files of this module share. They do not depend on the number type: the mathematics is in headers that
 * float.c and double.c compile once each, and arrays of numbers are `void *` up to there.
 *
 * A model is one or two towers. A tower reads observation groups, passes them through hidden layers and ends in one or
 * more heads, which are linear layers that all read the same features: mean or logits, the raw std where it depends on
 * the observation, and the value. With a shared trunk there is one tower, and the value is its last head.
 *
 * A model of SAC has a tower for the policy, one for each critic, whose last group is the action, and one for each target
 * critic. */
#ifndef CANTER_NATIVE_H
#define CANTER_NATIVE_H

#include <stddef.h>
#include <stdint.h>

enum { POLICY = 1, VALUE = 2 };                                      /* parts of a model, as bits */
enum { OUTPUT_HEAD, STD_HEAD, VALUE_HEAD, HIDDEN };                  /* roles of layers */
enum { LSTM, GRU };                                                  /* kinds of recurrent cells */
enum { GAUSSIAN, CATEGORICAL, BETA };                                /* families of distributions */
enum { NO_SURROGATE, CLIPPED, SMOOTH_CLIPPED, VANILLA };             /* policy losses */
enum { NO_VALUE_LOSS, MSE, CLIPPED_MSE, HUBER };                     /* value losses */
enum { NO_BOUND, SOFT, REGULARISATION };                             /* bound losses */
enum { GIVEN, POPULATION_STD, SAMPLE_STD };                          /* standardisation of advantages */
enum { LOG_PROB, TARGET, VALUE_OF_SAMPLE, ERROR, SAMPLE_VALUES };           /* columns that SAC keeps for each sample */
enum { POLICY_SUM, VALUE_SUM, ENTROPY_SUM, KL_SUM, CLIPPED_SUM, BOUND_SUM, SUMS }; /* means that a minibatch returns */

/* Samples that pass through a model together: their activations stay in the cache from the first layer to the last and
 * back. Threads take whole blocks. */
enum { BLOCK = 64, NODES = 25, MAX_GROUPS = 16, MAX_CRITICS = 8, MAX_TOWERS = 1 + 2 * MAX_CRITICS };
/* Of a recurrent model a block holds whole sequences: so many that a product reads its weights once for many of them,
 * but fewer if they are long, for the memory of their activations. */
enum { FEWEST_SEQUENCES = 4, MOST_SEQUENCES = 24, MOST_ROWS = 4096, MAX_CELLS = 8, MAX_STATES = 2 * MAX_CELLS };

typedef struct {
    void *value, *gradient; /* gradient: NULL if it is not trained */
    long size;
} Parameter;

typedef struct {
    long width;
    void *shift, *inverse_scale; /* NULL: the group is not normalised */
    double clip;
} Group;

typedef struct Cell Cell;

typedef struct {
    long inputs, outputs;
    int activation, role;             /* by their tables of names */
    int transposed;                       /* the weight is [inputs, outputs], as in stacked critics, not [outputs, inputs] */
    Parameter weight, bias, gamma, beta; /* gamma and beta of a layer norm before the activation, or NULL */
    void *packed, *packed_back;       /* the weight in the order of products with it and with its transpose */
    Cell *cell;                       /* of a recurrent layer, which has its parameters; NULL for a linear one */
} Layer;

/* Gates are linear in the input and in the state: input, forget, cell and output gate of an LSTM; reset and update gate
 * and the new state of a GRU. */
struct Cell {
    int kind, keeps_state; /* keeps_state: an episode begins with the state of the one before */
    Layer input, hidden;
};

typedef struct {
    int groups, hidden, heads;
    long inputs;
    Group *group;
    Layer *layer; /* hidden layers, then heads */
} Tower;

typedef struct {
    int family, std_form, masked;
    long outputs, params;   /* width of the output head, and parameters P of the distribution */
    long components;           /* discrete components of an action */
    const int64_t *options; /* and the number of options of each */
    Parameter raw_std;      /* of a Gaussian whose std is a parameter, or NULL */
    double std_mid, std_half;
    int to_env;                                      /* the environment receives a rescaled or clipped sample */
    int squashed;                                    /* by tanh, before rescaling; the bounds are finite */
    double log_volume;                               /* of the bounds */
    void *nodes, *node_weights;                      /* of expectations under a standard normal, [NODES] */
    void *scale, *centre, *low, *high;               /* of the rescaling, [A] */
    void *bound_centre, *bound_half;                 /* units of the bound loss, [A] */
} Policy;

typedef struct {
    int surrogate, value, bound, standardize;
    double clip_ratio, value_clip, value_coef, bound_coef, bound_limit;
} Loss;

/* Activations and sums of gradients of one layer, for one thread and one block of samples. Rows are padded to whole
 * vectors, so that no loop has a tail and no result depends on its position in a row or a call. */
typedef struct CellTrace CellTrace;
typedef struct {
    void *before, *after;   /* the activation, [BLOCK, outputs]; the same if its slope follows from its output */
    void *normal, *inverse; /* of a layer norm: its output before gamma and beta, and 1 / std, [BLOCK] */
    void *d;                /* the gradient of the output, [BLOCK, outputs]; that of a head overwrites its output */
    void *d_weight, *d_bias, *d_gamma, *d_beta;
    CellTrace *cell; /* of a recurrent layer */
} Trace;

/* The sequences of a block. Its rows go step by step: row t * count + j is step t of sequence j. */
typedef struct {
    long count, steps;
    unsigned char *reset; /* of each row: an episode begins */
    int64_t *row;         /* the sample of each row */
} Sequences;

struct CellTrace {
    Trace input, hidden;    /* gates [rows, 3 or 4 H], later their gradients; an LSTM has one array for the sum of both */
    const Sequences *block;
    void *hidden_before, *hidden_after;           /* [rows, H], the former after resets */
    void *cell_before, *cell_after, *cell_tanh; /* of an LSTM */
    void *start[2];                               /* hidden and cell state before the first step, [BLOCK, H] */
    void *carry[2];                               /* gradients of the state after a step, [BLOCK, H] */
};

typedef struct {
    void *input[MAX_TOWERS];  /* [BLOCK, inputs] of each tower; critics share one */
    Trace *trace[MAX_TOWERS]; /* of each layer of each tower */
    void *d[2];               /* gradients of layers, [BLOCK, widest]; for SAC the first is that of the critics' input */
    void *row;                /* scratch: a few rows of P numbers */
    Sequences block;          /* of a recurrent model */
    void *d_log_std;
    void *gradients; /* begin of all d_... */
    size_t gradient_bytes;
    double sums[SUMS];
} Workspace;

typedef struct {
    int is_double, threads, towers;
    Tower tower[MAX_TOWERS];
    Policy policy;
    Loss loss;
    long length;          /* steps of the longest sequence to learn from; 0 without recurrent layers */
    long sequences, block; /* of a block: most sequences to learn from, and most rows */
    int critics, lowest;  /* of SAC: their number, and 1 for their minimum, 0 for their mean */
    long batch_size;            /* of SAC; 0 for PPO */
    void *sample_values;     /* of SAC: SAMPLE_VALUES columns [B], and the policy's std [B, A] */
    int workspaces;       /* one for each thread; of SAC one for each block, the first with the sums of all */
    Workspace *workspace;
    void *log_std;        /* of a Gaussian whose std is a parameter: log-std and exp(-log-std), [2, A] */
    void *zeros;          /* as wide as any row */
    int64_t *selected;         /* the valid samples of a minibatch; grows with the largest one */
    long selected_room;
    void *arena;
} Model;

/* Samples to learn from or to evaluate; fields that a call does not need are NULL. */
typedef struct {
    long count, steps;              /* samples in all, and steps of a sequence: sample t * (count / steps) + s is step t of s */
    const void *obs[2][MAX_GROUPS]; /* by tower and group, [count, width] */
    const void *state[2][MAX_STATES], *reset; /* states before step 0, by tower; and which steps begin an episode */
    const void *mask, *valid, *action, *dist_params, *log_prob, *advantage, *value, *return_;
} Samples;

typedef struct {
    double entropy_coef;
    double count;                 /* valid samples of this minibatch, set by `gradients` */
    double adv_mean, adv_divisor; /* of standardised advantages; a negative divisor: compute both */
} Coefs;

typedef struct {
    double step, learning_rate, beta1, beta2, eps, weight_decay, scale;
    int coupled; /* weight decay is added to the gradient */
} AdamW;

/* A batch for SAC: transitions before and after the step, whose observations the critics share, and the results. */
typedef struct {
    Samples now, next;
    const void *reward, *discount, *valid, *noise; /* [B], and [B, A] */
    double temperature;
    double means[4]; /* critics: loss, std of the targets; policy: loss, log-probability, std, value */
} SACBatch;

/* The mathematics for one number type. */
typedef struct {
    size_t item;
    int (*prepare)(Model *); /* allocates the workspaces; 0 if there is no memory */
    void (*act)(Model *, const Samples *, const void *noise, void *params, void *action, void *for_env, void *states);
    void (*values)(Model *, const Samples *, const int64_t *index, long count, void *value, void *states);
    int (*log_prob)(const Model *, const Samples *, void *log_prob); /* 0 for an action out of range */
    int (*gradients)(Model *, const Samples *, const int64_t *index, long count, Coefs, double *sums);
    double (*square_sum)(const void *x, long n);
    void (*reverse_discounted_sum)(void *x, const void *decay, long n, long columns);
    void (*column_sums)(const void *x, const char *mask, long rows, long columns, const double *centre, double *sums);
    void (*adamw)(void *flat, const void *gradient, void *mean, void *square, long n, AdamW);
    void (*sac_gradients)(Model *, SACBatch *, int policy); /* of the policy, or of the critics */
} Real;

extern const Real REAL_FLOAT, REAL_DOUBLE;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86_VERSIONS
extern const Real REAL_FLOAT_AVX2, REAL_FLOAT_AVX512;
#endif

/* Returns the fastest version that this processor supports. */
const Real *real_of(int is_double);
extern const char *const ACTIVATION_NAMES[], *const STD_NAMES[];

/* Runs work(context, 0 .. threads - 1), each in a thread; returns after all of them. */
void run_in_threads(void (*work)(void *, int, int), void *context, int threads);

#endif
