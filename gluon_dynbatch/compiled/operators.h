/* Operators: a call of an operator that was met before. */

enum {MOST_OPERANDS = 32};                     /* of calls that go the short way */

/* `entries` finds an entry by (name, (attribute, value) .., owner of each operand ..); one of calls on any number of
   arrays, which all have the same owner, by (name, owner, None). */
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

/* Record a call whose entry has the name `key`, which is dropped: NULL if there is none, if it came too late, or for an
   error. */
static PyObject *append_to(Operators *self, PyObject *key, PyObject *const *operands, Py_ssize_t n)
{
    PyObject *append = key ? find_operator(self, key) : NULL, *made = NULL;
    if (append && Py_TYPE(append) == &AppendType)
        made = append_operands((Append *)append, operands, n);
    if (made == known.retry)
        Py_CLEAR(made);
    Py_XDECREF(append);
    Py_XDECREF(key);
    return made;
}

static PyObject *record_operator(Operators *self, PyObject *name, PyObject *arrays, PyObject *keys, PyObject *values)
{
    PyObject *operands[MOST_OPERANDS], *made = NULL;
    Py_ssize_t k = 0, n = PySequence_Fast_GET_SIZE(arrays);
    if (n > MOST_OPERANDS)
        return NULL;
    /* An array that is new to the flush is not made known here: nobody has asked yet whether the call is recorded. */
    while (k < n && (operands[k] = known_operand(&self->target, PySequence_Fast_GET_ITEM(arrays, k))))
        k++;
    if (k == n)
        made = append_to(self, key_of(name, keys, values, operands, n), operands, n);
    drop(operands, k);
    return made;
}

/* The owner of all arrays, not held; NULL if there is none. */
static PyObject *owner_of_all(PyObject *const *arrays, Py_ssize_t n)
{
    PyObject *owner = n && IS_LAZY(arrays[0]) ? SLOT(arrays[0], known.owner) : NULL;
    while (owner && --n)
        if (!IS_LAZY(arrays[n]) || SLOT(arrays[n], known.owner) != owner)
            return NULL;
    return owner;
}

/* Arguments as they were given, a tuple: nobody has looked yet whether they are arrays. */
static PyObject *record_arguments(Operators *self, PyObject *name, PyObject *args, PyObject *keys, PyObject *values)
{
    PyObject *made = NULL, *const *arrays = &PyTuple_GET_ITEM(args, 0), *owner;
    Py_ssize_t k, n = PyTuple_GET_SIZE(args);
    if (!PyList_GET_SIZE(keys) && (owner = owner_of_all(arrays, n)))
        made = append_to(self, PyTuple_Pack(3, name, owner, Py_None), arrays, n);
    if (made || PyErr_Occurred())
        return made;
    for (k = 0; k < n; k++)
        if (!IS_LAZY(arrays[k]) && Py_TYPE(arrays[k]) != known.lazy->tp_base)
            return NULL;                        /* MXNet has something to say about it */
    return record_operator(self, name, args, keys, values);
}

static PyObject *operators_call(PyObject *me, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Operators *self = (Operators *)me;
    PyObject *made = NULL;
    if (!check_alive(&self->target))
        return NULL;
    if (PyVectorcall_NARGS(nargsf) != 4 || (names && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "an operator call is its name, arrays, and attributes: names and values");
        return NULL;
    }
    if (PyList_CheckExact(args[2]) && PyList_CheckExact(args[3])
        && PyList_GET_SIZE(args[2]) == PyList_GET_SIZE(args[3])) {
        if (PyTuple_CheckExact(args[1]) && PyTuple_GET_SIZE(args[1]))
            made = record_arguments(self, args[0], args[1], args[2], args[3]);
        else if (PyList_CheckExact(args[1]) && PyList_GET_SIZE(args[1]))
            made = record_operator(self, args[0], args[1], args[2], args[3]);
    }
    return made || PyErr_Occurred() ? made : held(Py_NotImplemented);
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
