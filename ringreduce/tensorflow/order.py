"""The order of the collectives in a graph: that of the program, on every rank.

TensorFlow runs stateful ops in program order, but not all of them: one that touches variables, such
as a condition, a loop or another function with a reduction in it, waits for those that touch the
same ones and for no others. XLA runs whatever does not depend on each other in any order at all. So
each collective comes after the token of the one before it: an int32 scalar that is there when that
has been done.

A token cannot be seen from another function's graph, nor from outside of a loop. So there is a
variable for each communicator, the turn: the first collective of a graph reads it, and each writes
its token to it. Whatever has collectives in it then touches that variable: TensorFlow orders those,
and XLA, for which a variable is a value that goes in and comes out, sees what depends on what.

Backward passes are TensorFlow's to make, in graphs of their own, and in those that it makes for a
tape outside of the function it orders nothing; `_order_backward_passes` does.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import gen_resource_variable_ops as resources
from tensorflow.python.ops import gradients_util, while_v2

from ringreduce.communicator.communicator import Communicator

__all__ = ["done", "follow", "in_turn", "token"]

# Handles. What they stand for, 4 bytes, lives as long as the process: any graph may refer to it.
_turns: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
# Of each graph, as an attribute of it: its places in the orders of communicators. A dictionary by
# graph would keep them all alive, since tokens refer to theirs.
_PLACES = "_ringreduce_places"


@dataclass
class _Place:
    """How far a graph has come in the order of a communicator.

    Attributes:
        handle: the turn, as it is seen from this graph.
        token: of the latest collective; None before the first.
        written: the op that wrote it to the turn, in a list.
        seen: names of the ops that used the turn until then.
    """

    handle: Any
    token: Any = None
    written: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def others(self) -> list[Any]:
        """Functions, loops and conditions with collectives in them, since the latest token."""
        return [op for op in self.handle.consumers() if op.name not in self.seen]


def token(communicator: Communicator) -> Any:
    """The token of the collective that was traced last, for the next one to come after it."""
    if tf.executing_eagerly():
        return tf.constant(0, tf.int32)
    place = _place(tf_ops.get_default_graph(), communicator)
    others = place.others()
    if place.token is None or others:
        with tf.control_dependencies([*place.written, *others]), tf.device("CPU:0"):
            place.token = resources.read_variable_op(place.handle, tf.int32)
        place.token.set_shape(())
        place.seen.update(op.name for op in (*others, place.token.op))
    return place.token


def follow(communicator: Communicator, latest: Any) -> None:
    """Have the next collective come after what the token `latest` stands for."""
    if tf.executing_eagerly():
        return
    place = _place(tf_ops.get_default_graph(), communicator)
    with tf.control_dependencies(place.written), tf.device("CPU:0"):
        written = resources.assign_variable_op(place.handle, latest)
    place.token, place.written = latest, [written]
    place.seen.add(written.name)


@contextmanager
def in_turn(communicator: Communicator) -> Iterator[None]:
    """Ops that are added within come after the last collective. For graphs that TensorFlow runs."""
    with tf.control_dependencies([token(communicator)]):
        yield


def done(communicator: Communicator, results: Sequence[Any]) -> None:
    """Have the next collective come after the one that gave `results`: tensors, or ops."""
    with tf.control_dependencies(results):
        follow(communicator, tf.identity(tf.constant(0, tf.int32)))


def _place(graph: Any, communicator: Communicator) -> _Place:
    if not hasattr(graph, _PLACES):
        setattr(graph, _PLACES, weakref.WeakKeyDictionary())
    places = getattr(graph, _PLACES)
    if communicator not in places:
        places[communicator] = _Place(_seen_from(graph, _turn(communicator)))
    found: _Place = places[communicator]
    return found


def _turn(communicator: Communicator) -> Any:
    if communicator not in _turns:
        _order_backward_passes()
        # By ops, and not as a `tf.Variable`: a function may make one of those only when it is
        # traced for the first time, and TensorFlow would ask for its gradient.
        with tf.init_scope(), tf.device("CPU:0"):
            name = f"turn of ringreduce {next(_numbers)}"
            turn = resources.var_handle_op(dtype=tf.int32, shape=(), shared_name=name)
            resources.assign_variable_op(turn, tf.constant(0))
            _turns.setdefault(communicator, turn)
    return _turns[communicator]


def _seen_from(graph: Any, turn: Any) -> Any:
    """The tensor that is the turn in `graph`: one and the same for all that is in there."""
    if not isinstance(graph, while_v2._WhileBodyGradFuncGraph):
        return graph.capture(turn)
    captures = graph.function_captures
    if id(turn) not in captures.by_val_internal:
        # A loop's backward pass takes nothing from outside but through the graph around it. What
        # is called in there and asks for the turn itself is to get the same.
        around = _seen_from(graph.outer_graph, turn)
        inside = graph.capture(around)
        captures.pop(id(around), False)
        captures.add_or_replace(id(turn), around, inside, is_by_ref=False)
    return captures.by_val_internal[id(turn)]


@functools.cache
def _order_backward_passes() -> None:
    """Have the collectives in backward passes in order: once, in this process.

    This wraps the function of TensorFlow's that adds the backward pass of one graph to another. It
    is not polite, but no public place gives access to those graphs.
    """
    make = gradients_util._GradientsHelper

    @functools.wraps(make)
    def ordered(*args: Any, src_graph: Any = None, **options: Any) -> Any:
        graph = tf_ops.get_default_graph()
        if src_graph is None or src_graph is graph:
            return make(*args, src_graph=src_graph, **options)
        if isinstance(graph, while_v2._WhileBodyGradFuncGraph):
            for seen, turn in _turns_in(src_graph):
                graph._indirect_captures[tf_ops.tensor_id(seen)] = _seen_from(graph, turn)
        gradients = make(*args, src_graph=src_graph, **options)
        users = {op for seen, _ in _turns_in(graph) for op in seen.consumers()}
        # As TensorFlow added them, which follows from the program: alike on every rank.
        in_order = [op for op in graph.get_operations() if op in users] if users else []
        for first, second in itertools.pairwise(in_order):
            second._add_control_input(first)
        if in_order and not graph._add_control_dependencies:
            # Nor would what comes after this backward pass wait for its end.
            graph.control_outputs.append(in_order[-1])
        return gradients

    gradients_util._GradientsHelper = ordered


def _turns_in(graph: Any) -> Iterator[tuple[Any, Any]]:
    """What stands for a turn in `graph`, and that turn; TensorFlow may bring one in twice."""

    @functools.cache
    def outside_of(inner: Any) -> dict[int, Any]:
        return {id(seen): origin for origin, seen in getattr(inner, "captures", ())}

    turns = {id(turn) for turn in _turns.values()}
    for origin, seen in graph.captures if isinstance(graph, FuncGraph) else ():
        if seen.dtype != tf.resource:
            continue
        while origin is not None and id(origin) not in turns:
            eager = isinstance(origin, tf_ops.EagerTensor)
            origin = None if eager else outside_of(origin.graph).get(id(origin))
        if origin is not None:
            yield seen, origin
