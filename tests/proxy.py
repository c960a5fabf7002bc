"""A TCP proxy that does to connections what bad networks and bad people do, and a reader of ZMTP.

A **way** leads from a port of the proxy's to a target, ``host:port``, and has a name. What is done
to the bytes on a way is set and cleared while they flow.

A `Proxy` serves them in a thread of the tests' process, so stopping or killing a rank does nothing
to it. It addresses ways by a pattern of their names, as in a shell: ``1>*`` is all ways that rank 1
uses, if they are named so. A function may change what passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fnmatch
import socket
import struct
import threading
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Iterator
from typing import Any

__all__ = ["Change", "Frames", "Proxy", "command", "wrap"]

# From the visitor to the target, and the other.
_DIRECTIONS = ("forward", "back")
# What `set` takes, and what each is when nothing is set.
HARMLESS: dict[str, Any] = {
    "delay_s": 0.0,  # each byte arrives that much later; order and rate stay
    "bytes_per_s": 0,  # at most so many leave per second; 0: as many as can
    "drop": False,  # bytes are taken and go nowhere
    "half_open": False,  # nothing is taken or given, both ends stay connected
}
_READ_BYTES = 1 << 16
# How many reads wait in a direction with a delay, and in one without: then no more is read.
_QUEUED_MAX, _QUEUED = 1024, 8
# With a rate, what leaves at once: so much time's worth.
_BURST_S = 0.02
_REPLY_TIMEOUT_S = 15.0
# A packet filter that keeps nothing: struct sock_fprog with the one instruction "return 0". What
# it turns away, TCP has never seen and does not confirm.
_KEEP_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
_FILTER = struct.pack("HP", 1, ctypes.addressof(_KEEP_NOTHING))
_SO_ATTACH_FILTER = 26

# What is sent on instead of some bytes of a connection, in pieces; after an EOFError nothing is.
Change = Callable[[bytes], AsyncIterable[bytes]]


class Way:
    """A port that leads to `target`, what is done to each direction, and its connections.

    `change`, if any, makes the change of what each connection brings.
    """

    def __init__(
        self, name: str, target: tuple[str, int], change: Callable[[], Change] | None = None
    ) -> None:
        self.name, self._target, self._change = name, target, change
        self.faults = dict(HARMLESS)
        self.nbytes = dict.fromkeys(_DIRECTIONS, 0)
        self.connections: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._flows = asyncio.Event()
        self.set()

    async def open(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._visit, "127.0.0.1", 0, backlog=128)
        return int(self._server.sockets[0].getsockname()[1])

    def set(self, **faults: Any) -> None:
        self.faults.update(faults)
        (self._flows.clear if self.faults["half_open"] else self._flows.set)()

    def reset(self) -> int:
        """End all connections with RST on both sides; return how many."""
        for end in sum(self.connections, ()):
            _reset(end)
        return len(self.connections)

    def cut(self) -> int:
        """Lose all packets of the connections; return how many."""
        for end in sum(self.connections, ()):
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _FILTER)
        return len(self.connections)

    def close(self) -> None:
        self._server.close()
        self.reset()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            # Refused, or reset as soon as it stood: to the visitor that is a reset as well.
            _reset(writer)
            return
        ends = writer, far_writer
        self.connections.append(ends)
        tasks = []
        for direction, source, sink in zip(
            _DIRECTIONS, (reader, far_reader), (far_writer, writer), strict=True
        ):
            queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            tasks += [self._take(direction, source, queue), self._give(queue, sink)]
        running = [asyncio.ensure_future(task) for task in tasks]
        with contextlib.suppress(asyncio.CancelledError):  # The proxy ends.
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        has_failed = any(
            not task.done() or task.cancelled() or task.exception() for task in running
        )
        for task in running:
            task.cancel()
        for end in ends:
            _reset(end) if has_failed else end.close()
        self.connections.remove(ends)

    async def _take(
        self, direction: str, source: asyncio.StreamReader, queue: asyncio.Queue[Any]
    ) -> None:
        faults, flows = self.faults, self._flows
        change = self._change() if self._change and direction == "forward" else _nothing
        data = b"?"
        while data:
            try:
                data = await source.read(_READ_BYTES)
            except OSError:
                await flows.wait()
                raise
            await flows.wait()
            self.nbytes[direction] += len(data)
            try:
                async for piece in change(data):
                    if piece and not faults["drop"]:
                        queue.put_nowait((time.monotonic() + faults["delay_s"], piece))
            except EOFError:
                data = b""
            while queue.qsize() > (_QUEUED_MAX if faults["delay_s"] else _QUEUED):
                await asyncio.sleep(0.005)
        queue.put_nowait((time.monotonic() + faults["delay_s"], b""))

    async def _give(self, queue: asyncio.Queue[Any], sink: asyncio.StreamWriter) -> None:
        faults, data = self.faults, b"?"
        while data:
            due_s, data = await queue.get()
            await asyncio.sleep(due_s - time.monotonic())
            left = data
            while left:
                await self._flows.wait()
                rate = faults["bytes_per_s"]
                piece = left[: max(1, int(rate * _BURST_S))] if rate else left
                sink.write(piece)
                await sink.drain()
                if rate:
                    await asyncio.sleep(len(piece) / rate)
                left = left[len(piece) :]
        sink.write_eof()


async def _nothing(data: bytes) -> AsyncIterable[bytes]:
    yield data


def _reset(end: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    with contextlib.suppress(OSError):  # It has ended.
        linger = struct.pack("ii", 1, 0)
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    end.transport.abort()


class Proxy:
    """Ways, served by a thread while the block lasts."""

    def __enter__(self) -> Proxy:
        self._loop, self._ways = asyncio.new_event_loop(), []
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, target: str, name: str, change: Callable[[], Change] | None = None) -> int:
        """The port of a new way to `target`, ``host:port``."""
        return int(self._run(self._open(target, name, change)))

    def set(self, ways: str = "*", **faults: Any) -> int:
        """Change `faults` (see `HARMLESS`) of the ways that match; return how many do."""
        assert set(faults) <= set(HARMLESS), faults
        return self._each(ways, lambda way: way.set(**faults) or 1)

    def clear(self, ways: str = "*") -> None:
        """End all faults of the ways that match."""
        self.set(ways, **HARMLESS)

    def reset(self, ways: str = "*") -> int:
        """End the connections of these ways with RST on both sides; return how many."""
        return self._each(ways, Way.reset)

    def cut(self, ways: str = "*") -> int:
        """Lose every packet of these connections, confirmations too; Linux. Return how many.

        What both ends see when a cable is pulled. With `half_open` the proxy's system still
        confirms what it gets, as that of a stopped process does.
        """
        self.set(ways, half_open=True)
        return self._each(ways, Way.cut)

    def status(self) -> dict[str, Any]:
        """Of each way: its connections, and the bytes taken each way."""
        return {way.name: {"connections": len(way.connections), **way.nbytes} for way in self._ways}

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_REPLY_TIMEOUT_S)

    def _each(self, ways: str, do: Callable[[Way], int]) -> int:
        """The sum of what `do` returns for each way that matches."""

        async def run() -> int:
            return sum(do(way) for way in self._ways if fnmatch.fnmatchcase(way.name, ways))

        return int(self._run(run()))

    async def _open(self, target: str, name: str, change: Callable[[], Change] | None) -> int:
        host, _, port = target.rpartition(":")
        self._ways.append(Way(name, (host.strip("[]"), int(port)), change))
        return await self._ways[-1].open()

    async def _end(self) -> None:
        for way in self._ways:
            way.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- ZMTP 3.1 -------------------------------------------------------------------------------

MORE, LONG, COMMAND = 1, 2, 4
_GREETING_BYTES = 64


def wrap(body: bytes, flags: int = 0) -> bytes:
    """`body` as a frame."""
    if len(body) > 255 or flags & LONG:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def greeting(mechanism: bytes = b"NULL", version: bytes = b"\x03\x01", is_server: int = 0) -> bytes:
    """The first 64 bytes."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + version + mechanism.ljust(20, b"\0")[:20] + bytes([is_server]) + bytes(31)


def command(name: bytes, body: bytes = b"") -> bytes:
    return wrap(bytes([len(name)]) + name + body, COMMAND)


def ready(kind: bytes = b"PUSH") -> bytes:
    """NULL's READY command."""
    return command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind)


class Frames:
    """Splits a connection into its greeting, and then its frames: (flags, content, raw bytes)."""

    def __init__(self) -> None:
        self._rest = b""
        self._greeting_bytes = _GREETING_BYTES  # that are still to come

    def split(self, data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        """What is complete now. Pieces of the greeting count as commands; each end awaits them."""
        piece, self._rest = data[: self._greeting_bytes], self._rest + data[self._greeting_bytes :]
        if piece:
            self._greeting_bytes -= len(piece)
            yield COMMAND, b"", piece
        while len(self._rest) >= 2:
            flags = self._rest[0]
            start = 9 if flags & LONG else 2
            end = start + int.from_bytes(self._rest[1:start], "big")
            if len(self._rest) < max(start, end):
                return
            raw, self._rest = self._rest[:end], self._rest[end:]
            yield flags, raw[start:], raw
