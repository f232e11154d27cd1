/* Tokens. */

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
