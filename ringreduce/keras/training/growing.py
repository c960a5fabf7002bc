"""A training takes back ranks that were lost: what members give them, and how a newcomer begins.

    members    compare, first step   steps ... look: one is ready     ring anew, state   step
    newcomer   compare, trace        ready ... waits                  ring anew, state   step

A newcomer has compared all that ranks compare before training, with what the members have told each
other then (`ringreduce.communicator.journal`), so it differs by nothing but what training has
changed. That goes from the first rank to newcomers alone, and the newcomer compares the digest of
what it has then with the first rank's:

    weights, the optimizer's and other variables of the program     what callbacks know, History
    which epoch, how many steps of it, and counts by which ranks meet

Metrics begin at zero there: all ranks' are added up when an epoch ends. Random numbers are others
than those of the process before.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Grows, Joined
from ringreduce.communicator.arrival import Arrival, arrival_of
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.gate import Gate, only_shrinks
from ringreduce.communicator.integration import newcomers_of
from ringreduce.communicator.journal import Journal, begin_training, journal_of, reopened
from ringreduce.communicator.program import facts_of_program
from ringreduce.effects.notice import EndsInOrder
from ringreduce.keras import private
from ringreduce.keras.callbacks.replicas import shared_state
from ringreduce.keras.callbacks.together import Together
from ringreduce.keras.checks import seeds
from ringreduce.keras.data.division import Feed
from ringreduce.keras.data.fingerprint import count_passes, passes_begun
from ringreduce.keras.elastic.backup import skip
from ringreduce.keras.elastic.fields import Fields
from ringreduce.keras.model.averages import Averages, untrained
from ringreduce.keras.model.metric_trial import found_names, note_found_names
from ringreduce.keras.training.elastic_steps import Elastic
from ringreduce.keras.training.looking import LooksInFit
from ringreduce.keras.training.random_states import random_states, set_random_states
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.differentiable import begin_anew
from ringreduce.tensorflow.variables import path_of, plain_variable, read
from ringreduce.transport.door import JobEndedError
from ringreduce.vocabulary.errors import MismatchError

_log = logging.getLogger(__name__)

_PACK_BYTES = 64 << 20  # of values that travel together


class Parts:
    """The parts of a training that know something which newcomers need."""

    def __init__(
        self,
        model: keras.Model,
        ring: Communicator,
        steps: Elastic,
        looks: LooksInFit,
        together: Together,
        feeds: tuple[Feed, Feed | None],
    ) -> None:
        self.model, self.ring, self.steps, self.looks = model, ring, steps, looks
        self.together, (self.training, self.validation) = together, feeds
        owner = self.training.owner
        # What of the data has changed since training began.
        self.of_data = Fields([] if owner is None else [owner], None)

    def variables(self, further: Mapping[int, Sequence[Any]]) -> list[Any]:
        """All that training changes, with `further` ones of the program; each once, in one order.

        What a traced step reads too, such as a weight of a term of the loss. Without states of
        random generators and of metrics.
        """
        every = [*shared_state(self.model, self.model.weights), *untrained(self.model)]
        every += itertools.chain(*(further[number] for number in sorted(further)))
        every += self.steps.captured
        by_id: dict[int, Any] = {}
        for variable in every:  # A step knows TensorFlow's own, without the names of Keras's.
            by_id.setdefault(id(plain_variable(variable)), variable)
        of_metrics = {id(plain_variable(each)) for each in self.model.metrics_variables}
        return [
            each
            for key, each in by_id.items()
            if key not in of_metrics and not seeds.is_seed_state(each)
        ]


class Members:
    """The side of ranks that train: they let newcomers in, and take them in at looks."""

    def __init__(
        self, parts: Parts, journal: Journal | None, averages: Averages | None = None
    ) -> None:
        # None: it was a newcomer itself, and cannot tell others how the job has begun.
        self._parts, self._journal = parts, journal
        self._gate: Gate | None = None
        self._averages = averages
        self._has_told: str | None = None
        parts.looks.growing = self
        parts.steps.preparing = self._preparing
        parts.steps.bring_in = self._bring_in
        parts.steps.formed = self._stand
        parts.together.calls_at_begin = 0
        self._place = 0, 0, 0

    @property
    def reason(self) -> str:
        """Why no rank can come back, as far as this one knows; the others are to be told."""
        return "" if self._journal is None else self._journal.ends_growing or ""

    def hear(self, reasons: Sequence[str]) -> None:
        """Take what all ranks have told each other when training began."""
        if self._journal is not None and any(reasons):
            self._journal.end_growing(next(filter(None, reasons)))

    def begin(self, averages: Averages, _: Callable[[], Iterator[Any]]) -> None:
        """Training begins: what ranks tell each other from now on newcomers get otherwise."""
        self._averages = averages
        begin_training(self._parts.ring)

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        with reopened(self._parts.ring):
            yield
        if self._journal is not None:
            facts = facts_of_program(self._journal.facts)
            self._gate = Gate(self._parts.ring, self._journal, facts)
            self._stand()

    def _stand(self) -> None:
        if self._gate is not None and self._journal is not None:
            self._gate.stand()
            self._tell(self._journal.ends_growing or "")
        elif self._journal is None:
            self._tell("no rank is left that was there when training began")

    def _tell(self, reason: str) -> None:
        """Tell the launcher whether lost ranks can come back; once."""
        if self._has_told != reason and self._parts.ring.rank == 0:
            self._has_told = reason
            handover.tell(Grows(reason))

    def count(self) -> int:
        """See `Grows` of `looking`, as the others."""
        if self._gate is None:
            return 0
        if self._parts.together.calls_at_begin:
            self._close("callbacks call collectives when an epoch begins")
            return 0
        return len(self._gate.ready())

    def may_grow(self, *, within_epoch: bool) -> bool:
        """Within an epoch only where batches are cheap to read, and some are left."""
        return not within_epoch or (self._parts.training.is_cheap and self._parts.steps.has_left)

    def grow(self, epoch: int, steps: int, count: int) -> None:
        """Take in those that are ready now; a second attempt to form the ring has none."""
        began_s, parts = time.monotonic(), self._parts
        self._place = epoch, steps, count
        rows = () if self._gate is None else self._gate.ready()
        parts.steps.grow(rows)
        if parts.ring.rank == 0:
            stopped_s, (_, made) = time.monotonic() - began_s, parts.steps.ended
            for row in newcomers_of(parts.ring):
                handover.tell(Joined(row.place, row.life, made + 1, stopped_s))

    def _bring_in(self) -> None:
        """Give newcomers, which are in the ring already, all that they need."""
        parts, ring = self._parts, self._parts.ring
        begin_anew(ring)
        if ring.rank:
            return
        assert self._averages is not None
        assert self._journal is not None
        rows = newcomers_of(ring)
        places = [ring.members.index(row.place) for row in rows]
        variables = parts.variables(self._journal.all_variables())
        packed, state = parts.together.told_to_newcomers()
        told = [
            *(self._place, parts.steps.ended, _layout_of(variables), len(packed), state),
            *(self._averages.state, found_names(parts.model), passes_begun(ring)),
            [parts.of_data.packed(warns=False).tobytes(), *random_states()],
        ]
        for place in places:
            ring.send_object(told, place)
        digest = hashlib.blake2b(packed.tobytes(), digest_size=16)
        for place in places:
            ring.send(packed, place)
        for group in _packs(variables):
            data = np.concatenate([_bytes_of(variable) for variable in group])
            for place in places:
                ring.send(data, place)
            digest.update(data.data)  # While newcomers do the same.
        for place in places:
            ring.send_object(digest.digest(), place)

    def _close(self, reason: str) -> None:
        if self._gate is not None:
            self._gate.end(reason)
            self._gate = None
        self._tell(reason)

    def end(self) -> None:
        """Training has ended: no rank can come back any more."""
        self._close("its first training has ended")

    def give_up(self) -> None:
        """This rank does not train any more; newcomers knock at the next first rank's door."""
        if self._gate is not None:
            self._gate.close()


class Newcomer:
    """The side of a process that takes the place of a rank which was lost."""

    def __init__(self, parts: Parts, arrival: Arrival) -> None:
        self._parts, self._arrival = parts, arrival
        self._of_data: list[Any] = []
        parts.steps.preparing = _nothing

    reason = ""

    def hear(self, reasons: Sequence[str]) -> None:
        """What all ranks have told each other when training began."""

    def begin(self, averages: Averages, make_iterator: Callable[[], Iterator[Any]]) -> None:
        """Trace, be taken into the ring, and have the model and its training where others are.

        `make_iterator` makes one like that from which steps read.

        Raises:
            EndsInOrder: the job has ended.
            MismatchError: this program is not the job's, or the state has arrived with errors.
            RendezvousError, PeerError: the job refuses it, or was lost while it came in.
        """
        parts = self._parts
        parts.steps.prepare()
        begin_training(parts.ring)
        if parts.training.source is None:  # Else an iterator takes a seed.
            parts.steps.trace(make_iterator())
        try:
            view = self._arrival.join(facts_of_program(), parts.looks.require_untold)
        except JobEndedError as error:
            _log.warning("%s", error)
            raise EndsInOrder(0) from None
        self._take(averages)
        life = view.life_of(parts.ring.config.rank)
        _, steps = parts.steps.ended
        seeds.draw_anew(seeds.states_of(parts.model), life, steps)

    def _take(self, averages: Averages) -> None:
        parts, ring, model = self._parts, self._parts.ring, self._parts.model
        begin_anew(ring)
        told = ring.recv_object(0)
        place, ended, layout, nbytes, state, of_averages, names, passes, of_data = told
        variables = parts.variables(self._arrival.variables)
        if layout != _layout_of(variables):
            raise MismatchError(
                "has other variables than the job by now, so it cannot take their values",
                **ring.config.who,
                remedy="Make all variables before rr.fit, and the same ones in each process.",
            )
        packed = np.empty(nbytes, np.uint8)
        ring.recv(packed, 0)
        digest = hashlib.blake2b(packed.tobytes(), digest_size=16)
        for group in _packs(variables):
            self._receive(group)
            for variable in group:
                digest.update(_bytes_of(variable).data)
        if ring.recv_object(0) != digest.digest():
            raise MismatchError(
                "has other values than the first rank, though it has just got them: a fault of "
                "memory or of the transport",
                **ring.config.who,
            )
        epoch, steps, count = place
        count_passes(ring, passes)  # Within an epoch those of arrays, which have none.
        note_found_names(model, names)
        averages.join(*of_averages)
        parts.together.join(packed, state, is_within=steps > 0)
        parts.looks.join(count)
        private.set_initial_epoch(model, epoch)
        skip(model, steps, ring)
        if not steps:  # Else of arrays, which are shuffled by numbers of their own.
            self._of_data = of_data
        units, made = ended
        parts.steps.join(units, made, epoch, steps)
        Members(parts, None, averages)

    def take_data(self) -> None:
        """Have data, and what draws their order, where the first rank had them.

        Called after `Feed.pass_by`, which may draw too.
        """
        if self._of_data:
            of_owner, *of_random = self._of_data
            self._parts.of_data.put(np.frombuffer(of_owner, np.uint8))
            set_random_states(*of_random)

    def _receive(self, group: Sequence[Any]) -> None:
        """Give variables the values that come in one pack."""
        values = [np.asarray(read(plain_variable(variable))) for variable in group]
        data = np.empty(sum(value.nbytes for value in values), np.uint8)
        self._parts.ring.recv(data, 0)
        offset = 0
        for variable, value in zip(group, values, strict=True):
            new = np.frombuffer(data, value.dtype, value.size, offset).reshape(value.shape)
            variable.assign(new)
            offset += value.nbytes

    def end(self) -> None:
        """Training has ended."""

    def give_up(self) -> None:
        """This process does not train any more."""


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _layout_of(variables: Sequence[Any]) -> int:
    """A hash of names, shapes and dtypes."""
    return signature_of(*((path_of(v), tuple(v.shape), str(v.dtype)) for v in variables))


def _bytes_of(variable: Any) -> np.ndarray:
    """The value of a variable, flat, as uint8; where it is in memory, so only for a moment."""
    value = np.ascontiguousarray(read(plain_variable(variable)))
    return value.reshape(-1).view(np.uint8)


def _packs(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """The `variables` in groups of about `_PACK_BYTES`, each of at least one."""
    group: list[Any] = []
    nbytes = 0
    for variable in variables:
        group.append(variable)
        nbytes += _bytes_of(variable).nbytes
        if nbytes >= _PACK_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


Growing = Members | Newcomer


@contextmanager
def growing_of(parts: Parts, why_not: str) -> Iterator[Growing | None]:
    """Around a training: this rank's side in it; None: the job only shrinks from here on.

    It can grow in its first training. `why_not`: why newcomers cannot come into this one, equal on
    all ranks; or empty.
    """
    arrival, journal = arrival_of(parts.ring), journal_of(parts.ring)
    growing: Growing | None = None
    if arrival is not None and arrival.is_waiting:
        growing = Newcomer(parts, arrival)
    elif why_not:
        only_shrinks(parts.ring, why_not)
    elif journal is not None and not journal.has_served:
        # Also if this rank's has ended: only all together know that of each other.
        journal.has_served = True
        growing = Members(parts, journal)
    try:
        yield growing
    except BaseException:  # Others may go on, with the next first rank's door.
        if growing is not None:
            growing.give_up()
        raise
    if growing is not None:
        growing.end()
