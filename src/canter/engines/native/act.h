/* Blocks of samples through the towers: acting, values and log-probabilities. */
#ifndef CANTER_ACT_H
#define CANTER_ACT_H

/* Multiplications that make another thread worthwhile: waking it takes as long as some hundred thousand of them. */
#define WORTH_A_THREAD (1L << 21)

/* Sequences that make a thread worthwhile: with fewer a step's product reads the weights for too little. */
enum { LEAST_SEQUENCES = 4 };

static long weights_of(const Layer *layer)
{
    return layer->cell ? layer->cell->input.weight.size + layer->cell->hidden.weight.size : layer->weight.size;
}

/* Returns the number of threads for rows in sequences of `steps` rows; it follows from sizes alone, because it decides
 * how sums are rounded. */
static int threads_for(const Model *model, long rows, long steps, int parts, int passes)
{
    const long least = model->length ? steps * LEAST_SEQUENCES : BLOCK, blocks = (rows + least - 1) / least;
    long weights = 0;
    for (int t = 0; t < model->towers; t++)
        for (int i = 0; parts_of(&model->tower[t]) & parts && i < model->tower[t].hidden + model->tower[t].heads; i++)
            weights += weights_of(&model->tower[t].layer[i]);
    long most = passes * rows * weights / WORTH_A_THREAD;
    most = most < blocks ? most : blocks;
    most = most < model->threads ? most : model->threads;
    return most > 1 ? (int)most : 1;
}

static void pack_tower(const Tower *tower, int parts, int back)
{
    for (int i = 0; parts_of(tower) & parts && i < tower->hidden + tower->heads; i++)
        if (i < tower->hidden || part_of(&tower->layer[i]) & parts) {
            const Layer *layer = &tower->layer[i];
            if (layer->cell) {
                pack_cell(layer->cell, back);
                continue;
            }
            pack(layer);
            if (back)
                pack_back(layer);
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

/* Takes sequences `first` to `first + count` of an index, or of the samples themselves, and their steps `from` to
 * `from + steps`: their samples, where their episodes begin, and their states. */
static void begin_block(const Model *model, Workspace *w, int parts, const Samples *samples, const int64_t *index,
                        long first, long count, long from, long steps)
{
    Sequences *block = &w->block;
    const long sequences = samples->count / samples->steps;
    for (long j = 0; j < count; j++)
        for (long t = 0; t < steps; t++) {
            const int64_t row = (from + t) * sequences + (index ? index[first + j] : first + j);
            block->row[t * count + j] = row;
            block->reset[t * count + j] = samples->reset ? ((const unsigned char *)samples->reset)[row] : 0;
        }
    block->count = count;
    for (int t = 0; t < model->towers; t++)
        if (parts_of(&model->tower[t]) & parts)
            begin_states(&model->tower[t], w->trace[t], block, samples->state[t], block->row, from == 0);
    block->steps = steps;
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
    REAL *params, *for_env, *value, *states;
    void *action;
    Coefs coefs;
    REAL weight;
    int parts;
    long block; /* rows, or sequences, of a block */
} Job;

/* First block of a thread; each thread has about as many consecutive blocks. */
static long first_block(long rows, long block, int thread, int threads)
{
    return (rows + block - 1) / block * thread / threads;
}

#define FOR_BLOCKS(FIRST, COUNT, ROWS, SIZE)                                                                           \
    for (long FIRST = first_block(ROWS, SIZE, thread, threads) * SIZE,                                                 \
              after_ = first_block(ROWS, SIZE, thread + 1, threads) * SIZE, stop_ = after_ < ROWS ? after_ : ROWS,     \
              COUNT;                                                                                                   \
         FIRST < stop_ && (COUNT = stop_ - FIRST < SIZE ? stop_ - FIRST : SIZE, 1); FIRST += SIZE)

/* Sequences of a block: shared evenly by the threads, up to a limit. */
static long sequences_of_block(long sequences, int threads, long most)
{
    const long each = (sequences + threads - 1) / threads;
    return each < 1 ? 1 : each < most ? each : most;
}

static void act_blocks(void *context, int thread, int threads)
{
    const Job *job = context;
    const Model *model = job->model;
    const Policy *policy = &model->policy;
    Workspace *w = &model->workspace[thread];
    const long n = policy->outputs, stride = padded(n);
    FOR_BLOCKS(first, count, job->samples->count, job->block) {
        if (model->length)
            begin_block(model, w, POLICY, job->samples, NULL, first, count, 0, 1);
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
            } else if (policy->family == CATEGORICAL) {
                if (policy->masked)
                    mask_logits(params, (const unsigned char *)job->samples->mask + r * n, n);
                draw_categorical(policy, params, job->noise + r * n, (int64_t *)job->action + r * policy->components);
            }
        }
        if (job->states)
            write_states(&model->tower[0], w->trace[0], &w->block, job->samples->count, job->states);
    }
}

/* A recurrent policy acts with the states of its samples, and writes those after the step to `states` [states, N, H]. */
static void act(Model *model, const Samples *samples, const void *noise, void *params, void *action, void *for_env,
                void *states)
{
    pack_model(model, POLICY, 0);
    const int threads = threads_for(model, samples->count, 1, POLICY, 1);
    Job job = {.model = model, .samples = samples, .noise = noise, .params = params, .action = action, .for_env = for_env,
               .states = states, .block = model->length ? sequences_of_block(samples->count, threads, BLOCK) : BLOCK};
    run_in_threads(act_blocks, &job, threads);
}

static void value_blocks(void *context, int thread, int threads)
{
    const Job *job = context;
    const Workspace *w = &job->model->workspace[thread];
    FOR_BLOCKS(first, count, job->count, BLOCK) {
        run_towers(job->model, w, VALUE, job->samples, job->index ? job->index + first : NULL, first, count);
        const REAL *output = head_output(job->model, w, VALUE_HEAD);
        for (long r = 0; r < count; r++)
            job->value[first + r] = output[r * padded(1)];
    }
}

/* The same of sequences, as many steps at a time as a block holds. */
static void value_sequences(void *context, int thread, int threads)
{
    const Job *job = context;
    const Model *model = job->model;
    Workspace *w = &model->workspace[thread];
    const int last = model->towers - 1;
    const long length = job->samples->steps;
    FOR_BLOCKS(first, count, job->count, job->block)
        for (long from = 0, steps; from < length; from += steps) {
            steps = model->block / count < length - from ? model->block / count : length - from;
            begin_block(model, w, VALUE, job->samples, job->index, first, count, from, steps);
            run_towers(model, w, VALUE, job->samples, w->block.row, 0, steps * count);
            const REAL *output = head_output(model, w, VALUE_HEAD);
            for (long r = 0; r < steps * count; r++)
                job->value[(from + r / count) * job->count + first + r % count] = output[r * padded(1)];
            if (job->states)
                write_states(&model->tower[last], w->trace[last], &w->block, job->samples->count, job->states);
        }
}

/* Values of samples, or of `count` sequences of a recurrent model; `index` NULL: of all. A recurrent critic writes the
 * states after each step to `states` [states, samples, H], unless it is NULL. */
static void values(Model *model, const Samples *samples, const int64_t *index, long count, void *value, void *states)
{
    pack_model(model, VALUE, 0);
    const int threads = threads_for(model, count * samples->steps, samples->steps, VALUE, 1);
    Job job = {.model = model, .samples = samples, .index = index, .count = count, .value = value, .states = states,
               .block = sequences_of_block(count, threads, model->sequences)};
    run_in_threads(model->length ? value_sequences : value_blocks, &job, threads);
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
            if (policy->squashed)
                ((REAL *)result)[r] -= log_squash_slopes(policy, (const REAL *)samples->action + r * n);
        } else if (policy->family == BETA) {
            const REAL *action = (const REAL *)samples->action + r * (policy->outputs / 2);
            ((REAL *)result)[r] = beta_log_prob(policy, params, action);
        } else {
            log_softmax(policy, params, row);
            ((REAL *)result)[r] = categorical_log_prob(policy, row, (const int64_t *)samples->action + r * policy->components);
        }
    }
    return 1;
}

#endif
