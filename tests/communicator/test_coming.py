"""The communicator of a rank that comes back, before it has joined the others."""

import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.communicator.coming import coming, join
from ringreduce.communicator.formation import Job
from ringreduce.communicator.gate import differing
from ringreduce.communicator.integration import (
    check,
    claim,
    drain_engine,
    engine_of,
    fail,
    gather_shares,
    job_size,
    membership_of,
    note_blocked,
    note_step,
    reduce_shares,
    refusing,
    share_count,
    shared_memory,
    shares,
)
from ringreduce.communicator.journal import Replay, begin_training
from ringreduce.communicator.reforming import Survivors, form_chosen, leave, reform
from ringreduce.pure.claims import Claim
from ringreduce.pure.views import Row
from ringreduce.testing import ring_of_threads
from tests.communicator.test_reforming import another_life
from tests.processes import wait_until


def at(rank, *, size=4, **settings):
    config = rr.Config(rank=rank, size=size, rendezvous="127.0.0.1:9", job_id="a", **settings)
    how = {"transport": "shm+zmq", "local_rank": 1, "local_size": 2}
    return coming(config, Replay([], lambda *_: []), **how)


@pytest.mark.parametrize(
    ("rank", "place", "members"),
    [(0, 3, (1, 2, 3, 0)), (1, 1, (0, 1, 2, 3)), (3, 3, (0, 1, 2, 3))],
)
def test_it_looks_as_the_job_s_at_its_start_and_is_never_rank_0(rank, place, members):
    """Else it would do what must be done once, though the job has done it."""
    with at(rank) as comm:
        assert (comm.rank, comm.size, comm.members) == (place, 4, members)
        assert comm.members[comm.rank] == comm.config.rank == rank
        assert (comm.local_rank, comm.local_size, comm.transport) == (1, 2, "shm+zmq")
        assert (comm.parent, comm.failure, comm.closed) == (None, None, False)
        assert (job_size(comm), membership_of(comm).members) == (4, members)
        assert repr(comm) == f"<Communicator rank {place} of 4, open>"
        assert comm.empty((2, 3)).shape == (2, 3)
        assert comm.statistics().collectives == 0
    assert comm.closed
    comm.close()


def test_a_job_of_one_rank_has_none():
    with pytest.raises(rr.ConfigError, match="to a job of one rank"):
        at(0, size=1)


def test_files_of_its_place_stay_those_of_the_rank_before_it(tmp_path):
    log, trace = tmp_path / "log", tmp_path / "trace"
    comm = at(1, log_dir=str(log), trace_dir=str(trace))
    assert comm.config.log_dir == str(log)
    comm.__exit__(KeyError, KeyError("the program's"), None)
    assert comm.closed
    assert not log.exists()
    assert not trace.exists()


@pytest.fixture
def trains():
    """A newcomer that has begun to train, and no thread of it afterwards."""
    with at(1) as comm:
        begin_training(comm)
        yield comm
    assert not [each for each in threading.enumerate() if each.name.startswith("ringreduce 1/4")]


CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(2)),
    "all_gather": lambda comm: comm.all_gather(np.ones(2)),
    "broadcast": lambda comm: comm.broadcast(np.ones(2)),
    "barrier": lambda comm: comm.barrier(),
    "all_gather_object": lambda comm: comm.all_gather_object(1),
    "broadcast_object": lambda comm: comm.broadcast_object(1, 1),
    "in the engine": lambda comm: comm.all_reduce(np.ones(2), async_op=True).wait(),
    "send": lambda comm: comm.send(np.ones(2), 0),
    "recv": lambda comm: comm.recv(np.ones(2), 0),
    "split": lambda comm: comm.split(0),
    "on_rank_zero": lambda comm: rr.on_rank_zero(pytest.fail, communicator=comm),
    "reduce_shares": lambda comm: reduce_shares(comm, np.ones(4), 0),
    "gather_shares": lambda comm: gather_shares(comm, np.ones(4), 0),
    "shared_memory": lambda comm: shared_memory(comm, [8]),
    "check": check,
}


@pytest.mark.parametrize("name", CALLS)
def test_its_calls_are_refused_until_it_has_joined(trains, name):
    for _ in range(2):
        with pytest.raises(rr.MismatchError, match="rank 1 of 4 made a call before it has joined"):
            CALLS[name](trains)
    assert trains.failure is None


def test_its_engine_works_and_steps_can_be_traced(trains):
    assert engine_of(trains).submit(lambda: 3).wait() == 3
    drain_engine(trains)
    claim(trains, Claim("plan", b"1", "has another plan", "Build the same model."))
    note_step(trains, 0.0, 1.0)
    note_blocked(trains, 0.1, 0.1)
    assert share_count(trains) > 0
    assert shares(trains, 8, 4)[-1][1] == 8
    with refusing(trains, KeyError("in a trial")):
        pass


def test_what_fails_in_it_closes_it_alone(trains):
    error = rr.MismatchError("another digest")
    assert fail(trains, error) is error
    assert trains.failure is error
    with pytest.raises(rr.MismatchError, match="another digest"):
        trains.barrier()


def test_calls_before_training_that_no_journal_sees_are_refused():
    """They would find a ring of one, and give what only this rank has passed."""
    with at(1) as comm, pytest.raises(rr.MismatchError, match="before it has joined"):
        reduce_shares(comm, np.ones(4), 0)


def test_it_joins_with_its_engine_and_becomes_a_rank():
    rows: list[Row] = []

    def comes_back(job: Job, row: Row) -> rr.Communicator:
        how = {"transport": "shm", "local_rank": 1, "local_size": 3}
        comm = coming(job.config, Replay([], lambda *_: []), **how)
        begin_training(comm)
        engine = engine_of(comm)
        with Survivors(job, ()) as survivors:
            rows.append(row)
            survivors.await_choice(row, 20.0)
            join(comm, lambda lasting: form_chosen(job, survivors, lasting))
        assert engine_of(comm) is engine
        return comm

    def work(comm):
        if comm.config.rank == 1:
            old = comm._session.job
            leave(comm, "it was told to")
            comm = comes_back(*another_life(old, 1))
        else:
            wait_until(lambda: rows, "the newcomer", 20)
            reform(comm, leaving=[1], newcomers=rows)
        assert (comm.members, comm.rank) == ((0, 2, 1), [0, 2, 1][comm.config.rank])
        assert comm.all_reduce(np.full(5003, 1.0 + comm.rank))[0] == 6
        assert comm.all_reduce(np.ones(2), async_op=True).wait()[0] == 3
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]
        comm.close()

    ring_of_threads(3, work, transport="shm")


def test_it_is_closed_where_it_cannot_join():
    def fails(lasting):
        raise rr.PeerLostError("lost rank 2 while the ring was formed anew")

    with at(1) as comm:
        begin_training(comm)
        with pytest.raises(rr.PeerLostError):
            join(comm, fails)
        assert comm.closed
        with pytest.raises(rr.ClosedError):
            comm.barrier()


def test_another_program_is_named_and_what_one_has_not_imported_yet_is_no_difference():
    job = {"argv": "['a']", "train.py": "a file with hash 1", "later.py": "a file with hash 2"}
    assert differing(job, {"argv": "['a']", "train.py": "a file with hash 1"}) == ""
    assert differing(job, job | {"argv": "['b']"}) == "argv is ['b'] here, and ['a'] in the job"
    edited = differing(job, job | {"train.py": "a file with hash 3"})
    assert edited == "train.py was changed since the job began"
