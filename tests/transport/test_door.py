"""Newcomers meet the job at the first rank's door: the right ones alone, and none waits long."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import ringreduce as rr
from ringreduce._version import __version__
from ringreduce.commands.launch.frames import MAGIC, NONCE_BYTES, Channel
from ringreduce.pure.arrivals import (
    Ended,
    FromDoor,
    Here,
    Knock,
    Ready,
    Refusal,
    ToDoor,
    Welcome,
)
from ringreduce.pure.views import Row, View
from ringreduce.transport import door as door_module
from ringreduce.transport import inherited
from ringreduce.transport.door import Door, JobEndedError, Visit, knock
from ringreduce.transport.security import Security
from ringreduce.vocabulary.config import TIMES, Config
from tests.fuzzing import mutate_bytes
from tests.processes import Process, clean_environment, wait_until

SIZE, SECRET = 4, "s" * 32
WELCOME = Welcome(
    number=7,
    size=SIZE,
    hosts=("a",) * SIZE,
    domains=("",) * SIZE,
    standbys=("",) * SIZE,
    keys=("",) * SIZE,
    networks=((),) * SIZE,
    view=View(3, (0, 2)),
    facts={"steps": 12},
)
KNOCK = Knock(__version__, "a job", 1, 1)
SOON_S = 5.0  # for what takes a millisecond, on a busy machine


def config_of(rank: int, secret: str = SECRET) -> Config:
    return Config(rank=rank, size=SIZE, rendezvous="127.0.0.1:1", job_id="a job", secret=secret)


def security_of(rank: int, secret: str = SECRET) -> Security:
    return Security.of(config_of(rank, secret))


def new_name() -> str:
    return f"ringreduce-test-{secrets.token_hex(8)}"


def row_of(place: int, life: int = 1) -> Row:
    return Row(place, life, "a", "", "tcp://127.0.0.1:9")


@contextlib.contextmanager
def opened(
    name: str,
    welcome: Callable[[Knock], Welcome | Refusal] = lambda knock: WELCOME,
    check_ready: Callable[[Ready], Refusal | None] = lambda ready: None,
    *,
    secret: str = SECRET,
    **limits: int,
) -> Iterator[Door]:
    security = security_of(0, secret)
    door = Door(name, security, config_of(0, secret), welcome, check_ready, **limits)
    try:
        yield door
    finally:
        door.close()


@pytest.fixture
def name() -> str:
    return new_name()


@pytest.fixture
def come(name: str) -> Iterator[Callable[..., Visit]]:
    """Come as a newcomer; it leaves when the test ends."""
    with contextlib.ExitStack() as undo:

        def coming(place: int = 1, life: int = 1, timeout_s: float = SOON_S, **how: Any) -> Visit:
            security = security_of(place, how.pop("secret", SECRET))
            limits = {"bytes_max": how.pop("bytes_max")} if "bytes_max" in how else {}
            fields = {"version": __version__, "job_id": "a job", "place": place, "life": life}
            _, visit = knock(name, security, Knock(**fields | how), timeout_s, **limits)
            undo.callback(visit.close)
            return visit

        yield coming


def ready(visit: Visit, place: int = 1, life: int = 1, **facts: Any) -> Visit:
    visit.ready(row_of(place, life), facts, SOON_S)
    return visit


def has_been_told(visit: Visit) -> Exception:
    """The error with which a visit ends, once it does."""
    assert select.select([visit], [], [], SOON_S)[0]
    with pytest.raises(rr.RingReduceError) as caught:
        visit.check()
    return caught.value


def are_ready(door: Door, *rows: Row) -> None:
    wait_until(lambda: door.ready() == rows, f"{rows} to be ready", SOON_S)


class Stranger:
    """A connection by hand, from its opening on."""

    def __init__(self, name: str, secret: str = "", **limits: int) -> None:
        wait_until(lambda: self._connected(name), "somebody to listen", SOON_S)
        text = secret or security_of(1).door_secret(name)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.channel = Channel[Any](FromDoor, text, nonce, is_first=True, **limits)
        self.end.settimeout(SOON_S)
        self.come: list[Any] = []

    def _connected(self, name: str) -> bool:
        self.end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.end.connect(f"\0{name}")
        except ConnectionRefusedError:
            self.end.close()
            return False
        return True

    def opens(self) -> None:
        """Exchange nonces."""
        self.end.sendall(self.channel.opening)
        while not self.channel.is_open:
            data = self.end.recv(len(MAGIC) + NONCE_BYTES)
            assert data, "closed before it has begun"
            self.channel.feed(data)

    def sends(self, *records: Any) -> None:
        """Open, and send these, as far as they are read."""
        self.opens()
        with contextlib.suppress(ConnectionError):
            for record in records:
                self.end.sendall(self.channel.encode(record))

    def is_closed(self) -> bool:
        """Read until the other end closes, and nothing that we understand comes; else fails."""
        with contextlib.suppress(ConnectionError):
            while self.end.recv(1 << 16):
                pass
        return True

    def answers(self) -> Any:
        """The next record but those that all are sent; None: it was the last."""
        while not self.come and (data := self.end.recv(1 << 16)):
            records = self.channel.feed(data)
            self.come += [record for record in records if not isinstance(record, Here)]
        return self.come.pop(0) if self.come else None

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()


# --- Newcomers of the job -----------------------------------------------------------------------
def test_a_newcomer_is_welcomed_and_ready_until_it_is_taken_in(name, come):
    knocks, offers = [], []

    def welcome(knock: Knock) -> Welcome:
        knocks.append(knock)
        return WELCOME

    def check(ready: Ready) -> None:
        offers.append(ready)

    with opened(name, welcome, check) as door:
        message = Knock(__version__, "a job", 1, 1, {"digest": "x"})
        answer, visit = knock(name, security_of(1), message, SOON_S)
        with contextlib.closing(visit):
            assert (answer, knocks) == (WELCOME, [message])
            assert door.ready() == ()
            ready(visit, built=True)
            assert offers == [Ready(row_of(1), {"built": True})]
            visit.check()
            ready(come(3), 3)
            assert door.ready() == (row_of(1), row_of(3))
            door.chosen([1])
            assert door.ready() == (row_of(3),)
            visit.check()


def test_one_that_leaves_is_not_ready_any_more(name, come):
    with opened(name) as door:
        visit = ready(come())
        assert door.ready() == (row_of(1),)
        visit.close()
        are_ready(door)
        assert visit.fileno() == -1
        ready(come())  # The same again, as after a connection that was lost.
        assert door.ready() == (row_of(1),)


def test_a_newcomer_comes_without_a_secret_as_the_other_ranks_do(name, come):
    with opened(name, secret="") as door:
        ready(come(secret=""))
        assert door.ready() == (row_of(1),)
        with pytest.raises(rr.RendezvousError, match="it belongs to another job"):
            come(2, secret="", job_id="another")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"version": "0.0.7"}, f"0.0.7, rank 0 has {__version__}: it was changed"),
        ({"job_id": "another"}, "it belongs to another job"),
        ({"place": 0}, "rank 0 is no place that is free in a job of 4"),
    ],
    ids=["version", "job", "place"],
)
def test_what_may_not_come_is_told_why_and_the_callback_is_not_asked(name, come, how, said):
    with opened(name, welcome=pytest.fail) as door:
        with pytest.raises(rr.RendezvousError, match=f"is not taken into the job: .*{said}"):
            come(**how)
        assert door.ready() == ()


def test_what_the_callbacks_refuse_is_refused(name, come):
    living = [1]

    def welcome(knock: Knock) -> Welcome | Refusal:
        return Refusal(f"rank {knock.place} is there") if knock.place in living else WELCOME

    def check(ready: Ready) -> Refusal | None:
        return Refusal("its model differs") if ready.facts["digest"] != 7 else None

    with opened(name, welcome, check) as door:
        with pytest.raises(rr.RendezvousError, match="rank 1 is there") as caught:
            come()
        assert caught.value.rank == 1
        living.clear()
        visit = come()
        with pytest.raises(rr.RendezvousError, match="its model differs"):
            ready(visit, digest=6)
        with pytest.raises(rr.RendezvousError, match="its model differs"):
            visit.check()
        assert door.ready() == ()
        ready(come(), digest=7)
        assert door.ready() == (row_of(1),)


@pytest.mark.parametrize("row", [row_of(2), row_of(1, life=2)], ids=["place", "life"])
def test_nobody_is_ready_by_a_row_that_is_not_its_own(name, come, row):
    with opened(name) as door:
        with pytest.raises(rr.RendezvousError, match="another process"):
            come().ready(row, {}, SOON_S)
        assert door.ready() == ()


def test_of_two_processes_of_a_place_the_later_life_comes(name, come):
    with opened(name) as door:
        first = ready(come(life=2), life=2)
        for life in (1, 2):
            with pytest.raises(rr.RendezvousError, match=f"life 2, not {life}"):
                come(life=life)
        assert door.ready() == (row_of(1, 2),)
        later = come(life=3)
        assert "life 3, and this one is 2" in str(has_been_told(first))
        assert door.ready() == ()
        ready(later, life=3)
        later.close()
        are_ready(door)
        with pytest.raises(rr.RendezvousError, match="life 3, not 2"):
            come(life=2)
        ready(come(life=3), life=3)
        assert door.ready() == (row_of(1, 3),)


def test_a_newcomer_may_be_refused_later(name, come):
    with opened(name) as door:
        visit = ready(come())
        door.refuse(1, "too many have come")
        assert door.ready() == ()
        assert "too many have come" in str(has_been_told(visit))
        door.refuse(1, "nobody is there")


@pytest.mark.parametrize("closes", [False, True])
def test_the_end_of_the_job_is_told_to_those_that_wait_and_those_that_come(name, come, closes):
    with opened(name) as door:
        visits = [come(1), ready(come(2), 2)]
        door.end("the training has ended after 3 epochs")
        assert door.ready() == ()
        if closes:
            door.close()
        for visit in visits:
            error = has_been_told(visit)
            assert isinstance(error, JobEndedError)
            assert "has nothing to do: the training has ended after 3 epochs" in str(error)
        if not closes:
            with pytest.raises(JobEndedError, match="3 epochs"):
                come(3)


def test_a_long_welcome_arrives_whole_and_one_that_is_too_long_is_a_refusal(name, come):
    journal = os.urandom(1 << 16) * 320

    def welcome(knock: Knock) -> Welcome:
        return msgspec.structs.replace(WELCOME, journal=journal[: len(journal) // knock.place])

    with opened(name, welcome, bytes_max=11 << 20) as door:
        message = Knock(__version__, "a job", 2, 1, {"text": "x" * (1 << 17)})
        answer, visit = knock(name, security_of(2), message, SOON_S)
        with contextlib.closing(visit):
            assert answer.journal == journal[: len(journal) // 2]
        with pytest.raises(rr.RendezvousError, match=r"Welcome of \d+ bytes, of which 11534336"):
            come(1)
        are_ready(door)
        with pytest.raises(rr.ConfigError, match=r"has a Knock of \d+ bytes"):
            come(1, facts={"text": b"x" * (12 << 20)}, bytes_max=11 << 20)


# --- Others -------------------------------------------------------------------------------------
def test_one_with_another_secret_is_told_nothing_and_sees_it_at_once(name, come):
    with opened(name, welcome=pytest.fail):
        with pytest.raises(rr.RendezvousError, match="does not know this job's secret") as caught:
            come(secret="another " * 4)
        assert name in str(caught.value)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("whose", ["another secret", "another door"])
def test_who_does_not_know_the_secret_of_this_door_is_not_let_in(name, whose, caplog):
    secret = security_of(1).door_secret("another") if whose == "another door" else "x" * 64
    with opened(name, welcome=pytest.fail), Stranger(name, secret) as stranger:
        stranger.sends(Here(), KNOCK)
        assert stranger.is_closed()
    assert "does not know this job's secret" in caplog.text


BEFORE = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 8,
    "a long frame": MAGIC + bytes(NONCE_BYTES) + (1 << 17).to_bytes(4, "big"),
    "no code": MAGIC + bytes(NONCE_BYTES) + b"\0\0\0\x01\xc0",
    "nothing but the end": b"",
    "a part": MAGIC[:5],
}


@pytest.mark.parametrize("sent", BEFORE)
def test_what_is_no_newcomer_is_closed_and_the_door_stays_open(name, come, sent, monkeypatch):
    monkeypatch.setattr(door_module, "TIMES", replace(TIMES, hello_s=60.0))
    with opened(name) as door:
        with Stranger(name) as stranger:
            stranger.end.sendall(BEFORE[sent])
            if not BEFORE[sent] or sent == "a part":
                stranger.end.shutdown(socket.SHUT_WR)
            assert stranger.is_closed()
        ready(come())
        assert door.ready() == (row_of(1),)


class Odd(msgspec.Struct, tag=True):
    """A record of another version."""


def as_knock(knock: Knock) -> Any:
    return msgspec.defstruct("Knock", [("version", str)], tag=True)(knock.version)


@pytest.mark.parametrize("sent", ["unknown", "other fields", "too long"])
def test_one_of_the_job_that_is_not_understood_is_told_our_version(name, sent):
    limit = 1 << 18
    message = Knock(
        __version__, "a job", 1, 1, {"text": "x" * (limit if sent == "too long" else 0)}
    )
    record = {"unknown": Odd(), "other fields": as_knock(message)}.get(sent, message)
    with opened(name, bytes_max=limit), Stranger(name) as stranger:
        stranger.sends(Here(), record)
        answer = stranger.answers()
        assert isinstance(answer, Refusal)
        assert f"rank 0, which has ringreduce {__version__}, got a record" in answer.text


def test_what_comes_out_of_order_ends_the_connection(name):
    for records in ([Here(), Here()], [Here(), Ready(row_of(1))], [Here(), KNOCK, KNOCK]):
        with opened(name) as door, Stranger(name) as stranger:
            stranger.sends(*records)
            assert stranger.is_closed()
            assert door.ready() == ()


def test_no_changed_record_of_one_that_knows_the_secret_closes_the_door(name, come, chance):
    row = Row(1, 1, "a", "", "tcp://127.0.0.1:9", "", ("10.0.0.4/24",))
    with opened(name) as door:
        for number in range(60):
            data = [*map(msgspec.msgpack.encode, (Here(), KNOCK, Ready(row, {"text": [1, 2]})))]
            data[number % 3] = mutate_bytes(chance, data[number % 3])
            with Stranger(name) as stranger, contextlib.suppress(ConnectionError):
                stranger.opens()
                for each in data:
                    stranger.end.sendall(stranger.channel.seal(each))
                stranger.end.shutdown(socket.SHUT_WR)
                assert stranger.is_closed()
        ready(come(2, life=1 << 60), 2, 1 << 60)  # Later than any that was made by chance.
        are_ready(door, row_of(2, 1 << 60))


def test_one_that_has_gone_before_it_is_read_has_no_place(name, come):
    is_busy, may_go_on = threading.Event(), threading.Event()

    def welcome(knock: Knock) -> Welcome:
        is_busy.set()
        assert may_go_on.wait(SOON_S)
        return WELCOME

    with opened(name, welcome) as door, Stranger(name) as gone, Stranger(name) as other:
        gone.channel.feed(gone.end.recv(len(MAGIC) + NONCE_BYTES))
        other.sends(Here(), KNOCK)
        assert is_busy.wait(SOON_S)
        records = (Here(), Knock(__version__, "a job", 3, 1))
        gone.end.sendall(gone.channel.opening + b"".join(map(gone.channel.encode, records)))
        gone.end.close()
        may_go_on.set()
        ready(come(3), 3)
        assert door.ready() == (row_of(3),)


def test_two_hundred_idle_connections_keep_no_newcomer_waiting(name, come):
    with opened(name) as door:
        with contextlib.ExitStack() as idle:
            strangers = [idle.enter_context(Stranger(name)) for _ in range(200)]
            began = time.monotonic()
            ready(come())
            assert time.monotonic() - began < 1.0
            assert door.ready() == (row_of(1),)
            kept = len(door._visitors)
            assert kept <= 1 + door_module._STRANGERS_MAX
            assert strangers[0].is_closed()
        assert door.ready() == (row_of(1),)


def test_what_says_nothing_has_little_time_and_newcomers_have_all(name, come, monkeypatch):
    monkeypatch.setattr(door_module, "TIMES", replace(TIMES, hello_s=0.2))
    with opened(name) as door:
        visit = ready(come())
        with Stranger(name) as silent, Stranger(name) as half:
            half.end.sendall(MAGIC[:5])
            assert silent.is_closed()
            assert half.is_closed()
        visit.check()
        assert door.ready() == (row_of(1),)


def test_connections_of_other_users_are_closed_unread(name, monkeypatch, caplog):
    with opened(name):
        Stranger(name).end.close()  # It listens.
        monkeypatch.setattr(door_module, "is_ours", lambda connection: False)
        for _ in range(2):
            with Stranger(name) as stranger:
                assert stranger.end.recv(1) == b""
    assert caplog.text.count("turned away") == 1
    assert f"process {os.getpid()} of user {os.geteuid()}" in caplog.text


# --- Doors of others ----------------------------------------------------------------------------
@contextlib.contextmanager
def impostor(name: str, answer: Callable[[socket.socket], None]) -> Iterator[list[bytes]]:
    """Something listens at that name; what newcomers send it, until they close."""
    got: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                with end, contextlib.suppress(OSError):
                    end.settimeout(SOON_S)
                    answer(end)
                    while data := end.recv(1 << 16):
                        got.append(data)

    with (
        ThreadPoolExecutor(1) as threads,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        listener.bind(f"\0{name}")
        listener.listen()
        serving = threads.submit(serve)
        try:
            yield got
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.result(SOON_S)


def reflect(end: socket.socket) -> None:
    while data := end.recv(1 << 16):
        end.sendall(data)


def claim(end: socket.socket) -> None:
    """Answer as a door does, with another secret."""
    channel = Channel[Any](ToDoor, "x" * 64, bytes(NONCE_BYTES), is_first=False)
    end.sendall(channel.opening)
    while not channel.is_open:
        channel.feed(end.recv(1 << 16))
    end.sendall(channel.encode(Here()))


OTHERS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "another secret": (claim, "does not know this job's secret"),
    "garbage": (lambda end: end.sendall(b"SSH-2.0-OpenSSH\r\n" * 4), "is no process of ringreduce"),
    "silent": (lambda end: None, "waited 0.5 s .* did not answer"),
    "closes": (lambda end: end.shutdown(socket.SHUT_RDWR), "waited 0.5 s .* closed the connection"),
    "reflects": (reflect, "waited 0.5 s .* did not answer"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_newcomer_tells_an_impostor_of_the_door_nothing(name, come, kind):
    answer, said = OTHERS[kind]
    with impostor(name, answer) as got, pytest.raises(rr.RendezvousError, match=said):
        come(timeout_s=0.5)
    assert b"a job" not in b"".join(got)


def test_a_newcomer_tells_another_users_process_nothing(name, come, monkeypatch):
    monkeypatch.setattr(door_module, "is_ours", lambda connection: False)
    said = "belongs to another user"
    with impostor(name, lambda end: None) as got, pytest.raises(rr.RendezvousError, match=said):
        come()
    assert got == []


def test_a_job_of_another_version_is_named_with_a_remedy(name, come):
    def answer(end: socket.socket) -> None:
        secret = security_of(0).door_secret(name)
        channel = Channel[Any](ToDoor, secret, bytes(NONCE_BYTES), is_first=False)
        end.sendall(channel.opening)
        while not channel.is_open:
            channel.feed(end.recv(1 << 16))
        end.sendall(channel.encode(Here()) + channel.encode(Odd()))

    said = f"This process has ringreduce {__version__}"
    with impostor(name, answer), pytest.raises(rr.MismatchError, match=said):
        come()


def test_where_nobody_listens_a_newcomer_says_so_after_its_limit(name, come):
    with pytest.raises(rr.RendezvousError, match=f"waited 0.5 s .*nobody listens at @{name}"):
        come(timeout_s=0.5)


# --- The first rank changes ---------------------------------------------------------------------
def test_the_next_first_rank_opens_the_name_when_it_is_free(name, come):
    with opened(name) as first, opened(name) as next_one:
        visit = ready(come())
        with ThreadPoolExecutor(1) as threads:
            door = first if first.ready() else next_one
            other = next_one if door is first else first
            door.close()
            error = has_been_told(visit)
            assert isinstance(error, rr.PeerLostError)
            assert error.peer == 0
            assert "rank 0 has ended, or takes in no newcomers" in str(error)
            with pytest.raises(rr.PeerLostError):
                visit.check()
            again = threads.submit(come, life=1).result(SOON_S)
        ready(again)
        assert other.ready() == (row_of(1),)
        assert door.ready() == ()


def test_while_another_has_the_name_it_is_tried_now_and_then(name, caplog, monkeypatch):
    binds = []

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            binds.append(time.monotonic())
            super().bind(address)

    times = replace(TIMES, reconnect_s=0.05, slow_warning_s=0.1)
    with opened(name):
        Stranger(name).end.close()
        monkeypatch.setattr(door_module, "TIMES", times)
        fake = {**vars(socket), "socket": Socket}
        monkeypatch.setattr(door_module, "socket", types.SimpleNamespace(**fake))
        with opened(name):
            wait_until(lambda: len(binds) >= 5, "five attempts", SOON_S)
    pauses = [after - before for before, after in pairwise(binds)]
    assert min(pauses) >= 0.04
    assert caplog.text.count(f"another process has the socket @{name} still") == 1


JOB = """
import os, signal, sys
from tests.transport.test_door import *

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As programs do that write to pipes.
name, what = sys.argv[1:]


def fork(check):
    # A child that outlives this process must keep nothing of it.
    if os.fork() == 0:
        check()
        print("forked", os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)


def check_door():
    assert door.ready() == ()
    door.refuse(1, "a child's")
    door.close()


def check_visit():
    assert visit.fileno() == -1
    visit.close()


if what == "door":
    door = Door(name, security_of(0), config_of(0), lambda knock: WELCOME, lambda ready: None)
    fork(check_door)  # While the thread opens its socket.
    wait_until(door.ready, "a newcomer")
    fork(check_door)
else:
    _, visit = knock(name, security_of(1), KNOCK, 30.0)
    ready(visit)
    fork(check_visit)
sys.stdin.read()
"""


@contextlib.contextmanager
def process_of(what: str, name: str, directory: Path) -> Iterator[Process]:
    """A process of the door, or a newcomer's that is ready, and children that outlive it."""
    command = [sys.executable, "-c", JOB, name, what]
    path = str(Path(__file__).parents[2])
    environment = clean_environment(PYTHONPATH=path)
    with Process(command, directory, environment=environment, stdin=-1) as process:
        process.wait_shown("forked")
        Stranger(name).end.close()  # It listens.
        try:
            yield process
            assert all(map(psutil.pid_exists, children_of(process)))
        finally:
            for child in children_of(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def children_of(process: Process) -> list[int]:
    return [int(line.split()[1]) for line in process.stdout.splitlines()]


def test_a_fork_waits_while_the_system_makes_a_connection(name, monkeypatch):
    """Else the child would have one that nobody closes in it."""
    waits = []

    class Socket(socket.socket):
        def __init__(self, *how: Any) -> None:
            waits.append(("socket", inherited.opening.locked()))
            super().__init__(*how)

        def accept(self) -> Any:
            waits.append(("accept", inherited.opening.locked()))
            return super().accept()

    fake = {**vars(socket), "socket": Socket}
    monkeypatch.setattr(door_module, "socket", types.SimpleNamespace(**fake))
    with opened(name):
        with Stranger(name) as stranger:
            stranger.opens()
        assert {*waits} == {("socket", True), ("accept", True)}
        assert not inherited.opening.locked()


def test_a_newcomer_that_is_killed_is_not_ready_any_more(name, tmp_path):
    with opened(name) as door, process_of("newcomer", name, tmp_path) as process:
        assert door.ready() == (row_of(1),)
        process.signal(signal.SIGKILL)
        are_ready(door)


def test_when_the_first_rank_is_killed_newcomers_see_it_and_find_the_next(name, tmp_path, come):
    with process_of("door", name, tmp_path) as process, opened(name) as next_one:
        visit = ready(come())
        process.wait_shown("forked", 2)
        process.signal(signal.SIGKILL)
        assert isinstance(has_been_told(visit), rr.PeerLostError)
        visit.close()
        ready(come())
        assert next_one.ready() == (row_of(1),)


def test_a_connection_that_has_ended_does_not_end_the_process(name, tmp_path, come):
    with process_of("door", name, tmp_path) as process:
        process.signal(signal.SIGSTOP)
        Stranger(name).end.close()
        process.signal(signal.SIGCONT)
        ready(come())
        assert not process.has_ended()


# --- The thread ---------------------------------------------------------------------------------
def test_closing_does_not_wait_for_newcomers_that_are_half_way(name, come):
    with opened(name, lambda knock: LONG) as door:
        with Stranger(name) as silent, Stranger(name) as half, Stranger(name) as unread:
            half.opens()
            unread.sends(Here(), KNOCK)
            wait_until(lambda: door._at_place, "the newcomer", SOON_S)
            began = time.monotonic()
            door.close()
            assert time.monotonic() - began < 1.0
            for each in (silent, half, unread):
                assert each.is_closed()
        assert not door._thread.is_alive()
        door.close()
        door.end("too late")
        door.refuse(1, "too late")
        door.chosen([1])


LONG = msgspec.structs.replace(WELCOME, journal=bytes(16 << 20))


def test_what_was_told_is_sent_before_the_door_closes(name):
    with opened(name, lambda knock: LONG) as door, Stranger(name, bytes_max=32 << 20) as slow:
        slow.sends(Here(), KNOCK)
        wait_until(lambda: door._at_place, "the newcomer", SOON_S)
        door.end("it has ended")
        with ThreadPoolExecutor(1) as threads:
            closing = threads.submit(door.close)
            wait_until(lambda: door._is_closing, "the end", SOON_S)
            assert [slow.answers(), slow.answers()] == [LONG, Ended("it has ended")]
            closing.result(SOON_S)


def test_one_that_does_not_read_it_delays_the_end_a_little(name, monkeypatch):
    monkeypatch.setattr(door_module, "TIMES", replace(TIMES, linger_s=0.2))
    with opened(name, lambda knock: LONG) as door, Stranger(name) as unread:
        unread.sends(Here(), KNOCK)
        wait_until(lambda: door._at_place, "the newcomer", SOON_S)
        door.end("it has ended")
        door.close()
        assert not door._thread.is_alive()


@pytest.mark.parametrize("where", ["welcome", "check_ready"])
def test_an_error_in_a_callback_closes_the_door_with_one_line(name, come, where, caplog):
    def fail(message: object) -> Any:
        raise KeyError("of the callback")

    with opened(name, **{where: fail}) as door:
        Stranger(name).end.close()  # It listens.
        if where == "welcome":
            with pytest.raises(rr.RendezvousError, match=r"waited 0\.5 s"):
                come(timeout_s=0.5)
        else:
            with pytest.raises(rr.PeerLostError):
                ready(come())
        assert door.ready() == ()
        door.end("too late")
        door.close()
    [line] = caplog.records
    assert line.getMessage() == (
        "[0/4] takes in no newcomers any more: its door failed: KeyError: 'of the callback'"
    )


@pytest.mark.parametrize("missing", ["descriptor", "thread"])
def test_a_door_that_cannot_be_opened_disturbs_nothing(name, monkeypatch, caplog, missing):
    def fail(*_: object) -> Any:
        raise OSError("there is none") if missing == "descriptor" else RuntimeError("there is none")

    before = psutil.Process().num_fds()
    monkeypatch.setattr(
        *(os, "eventfd") if missing == "descriptor" else (threading.Thread, "start"), fail
    )
    with opened(name) as door:
        assert door.ready() == ()
        door.end("it has ended")
    assert "its door failed" in caplog.text
    assert psutil.Process().num_fds() == before


def test_the_thread_sleeps_while_newcomers_wait(name, come, monkeypatch):
    limits: list[float | None] = []

    class Poll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, limit: float | None) -> Any:
            limits.append(limit)
            return self._poll.poll(limit)

    with opened(name):
        visit = ready(come())
        fake = {**vars(select), "poll": Poll}
        monkeypatch.setattr(door_module, "select", types.SimpleNamespace(**fake))
        ready(come(2), 2)
        wait_until(lambda: limits[-1:] == [None], "an end of what is due", SOON_S)
        visit.check()


def test_a_hundred_newcomers_leave_nothing_behind(name, come):
    process = psutil.Process()
    with opened(name) as door:
        visit = ready(come(3), 3)
        before = process.num_fds(), threading.active_count()
        for life in range(1, 101):
            message = Knock(__version__, "a job", 1, life)
            _, each = knock(name, security_of(1), message, SOON_S)
            each.ready(row_of(1, life), {}, SOON_S)
            each.close()
        are_ready(door, row_of(3))
        assert (process.num_fds(), threading.active_count()) == before
        assert len(door._visitors) == 1
        visit.check()
