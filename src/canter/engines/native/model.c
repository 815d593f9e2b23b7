/* A model from its description. */
#include "handle.h"

enum { LONGEST = 1 << 24, MOST_LAYERS = 1 << 10, MOST_THREADS = 256 };

/* Names of enumerations in native.h, in their order. */
static const char *const CELLS[] = {"lstm", "gru", NULL};
static const char *const ROLES[] = {"output", "std", "value", "hidden", NULL};
static const char *const FAMILIES[] = {"gaussian", "categorical", "beta", NULL};
static const char *const SURROGATES[] = {"none", "clipped", "smooth_clipped", "vanilla", NULL};
static const char *const VALUE_LOSSES[] = {"none", "mse", "clipped", "huber", NULL};
static const char *const BOUND_LOSSES[] = {"none", "soft", "regularisation", NULL};
static const char *const ADVANTAGES[] = {"given", "minibatch", "minibatch_sample", NULL};

static void read_group(Handle *h, PyObject *dict, Group *group)
{
    Fields f = open_fields(h, dict, "an observation group");
    const size_t item = h->real->item;
    group->width = read_integer(&f, "width", LONGEST);
    group->clip = read_number(&f, "clip");
    group->shift = read_array(&f, "shift", group->width, item);
    group->inverse_scale = read_array(&f, "inverse_scale", group->width, item);
    if (!group->shift != !group->inverse_scale)
        fail(h, "the description of a model: %s needs both shift and inverse_scale%s", f.what, "");
    close_fields(&f);
}

static void read_layer(Handle *h, PyObject *dict, Layer *layer, long inputs, int is_head)
{
    Fields f = open_fields(h, dict, "a layer");
    layer->inputs = inputs;
    layer->outputs = read_integer(&f, "outputs", LONGEST);
    layer->activation = read_name(&f, "activation", ACTIVATION_NAMES);
    layer->role = read_name(&f, "role", ROLES);
    layer->transposed = (int)read_integer(&f, "transposed", 1);
    layer->weight = read_parameter(&f, "weight", layer->outputs * inputs);
    layer->bias = read_parameter(&f, "bias", layer->outputs);
    layer->gamma = read_parameter(&f, "gamma", layer->outputs);
    layer->beta = read_parameter(&f, "beta", layer->outputs);
    close_fields(&f);
    int whole = layer->weight.value && layer->bias.value && !layer->gamma.value == !layer->beta.value;
    if (!whole || layer->outputs < 1)
        fail(h, "the description of a model: %s lacks parameters%s", f.what, "");
    if (is_head != (layer->role != HIDDEN) || (is_head && layer->activation != 0))
        fail(h, "the description of a model: %s has the role or the activation of another%s", f.what, "");
}

/* One of the two linear parts of a recurrent layer's gates. */
static void read_gates(Fields *f, Layer *layer, long inputs, long outputs, const char *weight, const char *bias)
{
    layer->inputs = inputs;
    layer->outputs = outputs;
    layer->weight = read_parameter(f, weight, outputs * inputs);
    layer->bias = read_parameter(f, bias, outputs);
    if (!layer->weight.value || !layer->bias.value)
        fail(f->h, "the description of a model: %s lacks parameters%s", f->what, "");
}

static void read_cell(Handle *h, PyObject *dict, Layer *layer, long inputs)
{
    Fields f = open_fields(h, dict, "a recurrent layer");
    Cell *cell = layer->cell = calloc(1, sizeof *cell);
    if (!cell) {
        PyErr_NoMemory();
        h->failed = 1;
        return;
    }
    cell->kind = read_name(&f, "cell", CELLS);
    cell->keeps_state = (int)read_integer(&f, "keeps_state", 1);
    layer->inputs = inputs;
    layer->outputs = read_integer(&f, "outputs", LONGEST);
    layer->role = HIDDEN;
    const long gates = (cell->kind == LSTM ? 4 : 3) * layer->outputs;
    read_gates(&f, &cell->input, inputs, gates, "weight", "bias");
    read_gates(&f, &cell->hidden, layer->outputs, gates, "state_weight", "state_bias");
    layer->gamma = read_parameter(&f, "gamma", layer->outputs);
    layer->beta = read_parameter(&f, "beta", layer->outputs);
    close_fields(&f);
    if (layer->outputs < 1 || !layer->gamma.value != !layer->beta.value)
        fail(h, "the description of a model: %s lacks parameters%s", f.what, "");
}

static void read_hidden(Handle *h, PyObject *dict, Layer *layer, long inputs)
{
    if (PyDict_Check(dict) && PyDict_GetItemString(dict, "cell"))
        read_cell(h, dict, layer, inputs);
    else
        read_layer(h, dict, layer, inputs, 0);
}

static void read_tower(Handle *h, PyObject *dict, Tower *tower)
{
    Fields f = open_fields(h, dict, "a tower");
    PyObject *groups = read_list(&f, "groups", MAX_GROUPS, &tower->groups);
    PyObject *hidden = read_list(&f, "hidden", MOST_LAYERS, &tower->hidden);
    PyObject *heads = read_list(&f, "heads", 3, &tower->heads);
    close_fields(&f);
    tower->group = calloc(tower->groups + 1, sizeof *tower->group);
    tower->layer = calloc(tower->hidden + tower->heads + 1, sizeof *tower->layer);
    if (!tower->group || !tower->layer) {
        PyErr_NoMemory();
        h->failed = 1;
    }
    for (int g = 0; g < tower->groups && !h->failed; g++) {
        read_group(h, PyList_GetItem(groups, g), &tower->group[g]);
        tower->inputs += tower->group[g].width;
    }
    long width = tower->inputs;
    for (int i = 0; i < tower->hidden && !h->failed; i++) {
        read_hidden(h, PyList_GetItem(hidden, i), &tower->layer[i], width);
        width = tower->layer[i].outputs;
    }
    for (int i = 0; i < tower->heads && !h->failed; i++)
        read_layer(h, PyList_GetItem(heads, i), &tower->layer[tower->hidden + i], width, 1);
}

static void read_categorical(Fields *f, Policy *policy, PyObject *options)
{
    Py_buffer *view = acquire(&f->h->buffers, options, -1, 0);
    if (!view) {
        f->h->failed = 1;
        return;
    }
    policy->options = view->buf;
    policy->components = (long)(view->len / sizeof *policy->options);
    long total = 0;
    for (long c = 0; c < policy->components; c++)
        total += policy->options[c];
    if (total != policy->outputs)
        fail(f->h, "the description of a model: %s.%s do not add up to outputs", f->what, "options");
}

static void read_gaussian(Fields *f, Policy *policy)
{
    policy->std_form = read_name(f, "std_form", STD_NAMES);
    policy->std_mid = read_number(f, "std_mid");
    policy->std_half = read_number(f, "std_half_range");
    policy->raw_std = read_parameter(f, "raw_std", policy->outputs);
    if (f->h->model.batch_size) /* SAC squashes its samples in Python */
        return;
    policy->to_env = (int)read_integer(f, "to_env", 1);
    policy->squashed = (int)read_integer(f, "squashed", 1);
    policy->log_volume = read_number(f, "log_volume");
    policy->nodes = read_array(f, "nodes", NODES, f->h->real->item);
    policy->node_weights = read_array(f, "node_weights", NODES, f->h->real->item);
    if (!policy->nodes || !policy->node_weights)
        fail(f->h, "the description of a model: %s.%s is missing", f->what, "nodes or node_weights");
    static const char *const names[] = {"scale", "centre", "low", "high", "bound_centre", "bound_half"};
    void **columns[] = {&policy->scale, &policy->centre, &policy->low, &policy->high, &policy->bound_centre,
                        &policy->bound_half};
    for (size_t c = 0; c < sizeof columns / sizeof *columns; c++)
        if (!(*columns[c] = read_array(f, names[c], policy->outputs, f->h->real->item)))
            fail(f->h, "the description of a model: %s.%s is missing", f->what, names[c]);
}

static void read_policy(Handle *h, PyObject *dict, Policy *policy)
{
    Fields f = open_fields(h, dict, "the policy");
    policy->family = read_name(&f, "family", FAMILIES);
    policy->outputs = read_integer(&f, "outputs", LONGEST);
    policy->masked = (int)read_integer(&f, "masked", 1);
    policy->params = policy->family == GAUSSIAN ? 2 * policy->outputs : policy->outputs;
    if (policy->family == GAUSSIAN)
        read_gaussian(&f, policy);
    else if (policy->family == BETA)
        policy->log_volume = read_number(&f, "log_volume");
    else {
        PyObject *options = read_field(&f, "options");
        if (options)
            read_categorical(&f, policy, options);
    }
    close_fields(&f);
}

static void read_loss(Handle *h, PyObject *dict, Loss *loss)
{
    Fields f = open_fields(h, dict, "the loss");
    loss->surrogate = read_name(&f, "surrogate", SURROGATES);
    loss->value = read_name(&f, "value_loss", VALUE_LOSSES);
    loss->bound = read_name(&f, "bound", BOUND_LOSSES);
    loss->standardize = read_name(&f, "advantage", ADVANTAGES);
    loss->clip_ratio = read_number(&f, "clip_ratio");
    loss->value_clip = read_number(&f, "value_clip");
    loss->value_coef = read_number(&f, "value_coef");
    loss->bound_coef = read_number(&f, "bound_coef");
    loss->bound_limit = read_number(&f, "bound_limit");
    close_fields(&f);
}

static void read_critics(Handle *h, PyObject *dict, Model *model)
{
    Fields f = open_fields(h, dict, "the critics");
    model->critics = (int)read_integer(&f, "members", MAX_CRITICS);
    model->lowest = (int)read_integer(&f, "lowest", 1);
    close_fields(&f);
    if (!model->critics || model->towers != 1 + 2 * model->critics)
        fail(h, "the description of a model: %s do not fit the towers%s", f.what, "");
}

/* Returns 1 for a model of SAC with critics of one shape and no layer norms, which is all that sac.h computes. */
static int critics_fit(const Model *model)
{
    const Tower *actor = &model->tower[0], *critic = &model->tower[1];
    int fit = actor->heads == 2 && actor->layer[actor->hidden + 1].role == STD_HEAD && critic->groups > 0;
    fit = fit && critic->group[critic->groups - 1].width == model->policy.outputs; /* the action */
    for (int t = 0; t < model->towers; t++)
        for (int i = 0; fit && i < model->tower[t].hidden + model->tower[t].heads; i++) {
            const Layer *layer = &model->tower[t].layer[i], *first = &critic->layer[i];
            fit = !layer->gamma.value && (t > model->critics || (layer->weight.gradient && layer->bias.gradient));
            if (t > 0)
                fit = fit && layer->inputs == first->inputs && layer->outputs == first->outputs &&
                      model->tower[t].hidden == critic->hidden;
        }
    return fit;
}

/* Returns 1 if there is each head that the policy needs, once. */
static int heads_fit(const Model *model)
{
    int seen[3] = {0};
    for (int t = 0; t < model->towers; t++)
        for (int i = model->tower[t].hidden; i < model->tower[t].hidden + model->tower[t].heads; i++) {
            const Layer *head = &model->tower[t].layer[i];
            seen[head->role]++;
            if (head->outputs != (head->role == VALUE_HEAD ? 1 : model->policy.outputs))
                return 0;
        }
    int std = model->policy.family == GAUSSIAN && !model->policy.raw_std.value;
    int values = model->batch_size ? 2 * model->critics : 1;
    return seen[OUTPUT_HEAD] == 1 && seen[STD_HEAD] == std && seen[VALUE_HEAD] == values;
}

static void drop_model(PyObject *capsule)
{
    Handle *h = PyCapsule_GetPointer(capsule, MODEL_NAME);
    Model *model = &h->model;
    for (int number = 0; model->workspace && number < model->workspaces; number++)
        for (int t = 0; t < MAX_TOWERS; t++) {
            Trace *trace = model->workspace[number].trace[t];
            for (int i = 0; trace && i < model->tower[t].hidden; i++)
                free(trace[i].cell);
            free(trace);
        }
    for (int t = 0; t < MAX_TOWERS; t++) {
        for (int i = 0; model->tower[t].layer && i < model->tower[t].hidden; i++)
            free(model->tower[t].layer[i].cell);
        free(model->tower[t].group);
        free(model->tower[t].layer);
    }
    free(model->workspace);
    free(model->selected);
    free(model->arena);
    release_buffers(&h->buffers);
    free(h);
}

static int make_workspaces(Model *model)
{
    model->workspaces = model->batch_size ? (int)((model->batch_size + BLOCK - 1) / BLOCK) : model->threads;
    model->workspace = calloc(model->workspaces, sizeof *model->workspace);
    for (int number = 0; model->workspace && number < model->workspaces; number++)
        for (int t = 0; t < model->towers; t++) {
            long layers = model->tower[t].hidden + model->tower[t].heads;
            Trace *trace = model->workspace[number].trace[t] = calloc(layers, sizeof *trace);
            if (!trace)
                return 0;
            for (int i = 0; i < model->tower[t].hidden; i++)
                if (model->tower[t].layer[i].cell && !(trace[i].cell = calloc(1, sizeof *trace[i].cell)))
                    return 0;
        }
    return model->workspace != NULL;
}

/* Returns 1 if recurrent layers are few enough, and a length is given for them alone. */
static int cells_fit(const Model *model)
{
    int any = 0;
    for (int t = 0; t < model->towers; t++) {
        int cells = 0;
        for (int i = 0; i < model->tower[t].hidden; i++)
            cells += model->tower[t].layer[i].cell != NULL;
        if (cells > MAX_CELLS)
            return 0;
        any |= cells > 0;
    }
    return any == (model->length > 0) && !(any && model->batch_size);
}

/* Reads towers, policy, and the loss of PPO or the critics of SAC. */
static void read_model(Handle *h, PyObject *description)
{
    Model *model = &h->model;
    Fields f = open_fields(h, description, "the model");
    PyObject *towers = read_list(&f, "towers", model->batch_size ? MAX_TOWERS : 2, &model->towers);
    PyObject *policy = read_field(&f, "policy");
    PyObject *rest = read_field(&f, model->batch_size ? "critics" : "loss");
    close_fields(&f);
    for (int t = 0; t < model->towers && !h->failed; t++)
        read_tower(h, PyList_GetItem(towers, t), &model->tower[t]);
    if (!h->failed)
        read_policy(h, policy, &model->policy);
    if (!h->failed && model->batch_size)
        read_critics(h, rest, model);
    else if (!h->failed)
        read_loss(h, rest, &model->loss);
    if (!h->failed && !cells_fit(model))
        fail(h, "the description of a model: %s do not fit the length of sequences%s", "recurrent layers", "");
    if (!h->failed && !(heads_fit(model) && (!model->batch_size || critics_fit(model))))
        fail(h, "the description of a model: %s do not fit the policy%s", "heads or critics", "");
}

static void size_blocks(Model *model)
{
    const long fitting = model->length ? MOST_ROWS / model->length : 0;
    model->sequences = fitting > MOST_SEQUENCES ? MOST_SEQUENCES : fitting < FEWEST_SEQUENCES ? FEWEST_SEQUENCES : fitting;
    const long rows = model->length * model->sequences;
    model->block = rows > BLOCK ? rows : BLOCK;
}

PyObject *make_model(PyObject *self, PyObject *args)
{
    int is_double, threads;
    long rows, length;
    PyObject *description;
    if (!PyArg_ParseTuple(args, "pillO", &is_double, &threads, &rows, &length, &description))
        return NULL;
    if (rows < 0 || rows > LONGEST || length < 0 || length > LONGEST)
        return PyErr_SetString(PyExc_ValueError, "a batch or a sequence that is too long, or negative"), NULL;
    Handle *h = calloc(1, sizeof *h);
    PyObject *capsule = h ? PyCapsule_New(h, MODEL_NAME, drop_model) : PyErr_NoMemory();
    if (!capsule)
        return free(h), NULL;
    Model *model = &h->model;
    h->real = real_of(is_double);
    model->batch_size = rows;
    model->length = length;
    size_blocks(model);
    model->threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    read_model(h, description);
    if (!h->failed && make_workspaces(model) && h->real->prepare(model))
        return capsule;
    if (!PyErr_Occurred())
        PyErr_NoMemory();
    Py_DecRef(capsule);
    return NULL;
}
