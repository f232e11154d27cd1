/* What all parts know: the classes and names that the module was given, and who listens on this thread. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

enum {INTERFACE = 7};                           /* the same number as in fastpath.py */

static struct {
    PyTypeObject *lazy, *ndarray, *integer;
    PyObject *retry;
    Py_ssize_t owner, token;                    /* where a LazyArray keeps them */
    long long first, largest;
    PyObject *append, *vertices, *forward_hooks, *forward_pre_hooks, *too_late, *call;  /* names */
} known;

#ifdef _MSC_VER
#define OF_THIS_THREAD __declspec(thread)
#define PREFETCH(address) ((void)(address))
#else
#define OF_THIS_THREAD __thread
#define PREFETCH(address) __builtin_prefetch(address)
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
