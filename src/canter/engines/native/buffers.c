/* Buffers of arrays and tensors. */
#include "handle.h"

Py_buffer *buffer_at(Buffers *buffers, Py_ssize_t number)
{
    return (buffers->many ? buffers->many : buffers->few) + number;
}

void release_buffers(Buffers *buffers)
{
    while (buffers->count > 0)
        PyBuffer_Release(buffer_at(buffers, --buffers->count));
    free(buffers->many);
    buffers->many = NULL;
}

static int is_true(PyObject *answer)
{
    int truth = answer && PyObject_IsTrue(answer) == 1;
    Py_XDECREF(answer);
    return truth;
}

/* Reads address and size of a tensor: a fraction of the time of making an array of it. */
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
            PyErr_SetString(PyExc_ValueError, "a tensor is not on the CPU or not contiguous");
        return -1;
    }
    PyObject *length = PyObject_GetAttr(tensor, nbytes), *address = PyObject_CallMethodObjArgs(tensor, data_ptr, NULL);
    if (length && address)
        *view = (Py_buffer){.len = PyLong_AsSsize_t(length), .buf = PyLong_AsVoidPtr(address), .obj = Py_NewRef(tensor)};
    Py_XDECREF(length);
    Py_XDECREF(address);
    return length && address ? 0 : -1;
}

/* Acquires the memory of an array or a tensor of `bytes` (negative: of any length); NULL with an exception for another
 * size. The view may move when the next buffer is acquired, the memory does not. */
Py_buffer *acquire(Buffers *buffers, PyObject *array, Py_ssize_t bytes, int write)
{
    const int few = sizeof buffers->few / sizeof *buffers->few;
    if (buffers->count == (buffers->many ? buffers->room : few)) {
        buffers->room = 2 * buffers->count;
        Py_buffer *grown = realloc(buffers->many, buffers->room * sizeof *grown);
        if (!grown)
            return (Py_buffer *)PyErr_NoMemory();
        if (!buffers->many)
            memcpy(grown, buffers->few, sizeof buffers->few);
        buffers->many = grown;
    }
    Py_buffer *view = buffer_at(buffers, buffers->count);
    int status = PyObject_CheckBuffer(array) ? PyObject_GetBuffer(array, view, write ? PyBUF_WRITABLE : PyBUF_SIMPLE)
                                             : tensor_memory(array, view);
    if (status < 0)
        return NULL;
    buffers->count++;
    if (bytes >= 0 && view->len != bytes) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes where %zd are needed", view->len, bytes);
        return NULL;
    }
    return view;
}
