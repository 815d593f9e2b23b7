/* Who owns which memory.
 *
 * Arrays come as buffers or tensors. Those of a call are held until it returns, those of a model or of rows until Python drops the
 * capsule; nothing here keeps an address without the buffer that it belongs to. Every length is checked against the
 * model's description, so that a wrong shape is an error and never a write beyond an array. */
#ifndef CANTER_HANDLE_H
#define CANTER_HANDLE_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

typedef struct {
    Py_buffer few[8], *many; /* a minibatch needs few, and allocates nothing */
    int count, room;
} Held;

/* A model and what its description is read from. */
typedef struct {
    Model model;
    const Real *real;
    Held held;
    int busy;
    const int64_t *number, *number_end; /* whole numbers that are still to be read, */
    const double *setting, *setting_end; /* settings, */
    PyObject *arrays;                    /* and arrays */
    Py_ssize_t next;
    int failed;
} Handle;

#define MODEL_NAME "canter.model"

void release(Held *);
Py_buffer *held_view(Held *, Py_ssize_t number);
Py_buffer *hold(Held *, PyObject *array, Py_ssize_t bytes, int write);
PyObject *make_model(PyObject *self, PyObject *args);
PyObject *copy_tensors(PyObject *self, PyObject *args);
PyObject *make_places(PyObject *self, PyObject *args);
PyObject *write_row(PyObject *self, PyObject *args);
PyObject *square_sum(PyObject *self, PyObject *args);
PyObject *adamw(PyObject *self, PyObject *args);
PyObject *trace_back(PyObject *self, PyObject *args);
PyObject *column_sums(PyObject *self, PyObject *args);

#endif
