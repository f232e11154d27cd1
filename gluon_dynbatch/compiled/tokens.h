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

/* Keep a token of a list that nobody else holds; None takes its place, so that the length of the list stays. */
static void keep_token(PyObject *made, Py_ssize_t k)
{
    PyObject *token = PyList_GET_ITEM(made, k);
    int64_t value;
    if (k < MOST_SPARE && !spare[k] && PyLong_CheckExact(token) && short_int(token, &value)
        && value == known.first + k) {
        spare[k] = token;
        PyList_SET_ITEM(made, k, held(Py_None));
    }
}

/* Whether anybody but the list holds its tokens; if they are recycled, the others are kept. One walk for both, and the
   next tokens are asked for in time: those of a long flush are in no cache of the processor. */
enum {AHEAD = 16};

static PyObject *is_held(PyObject *module, PyObject *args)
{
    PyObject *made, *answer;
    char *at;
    Py_ssize_t k, n;
    int recycles;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &made, &recycles))
        return NULL;
    if (recycles && !spare && !(spare = PyMem_Calloc(MOST_SPARE, sizeof *spare)))
        return PyErr_NoMemory();
    n = PyList_GET_SIZE(made);
    if ((answer = PyByteArray_FromStringAndSize(NULL, n)))
        for (k = 0, at = PyByteArray_AS_STRING(answer); k < n; k++) {
            if (k + AHEAD < n)
                PREFETCH(PyList_GET_ITEM(made, k + AHEAD));
            at[k] = Py_REFCNT(PyList_GET_ITEM(made, k)) > 1;
            if (recycles && !at[k])
                keep_token(made, k);
        }
    return answer;
}
