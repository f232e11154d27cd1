"""The functions of fastpath.py without a recorder: calls whose owners are names, and a vertex that computes nothing."""

import contextlib
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import gluon, mx
from gluon_dynbatch import fastpath
from gluon_dynbatch.fastpath import FIRST, RETRY, form_of, make_append, make_operators, make_recorder, structure_of

NDArray = mx.nd.NDArray
VARIANTS = ("compiled", "generated")
needs_compiled = pytest.mark.skipif(fastpath.compiled is None, reason="gluon_dynbatch/_fastpath.c was not compiled")
NO_ARRAY = LazyArray()
NO_ARRAY.owner = None


@contextlib.contextmanager
def recorded_by(variant):
    """Calls are recorded by the C extension, or by generated Python code."""
    if variant == "compiled" and fastpath.compiled is None:
        pytest.skip("gluon_dynbatch/_fastpath.c was not compiled: there was no C compiler at installation")
    makers = (fastpath.make_append, fastpath.make_recorder)
    with pytest.MonkeyPatch.context() as patch:
        if variant == "generated":
            patch.setattr(fastpath, "compiled", None)
            patch.setattr(sys.modules["gluon_dynbatch.vertex"], "compiled", None)
        for make in makers:
            make.cache_clear()
        yield variant
    for make in makers:
        make.cache_clear()


class Owner:
    def __init__(self, name):
        self.name = name


class Calls:
    """As much of gluon_dynbatch.calls.Calls as the functions use."""

    def __init__(self):
        self.log, self.made, self.leaf_of, self.leaves = bytearray(), [], {}, []
        self.owners, self.watchers, self.late, self.asked = {}, [], False, []

    def owner(self, name):
        if name not in self.owners:
            self.owners[name] = Owner(name)
        return self.owners[name]

    def outside(self, array):
        if not isinstance(array, NDArray):
            return NO_ARRAY
        if id(array) not in self.leaf_of:
            self.leaf_of[id(array)] = self._leaf(array, f"array {array.shape}")
        return self.leaf_of[id(array)]

    def data(self, value):
        return self._leaf(value, f"data {np.shape(value)}")

    def _leaf(self, value, name):
        self.leaves.append(value)
        leaf = LazyArray()
        leaf.owner, leaf.token = self.owner(name), -len(self.leaves)
        return leaf

    def too_late(self, token):
        self.asked.append(token - FIRST)        # not the token, which must be nobody's but its array's
        return self.late

    def forget(self):
        for part in (self.log, self.made, self.leaf_of, self.leaves, self.asked):
            part.clear()


class Vertex:
    """What recorder.py does for one vertex: a function for every form that came, the newest first."""

    lengths = {1, 2, 3, 7, 60}      # of a list; others go the general way

    def __init__(self, structure=0, num_outputs=1):
        self.calls, self.structure = Calls(), structure
        self.owners = tuple(self.calls.owner(f"out {k}") for k in range(num_outputs))
        self.numbers, self.entries, self.general_calls = {}, {}, 0
        self.short = self.general

    def __call__(self, *args):
        return self.short(args)

    def general(self, args):
        self.general_calls += 1
        place = self._place(args)
        fixed = args if place < 0 else (*args[:place], *args[place + 1:])
        forms = form_of(args if place < 0 else (*args[:place], args[place][:1], *args[place + 1:]))
        if forms is None:
            return "no form"
        kinds = list(leaves_of(fixed))
        elements = [list(leaves_of([part])) for part in args[place]] if place >= 0 else []
        operands = [self._operand(x) for x in kinds] + [self._operand(x) for part in elements for x in part]
        slots = len(elements[0]) if elements else 0
        keyed = [x for x, kind in zip(operands, kinds) if isinstance(kind, (NDArray, np.ndarray))]
        owners = tuple(x.owner for x in keyed + operands[len(kinds):len(kinds) + slots])
        number = self.numbers.setdefault((forms, place, owners), len(self.numbers))
        if (forms, place) not in self.entries:
            entries = self.entries[forms, place] = {}
            self.short = fastpath.make_recorder(forms, self.structure, len(self.owners), place)(
                self.calls, entries, self.short, self.general, self.lengths)
        self.entries[forms, place][owners] = (number, *self.owners)
        append = fastpath.make_append(len(kinds), self.structure, len(self.owners), slots)
        return append(self.calls, number, self.owners)(operands)

    def _place(self, args):
        """The first argument that is a list of arrays, or of equal lists of them, all of one look."""
        for place, arg in enumerate(args):
            if type(arg) in (list, tuple) and arg:
                forms = {form_of((part,)) for part in arg}
                looks = {tuple(self._look(x) for x in leaves_of([part])) for part in arg}
                (form,) = forms.pop() or ("?",)
                inside = ("a",) if form == "a" else () if isinstance(form, str) else form[1]
                if not forms and len(looks) == 1 and len(arg) in self.lengths and set(inside) == {"a"}:
                    return place
        return -1

    def _look(self, x):
        return x.owner.name if type(x) is LazyArray else np.shape(x)

    def _operand(self, x):
        if type(x) is LazyArray:
            return x
        return self.calls.outside(x) if isinstance(x, NDArray) else self.calls.data(x)

    def state(self):
        """All that recording has left."""
        calls = self.calls
        return (bytes(calls.log), list(calls.made), list(map(id, calls.leaves)), list(calls.leaf_of), calls.asked,
                self.general_calls, sorted(self.numbers.values()))


def leaves_of(nested):
    """What may be an operand, in order."""
    for x in nested:
        if isinstance(x, (list, tuple)):
            yield from leaves_of(x)
        elif x is not None and not isinstance(x, bool):
            yield x


def described(result):
    """A result with names and numbers in the place of LazyArrays."""
    if isinstance(result, (list, tuple)):
        return type(result)(map(described, result))
    return (result.owner.name, result.token - FIRST) if type(result) is LazyArray else result


def fails(*_):
    raise ZeroDivisionError


class Harness:
    """A function of each kind, with everything that it holds."""

    FORMS = ("i", "a", (list, ("a", "n")), "d", "None")

    def __init__(self):
        self.calls = calls = Calls()
        self.own, self.out = calls.owner("own"), calls.owner("out")
        self.array, self.data, self.word, self.number = mx.nd.ones((1,)), np.ones(3), 100_000, 2.5
        self.a, self.b = (make_append(0, 0, 1)(calls, 0, (self.own,))([]) for _ in range(2))
        outside, data = calls.outside(self.array).owner, calls.data(self.data).owner
        self.entry, self.entries = (1, self.out, self.own), {}
        self.entries[self.own, self.own, data] = self.entries[outside, self.own, data] = self.entry
        self.pairs, self.list_entries = [(self.a, self.b), (self.b, self.a)], {(self.own, self.own): self.entry}
        self.handed_on, self.lengths = [], {1, 2, 3, 60}
        structure = structure_of([0, (1, None)])
        self.record = make_recorder(self.FORMS, structure, 2)(
            calls, self.entries, self.handed_on.append, self.handed_on.append, ())
        self.record_list = make_recorder(("n", (list, ((tuple, ("a", "a")),))), structure, 2, 1)(
            calls, self.list_entries, self.handed_on.append, self.handed_on.append, self.lengths)
        self.append = make_append(2, structure, 2)(calls, 2, (self.out, self.own))
        self.values, self.operators = [2, (3, 4)], {}
        for first in (self.own, outside):
            self.operators["FC", ("units", 2), ("shape", (3, 4)), first, self.own] = SimpleNamespace(append=self.append)
        self.append_list = make_append(0, 0, 1, 1)(calls, 3, (self.out,))
        self.operators["add_n", self.own, None] = SimpleNamespace(append=self.append_list)
        self.operator = make_operators(calls, self.operators)

    def args(self, **others):
        names = {"word": self.word, "array": self.a, "pair": [self.b, self.number], "data": self.data, "none": None}
        return tuple({**names, **others}.values())

    def call_operator(self, name="FC", arrays=None, values=None):
        """Anything that is handed on is noted."""
        made = self.operator(name, [self.a, self.b] if arrays is None else arrays, ["units", "shape"],
                             self.values if values is None else values)
        if made is NotImplemented:
            self.handed_on.append((name,))
        return made

    def call_list_operator(self, *arrays):
        """As its function was called: nobody has looked at the arguments."""
        made = self.operator("add_n", arrays, [], [])
        if made is NotImplemented:
            self.handed_on.append(arrays)
        return made

    def tracked(self):
        return [self.operators, self.append, self.append_list, self.values, self.values[1], NotImplemented,
                self.own, self.out, self.array, self.data, self.word, self.number, self.a, self.b, self.entry,
                self.entries, self.list_entries, self.pairs, self.pairs[0], self.calls, self.calls.log, self.calls.made,
                self.handed_on, self.lengths, None, True, RETRY, LazyArray, NO_ARRAY, *self.calls.owners.values()]


class Plain(gluon.HybridBlock):
    def hybrid_forward(self, F, x, y):
        return F.tanh(x) + y


def make_cell():
    """A block of a marked class of its own, of the variant that records now."""
    return gdb.vertex(type("Cell", (Plain,), {}))()


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
