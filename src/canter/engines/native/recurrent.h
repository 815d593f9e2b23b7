/* Recurrent layers (LSTM, GRU): forward through the sequences of a block, and backward through time.
 *
 * The gates' products with the input are one for all steps of a block, those with the state one for each step. A row
 * rounds alike whether its step comes alone, for acting, or with others, for learning. */
#ifndef CANTER_RECURRENT_H
#define CANTER_RECURRENT_H

/* Tensors of a cell's state: hidden and, of an LSTM, cell state. */
INLINE int states_of(const Cell *cell)
{
    return cell->kind == LSTM ? 2 : 1;
}

static void pack_cell(const Cell *cell, int back)
{
    pack(&cell->input);
    pack(&cell->hidden);
    if (back) {
        pack_back(&cell->input);
        pack_back(&cell->hidden);
    }
    if (cell->kind != LSTM)
        return;
    REAL *packed = cell->input.packed; /* the gates of an LSTM are one sum, with both biases */
    const REAL *bias = cell->hidden.bias.value;
    const long step = PANEL * (cell->input.inputs + 1);
    for (long n = 0; n < cell->input.outputs; n++)
        packed[n / PANEL * step + n % PANEL] += bias[n];
}

/* The logistic function; NaN stays NaN. */
INLINE REAL gate(REAL x)
{
    return (REAL)0.5 + (REAL)0.5 * real_tanh((REAL)0.5 * x);
}

/* A step of one sequence; the gates [4, H] are those before their activation, then after it. */
ONCE void lstm_step(REAL *gates, const REAL *c_before, REAL *c_after, REAL *c_tanh, REAL *h, long n)
{
    REAL *in = gates, *forget = gates + n, *cell = gates + 2 * n, *out = gates + 3 * n;
    IN_PLACE for (long j = 0; j < 2 * n; j++)
        in[j] = gate(in[j]);
    IN_PLACE for (long j = 0; j < n; j++) {
        cell[j] = real_tanh(cell[j]);
        out[j] = gate(out[j]);
        c_after[j] = forget[j] * c_before[j] + in[j] * cell[j];
        c_tanh[j] = real_tanh(c_after[j]);
        h[j] = out[j] * c_tanh[j];
    }
}

/* Replaces the gates by their gradients; d_h comes from the layers above and from the next step, and d_c becomes the
 * gradient of the cell state before this step. */
ONCE void lstm_step_back(REAL *gates, const REAL *c_before, const REAL *c_tanh, const REAL *d_above, const REAL *d_h,
                         REAL *d_c, long n)
{
    REAL *in = gates, *forget = gates + n, *cell = gates + 2 * n, *out = gates + 3 * n;
    IN_PLACE for (long j = 0; j < n; j++) {
        const REAL d = d_above[j] + d_h[j], i = in[j], f = forget[j], g = cell[j], o = out[j];
        const REAL dc = d_c[j] + d * o * (ONE - c_tanh[j] * c_tanh[j]);
        out[j] = d * c_tanh[j] * o * (ONE - o);
        in[j] = dc * g * i * (ONE - i);
        forget[j] = dc * c_before[j] * f * (ONE - f);
        cell[j] = dc * i * (ONE - g * g);
        d_c[j] = dc * f;
    }
}

/* The same of a GRU, with gates [3, H] from the input and from the state. */
ONCE void gru_step(REAL *from_input, const REAL *from_state, const REAL *h_before, REAL *h, long n)
{
    REAL *reset = from_input, *update = from_input + n, *new = from_input + 2 * n;
    IN_PLACE for (long j = 0; j < 2 * n; j++)
        reset[j] = gate(reset[j] + from_state[j]);
    IN_PLACE for (long j = 0; j < n; j++) {
        new[j] = real_tanh(new[j] + reset[j] * from_state[2 * n + j]);
        h[j] = new[j] + update[j] * (h_before[j] - new[j]);
    }
}

/* d_h becomes the part of the gradient of the state before this step that does not pass through the gates. */
ONCE void gru_step_back(REAL *from_input, REAL *from_state, const REAL *h_before, const REAL *d_above, REAL *d_h, long n)
{
    REAL *reset = from_input, *update = from_input + n, *new = from_input + 2 * n, *state = from_state + 2 * n;
    IN_PLACE for (long j = 0; j < n; j++) {
        const REAL d = d_above[j] + d_h[j], r = reset[j], z = update[j], x = new[j];
        const REAL d_new = d * (ONE - z) * (ONE - x * x);
        reset[j] = d_new * state[j] * r * (ONE - r);
        update[j] = d * (h_before[j] - x) * z * (ONE - z);
        new[j] = d_new;
        state[j] = d_new * r;
        d_h[j] = d * z;
    }
    memcpy(from_state, from_input, 2 * n * sizeof *from_state);
}

/* Copies a state [count, H], or zeros where an episode begins. */
static void enter_step(const Cell *cell, const REAL *from, REAL *to, const unsigned char *reset, long count, long stride)
{
    for (long j = 0; j < count; j++, from += stride, to += stride)
        if (reset[j] && !cell->keeps_state)
            memset(to, 0, stride * sizeof *to);
        else
            memcpy(to, from, stride * sizeof *to);
}

/* The gates' products with the state before a step; those of an LSTM are added to those with the input. */
static void state_product(const Cell *cell, const REAL *h, REAL *gates, long count)
{
    const Layer *hidden = &cell->hidden;
    const REAL *packed = hidden->packed;
    const long stride = padded(hidden->outputs), panel = (hidden->inputs + 1) * PANEL;
    const int add = cell->kind == LSTM;
    multiply(&(Product){.a = h, .a_row = padded(hidden->inputs), .a_step = 1,
                        .b = packed + PANEL, .b_step = PANEL, .b_panel = panel,
                        .start = add ? gates : packed, .start_row = add ? stride : 0, .start_panel = add ? PANEL : panel,
                        .c = gates, .c_row = stride,
                        .rows = count, .columns = hidden->outputs, .depth = hidden->inputs});
}

/* x[rows, K] through the steps of all sequences of a block, from their states in `start`. */
static void cell_forward(const Layer *layer, const Trace *t, const REAL *x, long rows)
{
    const Cell *cell = layer->cell;
    const CellTrace *c = t->cell;
    const long n = layer->outputs, stride = padded(n), gate_stride = padded(cell->input.outputs), count = c->block->count;
    REAL *h_before = c->hidden_before, *h_after = c->hidden_after, *c_before = c->cell_before, *c_after = c->cell_after;
    REAL *c_tanh = c->cell_tanh, *gates = c->input.after, *state_gates = c->hidden.after;
    linear_forward(&cell->input, &c->input, x, rows);
    for (long first = 0; first < rows; first += count) {
        const unsigned char *reset = c->block->reset + first;
        const long at = first * stride, before = at - count * stride;
        enter_step(cell, first ? h_after + before : c->start[0], h_before + at, reset, count, stride);
        if (cell->kind == LSTM)
            enter_step(cell, first ? c_after + before : c->start[1], c_before + at, reset, count, stride);
        state_product(cell, h_before + at, state_gates + first * gate_stride, count);
        for (long r = first; r < first + count; r++)
            if (cell->kind == LSTM)
                lstm_step(gates + r * gate_stride, c_before + r * stride, c_after + r * stride, c_tanh + r * stride,
                          h_after + r * stride, n);
            else
                gru_step(gates + r * gate_stride, state_gates + r * gate_stride, h_before + r * stride,
                         h_after + r * stride, n);
    }
    if (t->normal) {
        memcpy(t->normal, h_after, rows * stride * sizeof *h_after);
        normalize(layer, t->normal, t->after, t->inverse, rows, stride);
    }
}

/* Clears the gradients of states that the next step did not read, since an episode began there. */
static void leave_step(const Cell *cell, const CellTrace *c, const unsigned char *reset, long stride)
{
    for (long j = 0; j < c->block->count; j++)
        for (int part = 0; reset[j] && !cell->keeps_state && part < states_of(cell); part++)
            memset((REAL *)c->carry[part] + j * stride, 0, stride * sizeof(REAL));
}

/* Expects the gradient of the output in t->d. Adds to the gradients of the weights; unless `back` is NULL, writes the
 * gradient of the input there. */
static void cell_backward(const Model *model, const Layer *layer, const Trace *t, const REAL *x, REAL *back, long rows)
{
    const Cell *cell = layer->cell;
    const CellTrace *c = t->cell;
    const long n = layer->outputs, stride = padded(n), gate_stride = padded(cell->input.outputs), count = c->block->count;
    REAL *gates = c->input.after, *state_gates = c->hidden.after, *d = t->d, *carry = c->carry[0], *carry_c = c->carry[1];
    const REAL *h_before = c->hidden_before, *c_before = c->cell_before, *c_tanh = c->cell_tanh;
    if (t->normal)
        normalize_back(layer, t, d, rows, stride);
    for (int part = 0; part < states_of(cell); part++) /* the loss does not depend on the state after the last step */
        memset(c->carry[part], 0, count * stride * sizeof *d);
    for (long first = rows - count; first >= 0; first -= count) {
        if (first + count < rows)
            leave_step(cell, c, c->block->reset + first + count, stride);
        for (long j = 0, r = first; j < count; j++, r++)
            if (cell->kind == LSTM)
                lstm_step_back(gates + r * gate_stride, c_before + r * stride, c_tanh + r * stride, d + r * stride,
                               carry + j * stride, carry_c + j * stride, n);
            else
                gru_step_back(gates + r * gate_stride, state_gates + r * gate_stride, h_before + r * stride,
                              d + r * stride, carry + j * stride, n);
        if (first > 0)
            input_gradient(model, &cell->hidden, state_gates + first * gate_stride, carry, cell->kind == GRU, count);
    }
    layer_gradients(&cell->input, &c->input, x, gates, 0, cell->input.outputs, rows);
    layer_gradients(&cell->hidden, &c->hidden, h_before, state_gates, 0, cell->hidden.outputs, rows);
    if (back)
        input_gradient(model, &cell->input, gates, back, 0, rows);
}

/* The states before the first step: those of the samples, or later those after the last step of the block before. */
static void begin_states(const Tower *tower, const Trace *trace, const Sequences *block, const void *const *states,
                         const int64_t *row, int is_first)
{
    for (int i = 0; i < tower->hidden; i++) {
        const Layer *layer = &tower->layer[i];
        const CellTrace *c = trace[i].cell;
        const long n = layer->outputs, stride = padded(n), last = (block->steps - 1) * block->count * stride;
        for (int part = 0; layer->cell && part < states_of(layer->cell); part++, states++) {
            REAL *to = c->start[part];
            if (!is_first)
                memcpy(to, (const REAL *)(part ? c->cell_after : c->hidden_after) + last, block->count * stride * sizeof *to);
            for (long j = 0; is_first && j < block->count; j++)
                memcpy(to + j * stride, (const REAL *)*states + row[j] * n, n * sizeof *to);
        }
    }
}

/* Writes the states after each step of a block to an array [states, count, H]. */
static void write_states(const Tower *tower, const Trace *trace, const Sequences *block, long count, REAL *to)
{
    for (int i = 0; i < tower->hidden; i++) {
        const Layer *layer = &tower->layer[i];
        const CellTrace *c = trace[i].cell;
        const long n = layer->outputs, stride = padded(n);
        for (int part = 0; layer->cell && part < states_of(layer->cell); part++, to += count * n) {
            const REAL *from = part ? c->cell_after : c->hidden_after;
            for (long r = 0; r < block->steps * block->count; r++)
                memcpy(to + block->row[r] * n, from + r * stride, n * sizeof *to);
        }
    }
}

#endif
