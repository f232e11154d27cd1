/* Record: a call of a vertex with arguments of one form. */

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
