"""A TCP proxy that does to connections what bad networks do; a process of its own.

A **way** leads from a port of the proxy's to a target, ``host:port``, and has a name. What
is done to the bytes on a way is set and cleared while they flow, for each direction:
``forward`` is from whoever connected to the target, ``back`` the other. Ways are addressed
by a pattern of their names, as in a shell: ``1>*`` is all ways that rank 1 uses, if they
are named so.

It is one process with one thread, apart from the rings that run through it: stopping or
killing a rank does nothing to the proxy. Memory is bounded: at most `_QUEUE_BYTES_MAX` for
each direction of a connection, after which it stops reading, as a slow network does.

Run as a program it prints its control port as JSON, takes one JSON object per line on
connections to it, and ends when its standard input does. `Proxy` does all that.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

__all__ = ["DIRECTIONS", "Proxy", "ask"]

DIRECTIONS = ("forward", "back")
# What `set` takes, and what each is when nothing is set.
HARMLESS: dict[str, Any] = {
    "delay_s": 0.0,  # each byte arrives that much later; order and rate stay
    "bytes_per_s": 0,  # at most so many leave per second; 0: as many as can
    "drop": False,  # bytes are taken and go nowhere
    "half_open": False,  # nothing is taken or given, both ends stay connected
    "flip_after": -1,  # one bit is turned around in the byte after so many; then -1 again
}
_READ_BYTES = 1 << 18
# Of a direction with a delay, and of one without, whose bytes leave at once or wait for the target.
_QUEUE_BYTES_MAX, _QUEUE_BYTES = 64 << 20, 1 << 19
# With a rate, what may leave at once: so much time's worth.
_BURST_S = 0.02
_CONNECT_TIMEOUT_S = 5.0
_REPLY_TIMEOUT_S = 15.0
# A packet filter that keeps nothing: struct sock_fprog with the one instruction "return 0". What
# it turns away, TCP has never seen and does not confirm.
_KEEP_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
_FILTER = struct.pack("HP", 1, ctypes.addressof(_KEEP_NOTHING))
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27


class _Direction:
    """One direction of a way: its faults, and what has passed."""

    def __init__(self) -> None:
        self.faults = dict(HARMLESS)
        self.nbytes = self.flipped = 0

    def take(self, data: bytearray) -> bytearray:
        """`data` as it goes on from here."""
        after = self.faults["flip_after"]
        if after >= 0:
            if after < len(data):
                data[after] ^= 1
                self.flipped += 1
            self.faults["flip_after"] = after - len(data) if after >= len(data) else -1
        self.nbytes += len(data)
        return bytearray() if self.faults["drop"] else data


class _Stream:
    """One direction of one connection: what was read and has not been written."""

    def __init__(self, direction: _Direction, source: socket.socket, target: socket.socket) -> None:
        self.direction, self.source, self.target = direction, source, target
        self._queue: deque[tuple[float, memoryview]] = deque()
        self._queued = 0
        self._allowance, self._allowed_s = 0.0, time.monotonic()
        self.has_ended = self.is_done = False  # nothing more to read; told the target so

    @property
    def wants_read(self) -> bool:
        faults = self.direction.faults
        limit = _QUEUE_BYTES_MAX if faults["delay_s"] else _QUEUE_BYTES
        return not (self.has_ended or faults["half_open"]) and self._queued < limit

    def read(self, now: float) -> None:
        data = bytearray(self.source.recv(_READ_BYTES))
        if not data:
            self.has_ended = True
        elif passed := self.direction.take(data):
            self._queue.append((now + self.direction.faults["delay_s"], memoryview(passed)))
            self._queued += len(passed)

    def due_s(self, now: float) -> float | None:
        """In how many seconds there is something to write; None when that is not foreseen."""
        if self.direction.faults["half_open"] or self.is_done:
            return None
        if not self._queue:
            return 0.0 if self.has_ended else None
        wait_s = self._queue[0][0] - now
        if (rate := self.direction.faults["bytes_per_s"]) and self._refill(now) < 1:
            wait_s = max(wait_s, (1 - self._allowance) / rate, _BURST_S / 4)
        return max(0.0, wait_s)

    def _refill(self, now: float) -> float:
        """Bytes that the rate lets through now."""
        rate = self.direction.faults["bytes_per_s"]
        most = max(1.0, rate * _BURST_S)
        self._allowance = min(most, self._allowance + rate * (now - self._allowed_s))
        self._allowed_s = now
        return self._allowance

    def write(self, now: float) -> None:
        """Write what is due; after the last byte, tell the target that it was."""
        while self._queue and self._queue[0][0] <= now:
            piece = self._queue[0][1]
            if self.direction.faults["bytes_per_s"]:
                piece = piece[: int(self._refill(now))]
                if not piece:
                    return
            sent = self.target.send(piece)
            self._queued -= sent
            if self.direction.faults["bytes_per_s"]:
                self._allowance -= sent  # What left before there was a rate is no debt.
            if sent == len(self._queue[0][1]):
                self._queue.popleft()
            else:
                self._queue[0] = (self._queue[0][0], self._queue[0][1][sent:])
        if self.has_ended and not self._queue and not self.is_done:
            self.is_done = True
            self.target.shutdown(socket.SHUT_WR)


def _reset(end: socket.socket) -> None:
    """Close with RST instead of FIN."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


class _Connection:
    """Somebody who came, and the target on the other side."""

    def __init__(self, way: _Way, visitor: socket.socket, target: socket.socket) -> None:
        self.way, self.sockets = way, (visitor, target)
        self.streams = (
            _Stream(way.directions["forward"], visitor, target),
            _Stream(way.directions["back"], target, visitor),
        )
        self.blocked: set[socket.socket] = set()  # cannot be written to for now


class _Way:
    def __init__(self, name: str, target: tuple[str, int]) -> None:
        self.name, self.target = name, target
        self.directions = {direction: _Direction() for direction in DIRECTIONS}
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.connections: list[_Connection] = []


class _Server:
    """All ways, and the loop."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._control = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._ways: list[_Way] = []
        self._interest: dict[socket.socket, int] = {}
        self._ended = False

    def serve(self) -> None:
        print(json.dumps({"port": self._control.getsockname()[1]}), flush=True)
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._end)
        self._selector.register(self._control, selectors.EVENT_READ, self._accept_control)
        while not self._ended:
            ready = self._selector.select(self._plan())
            for key, events in ready:
                if callable(key.data):
                    key.data()
                else:
                    self._move(key.data, key.fileobj, events)

    def _end(self) -> None:
        self._ended = not os.read(sys.stdin.fileno(), 4096)

    def _plan(self) -> float | None:
        """Write what is due, say what to look for, and return how long at most to wait."""
        now, soonest = time.monotonic(), None
        for way in self._ways:
            for connection in list(way.connections):
                wanted = dict.fromkeys(connection.sockets, 0)
                try:
                    for stream in connection.streams:
                        wait_s = stream.due_s(now)
                        if wait_s == 0.0 and stream.target not in connection.blocked:
                            try:
                                stream.write(now)
                            except BlockingIOError:
                                connection.blocked.add(stream.target)
                            wait_s = stream.due_s(now)
                        if stream.target in connection.blocked:
                            if wait_s is not None:
                                wanted[stream.target] |= selectors.EVENT_WRITE
                        elif wait_s is not None:
                            soonest = wait_s if soonest is None else min(soonest, wait_s)
                        if stream.wants_read:
                            wanted[stream.source] |= selectors.EVENT_READ
                except OSError:
                    self._drop(connection, reset=True)
                    continue
                if all(stream.is_done for stream in connection.streams):
                    self._drop(connection, reset=False)
                    continue
                for end, events in wanted.items():
                    self._watch(end, events, connection)
        return soonest

    def _watch(self, end: socket.socket, events: int, connection: _Connection) -> None:
        before = self._interest.get(end, 0)
        if events and not before:
            self._selector.register(end, events, connection)
        elif not events and before:
            # Else epoll would tell of the other side's reset, which a half-open way does not see.
            self._selector.unregister(end)
        elif events != before:
            self._selector.modify(end, events, connection)
        self._interest[end] = events

    def _move(self, connection: _Connection, end: Any, events: int) -> None:
        if connection not in connection.way.connections:
            return
        if events & selectors.EVENT_WRITE:
            connection.blocked.discard(end)
        if events & selectors.EVENT_READ:
            try:
                for stream in connection.streams:
                    if stream.source is end and stream.wants_read:
                        stream.read(time.monotonic())
            except BlockingIOError:
                pass
            except OSError:
                self._drop(connection, reset=True)

    def _drop(self, connection: _Connection, *, reset: bool) -> None:
        """Close both sides, with RST instead of FIN if `reset`."""
        connection.way.connections.remove(connection)
        for end in connection.sockets:
            self._watch(end, 0, connection)
            del self._interest[end]
            if reset:
                _reset(end)
            else:
                end.close()

    def _accept(self, way: _Way) -> None:
        visitor, _ = way.listener.accept()
        try:
            target = socket.create_connection(way.target, timeout=_CONNECT_TIMEOUT_S)
        except OSError:
            # Refused, or reset as soon as it stood: to the visitor that is a reset as well.
            _reset(visitor)
            return
        for end in (visitor, target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        way.connections.append(_Connection(way, visitor, target))

    def _accept_control(self) -> None:
        connection, _ = self._control.accept()
        file = connection.makefile("rwb", buffering=0)
        connection.close()  # The file keeps it.

        def answer() -> None:
            line = file.readline()
            if not line:
                self._selector.unregister(file)
                file.close()
                return
            try:
                reply = self._obey(json.loads(line))
            except (KeyError, ValueError, TypeError, OSError) as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            with contextlib.suppress(OSError):  # It may not wait for the answer.
                file.write(json.dumps(reply).encode() + b"\n")

        self._selector.register(file, selectors.EVENT_READ, answer)

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order.pop("do"):
            case "open":
                host, _, port = order["target"].rpartition(":")
                way = _Way(order["name"], (host.strip("[]"), int(port)))
                self._ways.append(way)
                self._selector.register(
                    way.listener, selectors.EVENT_READ, lambda: self._accept(way)
                )
                return {"port": way.listener.getsockname()[1]}
            case "set":
                ways = self._matching(order.pop("ways"))
                directions = order.pop("directions")
                faults = order.pop("faults")
                if unknown := set(faults) - set(HARMLESS) | set(order):
                    raise ValueError(f"unknown: {sorted(unknown)}")
                for way in ways:
                    for direction in directions:
                        way.directions[direction].faults.update(faults)
                return {"ways": len(ways)}
            case "reset":
                found = [c for way in self._matching(order["ways"]) for c in way.connections]
                for connection in found:
                    self._drop(connection, reset=True)
                return {"connections": len(found)}
            case "cut":
                found = [c for way in self._matching(order["ways"]) for c in way.connections]
                for connection in found:
                    for end in connection.sockets:
                        end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _FILTER)
                return {"connections": len(found)}
            case "mend":
                found = [c for way in self._matching(order["ways"]) for c in way.connections]
                for connection in found:
                    for end in connection.sockets:
                        end.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                return {"connections": len(found)}
            case "status":
                return {
                    way.name: {
                        "connections": len(way.connections),
                        **{name: d.nbytes for name, d in way.directions.items()},
                        "flipped": sum(d.flipped for d in way.directions.values()),
                    }
                    for way in self._ways
                }
            case other:
                raise ValueError(f"cannot {other!r}")

    def _matching(self, pattern: str) -> list[_Way]:
        return [way for way in self._ways if fnmatch.fnmatchcase(way.name, pattern)]


def ask(port: int, **order: Any) -> dict[str, Any]:
    """Have the proxy whose control port is `port` do something; return what it answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=_REPLY_TIMEOUT_S) as connection:
        connection.sendall(json.dumps(order).encode() + b"\n")
        with connection.makefile("rb") as answers:
            reply: dict[str, Any] = json.loads(answers.readline())
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply


class Proxy:
    """A proxy's process, started; it ends with the block, or with this process.

    Attributes:
        port: its control port.
        pid: its process.
    """

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._popen.stdout is not None
        self.pid = self._popen.pid
        self.port: int = json.loads(self._popen.stdout.readline())["port"]

    def open(self, target: str, name: str) -> int:
        """The proxy's port for a new way to `target`, ``host:port``."""
        return int(ask(self.port, do="open", target=target, name=name)["port"])

    def set(self, ways: str = "*", directions: tuple[str, ...] = DIRECTIONS, **faults: Any) -> int:
        """Change `faults` (see `HARMLESS`) of the ways that match; return how many do."""
        reply = ask(self.port, do="set", ways=ways, directions=directions, faults=faults)
        return int(reply["ways"])

    def clear(self, ways: str = "*") -> None:
        """End all faults of the ways that match."""
        self.set(ways, **HARMLESS)

    def reset(self, ways: str = "*") -> int:
        """End the connections of these ways with RST on both sides; return how many."""
        return int(ask(self.port, do="reset", ways=ways)["connections"])

    def cut(self, ways: str = "*") -> int:
        """Lose every packet of these connections, confirmations too; Linux. Return how many.

        What both ends see when a cable is pulled. With `half_open` the proxy's system still
        confirms what it gets, as that of a stopped process does.
        """
        self.set(ways, half_open=True)
        return int(ask(self.port, do="cut", ways=ways)["connections"])

    def mend(self, ways: str = "*") -> int:
        """End a `cut`; packets that were lost are sent again by their senders."""
        self.set(ways, half_open=False)
        return int(ask(self.port, do="mend", ways=ways)["connections"])

    def status(self) -> dict[str, Any]:
        """Of each way: its connections, the bytes taken each way, and those flipped."""
        return ask(self.port, do="status")

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(10)
        finally:
            self._popen.kill()
            self._popen.wait(10)
            self._popen.stdout.close()


if __name__ == "__main__":
    _Server().serve()
