/* Functions without a model: copies of tensors as bytes, without a call of torch for each; sums; a step of Adam. */
#include <math.h>

#include "handle.h"

#define ROW_WRITER_NAME "canter.writer"

static PyObject *SHAPE, *DTYPE, *DATA_PTR;

static int name_attributes(void)
{
    SHAPE = SHAPE ? SHAPE : PyUnicode_InternFromString("shape");
    DTYPE = DTYPE ? DTYPE : PyUnicode_InternFromString("dtype");
    DATA_PTR = DATA_PTR ? DATA_PTR : PyUnicode_InternFromString("data_ptr");
    return SHAPE && DTYPE && DATA_PTR;
}

/* Returns 1 if an attribute of a tensor equals `wanted`; 0 without the attribute too. */
static int has(PyObject *tensor, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(tensor, name);
    int equal = found && wanted && PyObject_RichCompareBool(found, wanted, Py_EQ) == 1;
    Py_XDECREF(found);
    return equal;
}

/* Copies the bytes of each source to its target; False, with nothing copied, unless all dtypes and sizes match. */
PyObject *copy_tensors(PyObject *self, PyObject *args)
{
    PyObject *targets, *sources;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &targets, &PyList_Type, &sources))
        return NULL;
    Buffers to = {0}, from = {0};
    const Py_ssize_t count = PyList_Size(targets);
    int fine = PyList_Size(sources) == count && name_attributes();
    for (Py_ssize_t i = 0; fine && i < count; i++) {
        PyObject *target = PyList_GetItem(targets, i), *source = PyList_GetItem(sources, i);
        PyObject *dtype = PyObject_GetAttr(target, DTYPE);
        fine = has(source, DTYPE, dtype) && acquire(&to, target, -1, 1) &&
               acquire(&from, source, buffer_at(&to, i)->len, 0);
        Py_XDECREF(dtype);
    }
    PyErr_Clear();
    for (Py_ssize_t i = 0; fine && i < count; i++)
        memcpy(buffer_at(&to, i)->buf, buffer_at(&from, i)->buf, buffer_at(&to, i)->len);
    release_buffers(&to);
    release_buffers(&from);
    return PyBool_FromLong(fine);
}

/* A tensor [T, ...] whose step t is written. */
typedef struct {
    PyObject *shape, *dtype; /* of a step */
    char *to;                /* address of step 0 */
    Py_ssize_t bytes;        /* of a step */
    PyObject *source;        /* the last source, whose shape is not checked again */
    void *from;              /* while its address stays */
} Target;

typedef struct {
    Buffers buffers;
    Py_ssize_t count, rows;
    Target target[];
} RowWriter;

static void drop_row_writer(PyObject *capsule)
{
    RowWriter *writer = PyCapsule_GetPointer(capsule, ROW_WRITER_NAME);
    for (Py_ssize_t i = 0; i < writer->count; i++) {
        Py_XDECREF(writer->target[i].shape);
        Py_XDECREF(writer->target[i].dtype);
        Py_XDECREF(writer->target[i].source);
    }
    release_buffers(&writer->buffers);
    free(writer);
}

PyObject *make_row_writer(PyObject *self, PyObject *args)
{
    PyObject *tensors;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &tensors) || !name_attributes())
        return NULL;
    const Py_ssize_t count = PyList_Size(tensors);
    RowWriter *writer = calloc(1, sizeof *writer + count * sizeof *writer->target);
    PyObject *capsule = writer ? PyCapsule_New(writer, ROW_WRITER_NAME, drop_row_writer) : PyErr_NoMemory();
    if (!capsule)
        return free(writer), NULL;
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        PyObject *tensor = PyList_GetItem(tensors, i), *whole = PyObject_GetAttr(tensor, SHAPE);
        Target *target = &writer->target[writer->count++];
        Py_buffer *view = acquire(&writer->buffers, tensor, -1, 1);
        const Py_ssize_t rows = whole ? PyObject_Size(tensor) : 0;
        if (view && rows > 0) {
            writer->rows = i == 0 || rows < writer->rows ? rows : writer->rows;
            target->to = view->buf, target->bytes = view->len / rows;
            target->shape = PySequence_GetSlice(whole, 1, PyTuple_Size(whole));
            target->dtype = PyObject_GetAttr(tensor, DTYPE);
        }
        Py_XDECREF(whole);
    }
    return PyErr_Occurred() ? Py_DecRef(capsule), NULL : capsule;
}

/* Returns 1 for a source with the shape and dtype of a step; `from` is then its address. */
static int fits(Target *target, PyObject *source)
{
    PyObject *number = PyObject_CallMethodObjArgs(source, DATA_PTR, NULL);
    void *from = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (source == target->source && from == target->from)
        return 1;
    Buffers buffers = {0};
    int fine = from && has(source, SHAPE, target->shape) && has(source, DTYPE, target->dtype) &&
               acquire(&buffers, source, target->bytes, 0);
    release_buffers(&buffers);
    if (fine) {
        Py_XDECREF(target->source);
        target->source = Py_NewRef(source), target->from = from;
    }
    return fine;
}

/* Copies sources to step t of their targets; None leaves one out, and the last ones may be missing. */
PyObject *write_row(PyObject *self, PyObject *args)
{
    PyObject *capsule, *sources;
    Py_ssize_t t;
    if (!PyArg_ParseTuple(args, "OnO!", &capsule, &t, &PyList_Type, &sources))
        return NULL;
    RowWriter *writer = PyCapsule_GetPointer(capsule, ROW_WRITER_NAME);
    const Py_ssize_t count = PyList_Size(sources);
    int fine = writer && count <= writer->count && t >= 0 && t < writer->rows;
    for (Py_ssize_t i = 0; fine && i < count; i++)
        fine = PyList_GetItem(sources, i) == Py_None || fits(&writer->target[i], PyList_GetItem(sources, i));
    PyErr_Clear();
    for (Py_ssize_t i = 0; fine && i < count; i++)
        if (PyList_GetItem(sources, i) != Py_None)
            memcpy(writer->target[i].to + t * writer->target[i].bytes, writer->target[i].from, writer->target[i].bytes);
    return PyBool_FromLong(fine);
}

PyObject *square_sum(PyObject *self, PyObject *args)
{
    PyObject *array;
    int is_double;
    if (!PyArg_ParseTuple(args, "pO", &is_double, &array))
        return NULL;
    const Real *real = real_of(is_double);
    Buffers buffers = {0};
    Py_buffer *view = acquire(&buffers, array, -1, 0);
    double sum = view ? real->square_sum(view->buf, (long)(view->len / real->item)) : 0.0;
    release_buffers(&buffers);
    return view ? PyFloat_FromDouble(sum) : NULL;
}

/* A negative norm: compute that of this gradient. No step is taken if it is NaN or infinity. */
PyObject *adamw(PyObject *self, PyObject *args)
{
    PyObject *array[5];
    void *data[5] = {NULL};
    int is_double, fine = 1;
    AdamW a = {0};
    double norm, max_norm;
    if (!PyArg_ParseTuple(args, "pOOOOOdddddpdd", &is_double, &array[0], &array[1], &array[2], &array[3], &array[4],
                          &a.learning_rate, &a.beta1, &a.beta2, &a.eps, &a.weight_decay, &a.coupled, &max_norm,
                          &norm))
        return NULL;
    const Real *real = real_of(is_double);
    Buffers buffers = {0};
    Py_ssize_t bytes = -1;
    for (int i = 0; i < 5 && fine; i++) { /* flat, gradient, exp_avg, exp_avg_sq, step */
        Py_buffer *view = acquire(&buffers, array[i], i < 4 ? bytes : (Py_ssize_t)sizeof(float), i != 1);
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
    release_buffers(&buffers);
    return fine ? PyFloat_FromDouble(norm) : NULL;
}

/* x[t] += decay[t] * x[t + 1] in each of n columns, backwards from the last row but one. */
PyObject *reverse_discounted_sum(PyObject *self, PyObject *args)
{
    PyObject *x_, *decay_;
    int is_double;
    long columns;
    if (!PyArg_ParseTuple(args, "plOO", &is_double, &columns, &x_, &decay_))
        return NULL;
    Buffers buffers = {0};
    int fine = acquire(&buffers, x_, -1, 1) != NULL;
    fine = fine && acquire(&buffers, decay_, buffer_at(&buffers, 0)->len, 0);
    if (fine) {
        const Real *real = real_of(is_double);
        Py_BEGIN_ALLOW_THREADS
        real->reverse_discounted_sum(buffers.few[0].buf, buffers.few[1].buf, (long)(buffers.few[0].len / real->item), columns);
        Py_END_ALLOW_THREADS
    }
    release_buffers(&buffers);
    return fine ? Py_NewRef(Py_None) : NULL;
}

/* Sums over rows where `mask` is true: of each column, or of its squared distance from `centre`, which may be None. */
PyObject *column_sums(PyObject *self, PyObject *args)
{
    PyObject *x_, *mask_, *sums_, *centre_;
    int is_double;
    long columns;
    if (!PyArg_ParseTuple(args, "plOOOO", &is_double, &columns, &x_, &mask_, &sums_, &centre_))
        return NULL;
    const Real *real = real_of(is_double);
    const Py_ssize_t bytes = columns * sizeof(double);
    Buffers buffers = {0};
    Py_buffer *mask = acquire(&buffers, mask_, -1, 0);
    Py_buffer *x = mask ? acquire(&buffers, x_, mask->len * columns * real->item, 0) : NULL;
    Py_buffer *sums = x ? acquire(&buffers, sums_, bytes, 1) : NULL;
    Py_buffer *centre = sums && centre_ != Py_None ? acquire(&buffers, centre_, bytes, 0) : NULL;
    const int fine = sums && (centre || centre_ == Py_None);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        real->column_sums(x->buf, mask->buf, mask->len, columns, centre ? centre->buf : NULL, sums->buf);
        Py_END_ALLOW_THREADS
    }
    release_buffers(&buffers);
    return fine ? Py_NewRef(Py_None) : NULL;
}
