/* Ownership of memory.
 *
 * Arrays come as buffers or tensors. The buffers of a call are released when it returns, those of a model or of samples
 * when Python drops the capsule; nothing keeps an address without the buffer that owns it. Every length is checked
 * against the model's description, so that a wrong shape is an error and never a write beyond an array. */
#ifndef CANTER_HANDLE_H
#define CANTER_HANDLE_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

typedef struct {
    Py_buffer few[8], *many; /* a minibatch needs only a few, without an allocation */
    int count, room;
} Buffers;

typedef struct {
    Model model;
    const Real *real;
    Buffers buffers; /* of the description */
    int busy;        /* a call is using the model */
    int failed;      /* an error was raised while the description was read */
} Handle;

/* A dictionary of the description, and its fields that were read so far. */
typedef struct {
    Handle *h;
    PyObject *dict;
    const char *what; /* its name in errors */
    const char *taken[24];
    int count;
} Fields;

void fail(Handle *, const char *format, const char *what, const char *name);
Fields open_fields(Handle *, PyObject *dict, const char *what);
void close_fields(Fields *);
PyObject *read_field(Fields *, const char *name);
long read_integer(Fields *, const char *name, long most);
double read_number(Fields *, const char *name);
int read_name(Fields *, const char *name, const char *const *table);
void *read_array(Fields *, const char *name, long size, size_t item);
Parameter read_parameter(Fields *, const char *name, long size);
PyObject *read_list(Fields *, const char *name, long most, int *count);

#define MODEL_NAME "canter.model"

void release_buffers(Buffers *);
Py_buffer *buffer_at(Buffers *, Py_ssize_t number);
Py_buffer *acquire(Buffers *, PyObject *array, Py_ssize_t bytes, int write);
PyObject *make_model(PyObject *self, PyObject *args);
PyObject *copy_tensors(PyObject *self, PyObject *args);
PyObject *make_row_writer(PyObject *self, PyObject *args);
PyObject *write_row(PyObject *self, PyObject *args);
PyObject *square_sum(PyObject *self, PyObject *args);
PyObject *adamw(PyObject *self, PyObject *args);
PyObject *reverse_discounted_sum(PyObject *self, PyObject *args);
PyObject *column_sums(PyObject *self, PyObject *args);

#endif
