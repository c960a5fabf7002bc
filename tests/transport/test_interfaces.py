"""Where ranks meet and listen: names that mean several hosts, or this one alone."""

import errno
import logging
import socket
from typing import Any

import pytest

import ringreduce as rr
from ringreduce.transport.address import is_literal, resolve
from ringreduce.transport.interfaces import local_addresses, meeting_hosts, own_networks


@pytest.fixture
def named(monkeypatch):
    """Makes node7 a name of these addresses."""

    def name(*hosts):
        real = socket.getaddrinfo

        def ask(host, port, *more, **options):
            wanted = hosts if host == "node7" else (host,)
            return [each for one in wanted for each in real(one, port, *more, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", ask)

    return name


def config(rank: int, rendezvous: str = "node7:4000", **settings: Any) -> rr.Config:
    return rr.Config(rank=rank, size=2, rendezvous=rendezvous, job_id="ours", **settings)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_means_this_host_alone_is_refused_in_a_job_of_several(named, rank):
    named("127.0.1.1")
    with pytest.raises(rr.ConfigError) as caught:
        own_networks(config(rank, local_size=1))
    text = str(caught.value)
    assert "node7 in RINGREDUCE_RENDEZVOUS is 127." in text
    assert "which other hosts cannot reach. Set it on all ranks to an address of rank 0" in text


def test_a_name_that_may_mean_this_host_alone_is_a_warning_on_rank_0(named, caplog):
    named("127.0.1.1")
    for rank, settings in ((1, {}), (0, {"local_size": 2})):
        own_networks(config(rank, **settings))
    own_networks(config(0, "localhost:4000"))
    assert not caplog.records
    assert own_networks(config(0)) == ("127.0.1.1/8",)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "node7 in RINGREDUCE_RENDEZVOUS is 127.0.1.1 here" in record.getMessage()


def test_of_the_addresses_of_a_name_loopback_comes_last(named):
    named("127.0.1.1", "192.0.2.7", "127.0.0.1", "2001:db8::7")
    assert resolve(config(0)) == (("192.0.2.7", "2001:db8::7"), 4000)
    named("127.0.1.1", "127.0.0.1")
    assert resolve(config(0)) == (("127.0.1.1",), 4000)


def test_rank_0_listens_at_those_of_its_own_host(named):
    named("192.0.2.77", "2001:db8::7")
    with pytest.raises(rr.RendezvousError) as caught:
        meeting_hosts(config(0))
    assert "192.0.2.77, 2001:db8::7 is not an address of this host, which has" in str(caught.value)
    assert "Set RINGREDUCE_RENDEZVOUS on all ranks to one of rank 0's own" in str(caught.value)


def test_no_address_is_refused_for_want_of_descriptors(monkeypatch):
    def exhausted(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", exhausted)
    assert meeting_hosts(config(0, "127.0.0.1:4000")) == ("127.0.0.1",)


def test_addresses_of_this_host():
    assert "127.0.0.1/8" in {address.network for address in local_addresses()}


def test_names_that_mean_the_same_to_everybody():
    same = ("10.0.0.4", "fe80::1%eth0", "localhost", "localhost.localdomain", "job.localhost.")
    assert all(map(is_literal, (*same, "ip6-localhost")))
    assert not any(map(is_literal, ("node7", "notlocalhost")))
