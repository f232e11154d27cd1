/* Results. */

/* Whether x is (list or tuple, parts): structures and forms are made of such pairs. */
static int is_pair(PyObject *x)
{
    return PyTuple_CheckExact(x) && PyTuple_GET_SIZE(x) == 2 && PyTuple_CheckExact(PyTuple_GET_ITEM(x, 1))
        && (PyTuple_GET_ITEM(x, 0) == (PyObject *)&PyTuple_Type || PyTuple_GET_ITEM(x, 0) == (PyObject *)&PyList_Type);
}

/* A structure is None, a result's number, or (list or tuple, structures). 0 with an error if this is none. */
static int check_structure(PyObject *structure, Py_ssize_t num_results)
{
    Py_ssize_t k;
    if (is_pair(structure)) {
        PyObject *parts = PyTuple_GET_ITEM(structure, 1);
        for (k = 0; k < PyTuple_GET_SIZE(parts); k++)
            if (!check_structure(PyTuple_GET_ITEM(parts, k), num_results))
                return 0;
        return 1;
    }
    if (structure == Py_None)
        return 1;
    if (PyLong_CheckExact(structure)) {
        k = PyLong_AsSsize_t(structure);
        if (0 <= k && k < num_results)
            return 1;
        PyErr_Clear();
    }
    PyErr_Format(PyExc_ValueError, "%R is no structure of %zd results", structure, num_results);
    return 0;
}

static PyObject *build(PyObject *structure, PyObject *const *results)
{
    PyObject *made, *parts;
    Py_ssize_t k, n;
    if (PyLong_CheckExact(structure))
        return held(results[PyLong_AsLong(structure)]);
    if (structure == Py_None)
        return held(Py_None);
    parts = PyTuple_GET_ITEM(structure, 1);
    n = PyTuple_GET_SIZE(parts);
    made = PyTuple_GET_ITEM(structure, 0) == (PyObject *)&PyTuple_Type ? PyTuple_New(n) : PyList_New(n);
    for (k = 0; made && k < n; k++) {
        PyObject *part = build(PyTuple_GET_ITEM(parts, k), results);
        if (!part)
            Py_CLEAR(made);
        else if (PyTuple_CheckExact(made))
            PyTuple_SET_ITEM(made, k, part);
        else
            PyList_SET_ITEM(made, k, part);
    }
    return made;
}

/* What a call returns: most return one result, or all of them in a list or tuple, and need no walk. */
typedef struct {
    PyObject *structure;
    Py_ssize_t num_results;
    enum {NESTED, ONE, IN_TUPLE, IN_LIST} kind;
} Results;

/* 0 with an error if a structure is none. */
static int open_results(Results *results, PyObject *structure, Py_ssize_t num_results)
{
    Py_ssize_t k = 0;
    if (!check_structure(structure, num_results))
        return 0;
    results->structure = held(structure);
    results->num_results = num_results;
    results->kind = NESTED;
    if (PyLong_CheckExact(structure) && num_results == 1)
        results->kind = ONE;
    else if (is_pair(structure) && PyTuple_GET_SIZE(PyTuple_GET_ITEM(structure, 1)) == num_results) {
        PyObject *parts = PyTuple_GET_ITEM(structure, 1);
        while (k < num_results && PyLong_CheckExact(PyTuple_GET_ITEM(parts, k))
               && PyLong_AsSsize_t(PyTuple_GET_ITEM(parts, k)) == k)
            k++;
        if (k == num_results)
            results->kind = PyTuple_GET_ITEM(structure, 0) == (PyObject *)&PyTuple_Type ? IN_TUPLE : IN_LIST;
    }
    return 1;
}

/* What a call returns, made of its results, which are dropped. */
static PyObject *deliver(const Results *what, PyObject **results)
{
    PyObject *made;
    if (what->kind == ONE)
        return results[0];
    if (what->kind == NESTED)
        made = build(what->structure, results);
    else {
        made = what->kind == IN_TUPLE ? PyTuple_New(what->num_results) : PyList_New(what->num_results);
        if (made) {
            PyObject **items = what->kind == IN_TUPLE ? &PyTuple_GET_ITEM(made, 0) : &PyList_GET_ITEM(made, 0);
            memcpy(items, results, what->num_results * sizeof *results);
            return made;
        }
    }
    drop(results, what->num_results);
    return made;
}

/* Append to a list, which takes over the reference: 0, -1 for an error, and the list is as before. */
static int append_item(PyObject *list, PyObject *item)
{
    Py_ssize_t size = PyList_GET_SIZE(list);
    int failed = 0;
    if (size < ((PyListObject *)list)->allocated) {
        Py_SET_SIZE(list, size + 1);
        PyList_SET_ITEM(list, size, item);
    } else {
        failed = PyList_Append(list, item);
        Py_DECREF(item);
    }
    return failed;
}

/* Append to a log: 0, -1 for an error, and the log is as before. Its memory is doubled where it ends, as it would else
   be copied for every eighth more. */
static int append_bytes(PyObject *log, const void *bytes, Py_ssize_t count)
{
    PyByteArrayObject *array = (PyByteArrayObject *)log;
    Py_ssize_t size = Py_SIZE(log), end = size + count;
    if ((array->ob_exports || array->ob_start - array->ob_bytes + end >= array->ob_alloc)
        && PyByteArray_Resize(log, 2 * end))    /* which refuses if somebody has a view of it */
        return -1;
    Py_SET_SIZE(log, end);
    memcpy(array->ob_start + size, bytes, count);
    array->ob_start[end] = 0;                   /* as the bytearray itself has it */
    return 0;
}

/* Number the results and append the call: all of it, or nothing and 0. No Python code runs in here, not even that of
   the garbage collector: nobody sees half a call. */
static int append_words(Target *target, const int64_t *words, Py_ssize_t count, PyObject *const *results,
                        Py_ssize_t num_results)
{
    Py_ssize_t k, before = PyList_GET_SIZE(target->made);
    for (k = 0; k < num_results; k++) {
        PyObject *token = SLOT(results[k], known.token) = new_token(before + k);
        if (!token || append_item(target->made, held(token)))
            break;
    }
    if (k == num_results && !append_bytes(target->log, words, count * sizeof *words))
        return 1;
    PyList_SetSlice(target->made, before, PyList_GET_SIZE(target->made), NULL);
    return 0;
}

/* Whether another thread has flushed the calls without the one that made an array; -1 for an error. */
static int came_too_late(Target *target, PyObject *array)
{
    PyObject *answer;
    int late;
    if (!PyList_GET_SIZE(target->watchers))
        return 0;
    answer = PyObject_CallMethodOneArg(target->calls, known.too_late, SLOT(array, known.token));
    late = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return late;
}

/* Append a call to the log and make its results, or RETRY if it came too late. */
static PyObject *emit(Target *target, const int64_t *words, Py_ssize_t num_words, PyObject *const *owners,
                      const Results *what)
{
    PyObject *fixed[16], **results = fixed, *made = NULL;
    Py_ssize_t count = 0, n = what->num_results;
    int late = -1;
    if (n > 16 && !(results = PyMem_Malloc(n * sizeof *results)))
        return PyErr_NoMemory();
    while (count < n && (results[count] = new_lazy(owners[count])))
        count++;
    if (count == n && append_words(target, words, num_words, results, n))
        late = came_too_late(target, results[0]);
    if (late == 0)
        made = deliver(what, results);
    else {
        drop(results, count);
        made = late < 0 ? NULL : held(known.retry);
    }
    if (results != fixed)
        PyMem_Free(results);
    return made;
}
