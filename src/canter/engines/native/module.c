/* The module: from Python's arguments to the calls. */
#include <math.h>

#include "handle.h"

#define ROWS_NAME "canter.rows"

/* The model for a call, which nobody else may be using, for calls share its memory. */
static Handle *open_model(PyObject *capsule)
{
    Handle *h = PyCapsule_GetPointer(capsule, MODEL_NAME);
    if (h && h->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is using this engine");
        return NULL;
    }
    return h;
}

#define COMPUTE(HANDLE, CALL)                                                                                          \
    (HANDLE)->busy = 1;                                                                                                \
    Py_BEGIN_ALLOW_THREADS CALL;                                                                                       \
    Py_END_ALLOW_THREADS(HANDLE)->busy = 0;

static void *hold_data(Held *held, PyObject *array, long numbers, size_t item, int write)
{
    Py_buffer *view = hold(held, array, (Py_ssize_t)(numbers * item), write);
    return view ? view->buf : NULL;
}

/* Observation groups of towers first..last, in a tuple; all have rows->count rows. */
static int hold_obs(Held *held, const Handle *h, PyObject *obs, int first, int last, Rows *rows)
{
    Py_ssize_t next = 0;
    for (int t = first; t <= last; t++)
        for (int g = 0; g < h->model.tower[t].groups; g++) {
            PyObject *array = PyTuple_GetItem(obs, next++);
            long numbers = rows->count * h->model.tower[t].group[g].width;
            if (!array || !(rows->obs[t][g] = hold_data(held, array, numbers, h->real->item, 0)))
                return 0;
        }
    return 1;
}

static int hold_mask(Held *held, const Handle *h, PyObject *mask, Rows *rows)
{
    if (!h->model.policy.masked)
        return 1;
    return (rows->mask = hold_data(held, mask, rows->count * h->model.policy.outputs, 1, 0)) != NULL;
}

/* Actions: numbers, or options as int64. */
static void *hold_action(Held *held, const Handle *h, PyObject *action, long rows, int write)
{
    const Policy *policy = &h->model.policy;
    if (policy->family == CHOICES)
        return hold_data(held, action, rows * policy->choices, sizeof(int64_t), write);
    return hold_data(held, action, rows * policy->outputs, h->real->item, write);
}

static PyObject *act(PyObject *self, PyObject *args)
{
    PyObject *capsule, *obs, *mask, *noise_, *params_, *action_, *for_env_;
    Rows rows = {0};
    if (!PyArg_ParseTuple(args, "OlO!OOOOO", &capsule, &rows.count, &PyTuple_Type, &obs, &mask, &noise_, &params_,
                          &action_, &for_env_))
        return NULL;
    Handle *h = open_model(capsule);
    Held held = {0};
    int fine = h && hold_obs(&held, h, obs, 0, 0, &rows) && hold_mask(&held, h, mask, &rows);
    if (fine) {
        const Policy *policy = &h->model.policy;
        const size_t item = h->real->item;
        void *noise = hold_data(&held, noise_, rows.count * policy->outputs, item, 0);
        void *params = noise ? hold_data(&held, params_, rows.count * policy->params, item, 1) : NULL;
        void *action = params ? hold_action(&held, h, action_, rows.count, 1) : NULL, *for_env = NULL;
        fine = action != NULL;
        if (fine && policy->to_env)
            fine = (for_env = hold_data(&held, for_env_, rows.count * policy->outputs, item, 1)) != NULL;
        if (fine) {
            COMPUTE(h, h->real->act(&h->model, &rows, noise, params, action, for_env))
        }
    }
    release(&held);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *values(PyObject *self, PyObject *args)
{
    PyObject *capsule, *obs, *index_, *value_;
    Rows rows = {0};
    if (!PyArg_ParseTuple(args, "OlO!OO", &capsule, &rows.count, &PyTuple_Type, &obs, &index_, &value_))
        return NULL;
    Handle *h = open_model(capsule);
    Held held = {0};
    const int tower = h ? h->model.towers - 1 : 0;
    int fine = h && hold_obs(&held, h, obs, tower, tower, &rows);
    long count = rows.count;
    const int64_t *index = NULL;
    if (fine && index_ != Py_None) {
        Py_buffer *view = hold(&held, index_, -1, 0);
        if ((fine = view != NULL))
            index = view->buf, count = (long)(view->len / sizeof *index);
        for (long r = 0; fine && r < count; r++)
            fine = index[r] >= 0 && index[r] < rows.count;
        if (!fine && !PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "a row that does not exist");
    }
    void *value = fine ? hold_data(&held, value_, count, h->real->item, 1) : NULL;
    if ((fine = value != NULL)) {
        COMPUTE(h, h->real->values(&h->model, &rows, index, count, value))
    }
    release(&held);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *log_prob(PyObject *self, PyObject *args)
{
    PyObject *capsule, *params, *action, *result_;
    Rows rows = {0};
    if (!PyArg_ParseTuple(args, "OlOOO", &capsule, &rows.count, &params, &action, &result_))
        return NULL;
    Handle *h = open_model(capsule);
    Held held = {0};
    void *result = NULL;
    if (h && (rows.dist_params = hold_data(&held, params, rows.count * h->model.policy.params, h->real->item, 0)) &&
        (rows.action = hold_action(&held, h, action, rows.count, 0)))
        result = hold_data(&held, result_, rows.count, h->real->item, 1);
    int done = 0;
    if (result) {
        COMPUTE(h, done = h->real->log_prob(&h->model, &rows, result))
        if (!done)
            PyErr_SetString(PyExc_IndexError, "an action that does not exist");
    }
    release(&held);
    return done ? Py_NewRef(Py_None) : NULL;
}

typedef struct {
    Rows rows;
    Held held;
    PyObject *model;
} RowsHandle;

static void drop_rows(PyObject *capsule)
{
    RowsHandle *r = PyCapsule_GetPointer(capsule, ROWS_NAME);
    release(&r->held);
    Py_DecRef(r->model);
    free(r);
}

static PyObject *make_rows(PyObject *self, PyObject *args)
{
    PyObject *capsule, *obs, *mask, *valid, *action, *params, *fields[4];
    long count;
    if (!PyArg_ParseTuple(args, "OlO!OOOOOOOO", &capsule, &count, &PyTuple_Type, &obs, &mask, &valid, &action, &params,
                          &fields[0], &fields[1], &fields[2], &fields[3]))
        return NULL;
    Handle *h = PyCapsule_GetPointer(capsule, MODEL_NAME);
    RowsHandle *r = h ? calloc(1, sizeof *r) : NULL;
    if (!r)
        return h ? PyErr_NoMemory() : NULL;
    Rows *rows = &r->rows;
    r->model = Py_NewRef(capsule);
    rows->count = count;
    const size_t item = h->real->item;
    int fine = hold_obs(&r->held, h, obs, 0, h->model.towers - 1, rows) && hold_mask(&r->held, h, mask, rows) &&
               (rows->valid = hold_data(&r->held, valid, count, 1, 0)) &&
               (rows->action = hold_action(&r->held, h, action, count, 0)) &&
               (rows->dist_params = hold_data(&r->held, params, count * h->model.policy.params, item, 0));
    const void **places[] = {&rows->log_prob, &rows->advantage, &rows->value, &rows->return_};
    for (int f = 0; f < 4; f++)
        fine = fine && (*places[f] = hold_data(&r->held, fields[f], count, item, 0));
    PyObject *result = fine ? PyCapsule_New(r, ROWS_NAME, drop_rows) : NULL;
    if (!result) {
        release(&r->held);
        Py_DecRef(r->model);
        free(r);
    }
    return result;
}

static PyObject *gradients(PyObject *self, PyObject *args)
{
    PyObject *capsule, *index_;
    Coefs coefs;
    if (!PyArg_ParseTuple(args, "OOdddd", &capsule, &index_, &coefs.entropy_coef, &coefs.count, &coefs.adv_mean,
                          &coefs.adv_divisor))
        return NULL;
    RowsHandle *r = PyCapsule_GetPointer(capsule, ROWS_NAME);
    Handle *h = r ? open_model(r->model) : NULL;
    if (!h)
        return NULL;
    Held held = {0};
    Py_buffer *index = hold(&held, index_, -1, 0);
    double sums[SUMS];
    int status = 1;
    if (index) {
        COMPUTE(h, status = h->real->gradients(&h->model, &r->rows, index->buf, (long)(index->len / sizeof(int64_t)),
                                               coefs, sums))
        if (status == 1)
            PyErr_NoMemory();
        else if (status)
            PyErr_SetString(PyExc_IndexError, "a row or an action that does not exist");
    }
    release(&held);
    return status ? NULL : Py_BuildValue("dddddd", sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]);
}

static PyObject *square_sum(PyObject *self, PyObject *args)
{
    PyObject *array;
    int is_double;
    if (!PyArg_ParseTuple(args, "pO", &is_double, &array))
        return NULL;
    const Real *real = is_double ? &REAL_DOUBLE : &REAL_FLOAT;
    Held held = {0};
    Py_buffer *view = hold(&held, array, -1, 0);
    double sum = view ? real->square_sum(view->buf, (long)(view->len / real->item)) : 0.0;
    release(&held);
    return view ? PyFloat_FromDouble(sum) : NULL;
}

/* norm < 0: that of this gradient. Nothing moves where it is not finite. */
static PyObject *adamw(PyObject *self, PyObject *args)
{
    PyObject *array[5];
    void *data[5] = {NULL};
    int is_double, fine = 1;
    AdamW a = {0};
    double norm, max_norm;
    if (!PyArg_ParseTuple(args, "pOOOOOddddddd", &is_double, &array[0], &array[1], &array[2], &array[3], &array[4],
                          &a.learning_rate, &a.beta1, &a.beta2, &a.eps, &a.weight_decay, &max_norm, &norm))
        return NULL;
    const Real *real = is_double ? &REAL_DOUBLE : &REAL_FLOAT;
    Held held = {0};
    Py_ssize_t bytes = -1;
    for (int i = 0; i < 5 && fine; i++) { /* flat, gradient, exp_avg, exp_avg_sq, step */
        Py_buffer *view = hold(&held, array[i], i < 4 ? bytes : (Py_ssize_t)sizeof(float), i != 1);
        if ((fine = view != NULL))
            data[i] = view->buf, bytes = i == 0 ? view->len : bytes;
    }
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        const long n = (long)(bytes / real->item);
        norm = norm < 0 ? sqrt(real->square_sum(data[1], n)) : norm;
        if (isfinite(norm)) {
            a.step = *(float *)data[4] += 1.0f;
            a.scale = norm > max_norm ? max_norm / norm : 1.0;
            real->adamw(data[0], data[1], data[2], data[3], n, a);
        }
        Py_END_ALLOW_THREADS
    }
    release(&held);
    return fine ? PyFloat_FromDouble(norm) : NULL;
}

static PyMethodDef METHODS[] = {
    {"model", make_model, METH_VARARGS, "model(is_double, threads, numbers, settings, arrays) -> model"},
    {"act", act, METH_VARARGS, "act(model, rows, obs, mask, noise, params, action, for_env)"},
    {"values", values, METH_VARARGS, "values(model, rows, obs, index, value)"},
    {"log_prob", log_prob, METH_VARARGS, "log_prob(model, rows, dist_params, action, result)"},
    {"rows", make_rows, METH_VARARGS,
     "rows(model, rows, obs, mask, valid, action, dist_params, log_prob, advantage, value, return_) -> rows"},
    {"gradients", gradients, METH_VARARGS,
     "gradients(rows, index, entropy_coef, count, advantage_mean, advantage_divisor) -> means of six terms"},
    {"square_sum", square_sum, METH_VARARGS, "square_sum(is_double, x) -> sum of squares"},
    {"adamw", adamw, METH_VARARGS,
     "adamw(is_double, flat, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, decay, max_norm, norm) -> norm"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

/* A tuple of the names in a table, in their order. */
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
    if (module && add_names(module, "ACTIVATIONS", ACTIVATION_NAMES) && add_names(module, "STD_FORMS", STD_NAMES))
        return module;
    Py_XDECREF(module);
    return NULL;
}
