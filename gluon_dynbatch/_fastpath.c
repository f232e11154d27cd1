/* Recording a call in one step: what fastpath.py generates as Python code, compiled.

   What a log, a token, an owner, an entry and a form are stands in fastpath.py, which also decides whether this module
   or its own functions are used; both do the same. Everything here runs under the GIL and calls Python code only where
   an operand is new to the flush, a call is not of the expected form, or another thread flushes meanwhile. (Wherever a
   list, tuple or LazyArray is made, the garbage collector may run Python code too.) */

/* One translation unit, part after part. */
#include "compiled/common.h"
#include "compiled/calls.h"
#include "compiled/lazy_arrays.h"
#include "compiled/tokens.h"
#include "compiled/log.h"
#include "compiled/results.h"
#include "compiled/append.h"
#include "compiled/operators.h"
#include "compiled/record.h"
#include "compiled/table.h"
#include "compiled/call.h"

#define CALLABLE(NAME, STRUCT, PREFIX, DOC, FLAGS) \
    .tp_name = "gluon_dynbatch._fastpath." NAME, .tp_basicsize = sizeof(STRUCT), .tp_doc = DOC, \
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | (FLAGS), \
    .tp_vectorcall_offset = offsetof(STRUCT, call), .tp_call = PyVectorcall_Call, .tp_new = PREFIX##_new, \
    .tp_traverse = PREFIX##_traverse, .tp_clear = PREFIX##_clear, .tp_dealloc = free_object

static PyTypeObject AppendType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    CALLABLE("Append", Append, append, "Append(structure, num_operands, slots, calls, number, owners)", 0)};

static PyTypeObject OperatorsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    CALLABLE("Operators", Operators, operators, "Operators(calls, entries)", 0)};

static PyTypeObject RecordType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    CALLABLE("Record", Record, record,
             "Record(forms, structure, num_results, place, calls, entries, other, general, lengths[, hooks])", 0)};

static PyMethodDef table_methods[] = {{"get", table_get, METH_VARARGS, "get(vertex[, otherwise])"}, {NULL}};

static PyMappingMethods table_mapping = {table_length, table_item, table_set};

static PyTypeObject TableType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gluon_dynbatch._fastpath.Table", .tp_basicsize = sizeof(Table), .tp_doc = "Table()",
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .tp_new = table_new, .tp_methods = table_methods,
    .tp_as_mapping = &table_mapping, .tp_traverse = table_traverse, .tp_clear = table_clear, .tp_dealloc = free_object};

static PyGetSetDef call_attributes[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                        {NULL}};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    CALLABLE("Call", Call, call, "Call(otherwise[, part, F])", Py_TPFLAGS_METHOD_DESCRIPTOR),
    .tp_descr_get = call_bind, .tp_dictoffset = offsetof(Call, dict), .tp_getset = call_attributes};

static PyObject *common_owner(PyObject *module, PyObject *arrays)
{
    PyObject *owner = NULL;
    (void)module;
    if (PyList_CheckExact(arrays) || PyTuple_CheckExact(arrays))
        owner = owner_of_all(PySequence_Fast_ITEMS(arrays), PySequence_Fast_GET_SIZE(arrays));
    return held(owner ? owner : Py_None);
}

static Py_ssize_t slot_of(PyTypeObject *type, const char *name)
{
    PyObject *slot = PyObject_GetAttrString((PyObject *)type, name);
    Py_ssize_t offset = -1;
    if (slot && Py_TYPE(slot) == &PyMemberDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(slot))
        && ((PyMemberDescrObject *)slot)->d_member->type == T_OBJECT_EX)
        offset = ((PyMemberDescrObject *)slot)->d_member->offset;
    else if (slot)
        PyErr_Format(PyExc_TypeError, "%s is no slot of %s", name, type->tp_name);
    Py_XDECREF(slot);
    return offset;
}

static PyObject *bind(PyObject *module, PyObject *args)
{
    PyTypeObject *lazy, *ndarray, *integer;
    PyObject *retry;
    Py_ssize_t owner, token;
    long long first, largest;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!OLL", &PyType_Type, &lazy, &PyType_Type, &ndarray, &PyType_Type, &integer,
                          &retry, &first, &largest)
        || (owner = slot_of(lazy, "owner")) < 0 || (token = slot_of(lazy, "token")) < 0)
        return NULL;
    if (!has_two_slots(lazy) || (known.lazy && known.lazy != lazy)) {
        PyErr_Format(PyExc_TypeError, "%s is no LazyArray, or not the first one", lazy->tp_name);
        return NULL;
    }
    known.owner = owner;
    known.token = token;
    known.first = first;
    known.largest = largest;
    Py_XSETREF(known.lazy, (PyTypeObject *)held((PyObject *)lazy));     /* for the life of the process, as the module */
    lazy->tp_finalize = end_silently;           /* the __del__ of NDArray frees a handle */
    lazy->tp_alloc = alloc_lazy;
    lazy->tp_dealloc = end_lazy;
    Py_XSETREF(known.ndarray, (PyTypeObject *)held((PyObject *)ndarray));
    Py_XSETREF(known.integer, (PyTypeObject *)held((PyObject *)integer));
    Py_XSETREF(known.retry, held(retry));
    return held(Py_None);
}

static PyObject *listen(PyObject *module, PyObject *whom)
{
    Py_ssize_t vertices = whom == Py_None ? 0 : slot_of(Py_TYPE(whom), "vertices");
    PyObject *before = here.listener;
    (void)module;
    if (vertices < 0) {                         /* an attribute like others */
        PyErr_Clear();
        vertices = 0;
    }
    here.listener = whom == Py_None ? NULL : held(whom);
    here.vertices = vertices;
    Py_XDECREF(before);
    return held(Py_None);
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, "bind(LazyArray, ndarray, integer, RETRY, first token, largest word id): once, first"},
    {"become", become, METH_VARARGS, "become(LazyArray, cls): array.__class__ = cls"},
    {"common_owner", common_owner, METH_O, "common_owner(arrays) -> the owner of all of them; None if there is none"},
    {"listen", listen, METH_O, "listen(whom): who listens on this thread from now on; None: nobody"},
    {"shorten", shorten, METH_O, "shorten(cls): let the calls of its blocks come here directly"},
    {"is_held", is_held, METH_VARARGS, "is_held(tokens, recycles) -> for each a byte: whether anybody but the list holds "
     "it; the next flushes may take the others, if they are recycled"},
    {NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "gluon_dynbatch._fastpath", .m_doc = "Recording, compiled; see fastpath.py.",
    .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__fastpath(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE)
        || !(known.append = PyUnicode_InternFromString("append"))
        || !(known.vertices = PyUnicode_InternFromString("vertices"))
        || !(known.forward_hooks = PyUnicode_InternFromString("_forward_hooks"))
        || !(known.forward_pre_hooks = PyUnicode_InternFromString("_forward_pre_hooks"))
        || !(known.too_late = PyUnicode_InternFromString("too_late"))
        || !(known.call = PyUnicode_InternFromString("__call__"))
        || PyModule_AddType(module, &AppendType) || PyModule_AddType(module, &OperatorsType)
        || PyModule_AddType(module, &RecordType) || PyModule_AddType(module, &TableType)
        || PyModule_AddType(module, &CallType)))
        Py_CLEAR(module);
    return module;
}
