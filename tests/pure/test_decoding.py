"""Bytes that are not ours, at every decoder: named as such, or dropped, and nothing else."""

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringreduce.bootstrap import hello
from ringreduce.commands.doctor import view
from ringreduce.commands.doctor.findings import Link
from ringreduce.commands.launch import exchange
from ringreduce.commands.launch.frames import Records
from ringreduce.communicator.journal import KeptCall, Replay
from ringreduce.pure import flight, payload, results, trace, watcher_messages
from ringreduce.pure.membership import whole
from ringreduce.pure.views import Message, Verb
from ringreduce.pure.watching import Watch
from ringreduce.transport.visits import Visits
from ringreduce.vocabulary.errors import ConfigError, ProtocolError
from tests.bootstrap.hellos import hello as hello_of_rank_1
from tests.fuzzing import mutate_bytes
from tests.scope import in_full

PACKAGE = Path(__file__).parents[2] / "ringreduce"
DEPTH = 100_000  # lists within lists; Python's stack ends at about a thousand


def fed(data: bytes) -> None:
    Records[exchange.Report](exchange.Report).feed(len(data).to_bytes(4, "big") + data)


def watched(data: bytes) -> None:
    Watch(0, 2, whole(2), 15.0, 0.0).receive(1, data, 0.0)


def visited(data: bytes) -> None:
    """As Visits.receive does with what has come to a standby port."""
    come: Iterator[bool] = iter([True, False])
    incoming = types.SimpleNamespace(poll=lambda wait_ms: next(come), recv=lambda: data)
    visits: Any = types.SimpleNamespace(
        _limit_visitors=lambda: None, _incoming=incoming, _ways={1: []}, _job=7, _rank=0
    )
    list(Visits.receive(visits, 0.0))


def doctored(data: bytes) -> None:
    view.records_in(f"[0] {data.decode(errors='replace')}")


def decoded(data: bytes) -> None:
    payload.decode(np.frombuffer(data, np.uint8), {"rank": 0, "size": 2})


HEAD = trace.Head(
    job="job", when=1.0, rank=0, size=2, host="here", clock="one", membership=whole(2), first=0
)
DUMP = flight.Dump(
    transport="shm", calls=1, operation=None, nbytes=0, since=1.0, format=flight.FORMAT, why="",
    when=1.0, iso="", rank=0, size=2, host="here", pid=1, job="job",
)  # fmt: skip
pack, text = msgspec.msgpack.encode, msgspec.json.encode
# By the file of the decoder: what decodes, what it may raise, and something that it can decode.
DECODERS: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...], bytes]] = {
    "bootstrap/hello.py": (hello.read, (), hello_of_rank_1()),
    "commands/doctor/view.py": (doctored, (), text(Link((0, 1), "shm", (1e-5, 1e-3)))),
    "commands/launch/frames.py": (fed, (ConfigError,), pack(exchange.Hello("1.0"))),
    "communicator/journal.py": (
        partial(Replay.of, gives_variables=lambda *_: []),
        (ProtocolError,),
        pack([KeptCall("all_reduce", "float32 (3,)", b"abc")]),
    ),
    "pure/flight.py": (flight.decode_dump, (ValueError,), text(DUMP)),
    "pure/payload.py": (decoded, (ProtocolError,), pack({"metrics": [1, 2.5, "text", None]})),
    "pure/results.py": (
        results.unpack,
        (ProtocolError,),
        results.pack({"metrics": [1, ("text", np.arange(3.0, dtype=np.float32))]}),
    ),
    "pure/trace.py": (trace.decode_trace, (ValueError,), text(HEAD) + b"\n"),
    "pure/watcher_messages.py": (watched, (), pack(watcher_messages.Left(1, 3, "why"))),
    "transport/visits.py": (visited, (), pack((7, Message(Verb.PREPARE, 1, 0, 0)))),
}
# It reads a file that its own job has made a moment ago, in a folder that no other user can enter.
# What the process has written itself, or tasks of its own, whose results are pickles besides.
OWN_FILES = {"commands/verify.py", "spark/function.py"}


def foreign(right: bytes) -> dict[str, bytes]:
    """What is not `right`, of the kinds that decoders have let through."""
    is_text = right.startswith(b"{")
    nested = b"[" * DEPTH + b"]" * DEPTH if is_text else b"\x91" * DEPTH + b"\xc0"
    if is_text:  # A field more.
        within = b'{"x":' + nested + b"," + right[1:]
    else:
        within = bytes([right[0] + 1]) + right[1:] + (b"\xa1x" if right[0] >> 4 == 8 else b"")
        within += nested
    return {
        "nothing": b"",
        "nested": nested,
        "nested in a field that is not known": within,
        "no UTF-8": b'"\xff\xfe"' if is_text else b"\xa2\xff\xfe",
        "no UTF-8 in a field": re.sub(rb"(?<=[a-z])[a-z](?=[a-z])", b"\xff", right),
        "more than one": right + right,
        "cut": right[:-1],
    }


@pytest.mark.parametrize("kind", foreign(b"{}"))
@pytest.mark.parametrize("file", DECODERS)
def test_bytes_that_are_not_ours_raise_what_is_said_or_nothing(file, kind):
    decode, allowed, right = DECODERS[file]
    decode(right)
    with contextlib.suppress(*allowed):
        decode(foreign(right)[kind])


@pytest.mark.parametrize("times", [1, in_full(50)])
@pytest.mark.parametrize("file", DECODERS)
def test_no_mutation_raises_anything_else(file, times, chance):
    decode, allowed, right = DECODERS[file]
    for _ in range(100 * times):
        data = mutate_bytes(chance, right)
        try:
            decode(data)
        except allowed:
            pass
        except Exception as error:
            raise AssertionError(data) from error


def test_an_object_that_cannot_be_read_is_named_with_the_rank():
    with pytest.raises(ProtocolError, match="rank 0 of 2 received 3 bytes that are no object"):
        decoded(b"\xa2\xff\xfe")


def test_a_neighbours_nested_message_is_a_warning_and_the_watcher_goes_on():
    watch = Watch(0, 2, whole(2), 15.0, 0.0)
    messages = foreign(DECODERS["pure/watcher_messages.py"][2])
    for message in (messages["nested"], messages["nested in a field that is not known"]):
        (warning,) = watch.receive(1, message, 0.0)
        assert "ignored a message of rank 1 that cannot be read" in str(warning)


def test_every_decoder_is_tried_here():
    decodes = re.compile(r"\bmsgspec\.(msgpack|json)\.(decode|Decoder)\b")
    files = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if decodes.search(file.read_text(encoding="utf-8"))
    }
    assert files == set(DECODERS) | OWN_FILES
