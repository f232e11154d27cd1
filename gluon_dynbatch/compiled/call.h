/* Call: the __call__ of a marked block, or a marked function. */

/* A block is a vertex by itself. A function or method has a `part`, and F as its first argument (behind the object, if
   it is a method); the vertex is (the object or the part, the part). */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *otherwise, *part, *first, *dict;
} Call;

static int has_some(PyObject *block, PyObject *name)
{
    PyObject *hooks = PyObject_GetAttr(block, name);
    int any = hooks ? PyObject_IsTrue(hooks) : -1;
    Py_XDECREF(hooks);
    return any;
}

/* Whether a block has hooks; -1 for an error. */
static int has_hooks(PyObject *block, PyObject *record)
{
    PyObject *hooks = Py_TYPE(record) == &RecordType ? ((Record *)record)->hooks : NULL;
    Py_ssize_t k;
    if (!hooks) {
        int any = has_some(block, known.forward_hooks);
        return any ? any : has_some(block, known.forward_pre_hooks);
    }
    for (k = 0; k < PyTuple_GET_SIZE(hooks); k++)
        if (PyDict_GET_SIZE(PyTuple_GET_ITEM(hooks, k)))
            return 1;
    return 0;
}

/* A call's vertex, and where its arguments begin; 0 if it is no call of a vertex. */
static int vertex_of(Call *self, PyObject *const *args, Py_ssize_t n, PyObject **block, Py_ssize_t *begin)
{
    *begin = 1;
    *block = args[0];
    if (!self->part)
        return 1;
    if (args[0] == self->first)
        *block = self->part;
    else
        *begin = 2;
    return args[0] == self->first || (n > 1 && args[1] == self->first);
}

/* What records a call of a vertex, held, by a table of any kind; NULL if there is none, or for an error. */
static PyObject *look_up(PyObject *block, PyObject *part)
{
    PyObject *table = PyObject_GetAttr(here.listener, known.vertices), *name = NULL, *found = NULL;
    if (table && PyDict_CheckExact(table)) {
        name = part ? Py_BuildValue("NN", PyLong_FromVoidPtr(block), PyLong_FromVoidPtr(part))
                    : PyLong_FromVoidPtr(block);
        found = name ? PyDict_GetItemWithError(table, name) : NULL;
    } else if (table && Py_TYPE(table) == &TableType)
        found = way_of((Table *)table, block, part);
    Py_XINCREF(found);
    Py_XDECREF(name);
    Py_XDECREF(table);
    return found;
}

/* What records a call of a vertex, held; NULL if there is none, if the block has hooks, or for an error. */
static PyObject *find_record(PyObject *block, PyObject *part)
{
    PyObject *table, *found;
    if (!here.listener)
        return NULL;
    table = here.vertices ? SLOT(here.listener, here.vertices) : NULL;
    if (table && Py_TYPE(table) == &TableType) {
        found = way_of((Table *)table, block, part);
        Py_XINCREF(found);
    } else
        found = look_up(block, part);
    if (found && !part && has_hooks(block, found))
        Py_CLEAR(found);
    return found;
}

static PyObject *call_call(PyObject *me, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)me;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf), begin;
    PyObject *block, *found, *made;
    if (!self->otherwise) {
        PyErr_SetString(PyExc_RuntimeError, "this function was collected as garbage");
        return NULL;
    }
    if (n && !(names && PyTuple_GET_SIZE(names)) && vertex_of(self, args, n, &block, &begin)) {
        if ((found = find_record(block, self->part))) {
            made = record(found, args + begin, n - begin);
            Py_DECREF(found);
            return made;
        }
        if (PyErr_Occurred())
            return NULL;
    }
    return PyObject_Vectorcall(self->otherwise, args, nargsf, names);
}

/* Whether a class takes its __call__ from a Call that is one of blocks. */
static int is_marked(PyTypeObject *type)
{
    Call *call = (Call *)_PyType_Lookup(type, known.call);
    return call && Py_TYPE(call) == &CallType && !call->part && call->otherwise;
}

static ternaryfunc call_by_python;              /* the tp_call of classes that have a __call__ */

/* The tp_call of a marked class: that of Python copies the arguments first. */
static PyObject *call_block(PyObject *block, PyObject *args, PyObject *names)
{
    PyObject *found, *made;
    if (!(names && PyDict_GET_SIZE(names)) && is_marked(Py_TYPE(block))) {
        if ((found = find_record(block, NULL))) {
            made = record(found, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args));
            Py_DECREF(found);
            return made;
        }
        if (PyErr_Occurred())
            return NULL;
    }
    return call_by_python(block, args, names);
}

/* Let the calls of the blocks of a class come here directly. (Whoever gives it another __call__ takes this back: Python
   then sets its tp_call, and also that of classes that are derived from it.) */
static PyObject *shorten(PyObject *module, PyObject *cls)
{
    PyTypeObject *type = (PyTypeObject *)cls;
    (void)module;
    if (!PyType_Check(cls) || !PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) || !is_marked(type)) {
        PyErr_SetString(PyExc_TypeError, "shorten takes a class whose __call__ is a Call of blocks");
        return NULL;
    }
    if (type->tp_call != call_block) {
        call_by_python = type->tp_call;         /* the same function for every class */
        type->tp_call = call_block;
    }
    return held(Py_None);
}

static PyObject *call_bind(PyObject *me, PyObject *block, PyObject *type)
{
    (void)type;
    return !block || block == Py_None ? held(me) : PyMethod_New(me, block);
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *otherwise, *part = NULL, *first = NULL;
    Call *self;
    if (!may_make(names) || !PyArg_ParseTuple(args, "O|OO", &otherwise, &part, &first))
        return NULL;
    if (part && !first) {
        PyErr_SetString(PyExc_TypeError, "a function has a part and a first argument");
        return NULL;
    }
    if (!(self = (Call *)type->tp_alloc(type, 0)))
        return NULL;
    self->call = call_call;
    self->otherwise = held(otherwise);
    self->part = part ? held(part) : NULL;
    self->first = first ? held(first) : NULL;
    return (PyObject *)self;
}

static int call_traverse(PyObject *me, visitproc visit, void *arg)
{
    Call *self = (Call *)me;
    Py_VISIT(self->otherwise);
    Py_VISIT(self->part);
    Py_VISIT(self->first);
    Py_VISIT(self->dict);
    return 0;
}

static int call_clear(PyObject *me)
{
    Call *self = (Call *)me;
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->part);
    Py_CLEAR(self->first);
    Py_CLEAR(self->dict);
    return 0;
}
