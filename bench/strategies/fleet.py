"""The processes of some ways to train, and turns of one way after the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.namespaces import at_switch, bits_per_second, shaped
from bench.strategies.ways import SERVER, Way, systems
from bench.systems import Host
from bench.turns import TURN_TIMEOUT_S, Process, System, SystemFailed, Turns

METER = "meter"
LEARN_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Turn:
    """What a way has done in a turn.

    Attributes:
        step_s: seconds of a step, the mean over turn and ranks.
        sent, received: bytes of a step on the link that carried most; None where there is none.
        sending, receiving: the shares of its rate that they took.
        full: the share of the time in which it was full, in either direction.
    """

    step_s: float
    sent: float | None = None
    received: float | None = None
    sending: float | None = None
    receiving: float | None = None
    full: float | None = None


class Fleet:
    """Running processes; each has a host, unless it is alone."""

    def __init__(self, turns: Turns, bytes_per_s: float | None) -> None:
        self._turns, self._bytes_per_s = turns, bytes_per_s

    def speed(self, way: Way, model: str, steps: int) -> Turn:
        """Train `steps` steps of a model of `bench.models`.

        Raises:
            SystemFailed: a process ended, or did not answer in time.
        """
        order = {"do": "speed", "way": way.name, "model": model, "steps": steps}
        answers = self._answers(way, order)
        began, ended = (float(np.mean([one[key] for one in answers])) for key in ("began", "ended"))
        step_s = (ended - began) / steps
        if self._bytes_per_s is None or way.is_alone:
            return Turn(step_s)
        [found] = self._turns.ask(METER, {"began": began, "ended": ended})
        link = max(found["links"], key=lambda one: max(one["sent"], one["received"]))
        sent, received = link["sent"] / steps, link["received"] / steps
        full_step = step_s * self._bytes_per_s
        return Turn(step_s, sent, received, sent / full_step, received / full_step, link["full"])

    def learn(self, way: Way, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Train a task from the beginning; the answers of its ranks, or of the coordinator.

        Raises:
            SystemFailed: a process ended, or did not answer in time.
        """
        return self._answers(way, {"do": "learn", "way": way.name, **order}, LEARN_TIMEOUT_S)

    def _answers(
        self, way: Way, order: dict[str, Any], timeout_s: float = TURN_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        answers = self._turns.ask(way.group, order, timeout_s)
        # The coordinator's is the first.
        return answers[:1] if way.group == SERVER else answers


@contextlib.contextmanager
def started(ways: Sequence[Way], workers: int, rate: str | None, every: int) -> Iterator[Fleet]:
    """Processes for `ways`, until the block ends.

    With a rate each worker, and the server, is on its own host with a link of that rate; without
    they are so many hosts by name, on this one, and what is between hosts is between them.

    Raises:
        UnavailableError: there are no namespaces here.
        SystemFailed: something did not start.
    """
    with contextlib.ExitStack() as stack:
        # Of the ranks, and of the server.
        hosts = [Host(name=f"host{number}") for number in range(workers + 1)]
        wanted, bytes_per_s = [], None
        if rate is not None:
            hosts = stack.enter_context(shaped(workers + 1, rate))
            bytes_per_s = bits_per_second(rate) / 8
            command = [*at_switch(hosts), sys.executable, "-m", "bench.strategies.meter"]
            command += ["--ports", str(len(hosts)), "--bytes-per-s", str(bytes_per_s)]
            wanted.append(System(METER, [Process(command)], lines=1))
        wanted += systems(ways, hosts[:-1], hosts[-1], every)
        turns = stack.enter_context(Turns())
        for answer in turns.start(wanted).values():
            if isinstance(answer, SystemFailed):
                raise answer
        yield Fleet(turns, bytes_per_s)
