"""cavs_core: a static vertex function, graphs of any shape, and an engine that runs them batched.

The names behind the comment in `__all__` are for those who build another face on the engine, as `gluon_dynbatch` does.
"""

from .array_memory import address_of_data, array_at, view_of_data
from .backends.choose import BACKENDS, have_run, make_run, note_seconds, runs_in_the_end, runs_natively
from .backends.mxnet_ops import MXNetBackend
from .backends.native_cpu.prepare import are_ready, kernel_sources
from .backends.native_cpu.row_sums import add_equal_rows
from .backends.targets import WRITTEN, Target
from .code_reads import CodeReads
from .compiling import cache_folder, compiled
from .errors import (
    ArityError,
    CycleError,
    DanglingEdgeError,
    DynBatchError,
    GraphError,
    KindError,
    ProgramError,
    RunError,
    TraceError,
    UnsupportedOpError,
)
from .executor import Run
from .face import RunOutput, RunStats, run
from .gradients import as_arrays_like, is_sparse, target_of, write_gradient
from .graph import InputGraph
from .hooks import CodeHook, Hooks, to_super_hook
from .layout import (
    ClassLayout,
    Layout,
    Place,
    Read,
    RowIndex,
    Segments,
    answer_reads,
    frames_of,
    offsets_of,
)
from .lazy import LazyArray, Listener, become_array, let_change, listening, tell, thread_state
from .leaf_copy import copy_arrays
from .ops import Builder, lookup, mxnet_function, supports
from .paths import flows_of, touches_of
from .plan import ClassPlan, VertexProgram, own_outputs, plan_class, respecified
from .program import CHILD, ROW, SHARED, Arg, Const, Gather, GatherAll, Leaf, Param, Program, Shared, Spec
from .ragged import one_row_program
from .roll import agrees, roll
from .subset import Begun, begins_everywhere, stretches, subset_of
from .tape import UNTOUCHED, TapeBridge, wrap_backward
from .tape_graph import is_computed
from .tape_state import need_gradient, needs_gradient, off_tape, on_tape
from .trace import flatten, inactive, map_nested, sequence_like, trace
from .vertex import VertexFunction

__all__ = [
    "ArityError", "CycleError", "DanglingEdgeError", "DynBatchError", "GraphError", "InputGraph", "KindError",
    "Program", "ProgramError", "RunError", "RunOutput", "RunStats", "Spec", "TraceError", "UnsupportedOpError",
    "VertexFunction", "run", "trace",
    # for other faces
    "Arg", "BACKENDS", "Begun", "Builder", "CHILD", "ClassLayout", "ClassPlan", "CodeHook", "CodeReads", "Const",
    "Gather", "GatherAll", "Hooks", "Layout", "LazyArray", "Leaf", "Listener", "MXNetBackend", "Param", "Place",
    "ROW", "Read", "RowIndex", "Run", "SHARED", "Segments", "Shared", "TapeBridge", "Target", "UNTOUCHED",
    "VertexProgram", "WRITTEN", "add_equal_rows", "address_of_data", "agrees", "answer_reads", "are_ready",
    "array_at", "as_arrays_like", "become_array", "begins_everywhere", "cache_folder", "compiled", "copy_arrays",
    "flatten", "flows_of", "frames_of", "have_run", "inactive", "is_computed", "is_sparse", "kernel_sources",
    "let_change", "listening", "lookup", "make_run", "map_nested", "mxnet_function", "need_gradient",
    "needs_gradient", "note_seconds", "off_tape", "offsets_of", "on_tape", "one_row_program", "own_outputs",
    "plan_class", "respecified", "roll", "runs_in_the_end", "runs_natively", "sequence_like", "stretches",
    "subset_of", "supports", "target_of", "tell", "thread_state", "to_super_hook", "touches_of", "view_of_data",
    "wrap_backward", "write_gradient",
]
__version__ = "0.1.0"
