/* Forward and backward passes of a tower for one block of samples. */
#ifndef CANTER_TOWER_H
#define CANTER_TOWER_H

INLINE int part_of(const Layer *head)
{
    return head->role == VALUE_HEAD ? VALUE : POLICY;
}

static int parts_of(const Tower *tower)
{
    int parts = 0;
    for (int i = tower->hidden; i < tower->hidden + tower->heads; i++)
        parts |= part_of(&tower->layer[i]);
    return parts;
}

static void tower_forward(const Model *model, int number, const Workspace *w, int parts, long rows)
{
    const Tower *tower = &model->tower[number];
    const REAL *x = w->input[number];
    for (int i = 0; i < tower->hidden + tower->heads; i++) {
        const Layer *layer = &tower->layer[i];
        if (i < tower->hidden || part_of(layer) & parts)
            layer->cell ? cell_forward(layer, &w->trace[number][i], x, rows)
                        : linear_forward(layer, &w->trace[number][i], x, rows);
        if (i < tower->hidden)
            x = w->trace[number][i].after;
    }
}

/* Returns the hidden layer that layer `i` of a tower reads; -1 for the input. */
INLINE int layer_below(const Tower *tower, int i)
{
    return (i < tower->hidden ? i : tower->hidden) - 1;
}

INLINE const REAL *layer_input(const Model *model, int number, int i, const Workspace *w)
{
    const int below = layer_below(&model->tower[number], i);
    return below < 0 ? w->input[number] : w->trace[number][below].after;
}

static void step_back(const Model *model, int number, int i, const Workspace *w, REAL *back, int add, long rows)
{
    const Layer *layer = &model->tower[number].layer[i];
    const Trace *trace = w->trace[number];
    const int below = layer_below(&model->tower[number], i);
    REAL *d_below = below < 0 ? back : trace[below].d;
    if (layer->cell) {
        cell_backward(model, layer, &trace[i], layer_input(model, number, i, w), d_below, rows);
        return;
    }
    linear_backward(model, layer, &trace[i], d_below, add, rows);
    if (!model->batch_size) /* for SAC after the last block */
        layer_gradients(layer, &trace[i], layer_input(model, number, i, w), trace[i].d, 0, weight_rows(layer), rows);
}

/* Expects the gradients of heads in their outputs. Writes that of the input to `back`, or adds it, unless it is NULL. */
static void tower_backward(const Model *model, int number, const Workspace *w, int parts, REAL *back, int add,
                           long rows)
{
    const Tower *tower = &model->tower[number];
    int more = tower->hidden ? 0 : add;
    for (int i = tower->hidden; i < tower->hidden + tower->heads; i++)
        if (part_of(&tower->layer[i]) & parts) {
            step_back(model, number, i, w, back, more, rows);
            more = 1;
        }
    for (int i = tower->hidden - 1; i >= 0; i--)
        step_back(model, number, i, w, back, i > 0 ? 0 : add, rows);
}

#endif
