"""A TCP proxy that does to connections what bad networks and bad people do, and a reader of ZMTP.

A **way** leads from a port of the proxy's to a target, ``host:port``, and has a name. What is done
to the bytes on a way is set and cleared while they flow, for each direction: ``forward`` is from
the visitor to the target, ``back`` the other.

`Proxy` is a process of its own, apart from the rings that run through it: stopping or killing a
rank does nothing to it. It addresses ways by a pattern of their names, as in a shell: ``1>*`` is
all ways that rank 1 uses, if they are named so. `ways_here` has ways in a thread of this process,
whose bytes a function may change.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fnmatch
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["DIRECTIONS", "Change", "Frames", "Proxy", "Way", "ask", "command", "ways_here", "wrap"]

DIRECTIONS = ("forward", "back")
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
        self.faults = {direction: dict(HARMLESS) for direction in DIRECTIONS}
        self.nbytes = dict.fromkeys(DIRECTIONS, 0)
        self.connections: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._flows = {direction: asyncio.Event() for direction in DIRECTIONS}
        self.set()

    async def open(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._visit, "127.0.0.1", 0, backlog=128)
        return int(self._server.sockets[0].getsockname()[1])

    def set(self, directions: tuple[str, ...] = DIRECTIONS, **faults: Any) -> None:
        for direction in directions:
            self.faults[direction].update(faults)
            is_open = self.faults[direction]["half_open"]
            (self._flows[direction].clear if is_open else self._flows[direction].set)()

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
            DIRECTIONS, (reader, far_reader), (far_writer, writer), strict=True
        ):
            queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            tasks += [self._take(direction, source, queue), self._give(direction, queue, sink)]
        running = [asyncio.ensure_future(task) for task in tasks]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            has_failed = any(task.done() and task.exception() for task in running)
            for end in ends:
                _reset(end) if has_failed else end.close()
        finally:
            for task in running:
                task.cancel()
            self.connections.remove(ends)

    async def _take(
        self, direction: str, source: asyncio.StreamReader, queue: asyncio.Queue[Any]
    ) -> None:
        faults, flows = self.faults[direction], self._flows[direction]
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

    async def _give(
        self, direction: str, queue: asyncio.Queue[Any], sink: asyncio.StreamWriter
    ) -> None:
        faults, data = self.faults[direction], b"?"
        while data:
            due_s, data = await queue.get()
            await asyncio.sleep(due_s - time.monotonic())
            left = data
            while left:
                await self._flows[direction].wait()
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


@contextlib.contextmanager
def ways_here() -> Iterator[Callable[[str, Callable[[], Change]], int]]:
    """A function that opens a way to a target with a change, and returns its port."""
    loop, ways = asyncio.new_event_loop(), []

    async def open_way(target: str, change: Callable[[], Change]) -> int:
        ways.append(Way(target, _address(target), change))
        return await ways[-1].open()

    async def end() -> None:
        for way in ways:
            way.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_REPLY_TIMEOUT_S)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda target, change: run(open_way(target, change))
    finally:
        run(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host.strip("[]"), int(port)


# --- A process of its own -------------------------------------------------------------------


async def _serve() -> None:
    """Print the control port as JSON, take a JSON object on each connection; end as stdin does."""
    ways: list[Way] = []

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await _obey(ways, json.loads(await reader.readline()))
        except (KeyError, ValueError, TypeError, OSError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(reply).encode() + b"\n")
        writer.close()

    server = await asyncio.start_server(obey, "127.0.0.1", 0, backlog=128)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _obey(ways: list[Way], order: dict[str, Any]) -> dict[str, Any]:
    do = order["do"]
    if do == "open":
        ways.append(Way(order["name"], _address(order["target"])))
        return {"port": await ways[-1].open()}
    if do == "status":
        return {way.name: {"connections": len(way.connections), **way.nbytes} for way in ways}
    matching = [way for way in ways if fnmatch.fnmatchcase(way.name, order["ways"])]
    if do == "set":
        if unknown := set(order["faults"]) - set(HARMLESS):
            raise ValueError(f"unknown: {sorted(unknown)}")
        for way in matching:
            way.set(order["directions"], **order["faults"])
        return {"count": len(matching)}
    return {"count": sum({"reset": way.reset, "cut": way.cut}[do]() for way in matching)}


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
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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
        return int(reply["count"])

    def clear(self, ways: str = "*") -> None:
        """End all faults of the ways that match."""
        self.set(ways, **HARMLESS)

    def reset(self, ways: str = "*") -> int:
        """End the connections of these ways with RST on both sides; return how many."""
        return int(ask(self.port, do="reset", ways=ways)["count"])

    def cut(self, ways: str = "*") -> int:
        """Lose every packet of these connections, confirmations too; Linux. Return how many.

        What both ends see when a cable is pulled. With `half_open` the proxy's system still
        confirms what it gets, as that of a stopped process does.
        """
        self.set(ways, half_open=True)
        return int(ask(self.port, do="cut", ways=ways)["count"])

    def status(self) -> dict[str, Any]:
        """Of each way: its connections, and the bytes taken each way."""
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


if __name__ == "__main__":
    asyncio.run(_serve())
