"""Traces on disk: everything that is recorded, once; and what is not is counted."""

import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.reforming import reform
from ringreduce.effects import tracing
from ringreduce.effects.events import Events
from ringreduce.effects.recorder import Recorder
from ringreduce.effects.tracing import Trace
from ringreduce.pure.membership import whole
from ringreduce.pure.spans import CALLS_KEPT, PARTS_KEPT, Span, SpanKind
from ringreduce.pure.trace import Stream, decode_trace
from ringreduce.pure.wire import Kind
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import Config
from tests.processes import wait_until
from tests.recorded import parts_of


def read(folder: Path, name: str = "rank-0.trace") -> Stream:
    return decode_trace((folder / name).read_bytes())


def of(stream: Stream, *kinds: SpanKind) -> list[Span]:
    return [span for span in stream.spans if span.kind in kinds]


def make(events: Events, calls: int) -> None:
    for _ in range(calls):
        events.begin(Kind.ALL_REDUCE, 80)
        events.part(SpanKind.WAIT, 1.0, 2.0)
        events.end()


@pytest.fixture
def recorder() -> Recorder:
    """Of a communicator that has made calls before."""
    events = Events()
    make(events, CALLS_KEPT + 3)
    return Recorder(0, 1, events, whole(1))


def test_all_that_is_recorded_is_copied_once(tmp_path: Path, recorder: Recorder) -> None:
    folder = tmp_path / "new"
    trace = Trace(Config(trace_dir=str(folder)), recorder)
    total = 0
    for calls in (1, CALLS_KEPT - 10, CALLS_KEPT, 5):
        make(recorder.events, calls)
        total += calls
        wait_until(partial(_holds, folder, 2 * total), "all records")
    make(recorder.events, 4)
    trace.close()
    make(recorder.events, 1)
    trace.close()
    found = read(folder)
    assert found.lost == 0
    for kind in (SpanKind.CALL, SpanKind.WAIT):
        assert [span.number for span in of(found, kind)] == list(range(total + 4))


def _holds(folder: Path, spans: int) -> bool:
    try:
        return len(read(folder).spans) == spans
    except (OSError, ValueError):
        return False  # Not begun yet.


def test_records_that_were_overwritten_are_counted(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(tracing, "_EVERY_S", 60.0)
    trace = Trace(Config(trace_dir=str(tmp_path)), recorder)
    make(recorder.events, PARTS_KEPT + 7)
    trace.close()
    found = read(tmp_path)
    assert found.lost == PARTS_KEPT + 7 - CALLS_KEPT + 7
    numbers = [span.number for span in of(found, SpanKind.CALL)]
    assert numbers == list(range(PARTS_KEPT + 7))[-CALLS_KEPT:]
    assert len(of(found, SpanKind.WAIT)) == PARTS_KEPT


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, recorder, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        trace = Trace(Config(trace_dir=str(tmp_path / "file" / "traces")), recorder)
        make(recorder.events, 1)
        trace.close()
    [record] = caplog.records
    assert record.getMessage().startswith("[0/1] cannot trace: ")
    assert str(tmp_path / "file" / "traces") in record.getMessage()


def test_nothing_is_written_without_a_folder(recorder: Recorder) -> None:
    trace = Trace(Config(), recorder)
    assert not recorder.events.is_traced
    trace.close()


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_messages_are_recorded_while_they_are_traced(tmp_path: Path, transport: str) -> None:
    """Of every way that a message can go: in C, in Python, in the background, as an object."""

    def work(comm: Communicator) -> None:
        array = np.zeros(10, np.float32)
        for is_async in (False, False, False, True):
            if comm.rank == 0:
                comm.send(array, 1, async_op=is_async)
            else:
                comm.recv(array, 0)
        if comm.rank == 0:
            comm.send_object("text", 1)
        else:
            assert comm.recv_object(0) == "text"
        comm.barrier()
        comm.all_to_all(np.zeros(2, np.int64))

    ring_of_threads(2, work, transport=transport, trace_dir=str(tmp_path))
    for rank, kind in enumerate((SpanKind.SEND, SpanKind.RECV)):
        found = read(tmp_path, f"rank-{rank}.trace")
        messages = of(found, SpanKind.SEND, SpanKind.RECV)
        assert {(span.kind, span.other) for span in messages} == {(kind, 1 - rank)}
        assert [span.nbytes for span in messages][:4] == [40] * 4
        assert messages[4].nbytes > 0
        assert len(messages) == 5
        assert of(found, SpanKind.CALL)[-1].operation == "all_to_all"


def test_messages_are_not_recorded_else() -> None:
    def work(comm: Communicator) -> list[Span]:
        array = np.zeros(10, np.float32)
        if comm.rank == 0:
            comm.send(array, 1)
        else:
            comm.recv(array, 0)
        return parts_of(comm._session.events)

    for parts in ring_of_threads(2, work):
        assert {SpanKind.SEND, SpanKind.RECV}.isdisjoint({span.kind for span in parts})


def test_groups_and_a_ring_that_is_formed_anew_have_files_of_their_own(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        group = comm.split(0)
        assert group is not None
        group.all_reduce(np.zeros(7))
        reform(comm, [])
        comm.all_reduce(np.zeros(9))

    ring_of_threads(2, work, trace_dir=str(tmp_path))
    for rank in range(2):
        for name, members, nbytes in (("-group-1", 1, 56), ("-epoch-1", 0, 72)):
            found = read(tmp_path, f"rank-{rank}{name}.trace")
            assert found.head.membership.group == members
            last = of(found, SpanKind.CALL)[-1]
            assert (last.operation, last.nbytes) == ("all_reduce", nbytes)
            assert last.number == len(of(found, SpanKind.CALL)) - 1
