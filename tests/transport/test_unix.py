"""Ranks of one host: which processes they are, and how they pass each other their memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ringreduce as rr
from ringreduce.communicator.reforming import reform
from ringreduce.effects import native
from ringreduce.testing import ring_of_threads
from ringreduce.transport import unix
from ringreduce.transport.unix import Mesh, _identified, end_process
from tests.rings import outcome


def test_a_process_is_ended_only_if_it_began_when_that_rank_did():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = _identified(child.pid)
        assert process[0] == child.pid
        assert not end_process((child.pid, process[1] - 1))
        assert child.poll() is None
        assert end_process(process)
        assert child.wait(10) == -signal.SIGKILL
    assert _identified(child.pid) is None
    assert not end_process(process)


class Meshes:
    """Meshes of some ranks, connected in threads by `connect`; closed with all that they got."""

    def __init__(self, count: int, timeout_s: float = 5.0) -> None:
        self.made = [Mesh() for _ in range(count)]
        self.memory = [os.memfd_create(f"of {index}") for index in range(count)]
        self._timeout_s = timeout_s
        self.results: list[Any] = []
        self.checked = threading.Event()  # by a rank but the first

    def _connect(self, index: int) -> Any:
        return self.made[index].connect(
            {rank: mesh.name for rank, mesh in enumerate(self.made)},
            rank=index,
            size=len(self.made),
            job=7,
            descriptor=self.memory[index],
            standing=self.memory[index],
            timeout_s=self._timeout_s,
            check=self.checked.set if index else lambda: None,
        )

    @contextlib.contextmanager
    def connecting(self, *ranks: int) -> Iterator[None]:
        """These ranks connect meanwhile; `results` has each one's descriptors, or its error."""
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = [pool.submit(outcome, lambda r=rank: self._connect(r)) for rank in ranks]
            yield
        self.results += [each.result() for each in found]

    def connect(self, *ranks: int) -> list[Any]:
        with self.connecting(*ranks):
            pass
        return self.results[-len(ranks) :]

    def __enter__(self) -> Meshes:
        return self

    def __exit__(self, *_: object) -> None:
        for mesh in self.made:
            mesh.close()
        for descriptor in self.memory:
            os.close(descriptor)
        for result in self.results:
            for descriptor in result.values() if isinstance(result, dict) else ():
                os.close(descriptor)


def test_mesh_passes_each_rank_everybodys_memory():
    with Meshes(4) as meshes:
        own = [os.fstat(descriptor).st_ino for descriptor in meshes.memory]
        for index, result in enumerate(meshes.connect(0, 1, 2, 3)):
            assert not any(os.get_inheritable(descriptor) for descriptor in result.values())
            inodes = {other: os.fstat(descriptor).st_ino for other, descriptor in result.items()}
            assert inodes == {other: inode for other, inode in enumerate(own) if other != index}
        assert all(mesh.gone() == set() for mesh in meshes.made)
        meshes.made[2].close()
        assert meshes.made[0].gone() == {2}


STRANGERS = {
    "says nothing": b"",
    "says what is no hello": b"GET / HTTP/1.1\r\n\r\n-------",
    "is of another job": struct.pack("<8sQQ", b"RRR-UNIX", 8, 1),
    "claims a rank that does not exist": struct.pack("<8sQQ", b"RRR-UNIX", 7, 2**63),
    "claims the rank it speaks to": struct.pack("<8sQQ", b"RRR-UNIX", 7, 0),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_mesh_turns_a_stranger_away_and_goes_on(what):
    with Meshes(2) as meshes, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{meshes.made[0].name}")
        if STRANGERS[what]:
            socket.send_fds(stranger, [STRANGERS[what]], [meshes.memory[1]] * 2)
        else:
            stranger.shutdown(socket.SHUT_WR)
        assert all(isinstance(result, dict) for result in meshes.connect(0, 1))


# Fills the queues of the sockets that it is told of, as any user of the host can, and says so. Then
# it goes, or stays until its standard input ends.
FILL = """
import os, resource, socket, sys
user, stays = map(int, sys.argv[1:])
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
if user != os.geteuid():
    os.setuid(user)
kept = []
for name in sys.stdin:
    while True:
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].setblocking(False)
        try:
            kept[-1].connect(f"\\0{name.strip()}")
        except BlockingIOError:
            break
    if not stays:
        [each.close() for each in kept]
        kept.clear()
    print("full", flush=True)
"""
NOBODY = 65534
FILLING = {
    "this user, and stays": (os.geteuid(), True),
    "this user, and has gone": (os.geteuid(), False),
    "another user, and stays": (NOBODY, True),
    "another user, and has gone": (NOBODY, False),
}


class Filler:
    """A process that fills the queues of sockets: whose, and whether it stays, as `who` says."""

    def __init__(self, who: str) -> None:
        user, stays = FILLING[who]
        if user != os.geteuid() and os.geteuid() != 0:
            pytest.skip("only root can become another user")
        command = [sys.executable, "-c", FILL, str(user), str(int(stays))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()

    def fill(self, name: str) -> None:
        with self._lock:
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()
            assert self._process.stdout.readline() == b"full\n"

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=10)


@pytest.mark.parametrize("who", FILLING)
def test_ranks_meet_though_strangers_have_filled_all_queues(who, caplog):
    with Filler(who) as filler, Meshes(3) as meshes:
        for mesh in meshes.made:
            filler.fill(mesh.name)
        results = meshes.connect(0, 1, 2)
    assert [sorted(result) for result in results] == [[1, 2], [0, 2], [0, 1]]
    warnings = [text for text in caplog.messages if "turned away a connection of user" in text]
    assert len(warnings) == (3 if "another" in who else 0)  # Once on each rank.


@pytest.mark.parametrize("who", ["this user, and stays", "another user, and has gone"])
def test_a_queue_that_stays_full_is_an_error_in_time_that_names_the_rank_and_the_cause(who):
    """As that of a rank that was stopped, or never accepts."""
    with Filler(who) as filler, Meshes(3, timeout_s=0.5) as meshes:
        filler.fill(meshes.made[2].name)
        for error in meshes.connect(0, 1):
            assert isinstance(error, rr.RendezvousError)
            assert error.peer == 2
            socket_of = f"could not share memory with rank 2: its socket @{meshes.made[2].name}"
            assert f"{socket_of} had no room in 0.5 s" in str(error)
            assert "no ranks of the job fill its queue" in str(error)
        assert meshes.checked.is_set()


@pytest.mark.parametrize("who", ["this user, and stays", "another user, and has gone"])
def test_rings_groups_and_rings_formed_anew_form_though_each_queue_is_filled(who, monkeypatch):
    if native.library() is None:
        pytest.skip(native.why_missing())
    names: list[str] = []
    make = Mesh.__init__

    def make_and_fill(mesh: Mesh) -> None:
        make(mesh)
        names.append(mesh.name)
        filler.fill(mesh.name)

    def work(comm: rr.Communicator) -> list[Any]:
        group = comm.split(0)
        found = [each.all_gather_object(comm.rank) for each in (comm, group)]
        reform(comm, [])
        return [*found, comm.all_gather_object(comm.rank), comm.transport]

    monkeypatch.setattr(Mesh, "__init__", make_and_fill)
    with Filler(who) as filler:
        assert ring_of_threads(2, work) == [[[0, 1]] * 3 + ["shm"]] * 2
    assert len(names) == 2 * 3


def test_mesh_of_another_user_is_turned_away(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unix.is_ours(ours)  # as the kernel says
    monkeypatch.setattr(unix, "is_ours", lambda connection: False)
    with Meshes(2, timeout_s=0.5) as meshes:
        assert all(isinstance(result, rr.RendezvousError) for result in meshes.connect(0, 1))


def test_rank_that_never_comes_is_named_with_a_remedy():
    with Meshes(3, timeout_s=0.5) as meshes:
        error, _ = meshes.connect(0, 1)
        assert "could not share memory with rank 2" in str(error)
        assert "RINGREDUCE_HOST_ID" in str(error)
        assert error.peer == 2


def test_rank_that_ends_before_it_connects_is_not_waited_for():
    with Meshes(2, timeout_s=60.0) as meshes:
        started = time.monotonic()
        with meshes.connecting(0), meshes.made[1]._listener.accept()[0] as connection:
            connection.recv(100)
        assert time.monotonic() - started < 10
        assert "could not share memory with rank 1: it has ended" in str(meshes.results[0])


def test_a_rank_that_waits_for_an_answer_goes_on_checking():
    with Meshes(2) as meshes, meshes.connecting(1):
        assert meshes.checked.wait(5)
        meshes.connect(0)
