"""Rings of real processes for tests: workers that run a program and say what happens to them.

Workers are started without the launcher, which would stop the survivors before they have
said what they saw. Each reports as JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
from tests.proxy import Proxy, ask

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

# Far below the workers' own time limit, so that a failure is seen because it was noticed.
SOON_S = 5.0
# Ranks that disagree need not wait for anything but each other.
MISMATCH_S = 4.0
TIMEOUT_S = 20.0

PREAMBLE = """
import atexit, json, os, signal, sys, threading, time
import numpy as np
import ringreduce as rr

CONFIGS = json.loads(sys.argv[1])
if len(sys.argv) > 2:
    from tests.rings import go_through_proxy

    go_through_proxy(int(sys.argv[2]))

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

    Attributes:
        proxy: with `proxied`, what all connections over TCP go through once the ranks have met;
            the way that rank 1 uses to the second port of rank 2 is ``1>2/address/1``.
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
        proxied: bool = False,
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
            more: list[str] = []
            variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
            variables["PYTHONPATH"] = str(Path(__file__).parent.parent)
            if secret:
                variables["RINGREDUCE_SECRET"] = secret
            if proxied:
                self.proxy = self._stack.enter_context(Proxy())
                more.append(str(self.proxy.port))
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
                    [sys.executable, str(path), json.dumps(places), *more],
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
    facts: list[dict[str, Any]], peer: int, kind: str = "PeerLostError", within_s: float = SOON_S
) -> None:
    """Each has raised an error of this kind about `peer`, soon."""
    for fact in facts:
        assert (fact["kind"], fact["peer"]) == (kind, peer), facts
        assert f"rank {peer}" in fact["text"]
        assert fact["seconds"] < within_s, fact


def go_through_proxy(port: int) -> None:
    """In a worker: have each rank that the rendezvous tells us of reached through the proxy.

    Every address in the table, whatever it is for, is replaced by those of new ways, which
    belong to this rank alone: so both ends of each connection are in its way's name. So are those
    at which other ranks listen for this one alone: ``1>2/pairs/0``.
    """
    meet = Rendezvous.meet

    def meet_and_detour(rendezvous: Rendezvous) -> Table:
        table = meet(rendezvous)
        rank = rendezvous._config.rank
        members = []
        for other, member in enumerate(table.members):
            detours = {
                name: _detour(port, value, f"{rank}>{other}/{name}") if other != rank else value
                for name, value in msgspec.structs.asdict(member).items()
                if isinstance(value, str)
            }
            members.append(msgspec.structs.replace(member, **detours))
        return msgspec.structs.replace(table, members=tuple(members))

    Rendezvous.meet = meet_and_detour  # type: ignore[method-assign]
    found = ZmqPairs.found

    def found_and_detour(pairs: ZmqPairs, listening: Listening) -> None:
        way = f"{listening.sender}>{listening.receiver}/pairs"
        address = _detour(port, listening.address, f"{way}/{listening.channel}")
        found(pairs, msgspec.structs.replace(listening, address=address))

    ZmqPairs.found = found_and_detour  # type: ignore[method-assign]


def _detour(proxy: int, address: str, name: str) -> str:
    """``tcp://host:port,port`` with ways to these ports instead; anything else as it is."""
    if not address.startswith("tcp://"):
        return address
    host, _, ports = address.removeprefix("tcp://").rpartition(":")
    ways = [
        ask(proxy, do="open", target=f"{host}:{port}", name=f"{name}/{number}")["port"]
        for number, port in enumerate(ports.split(","))
    ]
    return f"tcp://127.0.0.1:{','.join(map(str, ways))}"
