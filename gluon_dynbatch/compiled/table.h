/* Table: the functions that record the calls of vertices. */

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
