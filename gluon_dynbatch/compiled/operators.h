/* Operators: a call of an operator that was met before. */

enum {MOST_OPERANDS = 32};                     /* of calls that go the short way */

/* `entries` finds an entry by (name, (attribute, value) .., owner of each operand ..). */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Target target;
    PyObject *entries;
} Operators;

static PyTypeObject AppendType, TableType, CallType;

/* The name of a call in `entries`; NULL if an operand has no owner, if a list has changed, or for an error. */
static PyObject *key_of(PyObject *name, PyObject *keys, PyObject *values, PyObject *const *operands, Py_ssize_t n)
{
    Py_ssize_t k, m = PyList_GET_SIZE(keys);
    PyObject *key = PyTuple_New(1 + m + n);
    if (!key)
        return NULL;
    PyTuple_SET_ITEM(key, 0, held(name));
    for (k = 0; key && k < m; k++) {
        PyObject *pair = PyTuple_New(2);
        PyTuple_SET_ITEM(key, 1 + k, pair);
        if (pair && k < PyList_GET_SIZE(keys) && k < PyList_GET_SIZE(values)) {
            PyTuple_SET_ITEM(pair, 0, held(PyList_GET_ITEM(keys, k)));
            PyTuple_SET_ITEM(pair, 1, held(PyList_GET_ITEM(values, k)));
        } else
            Py_CLEAR(key);
    }
    for (k = 0; key && k < n; k++) {
        PyObject *owner = SLOT(operands[k], known.owner);
        Py_XINCREF(owner);
        PyTuple_SET_ITEM(key, 1 + m + k, owner);
        if (!owner)
            Py_CLEAR(key);
    }
    return key;
}

/* What appends to the entry of a call, held; NULL if there is none, or for an error. */
static PyObject *find_operator(Operators *self, PyObject *key)
{
    PyObject *entry = PyDict_GetItemWithError(self->entries, key), *append = NULL;
    if (entry) {
        Py_INCREF(entry);
        append = PyObject_GetAttr(entry, known.append);
        Py_DECREF(entry);
    } else if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError))     /* an attribute that is a list */
        PyErr_Clear();
    return append;
}

static PyObject *record_operator(Operators *self, PyObject *name, PyObject *arrays, PyObject *keys, PyObject *values)
{
    PyObject *operands[MOST_OPERANDS], *key = NULL, *append = NULL, *made = NULL;
    Py_ssize_t k = 0, n = PyList_GET_SIZE(arrays);
    /* An array that is new to the flush is not made known here: nobody has asked yet whether the call is recorded. */
    while (k < n && (operands[k] = known_operand(&self->target, PyList_GET_ITEM(arrays, k))))
        k++;
    if (k == n && (key = key_of(name, keys, values, operands, n)))
        append = find_operator(self, key);
    if (append && Py_TYPE(append) == &AppendType)
        made = append_operands((Append *)append, operands, n);
    if (made == known.retry)
        Py_CLEAR(made);
    if (!made && !PyErr_Occurred())
        made = held(Py_NotImplemented);
    Py_XDECREF(append);
    Py_XDECREF(key);
    drop(operands, k);
    return made;
}

static PyObject *operators_call(PyObject *me, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Operators *self = (Operators *)me;
    if (!check_alive(&self->target))
        return NULL;
    if (PyVectorcall_NARGS(nargsf) != 4 || (names && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "an operator call is its name, arrays, and attributes: names and values");
        return NULL;
    }
    if (!PyList_CheckExact(args[1]) || !PyList_CheckExact(args[2]) || !PyList_CheckExact(args[3])
        || !PyList_GET_SIZE(args[1]) || PyList_GET_SIZE(args[1]) > MOST_OPERANDS
        || PyList_GET_SIZE(args[2]) != PyList_GET_SIZE(args[3]))
        return held(Py_NotImplemented);
    return record_operator(self, args[0], args[1], args[2], args[3]);
}

static PyObject *operators_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *calls, *entries;
    Operators *self;
    if (!may_make(names) || !PyArg_ParseTuple(args, "OO!", &calls, &PyDict_Type, &entries)
        || !(self = (Operators *)type->tp_alloc(type, 0)))
        return NULL;
    self->call = operators_call;
    self->entries = held(entries);
    if (!open_target(&self->target, calls))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int operators_traverse(PyObject *me, visitproc visit, void *arg)
{
    VISIT_TARGET(((Operators *)me)->target);
    Py_VISIT(((Operators *)me)->entries);
    return 0;
}

static int operators_clear(PyObject *me)
{
    CLEAR_TARGET(((Operators *)me)->target);
    Py_CLEAR(((Operators *)me)->entries);
    return 0;
}
