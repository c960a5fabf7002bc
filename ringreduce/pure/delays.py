"""Ranks that keep this one waiting: when to warn of them. Pure."""

from collections.abc import Collection

from ringreduce.pure.liveness import PeerTable
from ringreduce.pure.spans import Present
from ringreduce.vocabulary.config import TIMES


class Delays:
    """Words a watcher's warnings of ranks that are late or slow, `neighbours` alone."""

    def __init__(self, peer_table: PeerTable, neighbours: Collection[int], now_s: float) -> None:
        self._peer_table, self._neighbours = peer_table, neighbours
        self.is_busy = False  # the rank that holds up this rank's call is alive and in user code
        self._progress: object = None
        self._progressed_s = now_s
        self._call: tuple[int, float] = (-1, 0.0)
        self._warn_s = 0.0

    def look(self, current: Present, progress: object, now_s: float) -> str | None:
        """Return a warning, at growing intervals, while ranks keep this one waiting."""
        call = current.calls, current.since_s
        if call != self._call:
            self._call, self._warn_s = call, 0.0
            self._progressed_s = max(current.since_s, self._progressed_s)
        if progress != self._progress:
            self._progress, self._progressed_s = progress, now_s
        if current.operation is None:
            self.is_busy = False
            return None
        waited_s = now_s - max(current.since_s, self._progressed_s)
        suspicion = self._peer_table.suspect(current, now_s)
        self.is_busy = suspicion is not None and suspicion.is_busy
        limit_s = TIMES.slow_warning_s
        if suspicion is not None and suspicion.is_silent:
            limit_s = TIMES.silent_warning_s
        if waited_s >= max(limit_s, self._warn_s):
            self._warn_s = max(TIMES.slow_warning_s, 2 * waited_s)
            if suspicion is None or suspicion.rank in self._neighbours:
                what = suspicion.text if suspicion else "no other rank is seen to hold it up"
                where = f"{waited_s:.1f} s in {current.operation} after {current.calls} calls"
                return f"has waited {where}: {what}"
        return None
