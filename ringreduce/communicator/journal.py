"""The results of an elastic job's collective calls before training, for a rank that comes back.

Only in a job whose launcher has a door for such ranks (``RINGREDUCE_DOOR``).

A rank that comes back runs the program from its first line, alone. Until it begins to train, its
calls give what those of the others gave at the same place (`Replay`), which these have kept for it
(`Journal`): in order, the outermost ones in the thread that called `init`.

    rank 0      all_gather_object    on_rank_zero    evaluate    fit ... step 7, 8, 9
                    |  kept              |  kept         |  kept
    newcomer    all_gather_object    on_rank_zero    evaluate    fit: joins at step 10

A communicator with a journal has methods of its own in place of those of its class, which are
removed with the last call before training: neither jobs that are not elastic nor steps ask.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.kept_calls import OF_A_RING, RULES, Arguments
from ringreduce.communicator.refusals import again
from ringreduce.pure.decoding import UNREADABLE
from ringreduce.vocabulary.errors import ArrayError, ConfigError, MismatchError, ProtocolError

_log = logging.getLogger(__name__)

LIMIT_BYTES = 64 << 20  # of all that a journal keeps
_CALL_BYTES = 64  # of each call, besides what it has given
_PARAMETERS = {name: inspect.signature(getattr(Communicator, name)) for name in OF_A_RING}

_Result = TypeVar("_Result")
# Gives a newcomer's variables, of the broadcast with that number among all calls, the first rank's
# values of now; returns those that it has changed.
GivesVariables = Callable[[int, Sequence[Any]], list[Any]]


class BeforeTraining(Protocol):
    """What an elastic job's communicator passes its calls to before training."""

    replays: bool  # whether calls get results without the other ranks

    def call(self, kind: str, arguments: Arguments, run: Callable[[], _Result]) -> _Result:
        """The result of a call, which `run` makes."""

    def note_other(self, what: str) -> None:
        """Note that a collective is made, or will be, of which no result can be kept."""

    def end(self) -> None:
        """Training begins."""


class KeptCall(msgspec.Struct, frozen=True, array_like=True):
    """A call, and what it has given, as `ringreduce.communicator.kept_calls` has it."""

    kind: str
    said: str
    kept: bytes

    def __str__(self) -> str:
        return f"{self.kind} of {self.said}" if self.said else self.kind


class Journal:
    """What the calls of `ring` before training have given, up to `limit_bytes`.

    The thread that makes it is the one whose calls have an order. A call of another thread ends
    growing, unless it is made while that thread is in a call, as the threads of an evaluation do.

    Attributes:
        ends_growing: why no rank can come back, in words; None while one can.
        facts: of the program, as they were when the job began.
        has_served: whether a training has begun that newcomers may come into, or may not.
    """

    replays = False

    def __init__(self, ring: Communicator, limit_bytes: int = LIMIT_BYTES) -> None:
        self.ends_growing: str | None = None
        self.facts: dict[str, str] = {}
        self.has_served = False
        self._ring, self._bytes_left, self._limit_bytes = ring, limit_bytes, limit_bytes
        self._thread, self._is_in_call = threading.get_ident(), False
        self._lock = threading.Lock()  # for moments; not held in a call
        self._calls: list[KeptCall] = []
        self._variables: dict[int, list[Any]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether training has begun, so that it has all that a newcomer needs."""
        return self.ends_growing is None and self._ring._before_training is not self

    def encoded(self) -> bytes:
        """All calls, for `Replay.of`. ConfigError, with the reason, if no rank can come back."""
        with self._lock:
            if self.ends_growing is not None:
                raise ConfigError(f"no rank can come back: {self.ends_growing}")
            if not self.is_whole:
                raise ConfigError("no rank can come back before training has begun")
            return msgspec.msgpack.encode(self._calls)

    def all_variables(self) -> dict[int, list[Any]]:
        """The variables, and optimizers' states, that were broadcast, by the number of the call.

        They are the program's own.
        """
        return dict(self._variables)

    def call(self, kind: str, arguments: Arguments, run: Callable[[], _Result]) -> _Result:
        if self._thread != threading.get_ident():
            self.note_other(f"{kind} was called in another thread than init()")
            return run()
        if self._is_in_call or self.ends_growing is not None:
            return run()
        rule, is_async = RULES.get(kind), bool(arguments.get("async_op"))
        if rule is None or is_async:
            self.note_other(f"{kind} was called{' with async_op' if is_async else ''}")
            return run()
        said = rule.said(self._ring, arguments)
        if not rule.is_kept(arguments):
            self.note_other(f"{kind} was called with another root than rank 0")
            return run()
        self._is_in_call = True
        try:
            result = run()
        except BaseException as error:
            self.end_growing(f"{kind} failed with {type(error).__name__}")
            raise
        finally:
            self._is_in_call = False
        try:
            self._keep(KeptCall(kind, said, rule.keep(arguments, result)), arguments)
        except ArrayError as error:
            self.end_growing(f"{kind} has given what cannot be kept: {error.message}")
        return result

    def _keep(self, call: KeptCall, arguments: Arguments) -> None:
        with self._lock:
            if self.ends_growing is not None:
                return
            self._bytes_left -= _CALL_BYTES + len(call.said) + len(call.kept)
            if call.kind == "broadcast_variables":
                every = [*arguments["variables"], *arguments["state"]]
                self._variables[len(self._calls)] = every
            self._calls.append(call)
        if self._bytes_left < 0:
            limit = f"{self._limit_bytes / 2**20:g} MiB"
            self.end_growing(f"its calls before training have given more than {limit} together")

    def note_other(self, what: str) -> None:
        if not self._is_in_call:  # Else it is a part of that.
            self.end_growing(f"{what} before training, and what that gives cannot be kept")

    def end_growing(self, reason: str) -> None:
        """From now on no rank can come back, because of `reason`; frees what was kept."""
        with self._lock:
            if self.ends_growing is not None:
                return
            self.ends_growing = reason
            self._calls, self._variables = [], {}
        _detach(self._ring, self)
        who = self._ring.config.rank, self._ring.config.size
        _log.info("[%d/%d] the job only shrinks from here on: %s", *who, reason)

    def end(self) -> None:
        """Keep no further call."""
        _detach(self._ring, self)


class Replay:
    """The calls that a newcomer makes before training, with what they give; no network.

    `gives_variables` gives values to variables that the program broadcasts. After the first
    MismatchError each later call raises it again.
    """

    replays = True

    def __init__(self, calls: Sequence[KeptCall], gives_variables: GivesVariables) -> None:
        self._calls, self._gives_variables = calls, gives_variables
        self._made = 0
        self._ring: Communicator | None = None
        self._thread = 0
        self._error: MismatchError | None = None

    @classmethod
    def of(cls, encoded: bytes, gives_variables: GivesVariables) -> Replay:
        """The replay of a journal that `Journal.encoded`; ProtocolError for other bytes."""
        try:
            calls = msgspec.msgpack.decode(encoded, type=list[KeptCall])
        except UNREADABLE as error:
            text = f"received {len(encoded)} bytes that are no journal of ringreduce: {error}"
            raise ProtocolError(text, remedy="All ranks must run the same ringreduce.") from error
        return cls(calls, gives_variables)

    def begin(self, ring: Communicator) -> None:
        """Answer the calls of `ring`, in this thread alone, from now on until training."""
        self._ring, self._thread = ring, threading.get_ident()
        _attach(ring, self)

    def call(self, kind: str, arguments: Arguments, run: Callable[[], _Result]) -> _Result:
        """What the job's call at this place has given; `run` is not called.

        Raises:
            MismatchError: the job has made another call there, or none.
            ArrayError: as the call itself, which refuses its arguments.
        """
        assert self._ring is not None
        if self._error is not None:
            raise again(self._error)
        rule = RULES.get(kind)
        if arguments.get("async_op"):
            raise self._differs(KeptCall(f"{kind} with async_op", "", b""))
        if rule is None:
            raise self._differs(KeptCall(kind, "", b""))
        ours = KeptCall(kind, rule.said(self._ring, arguments), b"")
        if threading.get_ident() != self._thread:
            raise self._differs(ours, " in another thread than init()")
        theirs = self._next
        if theirs is None or (ours.kind, ours.said) != (theirs.kind, theirs.said):
            raise self._differs(ours)
        number, self._made = self._made, self._made + 1
        if kind == "broadcast_variables":
            every = [*arguments["variables"], *arguments["state"]]
            return self._gives_variables(number, every)  # type: ignore[return-value]
        given: _Result = rule.give(self._ring, arguments, theirs.kept)
        return given

    def note_other(self, what: str) -> None:
        raise self._differs(KeptCall(what, "", b""))

    def end(self) -> None:
        """Raise MismatchError if the job has made more calls before training."""
        assert self._ring is not None
        if self._error is not None:
            raise again(self._error)
        if self._next is not None:
            raise self._fail(f"began to train after {self._made} calls, where the job ")
        _detach(self._ring, self)
        self._calls = ()

    @property
    def _next(self) -> KeptCall | None:
        return self._calls[self._made] if self._made < len(self._calls) else None

    def _differs(self, ours: KeptCall, where: str = "") -> MismatchError:
        called = f"called {ours}{where} as its call {self._made + 1} before training"
        return self._fail(f"{called}, where the job ")

    def _fail(self, text: str) -> MismatchError:
        assert self._ring is not None
        theirs = "began to train" if self._next is None else f"called {self._next}"
        why = "this program is another one, or does other things by time, files or random numbers"
        self._error = MismatchError(f"{text}{theirs}: {why}", **self._ring.config.who)
        return self._error


def keep_calls(ring: Communicator, limit_bytes: int = LIMIT_BYTES) -> Journal:
    """Keep what the calls of `ring` give in this thread, until `begin_training`; see `journal_of`.

    A ring alone, and that of a child process of a rank, are not to be kept.
    """
    ring._journal = journal = Journal(ring, limit_bytes)
    _attach(ring, journal)
    return journal


def journal_of(ring: Communicator) -> Journal | None:
    """The journal of a ring, also once training has begun; None if it keeps none."""
    return ring._journal


def begin_training(ring: Communicator) -> None:
    """End what comes before training. MismatchError at a newcomer that has not made all calls."""
    if ring._before_training is not None:
        ring._before_training.end()


@contextlib.contextmanager
def reopened(ring: Communicator) -> Iterator[None]:
    """Within the block what the calls of `ring` give is kept as before training, if it is at all.

    For what a newcomer does before it joins: the preparations of a first step.
    """
    journal = ring._journal
    if journal is None or journal.ends_growing is not None:
        yield
        return
    _attach(ring, journal)
    try:
        yield
    finally:
        _detach(ring, journal)


def compared(ring: Communicator, value: Any) -> Any:
    """The `value`, of plain types, that all ranks of the job have found equal to theirs.

    At a newcomer it is the job's, and may be another one.
    """
    return passed(ring, "comparison", {}, lambda: value)


def passed(
    ring: Communicator, kind: str, arguments: Arguments, run: Callable[[], _Result]
) -> _Result:
    """The result of a call of one of `RULES` that is made of others."""
    if ring._before_training is None:
        return run()
    return ring._before_training.call(kind, arguments, run)


def _attach(ring: Communicator, before: BeforeTraining) -> None:
    ring._before_training = before
    for name in OF_A_RING:
        vars(ring)[name] = functools.partial(_call, ring, before, name)


def _detach(ring: Communicator, before: BeforeTraining) -> None:
    if ring._before_training is before:
        ring._before_training = None
        for name in OF_A_RING:
            vars(ring).pop(name, None)


def _call(ring: Communicator, before: BeforeTraining, name: str, *args: Any, **kwargs: Any) -> Any:
    # As the class has it now: a profiler may have put another one there.
    run = functools.partial(getattr(type(ring), name), ring, *args, **kwargs)
    if ring._before_training is not before:  # The program has kept the method until training.
        return run()
    bound = _PARAMETERS[name].bind(ring, *args, **kwargs)
    bound.apply_defaults()
    return before.call(name, bound.arguments, run)
