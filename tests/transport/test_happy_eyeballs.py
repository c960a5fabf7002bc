"""The race of connections to the addresses of ranks, and sockets that listen at several."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

import ringreduce as rr
from ringreduce.pure.networks import Unreached
from ringreduce.transport import listening
from ringreduce.transport.address import address
from ringreduce.transport.listening import Bind, listen
from ringreduce.transport.routes import first_to_answer


@contextlib.contextmanager
def listener(host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    with socket.create_server((host, 0)) as opened:
        yield opened.getsockname()[:2]


@pytest.fixture
def closed():
    """A port where nobody listens, and nobody can."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()


@pytest.fixture
def silent():
    """A port that answers nobody: its queue is full."""
    with socket.socket() as opened, contextlib.ExitStack() as stack:
        opened.bind(("127.0.0.1", 0))
        opened.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(opened.getsockname())
        yield opened.getsockname()


def run(ways, limit_s=5.0):
    """The hosts that were found, by rank, and what failed."""
    return first_to_answer(0, ways, limit_s, lambda: None)


def test_each_rank_is_found_at_its_best_address(closed):
    with listener() as first, listener("127.0.0.2") as second:
        threads = threading.active_count()
        found, failed = run({1: [first, second], 2: [closed, second], 3: [second]})
        assert threading.active_count() == threads
    assert (found, failed) == ({1: "127.0.0.1", 2: "127.0.0.2", 3: "127.0.0.2"}, [])
    assert run({}) == ({}, [])


def test_an_address_that_is_silent_costs_the_start_of_the_next(silent):
    with listener("127.0.0.2") as good:
        started = time.monotonic()
        assert run({1: [silent, good]}) == ({1: "127.0.0.2"}, [])
    assert time.monotonic() - started < 2


def test_a_rank_that_is_not_reached_is_reported_with_each_address(closed, silent):
    with listener() as good:
        found, failed = run({1: [closed, silent], 2: [good]}, 0.15)
    assert found == {2: "127.0.0.1"}
    due = [Unreached(0, 1, address(*closed), "refused")]
    due += [Unreached(0, 1, address(*silent), "no answer in 0.15 s")]
    assert sorted(failed) == sorted(due)


def test_what_answers_while_this_thread_has_no_time_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as opened:
        way = opened.getsockname()
        found, _ = first_to_answer(0, {1: [way]}, 0.0, lambda: opened.accept()[0].close())
    assert found == {1: "127.0.0.1"}


def test_a_check_ends_the_race(silent):
    def check():
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        first_to_answer(0, {1: [silent]}, 5.0, check)


def names(bind: Bind) -> list[tuple[str, int]]:
    """Where a rank that is to listen there does so."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(each) for each in listen(bind, rank=0, size=2)]
        return [each.getsockname() for each in opened]


def test_one_port_at_every_address():
    hosts, ports = zip(*names(Bind(("127.0.0.1", "127.0.0.2", "127.0.0.3"))), strict=True)
    assert hosts == ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    assert len(set(ports)) == 1


def test_a_port_that_is_taken_at_one_address_is_passed_over():
    with listener("127.0.0.2") as (_, port):
        bind = Bind(("127.0.0.1", "127.0.0.2"), range(port, min(port + 50, 65536)))
        (_, first), (_, second) = names(bind)
    assert first == second > port


def test_without_a_free_port_the_error_says_how_many_are_needed():
    with listener() as (_, port):
        bind = Bind(("127.0.0.1",), range(port, port + 1), 3)
        with pytest.raises(rr.RendezvousError) as caught:
            listen(bind, rank=1, size=2)
    text = str(caught.value)
    assert f"no free port among the 1 of RINGREDUCE_PORTS={port}-{port}" in text
    assert "needs 3 to form the ring" in text


def test_an_address_of_another_host_is_refused():
    with pytest.raises(rr.RendezvousError, match=r"cannot listen on 203\.0\.113\.1: .* assign"):
        listen(Bind(("203.0.113.1",)), rank=0, size=2)


def test_a_port_that_is_taken_at_another_address_is_not_chosen(monkeypatch):
    """Of free ports the system knows those of the first address only."""
    bind, tried = listening._listen_at, []

    def listen_at(hosts, port):
        with contextlib.ExitStack() as stack:
            if len(tried) < 3:
                [first] = bind(hosts[:1], port)
                port = stack.enter_context(first).getsockname()[1]
                first.close()
                stack.enter_context(socket.create_server((hosts[1], port)))
            tried.append(port)
            return bind(hosts, port)

    monkeypatch.setattr(listening, "_listen_at", listen_at)
    assert len({port for _, port in names(Bind(("127.0.0.1", "127.0.0.2")))}) == 1
    assert len(tried) == 4
