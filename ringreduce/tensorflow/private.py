"""All private names of TensorFlow that this package uses, checked on import.

A version that nobody has tried may lack some: one line says so, and what needs them fails by name.
This file replaces nothing in TensorFlow. It adds a rule to AutoGraph's, and changes only a function
that it is given.
"""

import hashlib
import importlib
import itertools
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from ringreduce.vocabulary.errors import ConfigError

_log = logging.getLogger(__name__)


def _missing(name: str) -> ConfigError:
    text = f"TensorFlow {tf.__version__} has no {name}, which ringreduce needs for this"
    return ConfigError(text, remedy="Install TensorFlow 2.18 to 2.22.")


class Absent:
    """Stands for a private name that there is none of: whoever uses it gets the error."""

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error

    __call__ = __contains__ = __getitem__ = __iter__ = _refuse

    def __getattr__(self, _: str) -> Any:
        raise self._error


def named(module: str, name: str, missing: Callable[[str], ConfigError] = _missing) -> Any:
    """The object with that private name; or `Absent` with the error of `missing`, after a line."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        error = missing(f"{module}.{name}")
        what = str(error).partition(", which")[0]
        _log.warning("%s: what needs it fails, and all else works", what)
        return Absent(error)


_FUNCTIONS = "tensorflow.python.eager.polymorphic_function"
_ConcreteFunction = named(f"{_FUNCTIONS}.concrete_function", "ConcreteFunction")
# TensorFlow calls these with each function that it has traced.
called_with_traced = named(f"{_FUNCTIONS}.transform", "CONCRETE_FUNCTION_CALLBACKS")

_CONTROL_FLOW = "tensorflow.python.ops.control_flow_v2_func_graphs"
# Graphs of functions, branches and loops; `outer_graph` is the graph around one.
FuncGraph = named("tensorflow.python.framework.func_graph", "FuncGraph")
ControlFlowFuncGraph = named(_CONTROL_FLOW, "ControlFlowFuncGraph")
CondBranchFuncGraph = named(_CONTROL_FLOW, "CondBranchFuncGraph")
WhileBodyFuncGraph = named(_CONTROL_FLOW, "WhileBodyFuncGraph")
WhileCondFuncGraph = named(_CONTROL_FLOW, "WhileCondFuncGraph")
_LoopGradient = named("tensorflow.python.ops.while_v2", "_WhileBodyGradFuncGraph")

# The class that `tf.Variable` makes, outside of strategies and functions.
Variable = named("tensorflow.python.ops.resource_variable_ops", "ResourceVariable")

# What an `element_spec` has for None; public in later versions.
NoneTensorSpec = named("tensorflow.python.framework.none_tensor", "NoneTensorSpec")

# A dataset of which only a handle is known.
_VariantDataset = named("tensorflow.python.data.ops.dataset_ops", "_VariantDataset")

_graph_stack = named("tensorflow.python.framework.ops", "_default_graph_stack")

# Operations traced within such a context count as compiled by XLA.
XLAControlFlowContext = named("tensorflow.python.ops.control_flow_ops", "XLAControlFlowContext")
is_compiled_by_xla = named("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext")
is_op_of_xla = named("tensorflow.python.ops.control_flow_util", "IsInXLAContext")
# Adds the op XlaCallModule, a module of StableHLO, to the graph that is being traced.
call_module = named("tensorflow.compiler.tf2xla.python.xla", "call_module")
# Adds an op by its name, including ops registered at run time.
apply_op = named("tensorflow.python.framework.op_def_library", "apply_op")

# Whether the program has asked for `tf.config.experimental.enable_op_determinism`, which has some
# operations fail.
is_deterministic = named("tensorflow.python.framework.config", "is_op_determinism_enabled")
_ops = named("tensorflow.python.framework.op_def_registry", "get")
_context = named("tensorflow.python.eager.context", "context")

_VERSION = tuple(map(int, tf.__version__.split(".")[:2]))
# Whether what XLA compiles begins to draw with the same random numbers in every process.
XLA_DRAWS_ALIKE = _VERSION < (2, 22)

# Functions that TensorFlow calls, in a thread, with each op that was computed or made there: kind,
# inputs, attributes and outputs; and, by name, `op_name` and `graph` of one that was made.
_CALLBACKS = "tensorflow.python.framework.op_callbacks"
add_op_callback = named(_CALLBACKS, "add_op_callback")
remove_op_callback = named(_CALLBACKS, "remove_op_callback")


def kind_of(op: bytes | str) -> str:
    """The kind of an op, such as AddV2, or the name of a function, as such a function is told."""
    return op.decode() if isinstance(op, bytes) else op


_autograph = named("tensorflow.python.autograph.core", "config")

_graph = FuncGraph("ringreduce")
_captures = getattr(_graph, "function_captures", None)
for _owner, _owners, _names in (
    (_graph, "FuncGraph", ("_add_control_dependencies", "outer_graph", "function_captures")),
    (_graph, "FuncGraph", ("_watched_variables", "_functions", "seed")),
    (_graph_stack, "_default_graph_stack", ("stack",)),
    (_ConcreteFunction, "ConcreteFunction", ("_call_flat", "graph")),
    (_autograph, "config of AutoGraph", ("CONVERSION_RULES", "DoNotConvert")),
    (_captures, "FunctionCaptures", ("by_val_internal", "pop", "add_or_replace")),
):
    for _name in _names:
        if not isinstance(_owner, Absent) and not hasattr(_owner, _name):
            raise _missing(f"{_owners}.{_name}")

# It must leave our functions in a user's `tf.function` as they are: it cannot read all of Python,
# and has users report what it cannot to the TensorFlow team.
_autograph.CONVERSION_RULES += (_autograph.DoNotConvert("ringreduce"),)


def graphs_being_traced() -> list[Any]:
    """The graph that is being traced and those around it, functions and parts of them; or none."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    graphs = []
    while isinstance(graph, FuncGraph):
        graphs.append(graph)
        graph = graph.outer_graph
    return graphs


def call_through(function: Any, around: Callable[[partial[Any]], Any]) -> None:
    """From now on `around` makes the calls of `function`, this one that was traced and no other."""
    owner = weakref.ref(function)
    call = _ConcreteFunction._call_flat
    function._call_flat = lambda *args, **options: around(partial(call, owner(), *args, **options))


def traced_for(function: Any, *arguments: Any) -> Callable[..., Any]:
    """The `tf.function` as traced for such arguments, which a call does not look at again.

    That takes TensorFlow a quarter of a millisecond if one is an iterator.
    """
    concrete = function.get_concrete_function(*arguments)

    def call(*arguments: Any) -> Any:
        flat = tf.nest.flatten(arguments, expand_composites=True)
        tensors = [part for part in flat if part is not None]
        return concrete._call_flat(tensors, concrete.captured_inputs)

    return call


def function_around(graph: Any) -> Any:
    """The graph of the function that `graph` belongs to, which may be a branch or loop in it."""
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def graphs_in(graph: Any) -> list[Any]:
    """The graphs of the functions, branches and loops that are called in `graph`."""
    inner = (getattr(function, "graph", None) for function in graph._functions.values())
    return [each for each in inner if isinstance(each, FuncGraph)]


def attributes_of(kind: str) -> set[str]:
    """The names of the attributes of ops of a type; none of a type that is not known."""
    definition = _ops(kind)
    return {attribute.name for attribute in definition.attr} if definition is not None else set()


def eager_seeds() -> str | None:
    """What changes when an op that runs eagerly draws a seed of its own; None: without a seed."""
    numbers = getattr(_context(), "_rng", None)
    if numbers is None:
        return None
    return hashlib.sha256(repr(numbers.getstate()).encode()).hexdigest()


def orders_its_ops(graph: Any) -> bool:
    """Whether TensorFlow orders the graph's stateful ops: not in backward passes that it makes."""
    return bool(graph._add_control_dependencies)


def is_for_shapes(graph: Any) -> bool:
    """Whether Keras traces `graph` only to find out shapes, and will never run it."""
    graph = function_around(graph)
    name = str(getattr(graph, "name", ""))
    is_scratch = isinstance(graph, FuncGraph) and name.startswith("scratch_graph")
    return is_scratch and not orders_its_ops(graph)


def capture_once(graph: Any, resource: Any) -> Any:
    """The tensor for the eager tensor `resource` in `graph`: the same one at each call."""
    # A loop's gradient that `graph` is traced for could not capture it later by itself.
    for around in _graph_stack.stack:
        if isinstance(around, _LoopGradient):
            _capture_in_loop(around, resource)
    if isinstance(graph, _LoopGradient):
        return _capture_in_loop(graph, resource)
    return graph.capture(resource)


def _capture_in_loop(graph: Any, resource: Any) -> Any:
    captures = graph.function_captures
    if id(resource) not in captures.by_val_internal:
        # A loop's gradient can capture only through the graph around it.
        outer = graph.outer_graph
        loops = isinstance(outer, _LoopGradient)
        outside = _capture_in_loop(outer, resource) if loops else outer.capture(resource)
        inside = graph.capture(outside)
        # A function called there that captures the resource itself must get the same tensor.
        captures.pop(id(outside), False)
        captures.add_or_replace(id(resource), outside, inside, is_by_ref=False)
    return captures.by_val_internal[id(resource)]


def ops_in(dataset: Any) -> dict[str, bool] | None:
    """List the parts of a tf.data.Dataset: classes of it and its inputs, ops of its functions.

    Whether an op takes random numbers from TensorFlow's generator, by each name. None if it cannot
    tell.
    """
    if isinstance(dataset, _VariantDataset):
        return None
    try:
        inputs = dataset._inputs()
        functions = [wrapped.function for wrapped in dataset._functions()]
    except (AttributeError, NotImplementedError):
        return None
    ops = {type(dataset).__name__: False}
    for function in functions:
        graph = function.graph.as_graph_def()
        inner = (node for nested in graph.library.function for node in nested.node_def)
        for node in itertools.chain(graph.node, inner):
            ops[node.op] = "seed2" in node.attr
    for inner_ops in map(ops_in, inputs):
        if inner_ops is None:
            return None
        ops |= inner_ops
    return ops


def state_of_eager_seeds() -> Any:
    """The state of the generator that gives eager random ops their seeds."""
    generator = getattr(_context(), "_rng", None)  # None before the first op.
    return None if generator is None else generator.getstate()


def restore_eager_seeds(state: Any, *, have_drawn: bool) -> None:
    """Give eager random ops the seeds again that come after `state`.

    `have_drawn`: whether some ran since, of which the next with the same seed would go on with
    their numbers. What makes it begin anew makes TensorFlow prepare each traced function again.
    """
    if state is not None:
        _context()._rng.setstate(state)
    if have_drawn:
        _context().clear_kernel_cache()
