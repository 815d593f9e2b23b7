/* Named fields of a model's description: dictionaries from Python, read by name.
 *
 * Every error names the dictionary and the field. After the first error nothing more is read. */
#include "handle.h"

/* Sets a ValueError, unless there is an error already. */
void fail(Handle *h, const char *format, const char *what, const char *name)
{
    if (!h->failed && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, format, what, name);
    h->failed = 1;
}

Fields open_fields(Handle *h, PyObject *dict, const char *what)
{
    if (!h->failed && !(dict && PyDict_Check(dict)))
        fail(h, "the description of a model: %s is not a dictionary%s", what, "");
    return (Fields){.h = h, .dict = dict, .what = what};
}

/* Returns a field, borrowed; NULL after an error. */
PyObject *read_field(Fields *f, const char *name)
{
    PyObject *value = f->h->failed ? NULL : PyDict_GetItemString(f->dict, name);
    if (!value)
        return fail(f->h, "the description of a model: %s has no field '%s'", f->what, name), NULL;
    f->taken[f->count++] = name;
    return value;
}

/* Raises an error for a field that was not read. */
void close_fields(Fields *f)
{
    PyObject *key, *value;
    Py_ssize_t place = 0, length;
    while (!f->h->failed && PyDict_Next(f->dict, &place, &key, &value)) {
        const char *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &length) : "?";
        int known = 0;
        for (int i = 0; name && i < f->count; i++)
            known |= strcmp(name, f->taken[i]) == 0;
        if (!known)
            fail(f->h, "the description of a model: %s has an unknown field '%s'", f->what, name ? name : "?");
    }
}

/* Reads a whole number or a bool within 0..most. */
long read_integer(Fields *f, const char *name, long most)
{
    PyObject *field = read_field(f, name);
    const long value = field ? PyLong_AsLong(field) : 0;
    if (field && (PyErr_Occurred() || value < 0 || value > most)) {
        PyErr_Clear();
        fail(f->h, "the description of a model: %s.%s is out of range", f->what, name);
    }
    return f->h->failed ? 0 : value;
}

double read_number(Fields *f, const char *name)
{
    PyObject *field = read_field(f, name);
    const double value = field ? PyFloat_AsDouble(field) : 0.0;
    if (field && PyErr_Occurred()) {
        PyErr_Clear();
        fail(f->h, "the description of a model: %s.%s is not a number", f->what, name);
    }
    return value;
}

/* Reads a name; returns its index in a table that ends with NULL. */
int read_name(Fields *f, const char *name, const char *const *table)
{
    PyObject *field = read_field(f, name);
    Py_ssize_t length;
    const char *value = field && PyUnicode_Check(field) ? PyUnicode_AsUTF8AndSize(field, &length) : NULL;
    for (int i = 0; value && table[i]; i++)
        if (strcmp(value, table[i]) == 0)
            return i;
    fail(f->h, "the description of a model: %s.%s has an unknown value", f->what, name);
    return 0;
}

/* Acquires an array of `size` numbers of `item` bytes; None is NULL. */
static void *read_memory(Fields *f, PyObject *array, long size, size_t item, int write)
{
    if (!array || f->h->failed || array == Py_None)
        return NULL;
    Py_buffer *view = acquire(&f->h->buffers, array, (Py_ssize_t)(size * item), write);
    if (!view)
        return f->h->failed = 1, NULL;
    return view->buf;
}

void *read_array(Fields *f, const char *name, long size, size_t item)
{
    return read_memory(f, read_field(f, name), size, item, 0);
}

/* Reads a pair of a parameter and its gradient, or None. */
Parameter read_parameter(Fields *f, const char *name, long size)
{
    Parameter parameter = {NULL, NULL, size};
    PyObject *pair = read_field(f, name);
    if (!pair || pair == Py_None)
        return parameter;
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2)
        return fail(f->h, "the description of a model: %s.%s is not a pair", f->what, name), parameter;
    parameter.value = read_memory(f, PyTuple_GetItem(pair, 0), size, f->h->real->item, 0);
    parameter.gradient = read_memory(f, PyTuple_GetItem(pair, 1), size, f->h->real->item, 1);
    return parameter;
}

/* Reads a list of at most `most` items, borrowed; its length goes to `count`. */
PyObject *read_list(Fields *f, const char *name, long most, int *count)
{
    PyObject *list = read_field(f, name);
    *count = 0;
    if (list && (!PyList_Check(list) || PyList_Size(list) > most))
        return fail(f->h, "the description of a model: %s.%s is not a list, or too long", f->what, name), NULL;
    if (list)
        *count = (int)PyList_Size(list);
    return list;
}
