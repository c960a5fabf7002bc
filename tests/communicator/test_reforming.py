"""A ring that is formed anew, in the same processes, once some of its ranks are lost."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.commands.launch.standings import Standings
from ringreduce.communicator import formation
from ringreduce.communicator.opened_sockets import bind_of
from ringreduce.communicator.reforming import (
    EndedError,
    Survivors,
    answer_others,
    form_chosen,
    leave,
    reform,
)
from ringreduce.communicator.session import Lasting
from ringreduce.effects.events import Events
from ringreduce.pure.views import Row, Verb, View, outside, propose
from ringreduce.testing import ring_of_threads
from ringreduce.transport.interfaces import own_networks
from ringreduce.transport.routes import Routes
from ringreduce.transport.security import Security
from ringreduce.transport.standby import Standby
from ringreduce.transport.visits import Visits
from ringreduce.vocabulary.config import TIMES
from tests import hosts
from tests.processes import wait_until
from tests.rings import Ring, assert_lost, on_each_rank
from tests.scope import in_full

SURVIVING = """
from ringreduce.communicator.reforming import reform

ring = join()
registered = ring.empty(1009, np.float64)


def check():
    members = ring._session.membership.members
    assert members[ring.rank] == RANK and ring.size == len(members)
    for count in (1, 1009, 300_007):
        array = np.arange(count) + 1.0 * RANK
        assert (ring.all_reduce(array) == np.arange(count) * ring.size + sum(members)).all()
    registered[:] = RANK
    assert (ring.all_reduce(registered) == sum(members)).all()
    assert ring.all_gather(np.array([RANK])).tolist() == list(members)
    sending = ring.send(np.array([RANK]), (ring.rank + 1) % ring.size, async_op=True)
    before = (ring.rank - 1) % ring.size
    assert ring.recv(np.zeros(1, int), before) == members[before]
    sending.wait()
    assert ring.all_to_all(np.full((ring.size, 5003), RANK))[:, 0].tolist() == list(members)
    group = ring.split(ring.rank // 2)
    place = ring.rank // 2 * 2
    assert group.all_gather_object(RANK) == list(members[place : place + 2])


def reduce_for_ever():
    large = np.ones(1_000_000, np.float32)
    ring.all_reduce(large)
    say("reducing", victims=VICTIMS)
    while True:
        ring.all_reduce(large)


check()
for victim in VICTIMS:
    attempt("failed", reduce_for_ever)
    failed = time.monotonic()
    reform(ring, [victim])
    check()
    say("anew", rank=ring.rank, transport=ring.transport, at=time.monotonic())
ring.close()
"""
# Ranks that are killed, and how the ranks reach each other.
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "two levels, two ranks": ([1, 0], {"transport": "auto", "hosts": ["a", "b", "a", "b"]}),
    "shared memory": ([2], {"transport": "shm"}),
    "shared memory, rank 0": ([0, 3], {"transport": "shm"}),
    "sockets": ([3], {}),
    "sockets, rank 0": ([0, 1], {}),
    "sealed": ([2, 0], {"secret": "s" * 64, "encryption": "on"}),
}
# From the kill on, in seconds: twice what is promised, since other tests run at the same time.
ANEW_S = 4.0


@pytest.mark.parametrize("name", ["two levels, two ranks", *map(in_full, list(CASES)[1:])])
def test_ranks_that_are_left_go_on_in_a_ring_of_their_own(tmp_path, name):
    victims, ways = CASES[name]
    with Ring(tmp_path, 4, f"VICTIMS = {victims}\n" + SURVIVING, **ways) as ring:
        left = list(range(4))
        for number, victim in enumerate(victims, 1):
            ring.wait("reducing", left, number)
            killed = time.monotonic()
            ring.kill(victim)
            left.remove(victim)
            assert_lost(ring.wait("failed", left, number), victim, since_s=killed)
            anew = ring.wait("anew", left, number)
            assert [each["rank"] for each in anew] == list(range(len(left)))
            assert max(each["at"] for each in anew) - killed < ANEW_S
        ring.assert_ended(*left)


# Each of the first ranks dies once it has sent the first such message, the next one when it has
# told the others where it listens.
FATAL = """
from ringreduce.communicator import reforming
from ringreduce.pure.views import Verb
from ringreduce.transport.visits import Visits

LAST = {0: Verb.PREPARE, 1: Verb.ACCEPT, 2: Verb.CHOSEN}
exchange, send = reforming.Survivors.exchange, Visits.send


def fatal_exchange(survivors, value):
    if RANK == 3 and survivors._values:
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(survivors, value)


def fatal_send(visits, message):
    send(visits, message)
    if message.kind is LAST.get(RANK):
        os.kill(os.getpid(), signal.SIGKILL)


reforming.Survivors.exchange, Visits.send = fatal_exchange, fatal_send
ring = join()
reforming.reform(ring)
say("anew", members=ring._session.membership.members, sum=ring.all_reduce(np.ones(1))[0])
ring.close()
"""


def test_ranks_that_die_while_they_agree_are_left_out(tmp_path):
    with Ring(tmp_path, 6, FATAL, transport="auto") as ring:
        for fact in ring.wait("anew", [4, 5]):
            assert (fact["members"], fact["sum"]) == ([4, 5], 2.0)
        for rank in range(4):
            assert ring.workers[rank].wait(10) == -signal.SIGKILL
        ring.assert_ended(4, 5)


def test_values_of_an_attempt_that_failed_are_not_taken_for_those_of_the_next(monkeypatch):
    """Rank 0 agrees on the next ring while rank 1 still says where it listened for this one."""
    passed: dict[tuple[int, int], Any] = {}
    received: dict[tuple[int, int], Any] = {}
    real = Survivors.exchange

    def exchange(survivors, value):
        view, rank = survivors._job.agreement.view.number, survivors._rank
        passed.setdefault((view, rank), value)
        found = real(survivors, value)
        received.setdefault((view, rank), found[1 - rank])
        while view == 1:
            survivors.check(TIMES.poll_s)
            if rank == 0:
                raise rr.PeerError("gives up", rank=0)
        return found

    monkeypatch.setattr(Survivors, "exchange", exchange)
    ring_of_threads(2, reform)
    assert tuple(received[2, 0]) == passed[2, 1]
    assert tuple(received[2, 1]) == passed[2, 0]


BROKEN = """
from ringreduce.communicator.reforming import reform

ring = join()
ring.barrier()
say("formed")
attempt("failed", lambda: until_error(ring.barrier))
reform(ring, [0])
say("anew", members=ring._session.membership.members)
ring.close()
"""


def test_a_stopped_rank_of_this_host_is_killed(tmp_path):
    """Else the lowest rank's half could not go on without it."""
    with Ring(tmp_path, 2, BROKEN, transport="shm", timeout_s=2.0) as ring:
        ring.wait("formed")
        ring.workers[0].signal(signal.SIGSTOP)
        assert ring.wait("anew", [1])[0]["members"] == [1]
        assert "killed rank 0, process" in ring.workers[1].stderr
        assert ring.workers[0].wait(10) == -signal.SIGKILL
        ring.assert_ended(1)


# As if another rank had killed it just before: it is not there any more, or ends.
KILLED_BY_ANOTHER = """
from ringreduce.communicator import reforming

real = reforming.end_process


def was_faster(process):
    real(process)
    return False


reforming.end_process = was_faster
"""


@pytest.mark.full
def test_a_stopped_rank_that_another_has_killed_is_seen_to_be_dead(tmp_path):
    with Ring(tmp_path, 2, KILLED_BY_ANOTHER + BROKEN, transport="shm", timeout_s=2.0) as ring:
        ring.wait("formed")
        ring.workers[0].signal(signal.SIGSTOP)
        assert ring.wait("anew", [1])[0]["members"] == [1]
        assert "killed rank 0" not in ring.workers[1].stderr
        ring.assert_ended(1)


# Rank 2 is stopped; the others go on without it, and end well.
ENDS_WITHOUT_ONE = """
from ringreduce.communicator.reforming import reform

ring = join()
ring.barrier()
say("formed")
attempt("failed", lambda: until_error(ring.barrier))
if RANK == 2:
    attempt("anew", lambda: reform(ring))
    sys.exit(3)
reform(ring, [2])
say("anew", members=ring._session.membership.members)
"""


@pytest.mark.full
def test_a_rank_that_wakes_when_the_others_have_ended_well_does_not_go_on(tmp_path):
    """On another host nobody kills it, and nothing that they left behind is seen from there."""
    ways = {"transport": "auto", "hosts": ["a", "a", "b"]}
    with Ring(tmp_path, 3, ENDS_WITHOUT_ONE, timeout_s=2.0, **ways) as ring:
        ring.wait("formed")
        ring.workers[2].signal(signal.SIGSTOP)
        assert [each["members"] for each in ring.wait("anew", [0, 1])] == [[0, 1]] * 2
        ring.assert_ended(0, 1)
        ring.workers[2].signal(signal.SIGCONT)
        (woken,) = ring.wait("anew", [2])
        assert woken["kind"] == "RendezvousError"
        assert "gone are ranks 0, 1, no longer there" in woken["text"]
        assert "rank 2 was stopped or cut off; the others may have gone on" in woken["text"]
        assert ring.workers[2].wait(10) == 3


@pytest.mark.full
def test_a_rank_that_another_host_has_left_out_is_killed_on_its_own(tmp_path):
    """Whichever rank has proposed who goes on."""
    ways = {"transport": "auto", "hosts": ["a", "b", "b"]}
    with Ring(tmp_path, 3, ENDS_WITHOUT_ONE, timeout_s=2.0, **ways) as ring:
        ring.wait("formed")
        ring.workers[2].signal(signal.SIGSTOP)
        ring.wait("anew", [0, 1])
        assert ring.workers[2].wait(10) == -signal.SIGKILL
        assert "killed rank 2, process" in ring.workers[1].stderr
        ring.assert_ended(0, 1)


@on_each_rank(3, transport="shm", join_timeout_s=5.0)
def test_what_others_of_the_host_have_left_behind_tells_one_that_wakes_later(comm, together):
    if comm.rank < 2:
        reform(comm, [2])
        comm.close()
    together.wait()
    if comm.rank == 2:
        with pytest.raises(rr.RendezvousError, match="ring: ranks 0, 1 went on without it"):
            reform(comm)


@on_each_rank(2, transport="shm", join_timeout_s=5.0)
def test_one_that_has_left_after_the_end_has_ended_and_did_not_die(comm, together):
    answer_others(comm, has_ended=False, training=1)
    if comm.rank == 0:
        answer_others(comm, has_ended=True, training=1)
        comm.close()
    together.wait()
    if comm.rank == 1:
        with pytest.raises(EndedError):
            reform(comm, at_end=True)


@on_each_rank(2, transport="shm", join_timeout_s=5.0)
def test_one_that_leaves_before_the_end_of_a_later_training_is_gone(comm, together):
    for has_ended, training in ((False, 1), (True, 1), (False, 2)):
        answer_others(comm, has_ended=has_ended, training=training)
    if comm.rank == 0:
        comm.close()
    together.wait()
    if comm.rank == 1:
        reform(comm, at_end=True)
        assert comm.members == (1,)


# Whether the others' training has ended, when it asks; None: there is none yet.
@pytest.mark.parametrize("states", [in_full((None, None)), (False, True, False)])
@on_each_rank(3, join_timeout_s=5.0)
def test_a_rank_that_wakes_is_told_that_it_was_left_out(comm, together, states):
    """The first time too: what it was told it may remember."""
    wakes = comm.rank == 1
    if not wakes:
        reform(comm, [1])
        assert comm.all_gather_object(comm.config.rank) == [0, 2]
    for has_ended in states:
        if not wakes and has_ended is not None:
            answer_others(comm, has_ended=has_ended)
        together.wait()
        if wakes:
            text = "left out of the ring: ranks 0, 2 went on without it"
            with pytest.raises(rr.RendezvousError, match=text):
                reform(comm)
        together.wait()
    if not wakes:
        reform(comm)
        assert comm.all_gather_object(comm.config.rank) == [0, 2]


def test_a_rank_at_the_end_is_told_that_another_has_ended_and_others_wait_for_it(monkeypatch):
    together, told = threading.Barrier(3, timeout=30), {1: threading.Event(), 2: threading.Event()}
    receive = Visits.receive

    def noted(visits, wait_s):
        for message in receive(visits, wait_s):
            yield message
            if message.value == View(1, ()):
                told[message.receiver].set()

    monkeypatch.setattr(Visits, "receive", noted)

    def work(comm):
        if comm.rank == 0:
            answer_others(comm, has_ended=True)
        together.wait()
        if comm.rank == 1:
            with pytest.raises(EndedError, match="has ended"):
                reform(comm, at_end=True)
        elif comm.rank == 0:
            # Rank 2 is not at the end: what has ended is another training.
            assert all(event.wait(30) for event in told.values())
        if comm.rank < 2:
            answer_others(comm, has_ended=False)
        reform(comm)
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]

    ring_of_threads(3, work)


@on_each_rank(4, join_timeout_s=5.0)
def test_a_rank_in_a_working_ring_takes_no_part_in_a_choice_and_has_not_ended(comm, together):
    if comm.rank != 3:
        reform(comm, [3])
    together.wait()
    if comm.config.rank == 0:
        job, asked, receive = comm._session.job, Counter(), Visits.receive

        def noted(visits, wait_s):
            for message in receive(visits, wait_s):
                asked[visits] += 1
                yield message

        with (
            Survivors(job, [], at_end=True) as survivors,
            mock.patch.object(Visits, "receive", noted),
        ):
            # Answers to the first may be lost, while the others connect.
            while sum(n >= 10 for who, n in asked.items() if who is not survivors._visits) < 2:
                survivors._take(propose(job.agreement, [0]))
                survivors._receive(0.02)
            assert job.agreement.successor is None
            assert not survivors._is_told  # that the ring has ended
    together.wait()


@on_each_rank(2)
def test_children_of_a_rank_that_has_ended_have_no_port(comm):
    port = standby_port(comm)
    if comm.rank == 0:
        answer_others(comm, has_ended=True)
        # Its listener, and libzmq's descriptor of that.
        assert len(sockets_of(port)) == 2
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, bytes([len(sockets_of(port))]))
            os._exit(0)
        assert os.read(reading, 1) == b"\0"
        os.waitpid(child, 0)
    comm.barrier()


def test_the_standby_port_is_shut_a_while_after_the_end(monkeypatch):
    monkeypatch.setattr(formation, "TIMES", replace(TIMES, told_s=0.3))

    def work(comm):
        if comm.rank == 0:
            port = standby_port(comm)
            answer_others(comm, has_ended=True)
            assert len(sockets_of(port)) == 2
            wait_until(lambda: len(sockets_of(port)) == 1, "the end of answers", 30)
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.1).close()
            # It is opened again where the ring is formed anew.
            answer_others(comm, has_ended=False)
        comm.barrier()
        reform(comm)

    ring_of_threads(2, work)


@on_each_rank(2, secret="s" * 64)
def test_idle_connections_without_the_secret_do_not_exhaust_descriptors(comm, event):
    if comm.rank == 0:
        answer_others(comm, has_ended=True)
    comm.barrier()
    if comm.rank == 0:
        assert event.wait(30)
        return
    port = int(comm._session.job.standbys[0].rpartition(":")[2])
    with contextlib.ExitStack() as idle:
        most = 0
        for _ in range(12):
            for _ in range(50):
                one = idle.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                most = max(most, len(sockets_of(port)))
        # What is allowed, and what came before that was seen.
        assert 64 < most < 300
        # They are ended, and then a rank is answered.
        with pytest.raises(EndedError):
            reform(comm, at_end=True)
    event.set()


def standby_port(comm: rr.Communicator) -> int:
    return int(comm._session.job.standby.address.rpartition(":")[2])


def sockets_of(port: int) -> list[int]:
    """This process's descriptors of sockets at that port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            descriptor = os.dup(int(name))
            opened.callback(os.close, descriptor)
            one = socket.socket(fileno=descriptor)
            opened.callback(one.detach)
            if one.getsockname()[1:2] == (port,):
                found.append(int(name))
    return found


@pytest.mark.full
def test_of_two_halves_the_one_with_the_lowest_rank_goes_on():
    hosts.require()
    together = threading.Barrier(4, timeout=30)
    layout = {name: {"one": [f"10.1.0.{number}/24"]} for number, name in enumerate("abcd", 1)}

    def join(part, bridge):
        for name in part:
            hosts.run_ip(f"-n {four.switch} link set one-{name} master {bridge}")

    def work(comm):
        rank = comm.rank
        if together.wait() == 0:
            hosts.run_ip(f"-n {four.switch} link add other type bridge")
            hosts.run_ip(f"-n {four.switch} link set other up")
            join("cd", "other")
        together.wait()
        others = [each for each in range(4) if each // 2 != rank // 2]
        if rank > 1:
            with pytest.raises(rr.RendezvousError, match="ranks 0, 1, silent"):
                reform(comm, others)
        else:
            reform(comm, others)
            assert comm.all_reduce(np.ones(1)) == 2
        if together.wait() == 0:
            join("cd", "one")
        together.wait()
        if rank > 1:
            with pytest.raises(rr.RendezvousError, match="ranks 0, 1 went on without it"):
                reform(comm)
        together.wait()
        return "done"

    with hosts.connected(layout) as four:
        assert four.ring("10.1.0.1:20000", work, join_timeout_s=10.0) == ["done"] * 4


@on_each_rank(3, over="on_ranks")
def test_a_ring_that_has_not_failed_is_formed_anew_with_or_without_all(comm):
    """Down to one rank; and ranks that expect different losses agree."""
    group = comm.split(0)
    reform(comm, [])
    with pytest.raises(rr.ClosedError):
        group.barrier()
    assert comm.all_gather_object(comm.rank) == [0, 1, 2]
    assert comm.size == 3
    if comm.rank == 1:
        return
    reform(comm, [] if comm.rank == 2 else [1])
    assert comm.all_gather_object(comm.config.rank) == [0, 2]
    assert (comm.rank, comm.size) == (comm.config.rank // 2, 2)
    if comm.rank == 1:
        return
    reform(comm, [2])
    assert (comm.rank, comm.size, comm.transport) == (0, 1, "none")
    assert comm.all_gather_object("alone") == ["alone"]
    reform(comm, [])
    assert comm.all_reduce(np.ones(1)) == 1


@on_each_rank(2)
def test_what_was_begun_in_the_old_ring_ends_and_the_engine_goes_on(comm):
    engine = comm._session.engine
    begun = comm.all_reduce(np.ones(3), async_op=True) if comm.rank == 0 else None
    reform(comm, [])
    if begun is not None:
        with pytest.raises(rr.RingReduceError):
            begun.wait()
    assert comm._session.engine is engine
    assert comm.all_reduce(np.ones(3), async_op=True).wait().tolist() == [2, 2, 2]
    assert comm.failure is None
    assert comm.statistics().collectives >= 2
    comm.close()
    with pytest.raises(rr.ClosedError):
        engine.submit(lambda: None)
    with pytest.raises(rr.ClosedError, match=r"cannot form the ring anew after close\(\)"):
        reform(comm, [])


def test_the_engine_goes_on_where_forming_anew_has_succeeded_at_the_second_attempt(monkeypatch):
    formed, failed, both = Events.formed, threading.local(), threading.Barrier(2, timeout=30)

    def fail_once(events):
        if not getattr(failed, "once", False):
            failed.once = True
            raise OSError("no memory")
        formed(events)

    def work(comm):
        engine = comm._session.engine
        both.wait()  # Else the first ring of the other one might fail.
        monkeypatch.setattr(Events, "formed", fail_once)
        with pytest.raises(OSError, match="no memory"):
            reform(comm, [])
        both.wait()  # Both have closed what they had opened.
        reform(comm, [])
        assert comm._session.engine is engine
        assert comm.all_reduce(np.ones(3), async_op=True).wait().tolist() == [2, 2, 2]

    ring_of_threads(2, work)


def test_a_rank_passes_on_what_others_need_also_where_theirs_has_come_before(monkeypatch):
    exchange = Survivors.exchange

    def late(survivors, value):
        while survivors._rank == 1 and len(survivors._told.get(0, ())) <= len(survivors._values):
            survivors.check(0.01)
        return exchange(survivors, value)

    monkeypatch.setattr(Survivors, "exchange", late)
    ring_of_threads(2, reform, join_timeout_s=5.0)


def test_votes_that_are_given_while_a_ring_forms_count_afterwards(monkeypatch):
    exchange, send, first = Survivors.exchange, Visits.send, []
    together = threading.Barrier(3, timeout=30)

    def voting(survivors, value):
        """In the last exchange ranks 0 and 2 accept a ring of their own; nobody hears of it."""
        job = survivors._job
        if survivors._rank == 2 and len(survivors._values) == 1 and not first:
            first.append(job.agreement.view.number)
            survivors._take(propose(job.agreement, [0, 2]))
            while (campaign := job.agreement.campaign) and campaign.awaits != Verb.ACCEPTED:
                survivors._receive(0.01)
        return exchange(survivors, value)

    def lossy(visits, message):
        is_of_them = message.kind not in (Verb.HERE, Verb.CHOSEN) and [message.view] == first
        if not is_of_them or (message.kind != Verb.ACCEPTED and message.receiver != 1):
            send(visits, message)

    monkeypatch.setattr(Survivors, "exchange", voting)
    monkeypatch.setattr(Visits, "send", lossy)

    def work(comm):
        reform(comm)
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]
        first.append(-1)
        if comm.rank == 1:
            with pytest.raises(rr.RendezvousError, match="ranks 0, 2 went on without it"):
                reform(comm)
        else:
            reform(comm)
            assert comm.members == (0, 2)
        together.wait()  # Else rank 1 might find their ports closed.

    ring_of_threads(3, work)


def test_what_explains_mismatches_does_so_in_the_new_ring_too():
    class Better:
        def explain(self, error):
            return rr.MismatchError("has another variable")

    def work(comm):
        better = Better()
        comm._session.lasting.explainers.add(better)
        reform(comm, [])
        with pytest.raises(rr.MismatchError, match="has another variable"):
            comm.all_reduce(np.ones(3 + comm.rank))

    ring_of_threads(2, work)


@on_each_rank(2)
def test_half_the_ranks_without_the_lowest_wait_and_say_for_whom(comm, together):
    if comm.rank == 1:
        with pytest.raises(rr.RendezvousError) as caught:
            reform(comm, [0])
        text = str(caught.value)
        assert "anew of rank 1 alone: gone are rank 0, silent" in text
        assert "More than half of ranks 0, 1 are needed" in text
        assert caught.value.peer == 0
    together.wait()
    reform(comm)
    # An attempt that has failed has taken no number.
    assert comm._session.membership.members == (0, 1)


def another_life(old: formation.Job, life: int) -> tuple[formation.Job, Row]:
    """What another process at the place of `old` knows of the job, and what others know of it."""
    config = old.config
    place, networks = config.rank, own_networks(config)
    bind, security = bind_of(config, networks), Security.of(config)
    keys = [key.decode() for key in old.security.keys]
    security.learn([*keys[:place], security.public, *keys[place + 1 :]], bytes(32), old.number)
    standby = Standby(bind, rank=place, size=config.size)
    row = Row(
        place,
        life,
        old.hosts[place],
        old.domains[place],
        standby.address,
        security.public,
        networks,
    )
    job = formation.Job(
        config,
        old.number,
        security,
        old.hosts,
        old.domains,
        standby,
        (*old.standbys[:place], standby.address, *old.standbys[place + 1 :]),
        bind,
        Routes(place, config.size, {**old.routes.networks, place: networks}),
        outside(place),
        Standings.create(1),
    )
    return job, row


def come_back(job: formation.Job, row: Row, rows: list[Row]) -> rr.Communicator:
    """Offer `row` to the others, and be a rank of the ring that takes it in."""
    with Survivors(job, ()) as survivors:
        rows.append(row)
        assert row in survivors.await_choice(row, 20.0).newcomers
        session = form_chosen(job, survivors, Lasting())
    comm = rr.Communicator.__new__(rr.Communicator)
    comm._use(session)
    return comm


@pytest.mark.parametrize(
    "ways",
    [
        {"transport": "shm"},
        {"transport": "zmq", "encryption": "on"},
        in_full({"transport": "auto", "hosts": "aab"}),
    ],
)
def test_a_lost_rank_comes_back_as_another_process_and_is_a_full_member(ways):
    """It reduces, and is one of those that are left when another rank goes."""
    rows: list[Row] = []
    together = threading.Barrier(3, timeout=30)

    def work(comm):
        if comm.config.rank == 1:
            old = comm._session.job
            leave(comm, "it was told to")
            back = come_back(*another_life(old, 1), rows)
        else:
            wait_until(lambda: rows, "the newcomer", 20)
            reform(comm, leaving=[1], newcomers=rows)
            back = comm
        assert back.members == (0, 2, 1)
        assert back.all_gather_object(back.config.rank) == [0, 2, 1]
        assert back.all_reduce(np.full(5003, 1.0 + back.rank))[0] == 6
        together.wait()
        if comm.config.rank == 0:
            leave(back, "it was told to")
        else:
            reform(back, leaving=[0])
            assert back.members == (2, 1)
            assert back.all_reduce(np.ones(1)) == 2
            back.barrier()
            back.close()

    ring_of_threads(3, work, **ways)


def test_others_go_on_without_a_newcomer_that_ends_while_its_ring_forms():
    """And take in the next one at its place."""
    rows: list[Row] = []
    together = threading.Barrier(3, timeout=30)

    def work(comm):
        if comm.config.rank == 1:
            old = comm._session.job
            leave(comm, "it was told to")
            job, row = another_life(old, 1)
            with Survivors(job, ()) as survivors:
                rows.append(row)
                survivors.await_choice(row, 20.0)
            job.standby.close()
            together.wait()
            rows.clear()
            comm = come_back(*another_life(old, 2), rows)
        else:
            wait_until(lambda: rows, "the newcomer", 20)
            reform(comm, leaving=[1], newcomers=rows)
            assert comm.all_gather_object(comm.config.rank) == [0, 2]
            together.wait()
            wait_until(lambda: rows and rows[0].life == 2, "the next one", 20)
            # As if it had been stopped when it was left out, and killed since.
            job = comm._session.job
            job.agreement = job.agreement._replace(left_out=frozenset({1}))
            reform(comm, newcomers=rows)
        assert comm.all_gather_object(comm.config.rank) == [0, 2, 1]
        comm.close()

    ring_of_threads(3, work, transport="shm")


@on_each_rank(2, join_timeout_s=5.0, secret="s" * 64)
def test_rows_that_fit_no_table_are_not_taken_in(comm):
    job = comm._session.job
    key = Security.of(comm.config).public
    row = Row(1 - comm.rank, 1, "host", "", "tcp://127.0.0.1:9", key)
    assert job.has_place_for(row)
    own = job.security.public
    for place, standby, shown in (
        (2, row.standby, key),
        (comm.rank, row.standby, key),
        (row.place, "", key),
        (row.place, row.standby, ""),
        (row.place, row.standby, own),
    ):
        assert not job.has_place_for(Row(place, 1, "host", "", standby, shown))


@on_each_rank(2, transport="shm")
def test_a_newcomer_takes_no_place_of_a_rank_that_is_there(comm):
    row = Row(1 - comm.rank, 1, "host", "", "tcp://127.0.0.1:9", Security.of(comm.config).public)
    reform(comm, newcomers=[row])
    assert comm.all_gather_object(comm.rank) == [0, 1]
    assert comm._session.job.agreement.view.newcomers == ()


def test_a_ring_alone_is_formed_anew():
    with rr.Communicator(rr.Config()) as comm:
        reform(comm, [])
        assert comm.all_reduce(np.ones(1)) == 1


@on_each_rank(2)
def test_the_standby_port_is_shut_before_and_after_and_then_closed(comm):
    port = standby_port(comm)

    def attempt():
        socket.create_connection(("127.0.0.1", port), 0.1).close()

    for _ in range(2):
        with pytest.raises(TimeoutError):
            attempt()
        comm.barrier()
        reform(comm, [])
    comm.barrier()
    comm.close()
    with pytest.raises(ConnectionRefusedError):
        attempt()
