/* Tensors to where they belong, as bytes: without a call of torch for each. */
#include "handle.h"

#define PLACES_NAME "canter.places"

static PyObject *SHAPE, *DTYPE, *DATA_PTR;

static int name_attributes(void)
{
    SHAPE = SHAPE ? SHAPE : PyUnicode_InternFromString("shape");
    DTYPE = DTYPE ? DTYPE : PyUnicode_InternFromString("dtype");
    DATA_PTR = DATA_PTR ? DATA_PTR : PyUnicode_InternFromString("data_ptr");
    return SHAPE && DTYPE && DATA_PTR;
}

/* Whether an attribute of a tensor is this; false without it too. */
static int has(PyObject *tensor, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(tensor, name);
    int equal = found && wanted && PyObject_RichCompareBool(found, wanted, Py_EQ) == 1;
    Py_XDECREF(found);
    return equal;
}

/* Bytes of each tensor to where they belong; False, before anything is copied, unless all fit as they are. */
PyObject *copy_tensors(PyObject *self, PyObject *args)
{
    PyObject *targets, *sources;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &targets, &PyList_Type, &sources))
        return NULL;
    Held to = {0}, from = {0};
    const Py_ssize_t count = PyList_Size(targets);
    int fine = PyList_Size(sources) == count && name_attributes();
    for (Py_ssize_t i = 0; fine && i < count; i++) {
        PyObject *target = PyList_GetItem(targets, i), *source = PyList_GetItem(sources, i);
        PyObject *dtype = PyObject_GetAttr(target, DTYPE);
        fine = has(source, DTYPE, dtype) && hold(&to, target, -1, 1) && hold(&from, source, held_view(&to, i)->len, 0);
        Py_XDECREF(dtype);
    }
    PyErr_Clear();
    for (Py_ssize_t i = 0; fine && i < count; i++)
        memcpy(held_view(&to, i)->buf, held_view(&from, i)->buf, held_view(&to, i)->len);
    release(&to);
    release(&from);
    return PyBool_FromLong(fine);
}

/* Where row t of a tensor [T, ...] is written. */
typedef struct {
    PyObject *shape, *dtype; /* of a row */
    char *to;                /* where row 0 is */
    Py_ssize_t bytes;        /* of a row */
    PyObject *source;        /* what was written last, which is not looked at again */
    void *from;              /* as long as it is where it was */
} Place;

typedef struct {
    Held held;
    Py_ssize_t count, rows;
    Place place[];
} Places;

static void drop_places(PyObject *capsule)
{
    Places *places = PyCapsule_GetPointer(capsule, PLACES_NAME);
    for (Py_ssize_t i = 0; i < places->count; i++) {
        Py_XDECREF(places->place[i].shape);
        Py_XDECREF(places->place[i].dtype);
        Py_XDECREF(places->place[i].source);
    }
    release(&places->held);
    free(places);
}

PyObject *make_places(PyObject *self, PyObject *args)
{
    PyObject *tensors;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &tensors) || !name_attributes())
        return NULL;
    const Py_ssize_t count = PyList_Size(tensors);
    Places *places = calloc(1, sizeof *places + count * sizeof *places->place);
    PyObject *capsule = places ? PyCapsule_New(places, PLACES_NAME, drop_places) : PyErr_NoMemory();
    if (!capsule)
        return free(places), NULL;
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        PyObject *tensor = PyList_GetItem(tensors, i), *whole = PyObject_GetAttr(tensor, SHAPE);
        Place *place = &places->place[places->count++];
        Py_buffer *view = hold(&places->held, tensor, -1, 1);
        const Py_ssize_t rows = whole ? PyObject_Size(tensor) : 0;
        if (view && rows > 0) {
            places->rows = i == 0 || rows < places->rows ? rows : places->rows;
            place->to = view->buf, place->bytes = view->len / rows;
            place->shape = PySequence_GetSlice(whole, 1, PyTuple_Size(whole));
            place->dtype = PyObject_GetAttr(tensor, DTYPE);
        }
        Py_XDECREF(whole);
    }
    return PyErr_Occurred() ? Py_DecRef(capsule), NULL : capsule;
}

/* Whether a source is a row of this place, as it is; then `from` is where it is now. */
static int fits(Place *place, PyObject *source)
{
    PyObject *number = PyObject_CallMethodObjArgs(source, DATA_PTR, NULL);
    void *from = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (source == place->source && from == place->from)
        return 1;
    Held held = {0};
    int fine = from && has(source, SHAPE, place->shape) && has(source, DTYPE, place->dtype) &&
               hold(&held, source, place->bytes, 0);
    release(&held);
    if (fine) {
        Py_XDECREF(place->source);
        place->source = Py_NewRef(source), place->from = from;
    }
    return fine;
}

/* As copy, to row t of every place that there is a source for; the last ones may be missing. */
PyObject *write_row(PyObject *self, PyObject *args)
{
    PyObject *capsule, *sources;
    Py_ssize_t t;
    if (!PyArg_ParseTuple(args, "OnO!", &capsule, &t, &PyList_Type, &sources))
        return NULL;
    Places *places = PyCapsule_GetPointer(capsule, PLACES_NAME);
    const Py_ssize_t count = PyList_Size(sources);
    int fine = places && count <= places->count && t >= 0 && t < places->rows;
    for (Py_ssize_t i = 0; fine && i < count; i++)
        fine = PyList_GetItem(sources, i) == Py_None || fits(&places->place[i], PyList_GetItem(sources, i));
    PyErr_Clear();
    for (Py_ssize_t i = 0; fine && i < count; i++)
        if (PyList_GetItem(sources, i) != Py_None)
            memcpy(places->place[i].to + t * places->place[i].bytes, places->place[i].from, places->place[i].bytes);
    return PyBool_FromLong(fine);
}
