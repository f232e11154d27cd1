/* Recording a call in one step: what fastpath.py generates as Python code, compiled.

   What a log, a token, an owner, an entry and a form are stands in fastpath.py, which also decides whether this module
   or its own functions are used; both do the same. Everything here runs under the GIL and calls Python code only where
   an operand is new to the flush, a call is not of the expected form, or another thread flushes meanwhile. (Wherever a
   list, tuple or LazyArray is made, the garbage collector may run Python code too.) */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

enum {INTERFACE = 4};                           /* the same number as in fastpath.py */

static struct {
    PyTypeObject *lazy, *ndarray, *integer;
    PyObject *retry;
    Py_ssize_t owner, token;                    /* where a LazyArray keeps them */
    long long first, largest;
    PyObject *append, *vertices, *forward_hooks, *forward_pre_hooks, *too_late, *call;  /* names */
} known;

#ifdef _MSC_VER
#define OF_THIS_THREAD __declspec(thread)
#else
#define OF_THIS_THREAD __thread
#endif

static OF_THIS_THREAD struct {
    PyObject *listener;                         /* who listens on this thread, or NULL */
    Py_ssize_t vertices;                        /* where it keeps its table, if that is a slot; else 0 */
} here;

static PyObject *held(PyObject *x)
{
    Py_INCREF(x);
    return x;
}

static void drop(PyObject *const *some, Py_ssize_t count)
{
    while (count)
        Py_DECREF(some[--count]);
}

#define SLOT(array, offset) (*(PyObject **)((char *)(array) + (offset)))
#define IS_LAZY(x) (Py_TYPE(x) == known.lazy)

/* ---- the calls of one flush ------------------------------------------------------------------ */

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

/* ---- LazyArrays -------------------------------------------------------------------------------- */

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

/* ---- tokens ---------------------------------------------------------------------------------- */

#if PY_VERSION_HEX >= 0x030C0000
#define INT_TAG(x) ((PyLongObject *)(x))->long_value.lv_tag
#define INT_SIZE(x) ((Py_ssize_t)(INT_TAG(x) >> 3) * (1 - (Py_ssize_t)(INT_TAG(x) & 3)))
#define INT_DIGITS(x) ((PyLongObject *)(x))->long_value.ob_digit
#else
#define INT_SIZE(x) Py_SIZE(x)
#define INT_DIGITS(x) ((PyLongObject *)(x))->ob_digit
#endif

/* The value of an int of at most two digits, as tokens and word ids are: 1; 0 if it has more. */
static inline int short_int(PyObject *x, int64_t *value)
{
    const digit *digits = INT_DIGITS(x);
    switch (INT_SIZE(x)) {
    case 0: *value = 0; return 1;
    case 1: *value = digits[0]; return 1;
    case 2: *value = digits[0] | (int64_t)digits[1] << PyLong_SHIFT; return 1;
    case -1: *value = -(int64_t)digits[0]; return 1;
    case -2: *value = -(digits[0] | (int64_t)digits[1] << PyLong_SHIFT); return 1;
    default: return 0;
    }
}

/* The token of an array: 1, 0 if it has none (any more: another thread has given it its value), -1 for an error. */
static int token_of(PyObject *array, int64_t *word)
{
    PyObject *token = IS_LAZY(array) ? SLOT(array, known.token) : NULL;
    if (!token || !PyLong_Check(token))
        return 0;
    if (short_int(token, word))
        return 1;
    *word = PyLong_AsLongLong(token);
    return *word == -1 && PyErr_Occurred() ? -1 : 1;
}

/* Every flush counts its results from the first token on. So tokens whose arrays are dead are kept, by their number:
   the next flush takes them and makes none. */
enum {MOST_SPARE = 1 << 16};
static PyObject **spare;                        /* MOST_SPARE places, NULL where there is none */

static PyObject *new_token(Py_ssize_t number)
{
    PyObject *token;
    if (number >= MOST_SPARE || !spare || !(token = spare[number]))
        return PyLong_FromLongLong(known.first + number);
    spare[number] = NULL;
    return token;
}

/* Keep the tokens of a list that nobody else holds; None takes their places, so that its length stays. */
static PyObject *recycle(PyObject *module, PyObject *made)
{
    Py_ssize_t k, n;
    (void)module;
    if (!PyList_CheckExact(made)) {
        PyErr_SetString(PyExc_TypeError, "recycle takes the list of tokens");
        return NULL;
    }
    if (!spare && !(spare = PyMem_Calloc(MOST_SPARE, sizeof *spare)))
        return PyErr_NoMemory();
    n = PyList_GET_SIZE(made) < MOST_SPARE ? PyList_GET_SIZE(made) : MOST_SPARE;
    for (k = 0; k < n; k++) {
        PyObject *token = PyList_GET_ITEM(made, k);
        int64_t value;
        if (!spare[k] && Py_REFCNT(token) == 1 && PyLong_CheckExact(token) && short_int(token, &value)
            && value == known.first + k) {
            spare[k] = token;
            PyList_SET_ITEM(made, k, held(Py_None));
        }
    }
    return held(Py_None);
}

/* ---- a stretch of the log -------------------------------------------------------------------- */

typedef struct {
    int64_t *words, fixed[48];
    Py_ssize_t count, room;
} Words;

static void begin_words(Words *w)
{
    w->words = w->fixed;
    w->count = 0;
    w->room = sizeof w->fixed / sizeof *w->fixed;
}

static void end_words(Words *w)
{
    if (w->words != w->fixed)
        PyMem_Free(w->words);
}

static int put_word(Words *w, int64_t word)
{
    if (w->count == w->room) {
        int64_t *larger = PyMem_Malloc(2 * w->room * sizeof *larger);
        if (!larger) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(larger, w->words, w->count * sizeof *larger);
        end_words(w);
        w->words = larger;
        w->room *= 2;
    }
    w->words[w->count++] = word;
    return 1;
}

static int put_token(Words *w, PyObject *array)
{
    int64_t word;
    int right = token_of(array, &word);
    return right == 1 ? put_word(w, word) : right;
}

/* ---- results --------------------------------------------------------------------------------- */

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

/* ---- Append: a call on operands of every origin ------------------------------------------------ */

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

/* ---- Operators: a call of an operator that was met before ---------------------------------------- */

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

/* ---- Record: a call of a vertex with arguments of one form -------------------------------------- */

/* A form as code, outside in: a letter, and behind T and L (tuple, list) the number of parts. The letter E stands for
   the argument that is a list of any length: L or T, then the letter of its elements and their parts. */
enum {ARRAY = 'a', DATA = 'd', WORD = 'i', NUMBER = 'n', IS_NONE = '0', IS_TRUE = '1', IS_FALSE = '2',
      TUPLE = 'T', LIST = 'L', ELEMENTS = 'E'};

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Target target;
    Results results;
    PyObject *entries, *other, *general, *lengths;
    PyObject *hooks;                            /* of a block: dicts, empty as long as there are none; or NULL */
    PyObject *last_key, *last_entry;            /* of the newest call */
    int64_t last_number;                        /* that of its entry */
    uint64_t lengths_met;                       /* by bits: those below 64 that `lengths` has; it only grows */
    Py_ssize_t num_args, num_operands, num_code;
    int *code, element;                         /* element: where the form of an element begins; 0 without a list */
    int makes_leaves;                           /* of numbers and numpy arrays, by Python code */
} Record;

/* The operands of a call, held with all that is found by them: Python code may run between two steps, that of another
   thread too, and change lists and tables. */
typedef struct {
    PyObject *of[MOST_OPERANDS], *first[MOST_OPERANDS];         /* first: the arrays of the first element of `list` */
    int kind[MOST_OPERANDS];
    int64_t word[MOST_OPERANDS];
    Py_ssize_t count, parts, length;
    PyObject *list, *key, *entry;               /* the list is one of the arguments, which the caller holds */
    int64_t number;                             /* of the entry */
    const int *element;                         /* the form of its elements */
} Operands;

static void end_operands(Operands *found)
{
    drop(found->of, found->count);
    drop(found->first, found->parts);
    Py_XDECREF(found->key);
    Py_XDECREF(found->entry);
}

static PyTypeObject RecordType;

static const int *skip(const int *code)
{
    Py_ssize_t k, n;
    if (*code != TUPLE && *code != LIST)
        return code + 1;
    for (n = code[1], code += 2, k = 0; k < n; k++)
        code = skip(code);
    return code;
}

/* A word id as it stands in the log: 1, 0 if x is none or too large, -1 for an error. */
static int as_word(PyObject *x, int64_t *word)
{
    int overflow = 0;
    PyObject *number = PyLong_CheckExact(x) ? held(x) : NULL;
    if (!number) {
        if (!PyObject_TypeCheck(x, known.integer))
            return 0;
        if (!(number = PyNumber_Long(x)))
            return -1;
    }
    *word = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    return !overflow && -known.largest <= *word && *word <= known.largest;
}

static int is_sequence(PyObject *x, int kind)
{
    return kind == LIST ? PyList_CheckExact(x) : PyTuple_CheckExact(x);
}

/* Take the operands out of an argument: 1, 0 if it is of another form, -1 for an error. */
static int take(const int **code, PyObject *x, Operands *found)
{
    int right, kind = *(*code)++;
    Py_ssize_t k, n;
    switch (kind) {
    case IS_NONE: return x == Py_None;
    case IS_TRUE: return x == Py_True;
    case IS_FALSE: return x == Py_False;
    case ELEMENTS:
        found->list = x;
        found->element = *code + 2;             /* behind L or T and the number of parts, which is one */
        kind = **code;
        *code = skip(*code);
        return is_sequence(x, kind);
    case TUPLE: case LIST:
        n = *(*code)++;
        right = is_sequence(x, kind) && PySequence_Fast_GET_SIZE(x) == n;
        for (k = 0; right == 1 && k < n; k++) {
            PyObject *part = k < PySequence_Fast_GET_SIZE(x) ? held(PySequence_Fast_GET_ITEM(x, k)) : NULL;
            right = part ? take(code, part, found) : 0;
            Py_XDECREF(part);
        }
        return right;
    case WORD:
        if ((right = as_word(x, &found->word[found->count])) != 1)
            return right;
        break;
    case NUMBER:
        if (!PyFloat_CheckExact(x))
            return 0;
        break;
    case DATA:
        if (Py_TYPE(x) != known.ndarray)
            return 0;
        break;
    }
    found->kind[found->count] = kind;
    found->of[found->count++] = held(x);
    return 1;
}

/* The arrays of an element of a list, held: how many, 0 if it is of another form, -1 for an error. */
static Py_ssize_t open_element(Record *self, const int *code, PyObject *element, PyObject **arrays)
{
    Py_ssize_t k, n = 1;
    if (*code == ARRAY)
        arrays[0] = held(element);
    else {
        n = code[1];
        if (!is_sequence(element, *code) || PySequence_Fast_GET_SIZE(element) != n)
            return 0;
        for (k = 0; k < n; k++)
            arrays[k] = held(PySequence_Fast_GET_ITEM(element, k));
    }
    for (k = 0; k < n; k++)
        if (!IS_LAZY(arrays[k])) {
            PyObject *array = operand(&self->target, arrays[k]);
            if (!array) {
                drop(arrays, n);
                return -1;
            }
            Py_SETREF(arrays[k], array);
        }
    return n;
}

/* Append the arrays of all elements of a list, whose owners must be those of the first: 1, 0, or -1. */
static int put_elements(Record *self, Words *w, const Operands *found)
{
    PyObject *arrays[MOST_OPERANDS], *const *owners;
    Py_ssize_t k, j, n;
    int right = 1;
    owners = &PyTuple_GET_ITEM(found->key, PyTuple_GET_SIZE(found->key) - found->parts);
    for (k = 0; right == 1 && k < found->length; k++) {
        if (PySequence_Fast_GET_SIZE(found->list) != found->length)
            return 0;                           /* Python code has changed it meanwhile */
        n = open_element(self, found->element, PySequence_Fast_GET_ITEM(found->list, k), arrays);
        if (n <= 0)
            return (int)n;
        for (j = 0; right == 1 && j < n; j++)
            right = SLOT(arrays[j], known.owner) == owners[j] ? put_token(w, arrays[j]) : 0;
        drop(arrays, n);
    }
    return right;
}

/* Find the entry by the owners of arrays: 1, 0 if there is none, -1 for an error. */
static int find_entry(Record *self, PyObject *const *arrays, Py_ssize_t count, Operands *found)
{
    PyObject *entry, *old_key, *old_entry;
    Py_ssize_t k = 0;
    if (self->last_key && PyTuple_GET_SIZE(self->last_key) == count) {
        while (k < count && SLOT(arrays[k], known.owner) == PyTuple_GET_ITEM(self->last_key, k))
            k++;
        if (k == count) {
            found->key = held(self->last_key);
            found->entry = held(self->last_entry);
            found->number = self->last_number;
            return 1;
        }
    }
    if (!(found->key = PyTuple_New(count)))
        return -1;
    for (k = 0; k < count; k++) {
        PyObject *owner = IS_LAZY(arrays[k]) ? SLOT(arrays[k], known.owner) : NULL;
        if (!owner)
            return 0;                           /* another thread has given the array its value */
        PyTuple_SET_ITEM(found->key, k, held(owner));
    }
    if (!(entry = PyDict_GetItemWithError(self->entries, found->key)))
        return PyErr_Occurred() ? -1 : 0;
    if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 1 + self->results.num_results
        || !PyLong_Check(PyTuple_GET_ITEM(entry, 0))) {
        PyErr_Format(PyExc_ValueError, "an entry is a number and the owners of %zd results",
                     self->results.num_results);
        return -1;
    }
    found->number = PyLong_AsLongLong(PyTuple_GET_ITEM(entry, 0));
    if (found->number == -1 && PyErr_Occurred())
        return -1;
    found->entry = held(entry);
    old_key = self->last_key;
    old_entry = self->last_entry;
    self->last_key = held(found->key);
    self->last_entry = held(entry);
    self->last_number = found->number;
    Py_XDECREF(old_key);                        /* last: it may run code that records, which finds a pair */
    Py_XDECREF(old_entry);
    return 1;
}

/* Put a call of this form into words: 1, 0 if it is of another form, -1 for an error. */
static int read_call(Record *self, PyObject *const *args, Words *w, Operands *found)
{
    PyObject *arrays[MOST_OPERANDS];            /* whose owners find the entry; `found` holds them */
    const int *code = self->code;
    Py_ssize_t k, count = 0, numbers = 0;
    int right = 1;
    for (k = 0; k < self->num_args; k++)
        if ((right = take(&code, args[k], found)) != 1)
            return right;
    if (found->list) {
        PyObject *length = PyLong_FromSsize_t(found->length = PySequence_Fast_GET_SIZE(found->list));
        right = !length ? -1 : found->length ? PySequence_Contains(self->lengths, length) : 0;
        Py_XDECREF(length);
        if (right != 1)
            return right;
        if (found->length < 64)
            self->lengths_met |= (uint64_t)1 << found->length;
    }
    for (k = 0; k < found->count; k++) {
        PyObject *x = found->of[k];
        if (found->kind[k] == DATA || (found->kind[k] == ARRAY && !IS_LAZY(x))) {
            x = found->kind[k] == ARRAY ? operand(&self->target, x)
                                        : only_lazy(PyObject_CallOneArg(self->target.data, x));
            if (!x)
                return -1;
            Py_SETREF(found->of[k], x);
        }
        if (found->kind[k] == DATA || found->kind[k] == ARRAY)
            arrays[count++] = x;
    }
    if (found->list) {
        if (PySequence_Fast_GET_SIZE(found->list) != found->length)
            return 0;                           /* Python code has changed it meanwhile */
        k = open_element(self, found->element, PySequence_Fast_GET_ITEM(found->list, 0), found->first);
        if (k <= 0)
            return (int)k;
        for (found->parts = k, k = 0; k < found->parts; k++)
            arrays[count++] = found->first[k];
    }
    if ((right = find_entry(self, arrays, count, found)) != 1)
        return right;
    right = put_word(w, found->number);
    if (right == 1 && found->list)
        right = put_word(w, found->length);
    for (k = 0; right == 1 && k < found->count; k++)
        if (found->kind[k] == NUMBER) {
            right = put_word(w, 0);             /* its place; a call that is handed on must leave no leaf behind */
            numbers++;
        } else
            right = found->kind[k] == WORD ? put_word(w, found->word[k]) : put_token(w, found->of[k]);
    if (right == 1 && found->list)
        right = put_elements(self, w, found);
    for (k = 0; right == 1 && numbers && k < found->count; k++)
        if (found->kind[k] == NUMBER) {
            PyObject *leaf = only_lazy(PyObject_CallOneArg(self->target.data, found->of[k]));
            right = leaf ? token_of(leaf, &w->words[(found->list ? 2 : 1) + k]) : -1;
            Py_XDECREF(leaf);
        }
    return right;
}

/* The quick way: a call whose arrays all have the owners of the newest call, and tokens. Its words are put together in
   one pass that makes nothing and runs no Python code, so that nothing has to be held. */
typedef struct {
    const int *code;
    PyObject *const *owners;                    /* of the arrays to come */
    int64_t *words;                             /* where they go to */
    PyObject *list;
} Quick;

static inline int quick_array(Quick *at, PyObject *x)
{
    PyObject *token = IS_LAZY(x) && SLOT(x, known.owner) == *at->owners ? SLOT(x, known.token) : NULL;
    at->owners++;
    return token && PyLong_CheckExact(token) && short_int(token, at->words++);
}

/* Each of these returns 0 where a call has to go the long way. */
static int quick_part(Quick *at, PyObject *x)
{
    int kind = *at->code++;
    Py_ssize_t k, n;
    switch (kind) {
    case ARRAY:
        return quick_array(at, x);
    case WORD:
        return PyLong_CheckExact(x) && short_int(x, at->words) && -known.largest <= *at->words
            && *at->words++ <= known.largest;
    case TUPLE: case LIST:
        n = *at->code++;
        if (!is_sequence(x, kind) || PySequence_Fast_GET_SIZE(x) != n)
            return 0;
        for (k = 0; k < n; k++)
            if (!quick_part(at, PySequence_Fast_GET_ITEM(x, k)))
                return 0;
        return 1;
    case ELEMENTS:
        at->list = x;
        kind = *at->code;
        at->code = skip(at->code);
        return is_sequence(x, kind);
    case IS_NONE: return x == Py_None;
    case IS_TRUE: return x == Py_True;
    case IS_FALSE: return x == Py_False;
    }
    return 0;
}

static int quick_elements(Record *self, Quick *at, const int64_t *end)
{
    PyObject *const *owners = at->owners;
    Py_ssize_t k, n = PySequence_Fast_GET_SIZE(at->list);
    Py_ssize_t parts = &PyTuple_GET_ITEM(self->last_key, 0) + PyTuple_GET_SIZE(self->last_key) - owners;
    if (n >= 64 || !(self->lengths_met >> n & 1) || n * parts > end - at->words)
        return 0;
    for (k = 0; k < n; k++) {
        at->code = self->code + self->element;
        at->owners = owners;
        if (!quick_part(at, PySequence_Fast_GET_ITEM(at->list, k)))
            return 0;
    }
    return 1;
}

enum {MOST_WORDS = 2 + 2 * MOST_OPERANDS};      /* of calls that go the quick way */

/* The words of a call that goes the quick way: how many; 0 if it does not. */
static Py_ssize_t quick_words(Record *self, PyObject *const *args, int64_t *words)
{
    Quick at;
    Py_ssize_t k;
    if (self->makes_leaves || !self->last_key)
        return 0;
    at.code = self->code;
    at.owners = &PyTuple_GET_ITEM(self->last_key, 0);
    at.words = words + (self->element ? 2 : 1);
    at.list = NULL;
    for (k = 0; k < self->num_args; k++)
        if (!quick_part(&at, args[k]))
            return 0;
    if (at.list) {
        if (!quick_elements(self, &at, words + MOST_WORDS))
            return 0;
        words[1] = PySequence_Fast_GET_SIZE(at.list);
    }
    words[0] = self->last_number;
    return at.words - words;
}

/* Each of these records a call: 1 with what it makes, or RETRY if it came too late; 0 if it is of another form, -1 for
   an error. */
static int record_long(Record *self, PyObject *const *args, PyObject **made)
{
    Words w;
    Operands found;
    int right;
    found.count = found.parts = 0;
    found.list = found.key = found.entry = NULL;
    begin_words(&w);
    right = read_call(self, args, &w, &found);
    if (right == 1) {
        *made = emit(&self->target, w.words, w.count, &PyTuple_GET_ITEM(found.entry, 1), &self->results);
        right = *made ? 1 : -1;
    }
    end_words(&w);
    end_operands(&found);
    return right;
}

static int try_record(Record *self, PyObject *const *args, Py_ssize_t num_args, PyObject **made)
{
    int64_t words[MOST_WORDS];
    Py_ssize_t count;
    PyObject *entry;
    if (!check_alive(&self->target))
        return -1;
    if (num_args != self->num_args)
        return 0;
    if (!(count = quick_words(self, args, words)))
        return record_long(self, args, made);
    entry = held(self->last_entry);             /* a pass of the garbage collector may record here, too */
    *made = emit(&self->target, words, count, &PyTuple_GET_ITEM(entry, 1), &self->results);
    Py_DECREF(entry);
    return *made ? 1 : -1;
}

/* Record a call, or hand it on: to the function of another form, and at last to Python code. */
static PyObject *record(PyObject *whom, PyObject *const *args, Py_ssize_t num_args)
{
    PyObject *tuple, *made;
    Py_ssize_t k;
    while (Py_TYPE(whom) == &RecordType) {      /* each holds the next one, and our caller the first */
        int right = try_record((Record *)whom, args, num_args, &made);
        if (right < 0)
            return NULL;
        if (right && made != known.retry)
            return made;
        if (right)
            Py_DECREF(made);
        whom = right ? ((Record *)whom)->general : ((Record *)whom)->other;
    }
    if (!(tuple = PyTuple_New(num_args)))
        return NULL;
    for (k = 0; k < num_args; k++)
        PyTuple_SET_ITEM(tuple, k, held(args[k]));
    made = PyObject_CallOneArg(whom, tuple);
    Py_DECREF(tuple);
    return made;
}

static PyObject *record_call(PyObject *me, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) != 1 || (names && PyTuple_GET_SIZE(names)) || !PyTuple_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "record takes a tuple of arguments");
        return NULL;
    }
    return record(me, &PyTuple_GET_ITEM(args[0], 0), PyTuple_GET_SIZE(args[0]));
}

static int put_code(Record *self, int code)
{
    if (self->num_code % 32 == 0) {
        int *larger = PyMem_Realloc(self->code, (self->num_code + 32) * sizeof *larger);
        if (!larger) {
            PyErr_NoMemory();
            return 0;
        }
        self->code = larger;
    }
    self->code[self->num_code++] = code;
    return 1;
}

/* The letter of a form as code; 0 if it is none. */
static int letter_of(PyObject *form)
{
    static const struct {const char *name; int code;} letters[] = {
        {"a", ARRAY}, {"d", DATA}, {"i", WORD}, {"n", NUMBER},
        {"None", IS_NONE}, {"True", IS_TRUE}, {"False", IS_FALSE}};
    size_t k;
    for (k = 0; PyUnicode_Check(form) && k < sizeof letters / sizeof *letters; k++)
        if (!PyUnicode_CompareWithASCIIString(form, letters[k].name))
            return letters[k].code;
    return 0;
}

/* Whether a form is that of a list of one element, an array or a list of arrays. */
static int is_list_of_arrays(PyObject *form)
{
    PyObject *element;
    Py_ssize_t k = 0;
    if (!is_pair(form) || PyTuple_GET_SIZE(PyTuple_GET_ITEM(form, 1)) != 1)
        return 0;
    element = PyTuple_GET_ITEM(PyTuple_GET_ITEM(form, 1), 0);
    if (!is_pair(element))
        return letter_of(element) == ARRAY;
    element = PyTuple_GET_ITEM(element, 1);
    while (k < PyTuple_GET_SIZE(element) && letter_of(PyTuple_GET_ITEM(element, k)) == ARRAY)
        k++;
    return k && k == PyTuple_GET_SIZE(element);
}

/* Forms as code; 0 with an error if they are none, or too many. */
static int put_forms(Record *self, PyObject *forms, Py_ssize_t place)
{
    Py_ssize_t k;
    for (k = 0; k < PyTuple_GET_SIZE(forms); k++) {
        PyObject *form = PyTuple_GET_ITEM(forms, k);
        int letter = letter_of(form);
        if (k == place ? !is_list_of_arrays(form) : !letter && !is_pair(form)) {
            PyErr_Format(PyExc_ValueError, "%R is no form of an argument%s", form, k == place ? ", a list" : "");
            return 0;
        }
        if (k == place) {
            if (!put_code(self, ELEMENTS))
                return 0;
            self->element = (int)self->num_code + 2;    /* behind L or T and the number of parts, which is one */
        }
        if (letter) {
            self->num_operands += letter == ARRAY || letter == DATA || letter == WORD || letter == NUMBER;
            self->makes_leaves |= letter == DATA || letter == NUMBER;
            if (self->num_operands > MOST_OPERANDS) {
                PyErr_Format(PyExc_ValueError, "a call has at most %d operands", MOST_OPERANDS);
                return 0;
            }
            if (!put_code(self, letter))
                return 0;
        } else {
            PyObject *parts = PyTuple_GET_ITEM(form, 1);
            if (!put_code(self, PyTuple_GET_ITEM(form, 0) == (PyObject *)&PyTuple_Type ? TUPLE : LIST)
                || !put_code(self, (int)PyTuple_GET_SIZE(parts)) || !put_forms(self, parts, -1))
                return 0;
        }
    }
    return 1;
}

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *forms, *structure, *calls, *entries, *other, *general, *lengths, *hooks = NULL;
    Py_ssize_t num_results, place, k;
    Record *self;
    if (!may_make(names)
        || !PyArg_ParseTuple(args, "O!OnnOO!OOO|O!", &PyTuple_Type, &forms, &structure, &num_results, &place, &calls,
                             &PyDict_Type, &entries, &other, &general, &lengths, &PyTuple_Type, &hooks))
        return NULL;
    for (k = 0; hooks && k < PyTuple_GET_SIZE(hooks); k++)
        if (!PyDict_Check(PyTuple_GET_ITEM(hooks, k))) {
            PyErr_SetString(PyExc_TypeError, "hooks are dicts");
            return NULL;
        }
    if (num_results < 1 || place < -1 || place >= PyTuple_GET_SIZE(forms)) {
        PyErr_SetString(PyExc_ValueError, "a call has a result, and its list is one of the arguments");
        return NULL;
    }
    if (!(self = (Record *)type->tp_alloc(type, 0)))
        return NULL;
    self->call = record_call;
    self->entries = held(entries);
    self->other = held(other);
    self->general = held(general);
    self->lengths = held(lengths);
    self->hooks = hooks ? held(hooks) : NULL;
    self->num_args = PyTuple_GET_SIZE(forms);
    if (!open_results(&self->results, structure, num_results) || !open_target(&self->target, calls)
        || !put_forms(self, forms, place))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int record_traverse(PyObject *me, visitproc visit, void *arg)
{
    Record *self = (Record *)me;
    VISIT_TARGET(self->target);
    Py_VISIT(self->results.structure);
    Py_VISIT(self->entries);
    Py_VISIT(self->other);
    Py_VISIT(self->general);
    Py_VISIT(self->lengths);
    Py_VISIT(self->hooks);
    Py_VISIT(self->last_key);
    Py_VISIT(self->last_entry);
    return 0;
}

static int record_clear(PyObject *me)
{
    Record *self = (Record *)me;
    CLEAR_TARGET(self->target);
    Py_CLEAR(self->results.structure);
    Py_CLEAR(self->entries);
    Py_CLEAR(self->other);
    Py_CLEAR(self->general);
    Py_CLEAR(self->lengths);
    Py_CLEAR(self->hooks);
    Py_CLEAR(self->last_key);
    Py_CLEAR(self->last_entry);
    PyMem_Free(self->code);
    self->code = NULL;
    return 0;
}

/* ---- Table: the functions that record the calls of vertices ---------------------------------------- */

/* A vertex is a block, or (an object, a part of it). They are known by their addresses: whoever is in the table holds
   them. From outside it is a dict of ids and pairs of ids that only grows; here a call is found without making any. */
typedef struct {
    const void *block, *part;
    PyObject *way;                              /* NULL: a free place */
} Way;

typedef struct {
    PyObject_HEAD
    Way *ways;
    size_t room, count;                         /* room: a power of two, or 0 */
} Table;

/* The place of a vertex: its own, or a free one. At least one is free; NULL if there is no room at all. */
static Way *place_of(const Table *table, const void *block, const void *part)
{
    size_t at = ((uintptr_t)block >> 4) * 31 + ((uintptr_t)part >> 4);
    if (!table->room)
        return NULL;
    for (at ^= at >> 9; ; at++) {
        Way *place = &table->ways[at & (table->room - 1)];
        if (!place->way || (place->block == block && place->part == part))
            return place;
    }
}

/* The function that records a call of a vertex, not held; NULL if there is none. */
static PyObject *way_of(const Table *table, const void *block, const void *part)
{
    const Way *place = place_of(table, block, part);
    return place ? place->way : NULL;
}

/* Make room for one more; 0 with an error if there is none. */
static int grow_table(Table *self)
{
    Table larger = *self;
    size_t k;
    if (2 * self->count < self->room)
        return 1;
    larger.room = self->room ? 2 * self->room : 16;
    if (!(larger.ways = PyMem_Calloc(larger.room, sizeof *larger.ways))) {
        PyErr_NoMemory();
        return 0;
    }
    for (k = 0; k < self->room; k++)
        if (self->ways[k].way)
            *place_of(&larger, self->ways[k].block, self->ways[k].part) = self->ways[k];
    PyMem_Free(self->ways);
    self->ways = larger.ways;
    self->room = larger.room;
    return 1;
}

/* The addresses of a vertex: 0 with an error if a key has none. */
static int addresses_of(PyObject *key, void **block, void **part)
{
    int pair = PyTuple_CheckExact(key) && PyTuple_GET_SIZE(key) == 2;
    *block = PyLong_AsVoidPtr(pair ? PyTuple_GET_ITEM(key, 0) : key);
    *part = PyErr_Occurred() || !pair ? NULL : PyLong_AsVoidPtr(PyTuple_GET_ITEM(key, 1));
    return !PyErr_Occurred();
}

static int table_set(PyObject *me, PyObject *key, PyObject *way)
{
    Table *self = (Table *)me;
    void *block, *part;
    Way *place;
    PyObject *old;
    if (!way)
        PyErr_SetString(PyExc_TypeError, "vertices stay in their table");
    if (!way || !addresses_of(key, &block, &part) || !grow_table(self))
        return -1;
    place = place_of(self, block, part);
    old = place->way;
    self->count += !old;
    place->block = block;
    place->part = part;
    place->way = held(way);
    Py_XDECREF(old);                            /* last: it may run code that looks into the table */
    return 0;
}

static PyObject *table_get(PyObject *me, PyObject *args)
{
    PyObject *key, *otherwise = Py_None, *way;
    void *block, *part;
    if (!PyArg_ParseTuple(args, "O|O", &key, &otherwise) || !addresses_of(key, &block, &part))
        return NULL;
    way = way_of((Table *)me, block, part);
    return held(way ? way : otherwise);
}

static PyObject *table_item(PyObject *me, PyObject *key)
{
    void *block, *part;
    PyObject *way;
    if (!addresses_of(key, &block, &part))
        return NULL;
    if ((way = way_of((Table *)me, block, part)))
        return held(way);
    PyErr_SetObject(PyExc_KeyError, key);
    return NULL;
}

static Py_ssize_t table_length(PyObject *me)
{
    return (Py_ssize_t)((Table *)me)->count;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    return may_make(names) && PyArg_ParseTuple(args, "") ? type->tp_alloc(type, 0) : NULL;
}

static int table_traverse(PyObject *me, visitproc visit, void *arg)
{
    Table *self = (Table *)me;
    size_t k;
    for (k = 0; k < self->room; k++)
        Py_VISIT(self->ways[k].way);
    return 0;
}

static int table_clear(PyObject *me)
{
    Table *self = (Table *)me;
    Way *ways = self->ways;
    size_t k, room = self->room;
    self->ways = NULL;                          /* first: what ends may run code that looks into the table */
    self->room = self->count = 0;
    for (k = 0; k < room; k++)
        Py_XDECREF(ways[k].way);
    PyMem_Free(ways);
    return 0;
}

/* ---- Call: the __call__ of a marked block, or a marked function ----------------------------------- */

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

/* ---- the module ---------------------------------------------------------------------------------- */

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

static PyObject *is_held(PyObject *module, PyObject *made)
{
    PyObject *answer;
    char *at;
    Py_ssize_t k, n;
    (void)module;
    if (!PyList_CheckExact(made)) {
        PyErr_SetString(PyExc_TypeError, "is_held takes the list of tokens");
        return NULL;
    }
    n = PyList_GET_SIZE(made);
    if ((answer = PyByteArray_FromStringAndSize(NULL, n)))
        for (k = 0, at = PyByteArray_AS_STRING(answer); k < n; k++)
            at[k] = Py_REFCNT(PyList_GET_ITEM(made, k)) > 1;
    return answer;
}

static PyObject *common_owner(PyObject *module, PyObject *arrays)
{
    Py_ssize_t k, n = PyList_CheckExact(arrays) || PyTuple_CheckExact(arrays) ? PySequence_Fast_GET_SIZE(arrays) : 0;
    PyObject *owner = NULL;
    (void)module;
    for (k = 0; k < n; k++) {
        PyObject *x = PySequence_Fast_GET_ITEM(arrays, k);
        if (!IS_LAZY(x) || !SLOT(x, known.owner) || (owner && SLOT(x, known.owner) != owner))
            return held(Py_None);
        owner = SLOT(x, known.owner);
    }
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
    lazy->tp_finalize = NULL;                   /* a LazyArray ends in silence: the __del__ of NDArray frees a handle */
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
    {"recycle", recycle, METH_O, "recycle(tokens): the next flushes may take those that only the list holds"},
    {"is_held", is_held, METH_O, "is_held(tokens) -> for each a byte: whether anybody but the list holds it"},
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
