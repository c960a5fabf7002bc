"""Reads variables of model and optimizer, gives all ranks the values of one, compares them."""

import hashlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.outermost import outermost
from ringreduce.communicator.process import default_communicator
from ringreduce.pure.buckets import ALIGNMENT, GradientSpec, first_difference
from ringreduce.pure.payload import aligned, bounds_of, checked_root, cut
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow import private
from ringreduce.tensorflow.agreement import Difference, agree, refuse
from ringreduce.vocabulary.words import named


@outermost
def broadcast_variables(
    variables: Sequence[Any], ring: Communicator, root: int = 0, *, state: Sequence[Any] = ()
) -> list[Any]:
    """Give all ranks `root`'s values of `variables`, and of an optimizer's `state`.

    Returns those that differed on this rank. A variable, `tf.Variable` or `keras.Variable`, is
    assigned only where its value differs. Raises as `require_alike`. Collective: two exchanges; a
    newcomer that has not begun to train gets the first rank's values of now.
    """
    checked_root(root, ring.size, ring.config.who)
    if ring.size == 1:
        return []
    every = [*variables, *state]
    values = [value_of(variable) for variable in every]
    layout = [
        (path_of(v), value.shape, value.dtype.name) for v, value in zip(every, values, strict=True)
    ]
    require_alike(layout[: len(variables)], ring, layout[len(variables) :])
    received = broadcast_packed(values, ring, root)
    differed = []
    for variable, before, after in zip(every, values, received, strict=True):
        if before.tobytes() != after.tobytes():
            differed.append(variable)
            variable.assign(after)
    return differed


def broadcast_values(
    paths: Sequence[str], ring: Communicator, root: int, values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The `values` that `root` passed, on all ranks; new arrays. Raises as `require_alike`."""
    named = zip(paths, values, strict=True)
    require_alike([(path, value.shape, value.dtype.name) for path, value in named], ring)
    return broadcast_packed(values, ring, root)


# Name, shape and dtype of variables.
_Layout = Sequence[tuple[str, tuple[int, ...], str]]


def require_alike(layout: _Layout, ring: Communicator, state: _Layout = ()) -> None:
    """MismatchError, on all ranks, if variables differ in number or name, shape or dtype: `layout`.

    Or those of an optimizer's `state`, or the versions of TensorFlow or Keras. Collective: one
    exchange, of a hash, if they do not.
    """
    versions = {"TensorFlow": tf.__version__}
    if "keras" in sys.modules:
        versions["Keras"] = sys.modules["keras"].__version__
    layouts = [list(layout), list(state)]
    description = {"versions": versions, "variables": layouts}
    what, signature = "broadcast of the initial weights", signature_of("variables")
    essences = [[spec.essence for spec in _specs(one)] for one in layouts]
    digest = signature_of(sorted(versions.items()), essences)
    if len(set(ring.all_gather_object(digest, signature=signature))) == 1:
        return
    agree(ring, description, lambda *pair: _difference(description, *pair[2:]), what, signature)


def broadcast_packed(
    values: Sequence[np.ndarray], ring: Communicator, root: int = 0
) -> list[np.ndarray]:
    """The `values` of `root`, on all ranks, which have as many of the same shapes and dtypes.

    In one broadcast; new arrays, which share memory. As bytes, so that every dtype travels,
    booleans and 8-bit floats included.
    """
    arrays = list(map(np.asarray, values))  # TensorFlow's ops get scalars, not arrays.
    bounds = bounds_of([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays])
    packed = aligned(bounds[-1])
    received = [
        part[: array.nbytes].view(array.dtype).reshape(array.shape)
        for part, array in zip(cut(packed, bounds), arrays, strict=True)
    ]
    if ring.rank == root:
        for place, array in zip(received, arrays, strict=True):
            place[...] = array
    if packed.size:
        ring.broadcast(packed, root)
    return received


def _difference(ours: Any, peer: int, theirs: Any) -> Difference | None:
    """Where the libraries or variables of rank `peer` differ from this rank's."""
    # Ranks that never import Keras have no version of it.
    for library in ours["versions"].keys() & theirs["versions"].keys():
        here, there = ours["versions"][library], theirs["versions"][library]
        if here != there:
            text = f"runs {library} {here}, rank {peer} runs {library} {there}"
            remedy = "Install the same versions on every rank: results would differ silently."
            return Difference(peer, text, remedy)
    for here, there in zip(ours["variables"], theirs["variables"], strict=True):
        if difference := first_difference(_specs(here), _specs(there), "variables"):
            return Difference(
                peer,
                f"has another model than rank {peer}: here {difference[0]}; there {difference[1]}",
                "Build the same model and optimizer on every rank, in the same order and under the "
                "same names; only the numbers of automatic names may differ.",
            )
    return None


def _specs(layout: _Layout) -> list[GradientSpec]:
    return [GradientSpec(path, tuple(shape), dtype) for path, shape, dtype in layout]


def plain_variable(variable: Any) -> Any:
    """The `tf.Variable` in a Keras variable; others are returned as they are."""
    return getattr(variable, "_value", variable)


def is_initialized(variable: Any) -> bool:
    """Whether a variable has a value: one made while a function is traced gets it after that."""
    plain = variable if isinstance(variable, tf.Variable) else variable.value
    return bool(tf.raw_ops.VarIsInitializedOp(resource=plain.handle))


def lasting(value: Any) -> Any:
    """A variable that outlives the function being traced; `value` is from outside of that."""
    # A function whose first trace has made a `tf.Variable`, be it here, is traced again.
    with tf.init_scope():
        return private.Variable(value, trainable=False)


def value_of(variable: Any) -> np.ndarray:
    """The value of a variable as an array; do not write to it."""
    return np.asarray(variable.numpy())


def read(variable: Any) -> Any:
    """The tensor of a `tf.Variable`; by the operation alone, since this is done in each step."""
    if isinstance(variable, private.Variable):
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return variable.value()


def copy_of(variable: Any) -> np.ndarray:
    """A copy of the value of a variable: a third of what `numpy` takes, of few elements."""
    return np.array(read(plain_variable(variable)))


def put_value(variable: Any, value: np.ndarray) -> None:
    """Assign a value of the variable's shape and dtype: a fifth of what `assign` takes."""
    tf.raw_ops.AssignVariableOp(resource=plain_variable(variable).handle, value=value)


def path_of(variable: Any) -> str:
    """The name of a variable in messages."""
    return str(getattr(variable, "path", variable.name))


@outermost
def verify_replicas(variables: Sequence[Any], communicator: Communicator | None = None) -> None:
    """Return if every rank holds the same values of `variables`, to the last bit.

    Ranks that apply the same means to the same weights stay bit-identical. If they do not,
    something has changed one rank alone: a callback that assigns on one rank, a layer whose updates
    are random, faulty memory. Collective: all ranks must call it at the same point of the program,
    with `keras.Variable` or `tf.Variable` in the same order. Leave out what may differ: states of
    random generators, moving averages of normalization layers, which follow each rank's own data,
    and pieces of tables and layers. Hashes every variable (about 1 GB/s), and sends 9 bytes
    for each.

    Raises:
        MismatchError: they differ; on all ranks. The text names the first variable that differs,
            and the ranks that differ from the majority, or from rank 0 where there is none.
    """
    ring = communicator or default_communicator()
    if ring.size == 1:
        return
    gathered = ring.all_gather_object(list(map(_hash_of, variables)))
    if any(hashes != gathered[0] for hashes in gathered):
        refuse(ring, _who_differs(variables, gathered, ring.members), "verify_replicas")


def digest_of(variables: Sequence[Any]) -> int:
    """A hash of the values of `variables`, 64 bits."""
    return signature_of(*map(_hash_of, variables))


def differing(variables: Sequence[Any], ring: Communicator) -> list[Any]:
    """Find `variables` that differ between ranks; none where numbers of them do. Collective."""
    gathered = ring.all_gather_object(list(map(_hash_of, variables)))
    is_alike = len(set(map(len, gathered))) == 1
    return [variables[number] for number in _unequal(gathered)] if is_alike else []


def _who_differs(
    variables: Sequence[Any], gathered: list[list[int]], members: Sequence[int]
) -> Difference:
    counts = list(map(len, gathered))
    if len(set(counts)) > 1:
        differing = _minority(counts)
        names = [members[place] for place in differing]
        return Difference(
            names[0],
            f"found {counts[differing[0]]} variables on {named('rank', names)} and "
            f"{statistics.mode(counts)} on the others",
            "Build the same model and optimizer on every rank.",
        )
    bad = _unequal(gathered)
    differing = [members[place] for place in _minority([hashes[bad[0]] for hashes in gathered])]
    variable = variables[bad[0]]
    value = value_of(variable)
    whose = "has its own value" if len(differing) == 1 else "have values of their own"
    return Difference(
        differing[0],
        f"found that {named('rank', differing)} {whose} of {path_of(variable)} "
        f"({value.dtype.name} of shape {value.shape} here), and that {len(bad)} of "
        f"{len(variables)} variables differ",
        "Look for code that changes weights on some ranks only: a callback that assigns, a "
        "train_step that updates weights itself and not by model.optimizer, a layer that draws "
        "random numbers for its updates, a checkpoint loaded after the first step; or an "
        "optimizer with a communicator of its own, which is to be passed here too. "
        "Start again from a checkpoint, or call broadcast_variables.",
    )


def _hash_of(variable: Any) -> int:
    value = np.ascontiguousarray(value_of(variable))
    # As bytes, since dtypes such as bfloat16 offer no buffer.
    digest = hashlib.blake2b(value.reshape(-1).view(np.uint8).data, digest_size=8).digest()
    return signature_of(value.dtype.name, tuple(variable.shape), digest)


def _unequal(gathered: Sequence[Sequence[int]]) -> list[int]:
    """The places at which not all of these, which have one length, have the same number."""
    columns = enumerate(zip(*gathered, strict=True))
    return [place for place, column in columns if len(set(column)) > 1]


def _minority(values: Sequence[int]) -> list[int]:
    """The ranks whose value differs from that of most ranks; of equally common ones, the first."""
    usual = statistics.mode(values)
    return [rank for rank, value in enumerate(values) if value != usual]
