/* The Python module: reads the arguments of each call and runs it. */
#include "handle.h"

#include <math.h>

#define SAMPLES_NAME "canter.samples"

/* Changes with the arguments of a function or the fields of a description, here and in `__init__.py`. */
enum { INTERFACE = 2 };

/* Returns the model for a call; an error if another thread uses it, since calls share its memory. */
static Handle *open_model(PyObject *capsule)
{
    Handle *h = PyCapsule_GetPointer(capsule, MODEL_NAME);
    if (h && h->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is using this engine");
        return NULL;
    }
    return h;
}

/* Runs a call without the GIL. */
#define COMPUTE(HANDLE, CALL)                                                                                          \
    (HANDLE)->busy = 1;                                                                                                \
    Py_BEGIN_ALLOW_THREADS;                                                                                            \
    CALL;                                                                                                              \
    Py_END_ALLOW_THREADS;                                                                                              \
    (HANDLE)->busy = 0;

/* The arrays a call expects, in the order in which Python passes them. */
typedef struct {
    struct {
        const void **place; /* receives the address */
        Py_ssize_t bytes;
        int write, optional; /* optional: None is NULL */
    } array[4 * MAX_GROUPS + 2 * MAX_STATES + 10];
    int count;
} Arguments;

static void expect(Arguments *w, void *place, long numbers, size_t item, int write)
{
    w->array[w->count].place = place;
    w->array[w->count].bytes = (Py_ssize_t)(numbers * item);
    w->array[w->count++].write = write;
}

static void expect_or_none(Arguments *w, void *place, long numbers, size_t item, int write)
{
    expect(w, place, numbers, item, write);
    w->array[w->count - 1].optional = 1;
}

/* Expects the states of towers before the first step, and after all which steps begin an episode; nothing if no tower is
 * recurrent. Returns the numbers of all states of one sequence. */
static long expect_states(Arguments *w, const Handle *h, int first, int last, Samples *samples)
{
    long numbers = 0;
    for (int t = first; t <= last; t++) {
        int state = 0;
        for (int i = 0; i < h->model.tower[t].hidden; i++) {
            const Layer *layer = &h->model.tower[t].layer[i];
            for (int part = 0; layer->cell && part < (layer->cell->kind == LSTM ? 2 : 1); part++) {
                expect(w, &samples->state[t][state++], samples->count / samples->steps * layer->outputs, h->real->item, 0);
                numbers += layer->outputs;
            }
        }
    }
    if (numbers)
        expect_or_none(w, &samples->reset, samples->count, 1, 0);
    return numbers;
}

static void expect_obs(Arguments *w, const Handle *h, int first, int last, Samples *samples)
{
    for (int t = first; t <= last; t++)
        for (int g = 0; g < h->model.tower[t].groups; g++)
            expect(w, &samples->obs[t][g], samples->count * h->model.tower[t].group[g].width, h->real->item, 0);
}

static void expect_mask(Arguments *w, const Handle *h, Samples *samples)
{
    if (h->model.policy.masked)
        expect(w, &samples->mask, samples->count * h->model.policy.outputs, 1, 0);
}

/* Components of a continuous action: a beta distribution has two outputs for each. */
static long components_of(const Policy *policy)
{
    return policy->family == BETA ? policy->outputs / 2 : policy->outputs;
}

/* Continuous actions are numbers, discrete ones int64. */
static void expect_action(Arguments *w, const Handle *h, void *place, long rows, int write)
{
    const Policy *policy = &h->model.policy;
    if (policy->family == CATEGORICAL)
        expect(w, place, rows * policy->components, sizeof(int64_t), write);
    else
        expect(w, place, rows * components_of(policy), h->real->item, write);
}

static int acquire_arguments(Buffers *buffers, PyObject *arrays, const Arguments *w)
{
    if (PyTuple_Size(arrays) != w->count)
        return PyErr_Format(PyExc_ValueError, "%zd arrays where %d are needed", PyTuple_Size(arrays), w->count), 0;
    for (int i = 0; i < w->count; i++) {
        if (w->array[i].bytes < 0)
            return PyErr_SetString(PyExc_ValueError, "a negative number of samples"), 0;
        PyObject *array = PyTuple_GetItem(arrays, i);
        if (w->array[i].optional && array == Py_None)
            continue;
        Py_buffer *view = acquire(buffers, array, w->array[i].bytes, w->array[i].write);
        if (!view)
            return 0;
        *w->array[i].place = view->buf;
    }
    return 1;
}

static PyObject *act(PyObject *self, PyObject *args)
{
    PyObject *capsule, *arrays;
    Samples samples = {.steps = 1};
    Buffers buffers = {0};
    Arguments w = {.count = 0};
    void *noise = NULL, *params, *action = NULL, *for_env = NULL, *states = NULL;
    if (!PyArg_ParseTuple(args, "OlO!", &capsule, &samples.count, &PyTuple_Type, &arrays))
        return NULL;
    Handle *h = open_model(capsule);
    if (!h)
        return NULL;
    const Policy *policy = &h->model.policy;
    expect_obs(&w, h, 0, 0, &samples);
    expect_mask(&w, h, &samples);
    const long numbers = expect_states(&w, h, 0, 0, &samples);
    if (numbers)
        expect(&w, &states, samples.count * numbers, h->real->item, 1);
    if (policy->family != BETA) /* whose samples are drawn in Python */
        expect(&w, &noise, samples.count * policy->outputs, h->real->item, 0);
    expect(&w, &params, samples.count * policy->params, h->real->item, 1);
    if (policy->family != BETA)
        expect_action(&w, h, &action, samples.count, 1);
    if (policy->to_env)
        expect(&w, &for_env, samples.count * policy->outputs, h->real->item, 1);
    int fine = acquire_arguments(&buffers, arrays, &w);
    if (fine) {
        COMPUTE(h, h->real->act(&h->model, &samples, noise, params, action, for_env, states))
    }
    release_buffers(&buffers);
    return fine ? Py_NewRef(Py_None) : NULL;
}

/* Returns 0 with an IndexError for an index outside of 0..rows - 1. */
static int index_in_range(const int64_t *index, long count, long rows)
{
    for (long r = 0; r < count; r++)
        if (index[r] < 0 || index[r] >= rows)
            return PyErr_SetString(PyExc_IndexError, "an index of a sample is out of range"), 0;
    return 1;
}

/* Returns 0 with a ValueError unless the samples are whole sequences: of one step without recurrent layers, and for
 * learning no longer than the workspaces hold. */
static int steps_fit(const Model *model, const Samples *samples, int learning)
{
    const long steps = samples->steps, most = !model->length ? 1 : learning ? model->length : steps;
    if (steps >= 1 && steps <= most && samples->count >= 0 && samples->count % steps == 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "samples that are not whole sequences, or sequences that are too long");
    return 0;
}

static PyObject *values(PyObject *self, PyObject *args)
{
    PyObject *capsule, *index_, *arrays;
    Samples samples = {0};
    Buffers buffers = {0};
    Arguments w = {.count = 0};
    void *value, *states = NULL;
    if (!PyArg_ParseTuple(args, "OllOO!", &capsule, &samples.count, &samples.steps, &index_, &PyTuple_Type, &arrays))
        return NULL;
    Handle *h = open_model(capsule);
    if (!h || !steps_fit(&h->model, &samples, 0))
        return NULL;
    Py_buffer *index = index_ != Py_None ? acquire(&buffers, index_, -1, 0) : NULL;
    const long sequences = samples.count / samples.steps, count = index ? (long)(index->len / sizeof(int64_t)) : sequences;
    int fine = !PyErr_Occurred() && (!index || index_in_range(index->buf, count, sequences));
    if (fine) {
        const int last = h->model.towers - 1;
        expect_obs(&w, h, last, last, &samples);
        const long numbers = expect_states(&w, h, last, last, &samples);
        if (numbers)
            expect_or_none(&w, &states, samples.count * numbers, h->real->item, 1);
        expect(&w, &value, count * samples.steps, h->real->item, 1);
        const int64_t *row = index ? index->buf : NULL; /* before the buffers may move */
        if ((fine = acquire_arguments(&buffers, arrays, &w))) {
            COMPUTE(h, h->real->values(&h->model, &samples, row, count, value, states))
        }
    }
    release_buffers(&buffers);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *log_prob(PyObject *self, PyObject *args)
{
    PyObject *capsule, *arrays;
    Samples samples = {.steps = 1};
    Buffers buffers = {0};
    Arguments w = {.count = 0};
    void *result;
    if (!PyArg_ParseTuple(args, "OlO!", &capsule, &samples.count, &PyTuple_Type, &arrays))
        return NULL;
    Handle *h = open_model(capsule);
    if (!h)
        return NULL;
    expect(&w, &samples.dist_params, samples.count * h->model.policy.params, h->real->item, 0);
    expect_action(&w, h, &samples.action, samples.count, 0);
    expect(&w, &result, samples.count, h->real->item, 1);
    int done = 0;
    if (acquire_arguments(&buffers, arrays, &w)) {
        COMPUTE(h, done = h->real->log_prob(&h->model, &samples, result))
        if (!done)
            PyErr_SetString(PyExc_IndexError, "a discrete action is out of range");
    }
    release_buffers(&buffers);
    return done ? Py_NewRef(Py_None) : NULL;
}

typedef struct {
    Samples samples;
    Buffers buffers;
    PyObject *model;
} SamplesHandle;

static void free_samples(SamplesHandle *r)
{
    release_buffers(&r->buffers);
    Py_DecRef(r->model);
    free(r);
}

static void drop_samples(PyObject *capsule)
{
    free_samples(PyCapsule_GetPointer(capsule, SAMPLES_NAME));
}

static PyObject *make_samples(PyObject *self, PyObject *args)
{
    PyObject *capsule, *arrays;
    long count, steps;
    if (!PyArg_ParseTuple(args, "OllO!", &capsule, &count, &steps, &PyTuple_Type, &arrays))
        return NULL;
    Handle *h = PyCapsule_GetPointer(capsule, MODEL_NAME);
    if (!h || !steps_fit(&h->model, &(Samples){.count = count, .steps = steps}, 1))
        return NULL;
    SamplesHandle *r = calloc(1, sizeof *r);
    if (!r)
        return PyErr_NoMemory();
    Samples *samples = &r->samples;
    Arguments w = {.count = 0};
    r->model = Py_NewRef(capsule);
    samples->count = count;
    samples->steps = steps;
    expect_obs(&w, h, 0, h->model.towers - 1, samples);
    expect_mask(&w, h, samples);
    expect_states(&w, h, 0, h->model.towers - 1, samples);
    expect(&w, &samples->valid, count, 1, 0);
    expect_action(&w, h, &samples->action, count, 0);
    expect(&w, &samples->dist_params, count * h->model.policy.params, h->real->item, 0);
    const void **column[] = {&samples->log_prob, &samples->advantage, &samples->value, &samples->return_};
    for (int c = 0; c < 4; c++)
        expect(&w, column[c], count, h->real->item, 0);
    PyObject *result = acquire_arguments(&r->buffers, arrays, &w) ? PyCapsule_New(r, SAMPLES_NAME, drop_samples) : NULL;
    if (!result)
        free_samples(r);
    return result;
}

static PyObject *gradients(PyObject *self, PyObject *args)
{
    PyObject *capsule, *index_;
    Coefs coefs;
    if (!PyArg_ParseTuple(args, "OOddd", &capsule, &index_, &coefs.entropy_coef, &coefs.adv_mean, &coefs.adv_divisor))
        return NULL;
    SamplesHandle *r = PyCapsule_GetPointer(capsule, SAMPLES_NAME);
    Handle *h = r ? open_model(r->model) : NULL;
    if (!h)
        return NULL;
    Buffers buffers = {0};
    Py_buffer *index = acquire(&buffers, index_, -1, 0);
    double sums[SUMS];
    int status = 1;
    if (index) {
        COMPUTE(h, status = h->real->gradients(&h->model, &r->samples, index->buf, (long)(index->len / sizeof(int64_t)),
                                               coefs, sums))
        if (status == 1)
            PyErr_NoMemory();
        else if (status)
            PyErr_SetString(PyExc_IndexError, "an index of a sample or a discrete action is out of range");
    }
    release_buffers(&buffers);
    return status ? NULL : Py_BuildValue("dddddd", sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]);
}

/* Writes the gradients of SAC's critics, or of its policy; returns a few means. */
static PyObject *sac_gradients(PyObject *self, PyObject *args)
{
    PyObject *capsule, *arrays;
    SACBatch batch = {0};
    Buffers buffers = {0};
    Arguments w = {.count = 0};
    int policy;
    if (!PyArg_ParseTuple(args, "OpdO!", &capsule, &policy, &batch.temperature, &PyTuple_Type, &arrays))
        return NULL;
    Handle *h = open_model(capsule);
    if (!h)
        return NULL;
    const long rows = batch.now.count = batch.next.count = h->model.batch_size;
    expect_obs(&w, h, 0, 1, &batch.now); /* the critics' last group is the action */
    if (!policy) {
        expect_obs(&w, h, 0, 1, &batch.next); /* its action is ignored: the policy samples one */
        expect(&w, &batch.reward, rows, h->real->item, 0);
        expect(&w, &batch.discount, rows, h->real->item, 0);
        expect(&w, &batch.valid, rows, 1, 0);
    }
    expect(&w, &batch.noise, rows * h->model.policy.outputs, h->real->item, 0);
    if (!rows)
        PyErr_SetString(PyExc_ValueError, "this is not a model of SAC");
    int fine = rows && acquire_arguments(&buffers, arrays, &w);
    if (fine) {
        COMPUTE(h, h->real->sac_gradients(&h->model, &batch, policy))
    }
    release_buffers(&buffers);
    const double *means = batch.means;
    return fine ? Py_BuildValue("dddd", means[0], means[1], means[2], means[3]) : NULL;
}

static PyMethodDef METHODS[] = {
    {"model", make_model, METH_VARARGS, "model(is_double, threads, batch_size, length, description) -> model"},
    {"act", act, METH_VARARGS, "act(model, count, (*obs, mask, [*states, reset, next states,] noise, params, action, for_env))"},
    {"values", values, METH_VARARGS,
     "values(model, count, steps, index, (*obs, [*states, reset, states after each step,] value))"},
    {"log_prob", log_prob, METH_VARARGS, "log_prob(model, count, (dist_params, action, result))"},
    {"samples", make_samples, METH_VARARGS,
     "samples(model, count, steps, (*obs, mask, [*states, reset,] valid, action, dist_params, log_prob, advantage, value,"
     " return_)) -> samples"},
    {"gradients", gradients, METH_VARARGS,
     "gradients(samples, index, entropy_coef, advantage_mean, advantage_divisor) -> means of six terms"},
    {"square_sum", square_sum, METH_VARARGS, "square_sum(is_double, x) -> sum of squares"},
    {"adamw", adamw, METH_VARARGS,
     "adamw(is_double, flat, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, decay, coupled, max_norm, norm)"},
    {"sac_gradients", sac_gradients, METH_VARARGS,
     "sac_gradients(model, policy, temperature, (*obs, action, [*next_obs, action, reward, discount, valid,] noise))"
     " -> means"},
    {"reverse_discounted_sum", reverse_discounted_sum, METH_VARARGS, "reverse_discounted_sum(is_double, columns, x, decay)"},
    {"column_sums", column_sums, METH_VARARGS, "column_sums(is_double, columns, x, mask, sums, centre or None)"},
    {"copy", copy_tensors, METH_VARARGS, "copy(targets, sources) -> True if they were copied"},
    {"row_writer", make_row_writer, METH_VARARGS, "row_writer(tensors of [T, ...]) -> writer"},
    {"write", write_row, METH_VARARGS, "write(writer, t, sources or None) -> True if they were copied to step t"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

/* Adds a tuple of the names in a table. */
static int add_names(PyObject *module, const char *attribute, const char *const *names)
{
    Py_ssize_t count = 0;
    while (names[count])
        count++;
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++)
        PyTuple_SetItem(tuple, i, PyUnicode_FromString(names[i]));
    int status = PyModule_AddObjectRef(module, attribute, tuple);
    Py_XDECREF(tuple);
    return status == 0;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&MODULE);
    if (module && add_names(module, "ACTIVATIONS", ACTIVATION_NAMES) && add_names(module, "STD_FORMS", STD_NAMES) &&
        PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) == 0)
        return module;
    Py_XDECREF(module);
    return NULL;
}
