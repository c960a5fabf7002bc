"""What calls before training give is kept, and given again to a rank that comes back."""

import logging
import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.communicator import process
from ringreduce.communicator.coming import coming
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import check, note_unkept
from ringreduce.communicator.journal import (
    Replay,
    begin_training,
    compared,
    journal_of,
    keep_calls,
    reopened,
)
from ringreduce.communicator.kept_calls import OF_A_RING, RULES
from ringreduce.communicator.outermost import outermost
from ringreduce.pure import payload
from ringreduce.pure.encodings import Coding, encoding_of
from ringreduce.testing import ring_of_threads
from tests.pure.test_results import NAN, same
from tests.rings import on_each_rank

WHY = "this program is another one, or does other things by time, files or random numbers"


@outermost
def evaluate(
    x, communicator=None, y=None, sample_weight=None, batch_size=None, steps=None, return_dict=False
):
    """As `rr.evaluate`: collectives of its own, also in another thread, and a result for all."""
    total = communicator.all_reduce(np.array(x, np.float32))
    in_thread = threading.Thread(target=communicator.barrier)
    in_thread.start()
    in_thread.join()
    rr.on_rank_zero(int, 3, communicator=communicator)
    communicator.reduce_scatter(np.ones(5), async_op=True).wait()
    return {"loss": float(total[0]), "outputs": (total, np.float32(total[1]))}


@outermost
def predict(x, ring, batch_size=None, steps=None):
    return [ring.all_gather(np.array(x))]


@outermost
def verify_replicas(variables, communicator=None):
    communicator.barrier()


@outermost
def broadcast_variables(variables, ring, root=0, *, state=()):
    changed = []
    for variable in (*variables, *state):
        before = variable.copy()
        ring.broadcast(variable, root)
        changed += [variable] * bool((before != variable).any())
    return changed


def mismatch(call):
    with pytest.raises(rr.MismatchError) as caught:
        call()
    return caught.value.message


def fails():
    raise FileNotFoundError("no such archive")


def shows():
    return {"path": ("a", 1), "bytes": b"7"}


def program(comm):
    """Each kind of call that is kept; what it has given."""
    rank, nan = comm.rank, NAN.copy()
    halves, whole = np.full((2, 2), 0.5, np.float16), np.arange(3) + 10 * rank
    results = [
        comm.all_reduce(nan, "max"),
        comm.all_reduce(halves, signature=7),
        comm.all_reduce(np.full(9000, 0.3, np.float32), coding=Coding(encoding_of("fp16"))),
        comm.all_reduce(whole, op=rr.ReduceOp.MEAN),
        comm.all_gather(np.full((rank, 2), rank, np.int32)),
        comm.all_gather(np.array(rank * 1.5)),
        comm.broadcast(np.full(4, rank), root=1),
        comm.barrier(),
        comm.gather(np.full((1, 2), rank), 0),
        comm.gather_object(rank),
        comm.broadcast_object({"of": rank}, 2),
        comm.all_gather_object([rank, "text"], signature=1 << 63),
        rr.on_rank_zero(shows, communicator=comm),
        evaluate([1.5, 7 * rank], comm, batch_size=8),
        predict(np.arange(4), comm),
        verify_replicas([np.zeros(3)], comm),
        broadcast_variables([np.zeros(2)], comm),
    ]
    kind = FileNotFoundError if rank == 0 else rr.WorkerError
    with pytest.raises(kind, match="no such archive") as caught:
        rr.on_rank_zero(fails, communicator=comm)
    # In place: what is returned is what was passed.
    assert [each is results[place] for place, each in ((0, nan), (1, halves), (3, whole))] == [
        1
    ] * 3
    return [*results, "" if rank == 0 else caught.value.message]


def kept_by(size, job, **settings):
    """What each rank's calls in `job` gave, and the journal as it is sent, of ranks 0 and 1."""

    def work(comm):
        journal = keep_calls(comm)
        results = job(comm)
        begin_training(comm)
        assert journal.ends_growing is None
        return results, journal.encoded()

    rows = ring_of_threads(size, work, **settings)
    return [results for results, _ in rows], [journal for _, journal in rows]


def newcomer(encoded, *, rank=1, size=3, gives=lambda number, variables: []):
    config = rr.Config(rank=rank, size=size, rendezvous="127.0.0.1:9", job_id="a")
    how = {"transport": "shm", "local_rank": rank, "local_size": size}
    return coming(config, Replay.of(encoded, gives), **how)


def test_a_rank_that_comes_back_gets_the_same_bits_from_any_rank_s_journal():
    """The journals of ranks 0 and 2 are sent; calls that are made of others are one each."""
    results, journals = kept_by(3, program)
    for place, donor in ((1, 0), (2, 0), (1, 2), (0, 2)):
        with newcomer(journals[donor], rank=place) as comm:
            again = program(comm)
            begin_training(comm)
        expected = list(results[comm.rank])
        # Its own in its place, so that comparisons find what differs.
        objects = [[rank, "text"] for rank in comm.members]
        objects[comm.rank] = [comm.rank, "text"]
        expected[11] = objects
        if place == 0:
            expected[-1] = expected[-1].replace("rank 0", "rank 1")
        wrong = [one for one in zip(again, expected, strict=True) if not same(*one)]
        assert not wrong


def test_what_ranks_have_compared_is_known_to_one_that_has_another():
    def job(comm):
        return compared(comm, ["arguments", {"epochs": "3"}])

    (first, *_), (encoded, _) = kept_by(2, job)
    with newcomer(encoded, size=2) as comm:
        assert compared(comm, ["arguments", {"epochs": "4"}]) == first
        begin_training(comm)


def test_what_prepares_a_first_step_is_kept_when_training_has_begun():
    def job(comm):
        comm.barrier()
        begin_training(comm)
        comm.broadcast_object("a trial's")
        with reopened(comm):
            return comm.all_gather_object(comm.rank)

    def again(comm):
        comm.barrier()
        return comm.all_gather_object(7)

    _, (encoded, _) = kept_by(2, job)
    with newcomer(encoded, size=2) as comm:
        assert again(comm) == [0, 7]
        begin_training(comm)
    with Communicator(rr.Config(rank=0, size=1)) as alone, reopened(alone):
        assert alone.all_gather_object(3) == [3]


def test_all_ranks_keep_the_same():
    """Rank 0 too, whose function raised another error than the others."""
    journals = kept_by(3, program)[1]
    assert journals[0] == journals[1] == journals[2]


def test_each_public_collective_is_known_to_the_journal():
    own = {name for name, each in vars(rr.Communicator).items() if callable(each)}
    others = {"empty", "statistics", "close"}
    assert {name for name in own if not name.startswith("_")} - others == {*OF_A_RING}
    assert {*RULES} - {*OF_A_RING} == {
        *("on_rank_zero", "evaluate", "predict", "verify_replicas", "broadcast_variables"),
        "comparison",
    }


def ones(shape=3, dtype=np.float32):
    return np.ones(shape, dtype)


CALLS = {
    "all_reduce of float32 (3,), sum": lambda comm: comm.all_reduce(ones()),
    "all_reduce of float32 (3,), max": lambda comm: comm.all_reduce(ones(), "max"),
    "all_reduce of float32 (1, 3), sum": lambda comm: comm.all_reduce(ones((1, 3))),
    "all_reduce of float64 (3,), sum": lambda comm: comm.all_reduce(ones(3, np.float64)),
    "all_reduce of float32 (3,), sum, signature 0xff": (
        lambda comm: comm.all_reduce(ones(), signature=255)
    ),
    "all_reduce of float32 (3,), sum, int8": (
        lambda comm: comm.all_reduce(ones(), coding=Coding(encoding_of("int8")))
    ),
    "all_gather of float32 (*, 2)": lambda comm: comm.all_gather(ones((1, 2))),
    "all_gather of float32 (*, 3)": lambda comm: comm.all_gather(ones((2, 3))),
    "broadcast of float32 (3,), root 0": lambda comm: comm.broadcast(ones()),
    "broadcast of float32 (3,), root 1": lambda comm: comm.broadcast(ones(), 1),
    "barrier": lambda comm: comm.barrier(),
    "gather of float32 (*, 2), root 0": lambda comm: comm.gather(ones((1, 2))),
    "gather_object of root 0": lambda comm: comm.gather_object(1),
    "broadcast_object of root 0": lambda comm: comm.broadcast_object(1),
    "broadcast_object of root 1": lambda comm: comm.broadcast_object(1, 1),
    "all_gather_object": lambda comm: comm.all_gather_object(1),
    "all_gather_object of signature 0x1": lambda comm: comm.all_gather_object(1, signature=1),
    "on_rank_zero of shows": lambda comm: rr.on_rank_zero(shows, communicator=comm),
    "on_rank_zero of int": lambda comm: rr.on_rank_zero(int, communicator=comm),
    "evaluate of x [int, int], return_dict False": lambda comm: evaluate([1, 2], comm),
    "evaluate of x [int, int], steps 3, return_dict False": lambda comm: evaluate(
        [1, 2], comm, steps=3
    ),
    "predict of x float32 (3,)": lambda comm: predict(ones(), comm),
    "verify_replicas of variables [float32 (3,)]": lambda comm: verify_replicas([ones()], comm),
    "verify_replicas of variables [float32 (2,)]": lambda comm: verify_replicas([ones(2)], comm),
    "broadcast_variables of variables [float32 (3,)], state [], root 0": (
        lambda comm: broadcast_variables([ones()], comm)
    ),
    "broadcast_variables of variables [float32 (3,)], state [float32 (1,)], root 0": (
        lambda comm: broadcast_variables([ones()], comm, state=[ones(1)])
    ),
}


def test_another_call_than_the_job_s_names_both_and_is_raised_again():
    """Each against each other one; no call of the program is made."""

    def job(comm):
        for call in CALLS.values():
            call(comm)

    _, (encoded, _) = kept_by(2, job)
    for place, here in enumerate(CALLS):
        for there, call in CALLS.items():
            with newcomer(encoded, size=2) as comm:
                for before in [*CALLS.values()][:place]:
                    before(comm)
                if here == there:
                    call(comm)
                    continue
                with pytest.raises(rr.MismatchError) as caught:
                    call(comm)
                said = f"called {there} as its call {place + 1} before training"
                assert caught.value.message == f"{said}, where the job called {here}: {WHY}"
                assert caught.value.rank == 1
                assert mismatch([*CALLS.values()][place].__get__(comm)) == caught.value.message
                assert mismatch(lambda comm=comm: begin_training(comm)) == caught.value.message


def test_a_call_too_many_and_one_too_few_are_errors():
    _, (encoded, _) = kept_by(2, lambda comm: comm.barrier())
    with newcomer(encoded, size=2) as comm:
        comm.barrier()
        text = "called barrier as its call 2 before training, where the job began to "
        assert mismatch(comm.barrier) == f"{text}train: {WHY}"
    with newcomer(encoded, size=2) as comm:
        text = f"began to train after 0 calls, where the job called barrier: {WHY}"
        assert mismatch(lambda: begin_training(comm)) == text


def in_thread(call):
    errors = []

    def run():
        try:
            call()
        except rr.MismatchError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def refused(comm):
    with pytest.raises(ValueError, match="could not convert"):
        evaluate(["text"], comm)


def exchanged(comm):
    comm.send(np.ones(1), 1) if comm.rank == 0 else comm.recv(np.ones(1), 0)


def told(comm):
    comm.send_object(1, 1) if comm.rank == 0 else comm.recv_object(0)


UNKEPT = {
    "send was called": exchanged,
    "recv was called": exchanged,
    "send_object was called": told,
    "recv_object was called": told,
    "split was called": lambda comm: comm.split(0),
    "reduce_scatter was called": lambda comm: comm.reduce_scatter(ones()),
    "all_to_all was called": lambda comm: comm.all_to_all(ones(2)),
    "scatter was called": lambda comm: comm.scatter(ones((2, 1))),
    "scatter_object was called": lambda comm: comm.scatter_object([1, 2]),
    "gather was called with another root than rank 0": lambda comm: comm.gather(ones(), 1),
    "gather_object was called with another root": lambda comm: comm.gather_object(1, 1),
    "all_reduce was called with async_op": (
        lambda comm: comm.all_reduce(ones(), async_op=True).wait()
    ),
    "barrier was called in another thread than init()": lambda comm: in_thread(comm.barrier),
    "what is in a graph before training": lambda comm: note_unkept(comm, "what is in a graph"),
    "evaluate failed with ValueError": refused,
}


@pytest.mark.parametrize("reason", UNKEPT)
def test_calls_without_a_result_for_all_end_growing_once_with_a_reason(reason, caplog):
    """The job goes on, and nothing is kept any more."""
    caplog.set_level(logging.INFO)

    def work(comm):
        journal = keep_calls(comm)
        comm.barrier()
        UNKEPT[reason](comm)
        comm.all_reduce(ones(), async_op=True).wait()
        begin_training(comm)
        with pytest.raises(rr.ConfigError, match="no rank can come back") as caught:
            journal.encoded()
        assert journal.ends_growing in caught.value.message
        assert (journal._calls, journal._variables) == ([], {})
        assert "all_reduce" not in vars(comm)
        return journal.ends_growing

    reasons = ring_of_threads(2, work)
    assert any(reason in each for each in reasons)
    lines = [line for line in caplog.messages if "only shrinks" in line]
    assert len(lines) == 2
    assert any(line.endswith(f"only shrinks from here on: {reasons[0]}") for line in lines)


@pytest.mark.parametrize("reason", [name for name in UNKEPT if "failed" not in name])
def test_at_a_newcomer_such_calls_are_other_ones_than_the_job_s(reason):
    _, (encoded, _) = kept_by(2, lambda comm: comm.barrier())
    with newcomer(encoded, size=2) as comm:
        calls = {
            "send was called": lambda: comm.send(np.ones(1), 0),
            "send_object was called": lambda: comm.send_object(1, 0),
        }
        with pytest.raises(rr.MismatchError, match="where the job called barrier") as caught:
            calls.get(reason, UNKEPT[reason].__get__(comm))()
        assert f"called {reason.split(' ')[0]}" in str(caught.value)


def test_what_was_kept_is_as_it_was_when_a_program_changes_a_result():
    def job(comm):
        array = comm.all_reduce(ones())
        listed = comm.all_gather_object([1])
        result = evaluate([1, 2], comm)
        before = [array.copy(), [*map(list, listed)], result["outputs"][0].copy()]
        array[:], result["outputs"][0][:] = 9, 9
        listed[0].append(3)
        return before

    results, (encoded, _) = kept_by(2, job)
    for _ in range(2):
        with newcomer(encoded, size=2) as comm:
            assert same(job(comm), results[1])


def test_more_than_the_limit_is_not_kept():
    def work(comm):
        journal = keep_calls(comm, limit_bytes=2 << 20)
        for _ in range(2):
            comm.all_reduce(np.ones(120_000))  # 0.92 MiB each
        assert journal.ends_growing is None
        comm.barrier()
        comm.all_gather(np.ones(20_000))
        return journal.ends_growing, journal._calls

    why = "its calls before training have given more than 2 MiB together"
    assert ring_of_threads(2, work) == [(why, [])] * 2


def test_many_calls_that_give_nothing_are_limited_too():
    def work(comm):
        journal = keep_calls(comm, limit_bytes=100)
        comm.barrier()
        assert journal.ends_growing is None
        comm.barrier()
        return journal.ends_growing

    assert all(ring_of_threads(2, work))


@on_each_rank(2)
def test_a_result_that_cannot_be_encoded_ends_growing_by_name(comm):
    journal = keep_calls(comm)

    @outermost
    def predict(x, ring, batch_size=None, steps=None):
        return [np.ones(2), range(3)]

    assert predict(np.ones(3), comm)[1] == range(3)
    assert journal.ends_growing == "predict has given what cannot be kept: cannot keep a range"


@on_each_rank(2)
def test_a_result_that_is_too_large_is_not_even_copied(comm, monkeypatch):
    monkeypatch.setattr(payload, "OBJECT_BYTES_MAX", 1000)
    journal = keep_calls(comm)
    comm.all_reduce(np.ones(2000))
    kept = "all_reduce has given what cannot be kept: cannot keep an array of 16000 bytes"
    assert journal.ends_growing == kept


@on_each_rank(2)
def test_once_training_has_begun_nothing_is_asked_or_kept(comm):
    """Also by a method that the program has kept."""
    journal = keep_calls(comm)
    reduce, own = comm.all_reduce, {*vars(comm)}
    reduce(ones())
    begin_training(comm)
    begin_training(comm)
    encoded = journal.encoded()
    assert own - {*vars(comm)} == {*OF_A_RING}
    assert comm._before_training is None
    assert journal_of(comm) is journal
    for call in (reduce, comm.all_reduce):
        assert call(ones())[0] == 2
    in_thread(comm.barrier)
    evaluate([1, 2], comm)
    note_unkept(comm, "a step")
    assert (journal.encoded(), journal.ends_growing) == (encoded, None)


@on_each_rank(2)
def test_a_journal_is_sent_once_it_is_whole(comm):
    journal = keep_calls(comm)
    assert not journal.is_whole
    with pytest.raises(rr.ConfigError, match="before training has begun"):
        journal.encoded()
    begin_training(comm)
    assert journal.is_whole
    journal.end_growing("the program has said so")
    assert not journal.is_whole


def test_methods_that_something_else_replaces_meanwhile_are_called(monkeypatch):
    """As a profiler does; with any names of arguments."""
    calls, broadcast = [], rr.Communicator.broadcast_object

    def replaced(*args):
        calls.append(args[1:])
        return broadcast(*args)

    def work(comm):
        journal = keep_calls(comm)
        comm.barrier()
        monkeypatch.setattr(rr.Communicator, "broadcast_object", replaced)
        comm.barrier()
        assert comm.broadcast_object(7, 0) == 7
        begin_training(comm)
        return journal.encoded()

    first, second = ring_of_threads(2, work)
    assert calls == [(7, 0)] * 2
    assert first == second
    with newcomer(first, size=2) as comm:
        comm.barrier()
        comm.barrier()
        assert comm.broadcast_object(root=0) == 7


def test_variables_get_their_values_of_now():
    """The first rank knows which, by the number of the call; their values of then are not sent."""
    kept = {}

    def job(comm, *variables):
        comm.barrier()
        return broadcast_variables([*variables[:1]], comm, state=[*variables[1:]])

    def work(comm):
        journal, variables = keep_calls(comm), [np.full(999, 7.0), np.full(2, 8.0)]
        job(comm, *variables)
        begin_training(comm)
        variables[1][:] = 9
        [(number, known)] = journal.all_variables().items()
        assert number == 1
        assert all(map(np.shares_memory, known, variables))
        kept[comm.rank] = journal
        return journal.encoded()

    encoded = ring_of_threads(2, work)[0]
    assert len(encoded) < 200

    def gives(number, variables):
        for variable, now in zip(variables, kept[0].all_variables()[number], strict=True):
            variable[:] = now
        return variables[1:]

    with newcomer(encoded, size=2, gives=gives) as comm:
        variables = [np.zeros(999), np.zeros(2)]
        assert job(comm, *variables) == [variables[1]]
        assert (variables[0][0], variables[1][0]) == (7, 9)
        begin_training(comm)


def test_a_root_that_comes_back_has_what_it_sent():
    """Its own object, if it is the same; of an array that is only read, the same values."""

    class Own(dict):
        pass

    def job(comm, value, array):
        return comm.broadcast_object(value, 1), comm.broadcast(array, 1)

    read_only = np.arange(3)
    read_only.flags.writeable = False
    _, (encoded, _) = kept_by(2, lambda comm: job(comm, Own(a=1), np.arange(3)))
    with newcomer(encoded, size=2) as comm:
        assert type(job(comm, Own(a=1), read_only)[0]) is Own
    with newcomer(encoded, size=2) as comm:
        value, array = job(comm, Own(a=2), np.zeros(3, int))
        assert (value, array.tolist()) == ({"a": 1}, [0, 1, 2])
    read_only = np.zeros(3, int)
    read_only.flags.writeable = False
    with newcomer(encoded, size=2) as comm, pytest.raises(rr.ArrayError, match="read-only"):
        job(comm, 1, read_only)


def test_arguments_that_a_call_refuses_are_refused_at_a_newcomer_too():
    _, (encoded, _) = kept_by(2, lambda comm: comm.broadcast_object(1))
    with newcomer(encoded, size=2) as comm:
        for call in (
            lambda: comm.broadcast_object(1, 2),
            lambda: comm.all_reduce(ones(), "average"),
            lambda: comm.gather(ones(), "one"),
        ):
            with pytest.raises(rr.ArrayError):
                call()
        with pytest.raises(TypeError):
            comm.broadcast_object(1, 2, 3)


def test_calls_of_tensors_may_be_made_until_training_begins():
    """Which ask before they take a number."""
    _, (encoded, _) = kept_by(2, lambda comm: comm.barrier())
    with newcomer(encoded, size=2) as comm:
        check(comm)
        comm.barrier()
        begin_training(comm)
        with pytest.raises(rr.MismatchError, match="before it has joined"):
            check(comm)


@pytest.mark.parametrize("encoded", [b"", b"\xc1", b"\x91\x01", b"\x91\x92\xa1a\xa1b"])
def test_other_bytes_are_no_journal(encoded):
    with pytest.raises(rr.ProtocolError, match="no journal of ringreduce"):
        Replay.of(encoded, lambda *_: [])


@pytest.mark.parametrize(("elastic", "door"), [("", "a"), ("1", ""), ("1", "a")])
def test_jobs_to_which_no_rank_can_come_back_keep_nothing(monkeypatch, elastic, door):
    """Nor has the communicator any method in place of one of its class; nor in a rank's child."""
    monkeypatch.setenv("RINGREDUCE_ELASTIC", elastic)
    monkeypatch.setenv("RINGREDUCE_DOOR", door)

    def work(comm):
        if comm.rank == 0:
            rr.shutdown()
            monkeypatch.setattr(process, "Communicator", lambda config: comm)
            assert rr.init(**CONFIG) is comm
            rr.shutdown()
        journal = journal_of(comm)
        assert (journal is not None) == bool(elastic and door and comm.rank == 0)
        assert ("barrier" in vars(comm)) == (journal is not None)
        return True

    ring_of_threads(2, work)


CONFIG = {"rank": 0, "size": 2, "rendezvous": "127.0.0.1:9", "job_id": "a"}
