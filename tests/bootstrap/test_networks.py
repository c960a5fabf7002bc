"""Rings across hosts with several networks, of which some lead nowhere."""

import logging
import socket

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.communicator.reforming import reform
from ringreduce.transport.address import split_host
from tests import hosts

pytestmark = pytest.mark.full

TWO = {
    name: {"one": [f"10.1.0.{number}/24"], "two": [f"10.2.0.{number}/24"]}
    for number, name in enumerate("abc", 1)
}


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    hosts.require()


def use(comm: rr.Communicator) -> list[float]:
    """Everything that opens connections."""
    found = [float(comm.all_reduce(np.ones(100_000))[0])]
    rank, size = comm.rank, comm.size
    received = np.zeros(10)
    if rank == 0:
        comm.send(np.full(10, 7.0), size - 1)
    elif rank == size - 1:
        comm.recv(received, 0)
    found.append(float(received[0]))
    group = comm.split(rank % 2)
    found.append(float(group.all_reduce(np.ones(10))[0]))
    reform(comm, [])
    found.append(float(comm.all_reduce(np.ones(100_000))[0]))
    return found


EXPECTED = [[3.0, 0.0, 2.0, 3.0], [3.0, 0.0, 1.0, 3.0], [3.0, 7.0, 2.0, 3.0]]


def test_ranks_find_the_network_that_leads_somewhere(caplog):
    """The one that leads nowhere is tried first: it is the only one with a subnet."""
    caplog.set_level(logging.INFO, "ringreduce")
    layout = {name: {**has, "one": [has["one"][0][:-2] + "32"]} for name, has in TWO.items()}
    with hosts.connected(layout, cut=["two"]) as three:
        for name in layout:
            three.ip(name, "route add 10.1.0.0/24 dev eth0")
        assert three.ring("10.1.0.1:20000", use) == EXPECTED
    assert "[0/3] reaches rank 1 at 10.1.0.2 (it has 10.2.0.2, 10.1.0.2)" in caplog.text


@pytest.mark.parametrize(
    ("patterns", "found"),
    [("eth1", "10.2.0.1/24"), ("10.2.0.0/16", "10.2.0.1/24"), ("^eth0", "10.2.0.1/24")],
)
def test_a_chosen_interface_alone_is_used(patterns, found, caplog):
    """Also on rank 0, where another one has the rendezvous."""
    caplog.set_level(logging.INFO, "ringreduce")

    def work(comm):
        total = float(comm.all_reduce(np.ones(10))[0])
        link = comm._session.collectives._link  # type: ignore[attr-defined]
        return total, [split_host(each.endpoints[0])[0] for each in link.sockets.incoming]

    pair = {name: TWO[name] for name in ("a", "b")}
    with hosts.connected(pair) as two:
        results = two.ring("10.1.0.1:20000", work, iface=patterns)
    assert results == [(2.0, ["10.2.0.1"]), (2.0, ["10.2.0.2"])]
    assert f"[0/2] listens on {found}" in caplog.text


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with hosts.connected({"a": TWO["a"], "b": TWO["b"]}) as two:
        error, _ = two.ring(
            "10.1.0.1:20000", use, {"iface": "eth7"}, {}, join_timeout_s=1.0, secret="x" * 16
        )
    assert isinstance(error, rr.ConfigError)
    assert "RINGREDUCE_IFACE=eth7: eth7 matches no address of this host" in str(error)
    assert "there are eth0 10.1.0.1/24, eth1 10.2.0.1/24" in str(error)


def test_an_address_that_every_host_has_is_not_taken_for_the_others():
    """As of docker0. The ports are the same too, so a rank would connect to itself."""
    layout = {name: {"one": TWO[name]["one"], "two": ["172.17.0.1/16"]} for name in ("a", "b", "c")}
    with hosts.connected(layout, cut=["two"]) as three:
        assert three.ring("10.1.0.1:20000", use, ports="20001-20040") == EXPECTED


def test_hosts_with_ipv6_alone():
    layout = {
        name: {"one": [f"fd00:1::{number}/64"]} for number, name in enumerate(("a", "b", "c"), 1)
    }
    with hosts.connected(layout) as three:
        assert three.ring("[fd00:1::1]:20000", use) == EXPECTED


def test_a_name_with_several_addresses(monkeypatch):
    """Of which one is old, and one leads nowhere."""
    real = socket.getaddrinfo

    def ask(host, port, *more, **options):
        wanted = ("10.1.0.77", "10.2.0.1", "10.1.0.1") if host == "node7" else (host,)
        return [each for one in wanted for each in real(one, port, *more, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    with hosts.connected(TWO, cut=["two"]) as three:
        assert three.ring("node7:20000", use) == EXPECTED


def test_a_firewall_that_drops_all_but_the_port_range():
    with hosts.connected({name: {"one": has["one"]} for name, has in TWO.items()}) as three:
        for name in three.names:
            # Replies pass; what is sent to other ports goes where nobody is.
            three.ip(name, "link add lost type veth peer name unused")
            three.ip(name, "link set lost up")
            three.ip(name, "link set unused up")
            for number in (1, 2, 3):
                if not TWO[name]["one"][0].startswith(f"10.1.0.{number}/"):
                    gone = f"10.1.0.{number} lladdr 02:00:00:00:00:99 dev lost nud permanent"
                    three.ip(name, f"neighbour add {gone}")
            three.ip(name, "rule add pref 10 ipproto tcp sport 20000-20063 lookup main")
            three.ip(name, "rule add pref 11 ipproto tcp dport 20000-20063 lookup main")
            three.ip(name, "rule add pref 12 ipproto tcp lookup 100")
            three.ip(name, "route add default dev lost table 100")
        assert three.ring("10.1.0.1:20000", use, ports="20001-20063") == EXPECTED
        errors = three.ring("10.1.0.1:20000", use)
    for rank, error in enumerate(errors):
        assert isinstance(error, rr.RendezvousError)
        assert f"rank {rank} of 3 cannot form the ring" in str(error)
    tables = [str(error).split("\n")[1:-1] for error in errors]
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0]) == 1 + 3 * 2  # each rank is a neighbour of both others
    assert all("no answer in" in line and len(line) <= 80 for line in tables[0][1:])


def test_all_ranks_say_who_cannot_reach_whom_and_why():
    with hosts.connected(TWO, cut=["two"]) as three:
        three.ip("b", "route add unreachable 10.1.0.3/32")
        errors = three.ring("10.1.0.1:20000", use)
    for error in errors:
        assert isinstance(error, rr.RendezvousError)
        table = str(error).split("\n")[1:-1]
        assert [line.split()[:4] for line in table[:1]] == [["from", "to", "at", "why"]]
        rows = [line.split(maxsplit=5) for line in table[1:]]
        assert [row[:4] for row in rows] == [["1", "b", "2", "c"]] * 2 + [["2", "c", "1", "b"]] * 2
        assert [row[4].partition(":")[0] for row in rows[:2]] == ["10.1.0.3", "10.2.0.3"]
        assert rows[0][5] == "no route"
        assert all(row[5].startswith("no answer in") for row in rows[1:])
        assert max(map(len, table)) <= 80
        assert error.peer == 2
