"""Flight records on disk: what they hold, when they are written, and that they never hurt."""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ringreduce as rr
from ringreduce import Config, MismatchError
from ringreduce.commands.report.flight_records import read_records
from ringreduce.commands.report.verdict import judge
from ringreduce.effects.dumping import FlightFile
from ringreduce.effects.events import Events
from ringreduce.effects.recorder import Recorder
from ringreduce.pure.flight import GROUPS_MAX, Dump, decode_dump, file_name
from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.wire import Kind
from ringreduce.testing import ring_of_threads
from tests.processes import Process, wait_until


@pytest.fixture(autouse=True)
def _handler_is_put_back():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def read(directory: Path, rank: int = 0) -> Dump:
    return decode_dump((directory / file_name(rank)).read_bytes())


@contextlib.contextmanager
def flight_file(
    directory: Path, recorder: Recorder | None = None, size: int = 1
) -> Iterator[FlightFile]:
    config = Config(size=size, rendezvous="127.0.0.1:1", log_dir=str(directory))
    recorder = recorder or Recorder(0, size, Events(), whole(size))
    with contextlib.closing(FlightFile(config, recorder)) as file:
        yield file


# --- What a record holds ----------------------------------------------------------------------


def test_a_ring_that_breaks_leaves_a_record_of_every_rank(tmp_path: Path) -> None:
    def work(communicator):
        communicator.all_reduce(np.ones(4, np.float32))
        communicator.all_gather_object("x")
        with pytest.raises(MismatchError):
            communicator.all_reduce(np.ones(4 + communicator.rank, np.float32))
        return communicator.failure

    errors = ring_of_threads(2, work, log_dir=str(tmp_path))
    for rank, error in enumerate(errors):
        dump = read(tmp_path, rank)
        assert (dump.rank, dump.size, dump.pid, dump.calls) == (rank, 2, os.getpid(), 3)
        assert dump.why == f"MismatchError: {error}"
        assert dump.failure is not None
        assert (dump.failure.kind, dump.failure.text) == ("MismatchError", str(error))
        assert (dump.failure.peer, dump.failure.origin) == (error.peer, error.origin)
        assert dump.failure.in_call == "all_reduce"
        *entries, gathered, last = [(e.operation, e.nbytes, e.error) for e in dump.entries]
        assert entries == [("barrier", 0, None), ("all_reduce", 16, None)]
        assert (gathered[0], gathered[2]) == ("all_gather_object", None)
        assert last == ("all_reduce", 16 + 4 * rank, dump.why)
        assert dump.transport != "none"


def in_group(number: int) -> Recorder:
    return Recorder(0, 4, Events(), Membership((0, 3), number))


def test_a_call_of_a_group_is_recorded_with_those_of_the_job(tmp_path: Path) -> None:
    with flight_file(tmp_path, size=4) as file:
        group = in_group(1)
        file.add(group)
        group.events.begin(Kind.ALL_REDUCE, 80)
        file.dump("asked")
        dump = read(tmp_path)
        assert dump.pending == "all_reduce of the group of ranks 0 and 3"
        [part] = dump.groups
        assert (part.number, part.members) == (1, [0, 3])
        assert (part.operation, part.nbytes) == ("all_reduce", 80)
        group.events.end()
        file.dump("asked")
        dump = read(tmp_path)
        assert dump.pending is None
        assert [call.operation for call in dump.groups[0].entries] == ["all_reduce"]
        # In user code since that call, not since the last one of the job.
        ended = dump.groups[0].entries[0]
        assert dump.since == dump.groups[0].since >= ended.started


def test_a_call_of_another_group_of_the_same_ranks_is_called_so(tmp_path: Path) -> None:
    with flight_file(tmp_path, size=4) as file:
        first, second = in_group(1), in_group(2)
        for group in (first, second):
            file.add(group)
        first.events.begin(Kind.ALL_REDUCE, 80)
        assert file.elsewhere(second) == "all_reduce of another group of ranks 0 and 3"
        assert file.elsewhere(first) == ""


def test_open_groups_that_broke_and_those_used_last_are_kept(tmp_path: Path) -> None:
    with flight_file(tmp_path, size=4) as file:
        for number in range(1, 2 * GROUPS_MAX + 1):
            group = in_group(number)
            file.add(group)
            if number <= 2:
                group.fail(rr.PeerLostError("lost rank 3", peer=3))
            if number in (2, 2 * GROUPS_MAX):
                file.remove(group)
        file.dump("asked")
    groups = read(tmp_path).groups
    last = range(GROUPS_MAX + 2, 2 * GROUPS_MAX)
    assert [group.number for group in groups] == [*last, 1, 2]
    assert [group.failure.peer for group in groups if group.failure is not None] == [3, 3]


def test_a_group_that_breaks_leaves_a_record_on_its_ranks(tmp_path: Path) -> None:
    def work(communicator):
        group = communicator.split(communicator.rank % 2)
        if communicator.rank % 2 == 0:
            with pytest.raises(MismatchError):
                group.all_reduce(np.ones(4 + communicator.rank, np.float32))
        communicator.barrier()

    ring_of_threads(3, work, log_dir=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {file_name(0), file_name(2)}
    for rank in (0, 2):
        dump = read(tmp_path, rank)
        [group] = dump.groups
        assert (dump.failure, group.members) == (None, [0, 2])
        assert group.failure is not None
        assert dump.why == f"MismatchError: {group.failure.text}"
        assert (group.entries[-1].operation, group.entries[-1].error) == ("all_reduce", dump.why)
    assert judge(read_records(tmp_path)).culprits == (0, 2)


def test_stacks_show_where_user_code_is_and_other_threads_by_name(tmp_path: Path) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="loader")
    thread.start()
    with flight_file(tmp_path) as file:
        file.dump("asked")  # this line
    over.set()
    thread.join()
    first, *others = read(tmp_path).stacks
    assert first.main
    innermost = [frame for frame in first.frames if not frame.library][-1]
    assert innermost.file == __file__
    assert innermost.function == "test_stacks_show_where_user_code_is_and_other_threads_by_name"
    assert innermost.text == 'file.dump("asked")  # this line'
    [loader] = [stack for stack in others if stack.thread == "loader"]
    assert (loader.frames[-1].function, loader.frames[-1].library) == ("wait", True)
    assert not loader.main


def test_what_is_too_long_is_cut(tmp_path: Path) -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            file.dump("y" * 100_000)

    recorder = Recorder(0, 1, Events(), whole(1))
    recorder.events.begin(Kind.BARRIER, 0)
    recorder.fail(ValueError("x" * 100_000))
    with flight_file(tmp_path, recorder) as file:
        deep(300)
    dump = read(tmp_path)
    assert dump.failure is not None
    assert dump.failure.text.endswith("xxx...")
    assert [each.function for each in dump.stacks[0].frames if not each.library][-1] == "deep"


def test_a_later_record_takes_the_place_of_an_earlier_one_and_is_whole(tmp_path: Path) -> None:
    """Also if several are written at once; it is JSON that anybody can read."""
    with flight_file(tmp_path) as file:
        file.dump("first")
        file.dump("second")
        assert read(tmp_path).why == "second"
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(file.dump, map(str, range(8))))
    assert read(tmp_path).why in map(str, range(8))
    [path] = tmp_path.iterdir()
    assert path.name == "flight-rank0.json"
    assert set(json.loads(path.read_text())) == set(msgspec.structs.asdict(read(tmp_path)))


# --- When it is not written -------------------------------------------------------------------


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    FlightFile(Config(), Recorder(0, 1, Events(), whole(1))).dump("asked")
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_folder_that_cannot_be_made_is_a_warning_and_hides_no_error(tmp_path, caplog) -> None:
    (tmp_path / "taken").touch()

    def work(communicator):
        communicator.all_reduce(np.ones(4 + communicator.rank, np.float32))

    with caplog.at_level(logging.WARNING), pytest.raises(MismatchError):
        ring_of_threads(2, work, log_dir=str(tmp_path / "taken"))
    assert "[0/2] could not write the flight record to" in caplog.text


def test_a_ring_that_does_not_form_leaves_a_record(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    config = Config(
        rank=0,
        size=2,
        rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
        rendezvous_fd=listener.fileno(),
        job_id="alone",
        join_timeout_s=0.2,
        log_dir=str(tmp_path),
    )
    with pytest.raises(rr.RendezvousError):
        rr.Communicator(config)
    listener.detach()  # libzmq has taken it over and closed it.
    dump = read(tmp_path)
    assert dump.failure is not None
    assert (dump.failure.kind, dump.calls, dump.transport) == ("RendezvousError", 0, "none")


def test_an_error_that_a_layer_above_has_found_is_recorded(tmp_path: Path) -> None:
    with rr.Communicator(Config(log_dir=str(tmp_path))) as communicator:
        communicator._session.fail(MismatchError("found NaN", rank=0, size=1))
    dump = read(tmp_path)
    assert dump.failure is not None
    assert (dump.failure.text, dump.failure.in_call) == ("rank 0 of 1 found NaN.", None)


# --- SIGUSR1 ----------------------------------------------------------------------------------

PROGRAM = """
import os, signal, socket, sys, threading, time
import ringreduce
comm = ringreduce.Communicator(ringreduce.Config(log_dir="logs"))
"""


def program(directory: Path, text: str, *, ends: bool = False) -> Process:
    """A process with one communicator of one rank, which then runs `text`.

    `ends`: it is about the end of Python, so a fresh one.
    """
    path = directory / "program.py"
    path.write_text(PROGRAM + textwrap.dedent(text))
    return Process([sys.executable, str(path)], directory, worker=not ends)


def wait_dumped(directory: Path) -> Dump:
    path = directory / "logs" / "flight-rank0.json"
    wait_until(path.exists, "the flight record")
    return decode_dump(path.read_bytes())


def test_a_main_thread_that_never_comes_back_from_c_is_dumped(tmp_path: Path) -> None:
    text = """
    import ctypes
    lock = ctypes.CDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)  # for ever
    """
    with program(tmp_path, text) as process:
        process.wait_shown("ready")
        process.signal(signal.SIGUSR1)
        dump = wait_dumped(tmp_path)
        assert not process.has_ended()
    assert dump.why == "SIGUSR1"
    assert dump.stacks[0].main
    assert dump.stacks[0].frames[-1].text == "lock(mutex)  # for ever"


def test_a_program_goes_on_after_its_record(tmp_path: Path) -> None:
    text = """
    print("ready", flush=True)
    while not os.path.exists("logs/flight-rank0.json"):
        time.sleep(0.01)
    comm.barrier()
    print("done", flush=True)
    """
    with program(tmp_path, text) as process:
        process.wait_shown("ready")
        process.signal(signal.SIGUSR1)
        assert process.wait() == 0
        assert "done" in process.stdout
        assert process.stderr == ""


# What a program with a communicator finds true.
PROGRAMS = {
    "a program in an event loop, which has the wakeup descriptor, is dumped": """
        import asyncio
        async def wait():
            os.kill(os.getpid(), signal.SIGUSR1)
            while not os.path.exists("logs/flight-rank0.json"):
                await asyncio.sleep(0.01)
        asyncio.run(wait())
    """,
    "a handler that the program sets later is kept, in a forked child too": """
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        child = os.fork()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [1]
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not os.path.exists("logs")
    """,
    "a handler of the program is kept": """
        comm.close()
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        with ringreduce.Communicator(ringreduce.Config(log_dir="logs")):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [1]
        assert not os.path.exists("logs")
    """,
    "one thread serves all communicators, and a late signal is harmless": """
        descriptors = os.listdir("/proc/self/fd") if os.path.exists("/proc") else []
        comm.close()
        for _ in range(20):
            ringreduce.Communicator(ringreduce.Config(log_dir="logs")).close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not os.path.exists("logs")
        assert sum("flight recorder" in thread.name for thread in threading.enumerate()) == 1
        if descriptors:
            assert len(os.listdir("/proc/self/fd")) == len(descriptors)
        with ringreduce.Communicator(ringreduce.Config(log_dir="logs")):
            os.kill(os.getpid(), signal.SIGUSR1)
            while not os.path.exists("logs/flight-rank0.json"):
                time.sleep(0.01)
    """,
    "a signal to a forked child is not its parent's": """
        from ringreduce.effects import dumping
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(7 if dumping._listener.thread is None else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not os.path.exists("logs")
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_signal_does_to_a_program(tmp_path: Path, name: str) -> None:
    with program(tmp_path, PROGRAMS[name]) as process:
        assert process.wait() == 0, process.stderr


def test_signals_while_python_ends_are_harmless(tmp_path: Path) -> None:
    """Python puts default actions back for its own handlers before it clears the modules.

    The communicator is never closed, which keeps no process from ending.
    """
    text = """
    class Late:
        def __init__(self, text):
            self.text = text

        def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1, write=os.write):
            kill(pid, number)
            write(1, self.text)

    late = Late(b"late ")
    os.late = Late(b"lives ")  # goes when modules do, which is what Python does last
    """
    with program(tmp_path, text, ends=True) as process:
        assert process.wait() == 0
        assert (sorted(process.stdout.split()), process.stderr) == (["late", "lives"], "")


def test_a_communicator_of_another_thread_hears_no_signal_but_dumps_errors(tmp_path: Path) -> None:
    """Python sets handlers in the main thread alone."""
    fail = rr.RingReduceError("stop")
    ring_of_threads(1, lambda comm: comm._session.fail(fail), log_dir=str(tmp_path))
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert read(tmp_path).failure is not None
