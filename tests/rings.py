"""Rings of real processes for tests: workers that run a program and say what happens to them.

Workers are started without the launcher, which would stop the survivors before they have
said what they saw. Each reports as JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from ringreduce.bootstrap.hello import Table
from ringreduce.bootstrap.rendezvous import Rendezvous
from ringreduce.pure.watcher_messages import Listening
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.config import TIMES, Config
from tests.processes import Process, clean_environment, wait_until
from tests.proxy import Proxy, ask

__all__ = [
    "MISMATCH_S",
    "PREAMBLE",
    "SOON_S",
    "TIMEOUT_S",
    "Ring",
    "assert_lost",
    "go_through_proxy",
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
        timeout_s: float = TIMEOUT_S,
        busy_timeout_s: float = Config.busy_timeout_s,
        link_timeout_s: float = TIMES.link_warning_s,
        transport: str = "zmq",
        hosts: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        streams: int = 1,
        join_timeout_s: float = 60.0,
        proxied: bool = False,
        secret: str = "",
        encryption: str = "auto",
    ) -> None:
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
            if secret:
                variables["RINGREDUCE_SECRET"] = secret
            if proxied:
                self.proxy = self._stack.enter_context(Proxy())
                more.append(str(self.proxy.port))
                variables["PYTHONPATH"] = str(Path(__file__).parent.parent)
            jobs = [secrets.token_hex(8) for _ in range(rings)]
            self.workers: list[Process] = []
            for rank in range(size):
                inherited = tuple(listener.fileno() for listener in listeners) if not rank else ()
                configs = [
                    Config(
                        rank=rank,
                        size=size,
                        rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
                        rendezvous_fd=None if rank else listener.fileno(),
                        job_id=job,
                        timeout_s=timeout_s,
                        busy_timeout_s=busy_timeout_s,
                        link_timeout_s=link_timeout_s,
                        streams=streams,
                        join_timeout_s=join_timeout_s,
                        transport=transport,
                        host_id=hosts[rank] if hosts else "",
                        encryption=encryption,
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
                    pass_fds=inherited,
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

    def release(self) -> None:
        """Let workers that `hold` go on; all must then end well."""
        for worker in self.workers:
            worker.stdin.close()
        for worker in self.workers:
            assert worker.wait(10) == 0, worker.stderr

    def end_well(self) -> None:
        """Have workers that read a line end; they have raised nothing."""
        for worker in self.workers:
            worker.stdin.write(b"\n")
            worker.stdin.flush()
        for fact in self.wait("result"):
            assert fact["kind"] == "", fact
        for worker in self.workers:
            assert worker.wait(10) == 0, worker.stderr

    def assert_unhurt(self) -> None:
        """The ring has completed further rounds since the call, and raised nothing."""
        ranks = range(self.size)
        before = max(len(self.said(rank, "rounds")) for rank in ranks)
        wait_until(
            lambda: (
                all(len(self.said(rank, "rounds")) >= before + 2 for rank in ranks)
                or any(self.said(rank, "result") for rank in ranks)
            ),
            "further rounds",
        )
        assert not [self.said(rank, "result") for rank in ranks if self.said(rank, "result")]

    def port(self, rank: int) -> int:
        """The port on which this rank receives in its latest ring; said with ``ready``."""
        return int(self.said(rank, "ready")[-1]["address"].rpartition(":")[2])


def assert_lost(facts: list[dict[str, Any]], peer: int) -> None:
    """Each has raised PeerLostError about `peer`, soon."""
    assert [fact["kind"] for fact in facts] == ["PeerLostError"] * len(facts), facts
    assert [fact["peer"] for fact in facts] == [peer] * len(facts), facts
    for fact in facts:
        assert f"rank {peer}" in fact["text"]
        assert fact["seconds"] < SOON_S


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
