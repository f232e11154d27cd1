/* LazyArrays. */

/* Dead ones that the next results are made of. (A sample's die with it, so that not many live at a time.) */
enum {MOST_DEAD = 4096};
static PyObject *dead[MOST_DEAD];
static Py_ssize_t num_dead;

/* The tp_alloc of LazyArray. */
static PyObject *alloc_lazy(PyTypeObject *type, Py_ssize_t n)
{
    PyObject *made;
    if (type != known.lazy)                     /* a class that is derived from it */
        return PyType_GenericAlloc(type, n);
    if (num_dead) {
        made = dead[--num_dead];
        Py_INCREF(type);
        _Py_NewReference(made);
    } else if (!(made = PyObject_GC_New(PyObject, type)))
        return NULL;
    SLOT(made, known.owner) = SLOT(made, known.token) = NULL;
    PyObject_GC_Track(made);
    return made;
}

static PyObject *new_lazy(PyObject *owner)
{
    PyObject *made = alloc_lazy(known.lazy, 0);
    if (made)
        SLOT(made, known.owner) = held(owner);
    return made;
}

/* The tp_dealloc of LazyArray, which has nothing but its two slots: that of Python looks for all that a class may have.
   (Owners end as Python has it, which sees to it that chains of any length can.) */
static void end_lazy(PyObject *me)
{
    PyObject *owner = SLOT(me, known.owner), *token = SLOT(me, known.token);
    PyTypeObject *type = Py_TYPE(me);
    PyObject_GC_UnTrack(me);
    if (type == known.lazy && num_dead < MOST_DEAD)
        dead[num_dead++] = me;
    else
        type->tp_free(me);
    Py_DECREF(type);
    Py_XDECREF(owner);                          /* last: it may run code that makes LazyArrays */
    Py_XDECREF(token);
}

/* The tp_finalize of LazyArray: nothing. But the collector notes whom it has asked, and asks nobody twice. */
static void end_silently(PyObject *me)
{
    (void)me;
}

/* Whether a class has two slots and nothing else that an instance would have to give back. */
static int has_two_slots(PyTypeObject *type)
{
    return type->tp_basicsize == (Py_ssize_t)(sizeof(PyObject) + 2 * sizeof(PyObject *)) && !type->tp_itemsize
        && !type->tp_dictoffset && !type->tp_weaklistoffset && PyType_IS_GC(type);
}

/* `array.__class__ = cls`, which Python refuses, because LazyArrays do not end as others do. */
static PyObject *become(PyObject *module, PyObject *args)
{
    PyObject *array;
    PyTypeObject *cls, *old;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!", &array, &PyType_Type, &cls))
        return NULL;
    old = Py_TYPE(array);
    if (old != known.lazy || !PyType_IsSubtype(old, cls) || !has_two_slots(cls)) {
        PyErr_Format(PyExc_TypeError, "a %s cannot become a %s", old->tp_name, cls->tp_name);
        return NULL;
    }
    Py_SET_TYPE(array, (PyTypeObject *)held((PyObject *)cls));
    Py_DECREF(old);
    return held(Py_None);
}
