/* Layout of all workspaces in one piece of memory, allocated with the model. */
#ifndef CANTER_MEMORY_H
#define CANTER_MEMORY_H

#include <stdlib.h>

/* Laid out twice: without a base it only counts bytes. */
typedef struct {
    char *base;
    size_t used;
} Arena;

static void *take(Arena *arena, size_t bytes)
{
    void *piece = arena->base ? arena->base + arena->used : NULL;
    arena->used += (bytes + 63) / 64 * 64;
    return piece;
}

static void *take_rows(Arena *arena, long rows, long width)
{
    return take(arena, (size_t)rows * padded(width) * sizeof(REAL));
}

static void lay_out_cell(Arena *arena, const Layer *layer, Trace *t, long rows)
{
    const Cell *cell = layer->cell;
    CellTrace *c = t->cell;
    const long n = layer->outputs;
    c->input.before = c->input.after = take_rows(arena, rows, cell->input.outputs);
    c->hidden.before = c->hidden.after = cell->kind == LSTM ? c->input.after : take_rows(arena, rows, cell->input.outputs);
    c->hidden_before = take_rows(arena, rows, n);
    c->hidden_after = layer->gamma.value ? take_rows(arena, rows, n) : t->after;
    for (int part = 0; part < states_of(cell); part++) {
        c->start[part] = take_rows(arena, BLOCK, n);
        c->carry[part] = take_rows(arena, BLOCK, n);
    }
    if (cell->kind == LSTM) {
        c->cell_before = take_rows(arena, rows, n);
        c->cell_after = take_rows(arena, rows, n);
        c->cell_tanh = take_rows(arena, rows, n);
    }
}

static void lay_out_trace(Arena *arena, const Layer *layer, Trace *t, long rows)
{
    const long n = layer->outputs;
    t->after = take_rows(arena, rows, n);
    t->before = ACTIVATION[layer->activation].needs_x ? take_rows(arena, rows, n) : t->after;
    t->normal = layer->gamma.value ? take_rows(arena, rows, n) : NULL;
    t->inverse = layer->gamma.value ? take_rows(arena, 1, rows) : NULL;
    if (layer->cell)
        lay_out_cell(arena, layer, t, rows);
}

static void lay_out_cell_gradients(Arena *arena, const Layer *layer, Trace *t)
{
    t->d_weight = take_rows(arena, layer->outputs, layer->inputs);
    t->d_bias = take_rows(arena, 1, layer->outputs);
}

static void lay_out_gradients(Arena *arena, const Layer *layer, Trace *t)
{
    if (layer->cell) {
        lay_out_cell_gradients(arena, &layer->cell->input, &t->cell->input);
        lay_out_cell_gradients(arena, &layer->cell->hidden, &t->cell->hidden);
    } else {
        t->d_weight = take_rows(arena, weight_rows(layer), weight_columns(layer));
        t->d_bias = take_rows(arena, 1, layer->outputs);
    }
    t->d_gamma = layer->gamma.value ? take_rows(arena, 1, layer->outputs) : NULL;
    t->d_beta = layer->gamma.value ? take_rows(arena, 1, layer->outputs) : NULL;
}

static long widest(const Model *model)
{
    long most = model->policy.params;
    for (int t = 0; t < model->towers; t++)
        for (int i = 0; i < model->tower[t].hidden + model->tower[t].heads; i++) {
            const Layer *layer = &model->tower[t].layer[i];
            most = layer->inputs > most ? layer->inputs : most;
            most = layer->outputs > most ? layer->outputs : most;
        }
    return most;
}

static void lay_out_workspace(Arena *arena, const Model *model, Workspace *w)
{
    for (int i = 0; i < 2; i++)
        w->d[i] = take_rows(arena, model->block, widest(model));
    if (model->length) {
        w->block.row = take(arena, model->block * sizeof *w->block.row);
        w->block.reset = take(arena, model->block);
    }
    for (int t = 0; t < model->towers; t++) {
        const Tower *tower = &model->tower[t];
        w->input[t] = model->batch_size && t > 1 ? w->input[1] : take_rows(arena, model->block, tower->inputs);
        for (int i = 0; i < tower->hidden + tower->heads; i++) {
            const Layer *layer = &tower->layer[i];
            Trace *trace = &w->trace[t][i];
            if (model->batch_size && t > model->critics) { /* a target critic is done before its critic begins */
                *trace = w->trace[t - model->critics][i];
                continue;
            }
            if (layer->cell)
                trace->cell->block = &w->block;
            lay_out_trace(arena, layer, trace, model->block);
            if (i >= tower->hidden)
                trace->d = trace->after;
            else /* for PPO two are enough; SAC keeps all until the weights' gradients are computed */
                trace->d = model->batch_size ? take_rows(arena, model->block, layer->outputs) : w->d[i % 2];
        }
    }
    w->row = take_rows(arena, 5, model->policy.params);
    if (model->batch_size && w != model->workspace)
        return;
    size_t before = arena->used;
    w->gradients = take(arena, 0);
    for (int t = 0; t < model->towers; t++)
        for (int i = 0; i < model->tower[t].hidden + model->tower[t].heads; i++)
            lay_out_gradients(arena, &model->tower[t].layer[i], &w->trace[t][i]);
    w->d_log_std = take_rows(arena, 1, model->policy.outputs);
    w->gradient_bytes = arena->used - before;
}

static void lay_out_packed(Arena *arena, Layer *layer)
{
    layer->packed = take_rows(arena, layer->inputs + 1, layer->outputs);
    layer->packed_back = take_rows(arena, layer->outputs, layer->inputs);
}

static void lay_out(Arena *arena, Model *model)
{
    for (int t = 0; t < model->towers; t++)
        for (int i = 0; i < model->tower[t].hidden + model->tower[t].heads; i++) {
            Layer *layer = &model->tower[t].layer[i];
            if (layer->cell) {
                lay_out_packed(arena, &layer->cell->input);
                lay_out_packed(arena, &layer->cell->hidden);
            } else
                lay_out_packed(arena, layer);
        }
    model->log_std = take_rows(arena, 2, model->policy.outputs);
    model->zeros = take_rows(arena, 1, widest(model));
    model->sample_values = take(arena, (size_t)model->batch_size * (SAMPLE_VALUES + model->policy.outputs) * sizeof(REAL));
    for (int number = 0; number < model->workspaces; number++)
        lay_out_workspace(arena, model, &model->workspace[number]);
}

static int prepare(Model *model)
{
    Arena arena = {NULL, 0};
    lay_out(&arena, model);
    if (posix_memalign(&model->arena, 64, arena.used ? arena.used : 64) != 0) {
        model->arena = NULL;
        return 0;
    }
    memset(model->arena, 0, arena.used); /* padding begins as zeros */
    arena = (Arena){model->arena, 0};
    lay_out(&arena, model);
    return 1;
}

#endif
