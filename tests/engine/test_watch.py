"""What the watcher concludes, with a control channel and a clock that follow a script."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from ringreduce.effects.recorder import Recorder
from ringreduce.engine import watch
from ringreduce.engine.watch import Watcher
from ringreduce.pure import liveness
from ringreduce.pure.liveness import Heartbeats, News
from ringreduce.transport.base import Flow
from ringreduce.transport.control import Control
from ringreduce.transport.news import write_news
from ringreduce.vocabulary.errors import MismatchError, PeerLostError, RingReduceError
from ringreduce.vocabulary.times import Times


@dataclass(frozen=True)
class Turn:
    """What one turn of the watcher meets: the time, words of rank 1, and whether it looks lost."""

    at_s: float
    words: Sequence[bytes] = ()
    is_lost: bool = False


class Scripted:
    """A control channel of rank 0 with rank 1, which goes through `turns` and then is quiet."""

    neighbours = (1,)

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = list(turns)
        self.turn = self._turns[0]
        self.said: list[bytes] = []
        self.is_over, self._awake = threading.Event(), threading.Event()

    def receive(self, _: int) -> list[tuple[int, bytes]]:
        if not self._turns:
            self.is_over.set()
            assert self._awake.wait(10)
            return []
        self.turn = self._turns.pop(0)
        return [(1, word) for word in self.turn.words]

    def send(self, word: bytes, but: Collection[int] = ()) -> None:
        self.said.append(word)

    def lost(self) -> list[int]:
        return [1] if self.turn.is_lost else []

    def has_ended(self, _: int) -> bool:
        return False

    def lock(self) -> bool:
        return True

    def wake(self) -> None:
        # Not for words: only `leave` comes after the script.
        if self.is_over.is_set():
            self._awake.set()

    def close(self) -> None:
        pass


def play(
    monkeypatch: pytest.MonkeyPatch, turns: Sequence[Turn], flow: Flow
) -> tuple[list[RingReduceError], list[Heartbeats]]:
    """What a watcher tells that meets `turns`, and the heartbeats that it sends."""
    control = Scripted(turns)
    clock = SimpleNamespace(monotonic=lambda: control.turn.at_s)
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "TIMES", Times())  # scripts are written at full scale
    told: list[RingReduceError] = []
    watcher = Watcher(
        cast(Control, control),
        rank=0,
        size=2,
        link_timeout_s=10.0,
        standing=Recorder(0, 2).standing,
        flow=lambda: flow,
        progress=lambda: None,
        tell=told.append,
    )
    assert control.is_over.wait(10)
    # Rank 1 says nothing of it, so the watcher must not wait for that.
    control.turn = Turn(control.turn.at_s, is_lost=True)
    watcher.leave(0, "")
    watcher.join()
    said = [liveness.decode(word, 2) for word in control.said]
    return told, [message for message in said if isinstance(message, Heartbeats)]


def test_a_loss_that_was_none_does_not_cut_short_the_patience_with_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    news = liveness.encode(News(write_news(MismatchError("is the cause", rank=1, size=2), 1)))
    turns = [
        Turn(0.0, is_lost=True),  # its first word has come before the news of its connection
        *(Turn(0.2 * number) for number in range(1, 20)),
        Turn(4.0, is_lost=True),
        Turn(4.1, [news], is_lost=True),
    ]
    [error], _ = play(monkeypatch, turns, Flow())
    assert isinstance(error, MismatchError)
    assert "was told by rank 1: rank 1 of 2 is the cause" in str(error)


def test_a_loss_that_lasts_ends_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [Turn(0.0), Turn(0.5, is_lost=True), Turn(1.4, is_lost=True), Turn(1.6, is_lost=True)]
    [error], _ = play(monkeypatch, turns, Flow())
    assert isinstance(error, PeerLostError)
    assert error.peer == 1


def test_what_was_not_sent_while_the_process_stood_still_is_not_held_against_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = Flow(sent=((1, 0, 7),))
    turns = [Turn(0.0), Turn(0.5), Turn(1.1), Turn(1.6)]
    _, heartbeats = play(monkeypatch, turns, flow)
    quiet_s = [message.heartbeats[0][0].sent[0].quiet_s for message in heartbeats]
    assert quiet_s == pytest.approx([0.0, 0.5, 0.0, 0.5])
