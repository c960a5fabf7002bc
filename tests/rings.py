"""Rings of real processes for tests: workers that run a program and say what happens to them.

Workers are started without the launcher, which would stop the survivors before they have
said what they saw. Each reports as JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringreduce.bootstrap.hello import Table
from ringreduce.bootstrap.rendezvous import Rendezvous
from ringreduce.communicator.communicator import Communicator
from ringreduce.effects import native
from ringreduce.pure.watcher_messages import Listening
from ringreduce.testing import ring_of_threads
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import RingReduceError
from tests.processes import Process, clean_environment, wait_until
from tests.proxy import Proxy

__all__ = [
    "MISMATCH_S",
    "PREAMBLE",
    "SOON_S",
    "TIMEOUT_S",
    "Ring",
    "assert_lost",
    "outcome",
    "outcomes",
]

# Far below the workers' own time limit, so that a failure is seen because it was noticed. Both are
# long, since a busy machine may take seconds for what is noticed at once.
SOON_S = 15.0
# Ranks that disagree need not wait for anything but each other.
MISMATCH_S = 4.0
TIMEOUT_S = 60.0

PREAMBLE = """
import atexit, json, os, signal, sys, threading, time
import numpy as np
import ringreduce as rr

CONFIGS = json.loads(sys.argv[1])

def join(ring=0):
    # The secret is not among the arguments, which others can read.
    secret = os.environ.get("RINGREDUCE_SECRET", "")
    return rr.Communicator(rr.Config(**CONFIGS[ring], secret=secret))

def say(event, **facts):
    # One write: lines of two threads must not mix.
    os.write(1, (json.dumps({"event": event, **facts}) + "\\n").encode())

def attempt(event, call):
    '''Say what `call` raised, and how long it took.'''
    started = time.monotonic()
    kind, text, peer = "", "", None
    try:
        call()
    except BaseException as error:
        kind, text, peer = type(error).__name__, str(error), getattr(error, "peer", None)
    seconds = time.monotonic() - started
    at = time.monotonic()  # of the whole machine's clock
    say(event, kind=kind, text=text, peer=peer, seconds=seconds, at=at)

def until_error(call):
    while True:
        call()

def hold():
    '''Stay in the ring until the test has seen enough.'''
    sys.stdin.read()

RANK, SIZE = CONFIGS[0]["rank"], CONFIGS[0]["size"]
"""


class Ring:
    """Workers that run `program`, each with its place in `rings` rings to form in turn.

    Args:
        hosts: of each rank, where they are to take themselves for several.
        transport: the setting, or "hosts" for the hosts a, b and a.
        settings: others of the ranks.
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        program: str,
        *,
        rings: int = 1,
        transport: str = "zmq",
        hosts: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        secret: str = "",
        **settings: Any,
    ) -> None:
        if transport in ("shm", "hosts") and native.library() is None:
            pytest.skip(native.why_missing())
        if transport == "hosts":
            transport, hosts = "auto", "aba"[:size]
        limits = {"timeout_s": TIMEOUT_S, "link_timeout_s": TIMES.link_warning_s}
        settings = {**limits, "join_timeout_s": 60.0, "transport": transport, **settings}
        self.size = size
        path = directory / "worker.py"
        path.write_text(PREAMBLE + textwrap.dedent(program))
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as listening, self._stack:
            listeners = [
                listening.enter_context(socket.create_server(("127.0.0.1", 0)))
                for _ in range(rings)
            ]
            variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
            variables["PYTHONPATH"] = str(Path(__file__).parent.parent)
            if secret:
                variables["RINGREDUCE_SECRET"] = secret
            jobs = [secrets.token_hex(8) for _ in range(rings)]
            self.workers: list[Process] = []
            for rank in range(size):
                configs = [
                    Config(
                        rank=rank,
                        size=size,
                        rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
                        rendezvous_fd=None if rank else listener.fileno(),
                        job_id=job,
                        host_id=hosts[rank] if hosts else "",
                        **settings,
                    )
                    for listener, job in zip(listeners, jobs, strict=True)
                ]
                places = [asdict(config) for config in configs]
                for place in places:
                    del place["secret"]
                worker = Process(
                    [sys.executable, str(path), json.dumps(places)],
                    directory,
                    name=f"rank{rank}",
                    environment=clean_environment(**variables),
                    pass_fds=() if rank else tuple(each.fileno() for each in listeners),
                    stdin=subprocess.PIPE,
                    worker=True,
                )
                self.workers.append(self._stack.enter_context(worker))
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def said(self, rank: int, event: str) -> list[dict[str, Any]]:
        lines = self.workers[rank].stdout.splitlines(keepends=True)
        facts = [json.loads(line) for line in lines if line.endswith("\n")]
        return [fact for fact in facts if fact["event"] == event]

    def wait(self, event: str, ranks: list[int] | None = None, times: int = 1) -> list[Any]:
        """What each of `ranks` has said of `event`, once they all have, `times` times."""
        ranks = list(range(self.size)) if ranks is None else ranks

        def all_said() -> bool:
            for rank in ranks:
                worker = self.workers[rank]
                ended = worker.has_ended()  # Asked first: what it said before then counts.
                if len(self.said(rank, event)) < times:
                    assert not ended, f"rank {rank} ended:\n{worker.stdout}\n{worker.stderr}"
                    return False
            return True

        try:
            wait_until(all_said, f"{event} of ranks {ranks}")
        except AssertionError as error:
            for rank, worker in enumerate(self.workers):
                last = "".join(worker.stdout.splitlines(keepends=True)[-2:])
                error.add_note(f"rank {rank} said last:\n{last}{worker.stderr[-2000:]}")
            raise
        return [self.said(rank, event)[times - 1] for rank in ranks]

    def others(self, rank: int) -> list[int]:
        return [other for other in range(self.size) if other != rank]

    def tell(self, *ranks: int) -> None:
        """Give these ranks a line to read; all, if none is named."""
        for rank in ranks or range(self.size):
            self.workers[rank].stdin.write(b"\n")
            self.workers[rank].stdin.flush()

    def kill(self, rank: int) -> None:
        self.workers[rank].signal(signal.SIGKILL)

    def release(self) -> None:
        """Let workers that `hold` go on; all must then end well."""
        for worker in self.workers:
            worker.stdin.close()
        self.assert_ended(*range(self.size))

    def assert_ended(self, *ranks: int) -> None:
        """These ranks end, and well."""
        for rank in ranks:
            assert self.workers[rank].wait(10) == 0, self.workers[rank].stderr


# What the ranks of a test may share.
_SHARED: dict[str, Callable[[int], Any]] = {
    "together": lambda ranks: threading.Barrier(ranks, timeout=30),
    "event": lambda ranks: threading.Event(),
}


def on_each_rank(
    size: int | None = None, *, over: str = "", given: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test that runs on each rank of a ring of threads, whose communicator it gets first.

    Its argument `together` is a barrier of these threads, `event` one event for all.

    Args:
        size: how many ranks; that of the argument `size` by default.
        over: the fixture that forms the ring; by default it is the module's `ring_of_threads`,
            in whose place a fixture may have put something.
        given: arguments that are settings of the ring too.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            usual = test.__globals__.get("ring_of_threads", ring_of_threads)
            form = arguments.pop(over) if over else usual
            ranks = size or arguments["size"]
            arguments |= {name: make(ranks) for name, make in _SHARED.items() if name in named}
            more = {name: arguments[name] for name in given}
            form(ranks, lambda comm: test(comm, **arguments), **settings, **more)

        named = inspect.signature(test).parameters
        first, *others = (each for name, each in named.items() if name not in _SHARED)
        if over:
            others.append(first.replace(name=over))
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        run.__name__, run.__module__, run.__doc__ = test.__name__, test.__module__, test.__doc__
        return run

    return decorate


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the error of ours that it raises."""
    try:
        return call()
    except RingReduceError as error:
        return error


def outcomes(size: int, work: Callable[[Communicator], Any], **settings: Any) -> list[Any]:
    """Each rank's `outcome` of `work` in a ring of threads."""
    return ring_of_threads(size, lambda comm: outcome(lambda: work(comm)), **settings)


def assert_lost(
    facts: list[dict[str, Any]],
    peer: int | set[int],
    kind: str = "PeerLostError",
    within_s: float = SOON_S,
    since_s: float | None = None,
) -> list[float]:
    """Each has raised an error of this kind about `peer`, or one of them, soon; return the seconds.

    They count from the call on, or from `since_s`, of the whole machine's clock.
    """
    seconds = [fact["seconds"] if since_s is None else fact["at"] - since_s for fact in facts]
    for fact in facts:
        assert fact["kind"] == kind, facts
        assert fact["peer"] in ({peer} if isinstance(peer, int) else peer), facts
        assert f"rank {fact['peer']}" in fact["text"]
    assert max(seconds) < within_s, facts
    return seconds


def way_of(transport: str) -> dict[str, Any]:
    """Settings of a ring of threads; "hosts" is two of them, with rank 1 alone on the second."""
    if transport != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    return {"hosts": "aba"} if transport == "hosts" else {"transport": transport}


@contextlib.contextmanager
def through_proxy() -> Iterator[Proxy]:
    """All connections over TCP of rings of threads that form meanwhile go through the proxy.

    Every address in the rendezvous's table, whatever it is for, is replaced by those of new ways,
    which belong to the rank alone that reads it: the way that rank 1 uses to the second port of
    rank 2 is ``1>2/address/1``. So are addresses at which ranks listen for one alone:
    ``1>2/pairs/0``.
    """
    meet, found = Rendezvous.meet, ZmqPairs.found

    def detour(address: str, name: str) -> str:
        """``tcp://host:port,port`` with ways to these ports instead; anything else as it is."""
        if not address.startswith("tcp://"):
            return address
        host, _, ports = address.removeprefix("tcp://").rpartition(":")
        ways = [
            proxy.open(f"{host}:{port}", f"{name}/{number}")
            for number, port in enumerate(ports.split(","))
        ]
        return f"tcp://127.0.0.1:{','.join(map(str, ways))}"

    def meet_and_detour(rendezvous: Rendezvous) -> Table:
        table, rank = meet(rendezvous), rendezvous._config.rank
        members = []
        for other, member in enumerate(table.members):
            detours = {
                name: detour(value, f"{rank}>{other}/{name}") if other != rank else value
                for name, value in msgspec.structs.asdict(member).items()
                if isinstance(value, str)
            }
            members.append(msgspec.structs.replace(member, **detours))
        return msgspec.structs.replace(table, members=tuple(members))

    def found_and_detour(pairs: ZmqPairs, listening: Listening) -> None:
        way = f"{listening.sender}>{listening.receiver}/pairs/{listening.channel}"
        address = detour(listening.address, way)
        found(pairs, msgspec.structs.replace(listening, address=address))

    with Proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "meet", meet_and_detour)
        patch.setattr(ZmqPairs, "found", found_and_detour)
        yield proxy
