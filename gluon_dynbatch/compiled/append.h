/* Append: a call on operands of every origin. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Target target;
    Results results;
    PyObject *owners;
    long long number;
    Py_ssize_t num_operands, slots;
} Append;

/* Whether an object of this module may be made; 0 with an error if not. */
static int may_make(PyObject *names)
{
    if (!known.lazy)
        PyErr_SetString(PyExc_TypeError, "bind comes first");
    else if (names && PyDict_GET_SIZE(names))
        PyErr_SetString(PyExc_TypeError, "arguments are taken by position");
    else
        return 1;
    return 0;
}

static int check_alive(Target *target)
{
    if (!target->calls)
        PyErr_SetString(PyExc_RuntimeError, "these calls were collected as garbage");
    return target->calls != NULL;
}

/* Record a call on operands: its results, or RETRY if it came too late. */
static PyObject *append_operands(Append *self, PyObject *const *operands, Py_ssize_t n)
{
    Words w;
    PyObject *made = NULL;
    Py_ssize_t k;
    int right;
    if (!check_alive(&self->target))
        return NULL;
    if (self->slots ? n < self->num_operands || (n - self->num_operands) % self->slots : n != self->num_operands) {
        PyErr_Format(PyExc_ValueError, "a call of %zd operands got %zd", self->num_operands, n);
        return NULL;
    }
    begin_words(&w);
    right = put_word(&w, self->number);
    if (right == 1 && self->slots)
        right = put_word(&w, (n - self->num_operands) / self->slots);
    for (k = 0; right == 1 && k < n; k++) {
        right = put_token(&w, operands[k]);
        if (right == 0 && !PyObject_TypeCheck(operands[k], known.lazy->tp_base)) {
            PyErr_Format(PyExc_TypeError, "an operand of a recorded call is a %s", Py_TYPE(operands[k])->tp_name);
            right = -1;
        }
    }
    if (right == 1)
        made = emit(&self->target, w.words, w.count, &PyTuple_GET_ITEM(self->owners, 0), &self->results);
    else if (right == 0)                        /* another thread has given an operand its value: flushed the calls */
        made = held(known.retry);
    end_words(&w);
    return made;
}

static PyObject *append_call(PyObject *me, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) != 1 || (names && PyTuple_GET_SIZE(names))
        || !(PyList_CheckExact(args[0]) || PyTuple_CheckExact(args[0]))) {
        PyErr_SetString(PyExc_TypeError, "append takes a list of operands");
        return NULL;
    }
    return append_operands((Append *)me, PySequence_Fast_ITEMS(args[0]), PySequence_Fast_GET_SIZE(args[0]));
}

static PyObject *append_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *calls, *structure, *owners;
    Py_ssize_t num_operands, slots;
    long long number;
    Append *self;
    if (!may_make(names) || !PyArg_ParseTuple(args, "OnnOLO!", &structure, &num_operands, &slots, &calls, &number,
                                              &PyTuple_Type, &owners))
        return NULL;
    if (!PyTuple_GET_SIZE(owners) || num_operands < 0 || slots < 0) {
        PyErr_SetString(PyExc_ValueError, "a call has operands, none or more, and at least one result");
        return NULL;
    }
    if (!(self = (Append *)type->tp_alloc(type, 0)))
        return NULL;
    self->call = append_call;
    self->owners = held(owners);
    self->number = number;
    self->num_operands = num_operands;
    self->slots = slots;
    if (!open_results(&self->results, structure, PyTuple_GET_SIZE(owners)) || !open_target(&self->target, calls))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int append_traverse(PyObject *me, visitproc visit, void *arg)
{
    Append *self = (Append *)me;
    VISIT_TARGET(self->target);
    Py_VISIT(self->results.structure);
    Py_VISIT(self->owners);
    return 0;
}

static int append_clear(PyObject *me)
{
    Append *self = (Append *)me;
    CLEAR_TARGET(self->target);
    Py_CLEAR(self->results.structure);
    Py_CLEAR(self->owners);
    return 0;
}

static void free_object(PyObject *me)
{
    PyObject_GC_UnTrack(me);
    Py_TRASHCAN_BEGIN(me, free_object)          /* a Record holds the next one: a chain of any length */
    Py_TYPE(me)->tp_clear(me);
    Py_TYPE(me)->tp_free(me);
    Py_TRASHCAN_END
}
