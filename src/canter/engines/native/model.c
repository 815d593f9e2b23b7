/* A model from its description: whole numbers, settings and arrays, each read from the first to the last. */
#include "handle.h"

Py_buffer *held_view(Held *held, Py_ssize_t number)
{
    return (held->many ? held->many : held->few) + number;
}

void release(Held *held)
{
    while (held->count > 0)
        PyBuffer_Release(held_view(held, --held->count));
    free(held->many);
    held->many = NULL;
}

static int is_true(PyObject *answer)
{
    int truth = answer && PyObject_IsTrue(answer) == 1;
    Py_XDECREF(answer);
    return truth;
}

/* The memory of a tensor. Asked for its address it answers in a fraction of the time in which it makes an array. */
static int tensor_memory(PyObject *tensor, Py_buffer *view)
{
    static PyObject *is_cpu, *is_contiguous, *nbytes, *data_ptr;
    if (!data_ptr) {
        is_cpu = PyUnicode_InternFromString("is_cpu");
        is_contiguous = PyUnicode_InternFromString("is_contiguous");
        nbytes = PyUnicode_InternFromString("nbytes");
        data_ptr = PyUnicode_InternFromString("data_ptr");
    }
    if (!is_true(PyObject_GetAttr(tensor, is_cpu)) || !is_true(PyObject_CallMethodObjArgs(tensor, is_contiguous, NULL))) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a tensor that is not on the CPU, or not in one piece");
        return -1;
    }
    PyObject *length = PyObject_GetAttr(tensor, nbytes), *address = PyObject_CallMethodObjArgs(tensor, data_ptr, NULL);
    if (length && address)
        *view = (Py_buffer){.len = PyLong_AsSsize_t(length), .buf = PyLong_AsVoidPtr(address), .obj = Py_NewRef(tensor)};
    Py_XDECREF(length);
    Py_XDECREF(address);
    return length && address ? 0 : -1;
}

/* The memory of an array or a tensor of `bytes` (negative: of any length); NULL with an exception where it has not that
 * many. The view may move when the next array is held, what it points to does not. */
Py_buffer *hold(Held *held, PyObject *array, Py_ssize_t bytes, int write)
{
    const int few = sizeof held->few / sizeof *held->few;
    if (held->count == (held->many ? held->room : few)) {
        held->room = 2 * held->count;
        Py_buffer *grown = realloc(held->many, held->room * sizeof *grown);
        if (!grown)
            return (Py_buffer *)PyErr_NoMemory();
        if (!held->many)
            memcpy(grown, held->few, sizeof held->few);
        held->many = grown;
    }
    Py_buffer *view = held_view(held, held->count);
    int status = PyObject_CheckBuffer(array) ? PyObject_GetBuffer(array, view, write ? PyBUF_WRITABLE : PyBUF_SIMPLE)
                                             : tensor_memory(array, view);
    if (status < 0)
        return NULL;
    held->count++;
    if (bytes >= 0 && view->len != bytes) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes where %zd are needed", view->len, bytes);
        return NULL;
    }
    return view;
}

static long read_number(Handle *h, long most)
{
    if (h->number == h->number_end || *h->number < 0 || *h->number > most)
        return h->failed = 1, 0;
    return (long)*h->number++;
}

static double read_setting(Handle *h)
{
    return h->setting == h->setting_end ? (h->failed = 1, 0.0) : *h->setting++;
}

/* The next array, of `size` numbers of `item` bytes; None is NULL. */
static void *read_array(Handle *h, long size, size_t item, int write)
{
    PyObject *array = h->failed ? NULL : PyList_GetItem(h->arrays, h->next++);
    if (array == Py_None)
        return NULL;
    Py_buffer *view = array ? hold(&h->held, array, (Py_ssize_t)(size * item), write) : NULL;
    if (!view)
        return h->failed = 1, NULL;
    return view->buf;
}

static Parameter read_parameter(Handle *h, long size)
{
    void *value = read_array(h, size, h->real->item, 0), *gradient = read_array(h, size, h->real->item, 1);
    return (Parameter){value, gradient, size};
}

enum { LONGEST = 1 << 24, MOST_LAYERS = 1 << 10, MOST_THREADS = 256 };

static void read_tower(Handle *h, Tower *tower)
{
    const size_t item = h->real->item;
    tower->groups = (int)read_number(h, MAX_GROUPS);
    tower->hidden = (int)read_number(h, MOST_LAYERS);
    tower->heads = (int)read_number(h, 3);
    tower->group = calloc(tower->groups + 1, sizeof *tower->group);
    tower->layer = calloc(tower->hidden + tower->heads + 1, sizeof *tower->layer);
    if (!tower->group || !tower->layer)
        h->failed = 1;
    for (int g = 0; g < tower->groups && !h->failed; g++) {
        Group *group = &tower->group[g];
        tower->inputs += group->width = read_number(h, LONGEST);
        group->clip = read_setting(h);
        group->shift = read_array(h, group->width, item, 0);
        group->inverse_scale = read_array(h, group->width, item, 0);
        h->failed |= !group->shift != !group->inverse_scale;
    }
    long width = tower->inputs;
    for (int i = 0; i < tower->hidden + tower->heads && !h->failed; i++) {
        Layer *layer = &tower->layer[i];
        layer->inputs = width;
        layer->outputs = read_number(h, LONGEST);
        long activations = 0;
        while (ACTIVATION_NAMES[activations])
            activations++;
        layer->activation = (int)read_number(h, activations - 1);
        layer->role = (int)read_number(h, VALUE_HEAD);
        layer->turned = (int)read_number(h, 1);
        layer->weight = read_parameter(h, layer->outputs * width);
        layer->bias = read_parameter(h, layer->outputs);
        layer->gamma = read_parameter(h, layer->outputs);
        layer->beta = read_parameter(h, layer->outputs);
        h->failed |= !layer->weight.value || !layer->bias.value || !layer->gamma.value != !layer->beta.value;
        h->failed |= layer->outputs < 1 || (i >= tower->hidden && layer->activation != 0);
        width = i < tower->hidden ? layer->outputs : width;
    }
}

static void read_policy(Handle *h, Policy *policy)
{
    const size_t item = h->real->item;
    policy->family = (int)read_number(h, CHOICES);
    policy->outputs = read_number(h, LONGEST);
    policy->masked = (int)read_number(h, 1);
    policy->choices = read_number(h, LONGEST);
    policy->params = policy->family == GAUSSIAN ? 2 * policy->outputs : policy->outputs;
    policy->options = read_array(h, policy->choices, sizeof *policy->options, 0);
    long options = 0;
    for (long c = 0; c < policy->choices && !h->failed; c++)
        options += policy->options[c];
    h->failed |= policy->family == CHOICES && options != policy->outputs;
    if (policy->family != GAUSSIAN || h->failed)
        return;
    policy->std_form = (int)read_number(h, 3);
    policy->std_mid = read_setting(h), policy->std_half = read_setting(h);
    policy->raw_std = read_parameter(h, policy->outputs);
    if (h->model.rows) /* SAC squashes what it draws, outside of this */
        return;
    policy->to_env = (int)read_number(h, 1);
    void **columns[] = {&policy->scale, &policy->centre, &policy->low, &policy->high, &policy->bound_centre,
                        &policy->bound_half};
    for (size_t c = 0; c < sizeof columns / sizeof *columns; c++)
        h->failed |= !(*columns[c] = read_array(h, policy->outputs, item, 0));
}

static void read_loss(Handle *h, Loss *loss)
{
    loss->surrogate = (int)read_number(h, VANILLA), loss->value = (int)read_number(h, HUBER);
    loss->bound = (int)read_number(h, REGULARISATION), loss->standardize = (int)read_number(h, SAMPLE_STD);
    loss->clip_ratio = read_setting(h), loss->value_clip = read_setting(h), loss->value_coef = read_setting(h);
    loss->bound_coef = read_setting(h), loss->bound_limit = read_setting(h);
}

static void read_critics(Handle *h, Model *model)
{
    model->critics = (int)read_number(h, MAX_CRITICS);
    model->lowest = (int)read_number(h, 1);
    h->failed |= !model->critics || model->towers != 1 + 2 * model->critics;
}

/* Whether a model of SAC has the towers that its mathematics goes through: critics of one shape, and no layer norms. */
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

/* Whether the heads are those that the policy needs, each once. */
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
    int values = model->rows ? 2 * model->critics : 1;
    return seen[OUTPUT_HEAD] == 1 && seen[STD_HEAD] == std && seen[VALUE_HEAD] == values;
}

static void drop_model(PyObject *capsule)
{
    Handle *h = PyCapsule_GetPointer(capsule, MODEL_NAME);
    Model *model = &h->model;
    for (int number = 0; model->workspace && number < model->workspaces; number++)
        for (int t = 0; t < MAX_TOWERS; t++)
            free(model->workspace[number].trace[t]);
    for (int t = 0; t < MAX_TOWERS; t++) {
        free(model->tower[t].group);
        free(model->tower[t].layer);
    }
    free(model->workspace);
    free(model->row);
    free(model->arena);
    release(&h->held);
    free(h);
}

static int make_workspaces(Model *model)
{
    model->workspaces = model->rows ? (int)((model->rows + BLOCK - 1) / BLOCK) : model->threads;
    model->workspace = calloc(model->workspaces, sizeof *model->workspace);
    for (int number = 0; model->workspace && number < model->workspaces; number++)
        for (int t = 0; t < model->towers; t++) {
            long layers = model->tower[t].hidden + model->tower[t].heads;
            if (!(model->workspace[number].trace[t] = calloc(layers, sizeof(Trace))))
                return 0;
        }
    return model->workspace != NULL;
}

PyObject *make_model(PyObject *self, PyObject *args)
{
    int is_double, threads;
    long rows;
    PyObject *numbers, *settings, *arrays;
    if (!PyArg_ParseTuple(args, "pilOOO!", &is_double, &threads, &rows, &numbers, &settings, &PyList_Type, &arrays))
        return NULL;
    Handle *h = calloc(1, sizeof *h);
    PyObject *capsule = h ? PyCapsule_New(h, MODEL_NAME, drop_model) : PyErr_NoMemory();
    if (!capsule)
        return free(h), NULL;
    Model *model = &h->model;
    h->real = real_of(is_double);
    h->arrays = arrays;
    model->rows = rows < 0 || rows > LONGEST ? (h->failed = 1, 0) : rows;
    model->threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    Py_buffer *view = hold(&h->held, numbers, -1, 0);
    if (view)
        h->number = view->buf, h->number_end = h->number + view->len / sizeof *h->number;
    view = view ? hold(&h->held, settings, -1, 0) : NULL;
    if (!view)
        return Py_DecRef(capsule), NULL;
    h->setting = view->buf, h->setting_end = h->setting + view->len / sizeof *h->setting;
    model->towers = (int)read_number(h, rows ? MAX_TOWERS : 2);
    for (int t = 0; t < model->towers && !h->failed; t++)
        read_tower(h, &model->tower[t]);
    if (!h->failed)
        read_policy(h, &model->policy);
    if (!h->failed && rows)
        read_critics(h, model);
    else if (!h->failed)
        read_loss(h, &model->loss);
    if (!h->failed && heads_fit(model) && (!rows || critics_fit(model))) {
        h->arrays = NULL; /* read, and only borrowed */
        if (make_workspaces(model) && h->real->prepare(model))
            return capsule;
        PyErr_NoMemory();
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the description is not that of a model");
    Py_DecRef(capsule);
    return NULL;
}
