/* The calls of one flush. */

typedef struct {
    PyObject *calls, *log, *made, *watchers, *leaf_of, *outside, *data;
} Target;

static int open_target(Target *target, PyObject *calls)
{
    target->calls = held(calls);
    if (!(target->log = PyObject_GetAttrString(calls, "log"))
        || !(target->made = PyObject_GetAttrString(calls, "made"))
        || !(target->watchers = PyObject_GetAttrString(calls, "watchers"))
        || !(target->leaf_of = PyObject_GetAttrString(calls, "leaf_of"))
        || !(target->outside = PyObject_GetAttrString(calls, "outside"))
        || !(target->data = PyObject_GetAttrString(calls, "data")))
        return 0;
    if (!PyByteArray_CheckExact(target->log) || !PyList_CheckExact(target->made)
        || !PyList_CheckExact(target->watchers) || !PyDict_CheckExact(target->leaf_of)) {
        PyErr_SetString(PyExc_TypeError, "calls have a log (bytearray), made, watchers (lists) and leaf_of (dict)");
        return 0;
    }
    return 1;
}

#define VISIT_TARGET(t) \
    Py_VISIT((t).calls); Py_VISIT((t).log); Py_VISIT((t).made); Py_VISIT((t).watchers); Py_VISIT((t).leaf_of); \
    Py_VISIT((t).outside); Py_VISIT((t).data)
#define CLEAR_TARGET(t) \
    Py_CLEAR((t).calls); Py_CLEAR((t).log); Py_CLEAR((t).made); Py_CLEAR((t).watchers); Py_CLEAR((t).leaf_of); \
    Py_CLEAR((t).outside); Py_CLEAR((t).data)

/* What `outside` or `data` returned, which must be a LazyArray. */
static PyObject *only_lazy(PyObject *made)
{
    if (made && !IS_LAZY(made)) {
        PyErr_Format(PyExc_TypeError, "a LazyArray stands for an array, not a %s", Py_TYPE(made)->tp_name);
        Py_CLEAR(made);
    }
    return made;
}

/* What stands for an array, if a recorded call has read it before; else NULL, as for an error. (Held: while Python code
   runs, another thread may flush and clear `leaf_of`.) */
static PyObject *known_operand(Target *target, PyObject *array)
{
    PyObject *key, *found;
    if (IS_LAZY(array))
        return held(array);
    if (!(key = PyLong_FromVoidPtr(array)))
        return NULL;
    found = PyDict_GetItemWithError(target->leaf_of, key);
    Py_XINCREF(found);
    Py_DECREF(key);
    return only_lazy(found);
}

/* What stands for an array. */
static PyObject *operand(Target *target, PyObject *array)
{
    PyObject *found = known_operand(target, array);
    return found || PyErr_Occurred() ? found : only_lazy(PyObject_CallOneArg(target->outside, array));
}
