"""Loops of one's own that go back to their last commit when a rank is lost, and go on.

    rank 0   commit 4   step   step -- fails -- ring anew, commit 4 -- step   step   commit 5
    rank 1   commit 4   step   dies

Ranks that have committed differently all get the newest commit that one of them has.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.gate import only_shrinks
from ringreduce.communicator.integration import membership_of
from ringreduce.communicator.process import default_communicator
from ringreduce.communicator.reforming import EndedError
from ringreduce.keras.checks.elastic_refusals import facts_of, refuse
from ringreduce.keras.checks.seeds import states_of_tensorflow
from ringreduce.keras.elastic.leaving import Looks, heard
from ringreduce.keras.elastic.recovery import REPEATS_MAX, ending_together, go_on
from ringreduce.keras.optimizer.first_step import broadcast_variables
from ringreduce.keras.repeating import Repeating, is_repeating
from ringreduce.keras.wrapper import Wrapper
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.variables import value_of
from ringreduce.vocabulary.config import elastic_minimum
from ringreduce.vocabulary.errors import ConfigError, PeerError, RingReduceError

_log = logging.getLogger(__name__)

_SAVED = "The program has the state of the newest commit, to save it."
_SAVE = "The state is that of the newest commit: save it where this error is caught."


class _Parted(BaseException):
    """Ranks leave after a commit, and what each was told by; the others go on from there."""

    def __init__(self, going: Mapping[int, str]) -> None:
        super().__init__("ranks leave")
        self.going = going


class State:
    """A loop's state, by which it goes on: `variables`, and `attributes` such as ``state.epoch``.

    These are numbers, text, bytes, lists and dicts. Other attributes that are set on it are neither
    committed nor shared.
    """

    def __init__(self, variables: Sequence[Any] = (), **attributes: Any) -> None:
        self._variables = self._shared = list(variables)
        self._names = list(attributes)
        vars(self).update(attributes)
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0
        self._looks: Looks | None = None  # within `run`
        self.save()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have each of `callbacks` called on all ranks after a loss, before the state is shared.

        A further loss may call them again: ``lr.assign(0.1 * rr.size())``, not ``lr.assign(lr/2)``.
        """
        self._reset_callbacks += callbacks

    def commit(self) -> None:
        """Copy what is now, to go back to; all ranks at the same points.

        It needs no other rank; but within `run` in an elastic job ranks look here, about once a
        second, which of them were told to go, as by SIGTERM. Those leave, and the others call the
        loop again from here; or all stop here, if too few would be left.

        Raises:
            SystemExit: this rank leaves, with the exit code ``RINGREDUCE_LEAVE_CODE`` (0).
            Stopped: all stop.
        """
        self.save()
        self._commits += 1
        looks = self._looks
        if looks is None or not looks.is_due(self._commits):
            return
        if going := looks.look(self._commits):
            looks.act(going, self._where())

    def save(self) -> None:
        """Copy variables and attributes for `restore`; for other ranks that is no commit."""
        values = [np.array(value_of(variable)) for variable in self._variables]
        self._saved = values, copy.deepcopy(self._attributes())

    def restore(self) -> None:
        """Go back to what was saved last, on this rank."""
        values, attributes = self._saved
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)
        vars(self).update(copy.deepcopy(attributes))

    def sync(self) -> None:
        """Give all ranks what one that has committed most often has, and commit. Collective."""
        ring = default_communicator()
        commits = ring.all_gather_object(self._commits)
        newest = commits.index(max(commits))
        vars(self).update(ring.broadcast_object(self._attributes(), newest))
        broadcast_variables(self._shared, newest, ring)
        self._commits = max(commits)
        self.save()
        self._commits += 1

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _where(self) -> str:
        numbers = [f"{n}={v}" for n, v in self._attributes().items() if isinstance(v, int)]
        return f"at {', '.join(numbers)}" if numbers else "in a loop"


class KerasState(State):
    """`State` of a built model and an optimizer, by default its own.

    With states of random generators, which stay each rank's own. Raises ConfigError if the model is
    not built, or the job is elastic and steps of these cannot be made again.
    """

    def __init__(self, model: Any, optimizer: Any = None, **attributes: Any) -> None:
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if not model.built:
            text = f"got a model ({model.name}) without weights as the state of a loop"
            raise ConfigError(text, remedy="Build it first, with model.build() or a keras.Input.")
        weights = list(model.weights)
        variables = [*model.variables, *states_of_tensorflow(model)]
        if (optimizer := self.optimizer) is not None:
            if elastic_minimum() is not None:
                ring = getattr(optimizer, "communicator", None) or default_communicator()
                options = optimizer.options if isinstance(optimizer, Wrapper) else {}
                refuse(ring, facts_of(model), options)
            if not optimizer.built:
                getattr(optimizer, "build_inner", optimizer.build)(model.trainable_variables)
            weights, variables = [[*optimizer.variables, *own] for own in (weights, variables)]
        super().__init__(variables, **attributes)
        self._shared = getattr(optimizer, "shared", list)(weights)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function(state, ...)``, a training loop, to go on when ranks are lost.

    It is called after ``state.sync()``. When a rank is lost in an elastic job (``ringreduce run
    --elastic``), those that are left form the ring anew, go back to the newest commit and call it
    again. So it must take ranks, shares of data and where to begin from ``rr.size()`` and the state
    when it begins. All ranks make the same calls in it, and what it returns is returned. A rank
    that is told to go leaves at a commit: see `State.commit`.

    Raises:
        Stopped: ranks were told to go, and too few would be left: a SystemExit, on all ranks, which
            have the newest commit then.
        RendezvousError: fewer ranks are left than training may go on with. All of them have the
            newest commit then, to save it.
        Exception: what it raises for another reason.
    """

    @functools.wraps(function)
    def running(state: State, *arguments: Any, **options: Any) -> Any:
        ring, minimum = default_communicator(), elastic_minimum()
        call = functools.partial(function, state, *arguments, **options)
        if minimum is None or is_repeating(ring):
            state.sync()
            return call()
        refuse(ring, facts_of(None, state._variables))
        only_shrinks(ring, "it trains by a loop of its own (rr.elastic.run)")
        kept(ring, Repeating).by = lambda meeting: meeting()
        with heard(ring, is_elastic=True) as notice:
            try:
                state._looks = Looks(ring, notice, lambda: _SAVED, minimum, _part)
                return _repeated(call, state, ring, minimum)
            finally:
                state._looks, kept(ring, Repeating).by = None, None

    return running


def _part(going: Mapping[int, str]) -> None:
    raise _Parted(going)


def _repeated(call: Callable[[], Any], state: State, ring: Communicator, minimum: int) -> Any:
    """Return the result of `call`, once it has returned on all ranks."""
    result, has_ended = None, False

    def at_end() -> bool:
        return has_ended

    def go_back() -> None:
        nonlocal has_ended
        progress = ring.all_gather_object([number, has_ended])
        if max(progress)[0] > number:  # One that has ended was met in the next loop.
            raise EndedError("is told that the loop has ended", **ring.config.who)
        # Where all ranks have ended nothing is to be made again.
        if not all(ended for _, ended in progress):
            has_ended = False
            state.restore()
            for callback in state._reset_callbacks:
                callback()
            if ring.size < minimum:
                state.sync()

    state.save()
    commits, repeats_left = state._commits, REPEATS_MAX
    with ending_together(ring) as number:
        while True:
            try:
                if not has_ended:
                    state.sync()
                    if membership_of(ring).epoch and ring.rank == 0:
                        who = ring.config.rank, ring.config.size
                        _log.warning("[%d/%d] goes on from the commit %s", *who, state._where())
                    if state._commits > commits + 1:
                        repeats_left = REPEATS_MAX
                    commits = state._commits
                    result, has_ended = call(), True
                ring.barrier()  # Without a rank that has ended the others could not go back.
                assert state._looks is not None
                if going := state._looks.look(state._commits, is_last=True):
                    state._looks.act(going, state._where())
                break
            except (_Parted, RingReduceError) as error:
                broken = error if isinstance(error, RingReduceError) else None
                if broken and not (isinstance(ring.failure, PeerError) and repeats_left):
                    raise
                repeats_left -= broken is not None
                how: Any = {"at_end": at_end, "leaving": getattr(error, "going", {})}
                go_on(ring, broken, minimum, state._where(), go_back, lambda: _SAVE, **how)
                if state._looks is not None:
                    state._looks.begin_anew()
    return result
