/* A stretch of the log. */

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
