"""Rendezvous names of a cluster's pods: known seconds later, or still those of the pods before."""

import logging
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.transport.interfaces import await_name

NAME = "job-0.pods"
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
OWN = "127.0.0.1"
# Of this host too, but nobody listens there.
OLD = "127.0.0.99"
# Of no host, by RFC 5737.
ELSEWHERE = "192.0.2.77"


class Names:
    """Gives each thread that asks for NAME `answers` one after the other, then OWN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str | OSError) -> None:
        self.answers: dict[str, list[str | OSError]] = {}
        self._default = answers
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._ask)

    def give(self, thread: str, answers: Sequence[str | OSError]) -> None:
        self.answers[thread] = list(answers)

    def _ask(self, host: str, port: int, *more: Any, **options: Any) -> list[Any]:
        if host != NAME:
            return self._real(host, port, *more, **options)
        left = self.answers.setdefault(threading.current_thread().name, list(self._default))
        answer = left.pop(0) if left else OWN
        if isinstance(answer, OSError):
            raise answer
        return self._real(answer, port, *more, **options)


def config(rank: int, port: int = 4000, **settings: Any) -> rr.Config:
    common = {"job_id": "ours", "join_timeout_s": 10.0, "rendezvous": f"{NAME}:{port}", **settings}
    return rr.Config(rank=rank, size=2, **common)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_is_not_known_yet_is_awaited(rank, monkeypatch, caplog):
    names = Names(monkeypatch, UNKNOWN)
    await_name(config(rank))
    assert names.answers == {threading.current_thread().name: []}
    (text,) = warnings(caplog)
    assert text == (
        f"[{rank}/2] waits for the rendezvous job-0.pods:4000, up to 10 s: the name does not "
        "resolve ([Errno -2] Name or service not known)"
    )


def test_rank_0_waits_until_the_name_is_its_own_again(monkeypatch, caplog):
    names = Names(monkeypatch, ELSEWHERE)
    await_name(config(0))
    assert names.answers == {threading.current_thread().name: []}
    assert f"{ELSEWHERE} is not an address of this host" in warnings(caplog)[0]


@pytest.mark.parametrize("rendezvous", [f"{ELSEWHERE}:4000", f"{'a' * 64}.example:4000"])
def test_what_can_never_be_is_not_awaited(rendezvous, caplog):
    await_name(config(0, rendezvous=rendezvous))
    assert not caplog.records


def test_a_ring_forms_once_its_name_leads_to_rank_0(monkeypatch):
    """Rank 1 asks three times before it connects to what the name means by then."""
    names = Names(monkeypatch)
    with socket.create_server((OWN, 0)) as listener, ThreadPoolExecutor(1, "rank 1") as pool:
        port = listener.getsockname()[1]
        names.give("rank 1_0", [UNKNOWN, *[OLD] * 4])
        joined = pool.submit(rr.Communicator, config(1, port))
        with rr.Communicator(config(0, port, rendezvous_fd=listener.detach())) as first:
            second = joined.result()
            total = pool.submit(second.all_reduce, np.ones(1))
            assert first.all_reduce(np.ones(1)) == 2
            assert total.result() == 2
            pool.submit(second.close)
    assert names.answers["rank 1_0"] == []


def test_without_a_way_to_the_rendezvous_the_reason_is_said():
    with pytest.raises(rr.RendezvousError, match=r"cannot reach .*: (Perm|Network is unr)"):
        rr.Communicator(config(1, rendezvous="255.255.255.255:4000", secret="x" * 16))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_never_resolves_is_an_error_at_the_join_limit(rank, monkeypatch, caplog):
    Names(monkeypatch, *[UNKNOWN] * 50)
    with pytest.raises(rr.RendezvousError, match=f"cannot reach the rendezvous {NAME}:4000: Name"):
        rr.Communicator(config(rank, join_timeout_s=0.5))
    assert len(warnings(caplog)) == 1
