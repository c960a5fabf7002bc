"""Launchers of several hosts that meet: who gets which ranks, who is refused, who learns what.

Most are threads here: `Nodes` needs no processes.
"""

import contextlib
import re
import select
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce._version import __version__
from ringreduce.commands.launch import meeting as meeting_module
from ringreduce.commands.launch import nodes
from ringreduce.commands.launch.exchange import Alive, Ended, Event, Join, NodeRecord, Placed, Told
from ringreduce.commands.launch.frames import NONCE_BYTES, Channel
from ringreduce.commands.launch.meeting import Meeting, Node
from ringreduce.commands.launch.nodes import Nodes
from ringreduce.commands.launch.worker_records import Raised
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ConfigError
from tests.launching import RANK, WAITS, numbers, pieces, script
from tests.processes import Process, launcher, wait_gone, wait_until

SECRET = "a secret that all launchers have"
RECORDS = [
    Join("1.0", 2, 0, 1, 4, "b"),
    Placed(4, 8, "job", 0, 4000),
    Told(5, Raised("ValueError")),
    Ended(5, -9, "killed"),
    Alive(),
]


# --- Records on a connection ------------------------------------------------------------------
def channels(secret: str = SECRET) -> tuple[Channel[NodeRecord], Channel[NodeRecord]]:
    """Both ends of a connection, which have exchanged their nonces."""
    first = Channel(NodeRecord, SECRET, b"1" * NONCE_BYTES, is_first=True)
    other = Channel(NodeRecord, secret, b"2" * NONCE_BYTES, is_first=False)
    assert first.feed(other.opening) == other.feed(first.opening) == []
    return first, other


@given(cuts=st.lists(st.integers(0, 600), max_size=8))
def test_records_arrive_whole_and_in_order(cuts):
    first, other = channels()
    data = b"".join(map(first.encode, RECORDS))
    assert [record for piece in pieces(data, cuts) for record in other.feed(piece)] == RECORDS


@given(place=st.integers(4, 10_000), change=st.integers(1, 255))
def test_a_changed_record_is_refused(place, change):
    first, other = channels()
    data = bytearray(first.encode(RECORDS[0]))
    data[4 + place % (len(data) - 4)] ^= change
    with pytest.raises(ConfigError, match="does not know this job's secret"):
        other.feed(bytes(data))


def test_a_repeated_record_a_reflected_one_another_secret_and_a_stranger_are_refused():
    first, other = channels()
    frame = first.encode(Alive())
    assert other.feed(frame) == [Alive()]
    mine, stranger = channels("another secret of the job")
    reflected, foreign = first.encode(Alive()), stranger.encode(Alive())
    for end, refused in ((other, frame), (first, reflected), (mine, foreign)):
        with pytest.raises(ConfigError, match="secret"):
            end.feed(refused)
    with pytest.raises(ConfigError, match="is no process"):
        Channel(NodeRecord, SECRET, b"1" * NONCE_BYTES, is_first=True).feed(b"GET / HTTP/1.1\r\n")


# --- Launchers that meet ----------------------------------------------------------------------
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def node(port: int, number: int, nodes: int = 2, count: int = 1, **fields: Any) -> Node:
    own = {"version": __version__, "nodes": nodes, "max_restarts": 0}
    own |= {name: fields.pop(name) for name in own.keys() & fields.keys()}
    join = Join(**own, node=number, count=count, host="b")
    return Node(join, "127.0.0.1", port, SECRET, 20.0)._replace(**fields)


@contextlib.contextmanager
def meeting(*all_nodes: Node) -> Iterator[list[Future[Meeting]]]:
    """Each launcher's meeting, or error, as soon as there is one."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(all_nodes)) as threads:

        def meet(node: Node) -> Meeting:
            found = stack.enter_context(contextlib.closing(Nodes(node, deque()))).meet(0)
            stack.callback(found.close)
            return found

        yield [threads.submit(meet, node) for node in all_nodes]


def test_ranks_are_shared_out_by_node_and_all_meet_at_one_port():
    port = free_port()
    with meeting(node(port, 2, 3, 1), node(port, 0, 3, 2), node(port, 1, 3, 4)) as found:
        placed = {one.result().node.own.node: one.result().placed for one in found}
        listener = found[1].result().listener
        assert listener.getsockname()[1] == placed[0].port
    assert [placed[number].first_rank for number in range(3)] == [0, 2, 6]
    common = 7, placed[0].job_id, 0, placed[0].port
    assert {(p.size, p.job_id, p.restart, p.port) for p in placed.values()} == {common}


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"nodes": 3}, r"node 1 \(.*\) has --nnodes 3, node 0 has 2"),
        ({"version": "0.0"}, r"node 1 \(.*\) has ringreduce 0.0, node 0 has "),
        ({"max_restarts": 1}, r"node 1 \(.*\) has --max-restarts 1, node 0 has 0"),
    ],
)
def test_launchers_that_differ_all_say_how(other, complaint):
    port = free_port()
    with meeting(node(port, 0), node(port, 1, **other)) as both:
        assert all(re.search(complaint, str(each.exception())) for each in both)


def test_strangers_that_say_nothing_take_few_descriptors_and_no_time():
    port = free_port()
    with contextlib.ExitStack() as opened, meeting(node(port, 0)) as (first,):
        idle: list[socket.socket] = []

        def knocks() -> bool:
            with contextlib.suppress(ConnectionRefusedError):  # It does not listen yet.
                idle.append(opened.enter_context(socket.create_connection(("127.0.0.1", port))))
            return len(idle) == 100

        wait_until(knocks, "100 connections")
        for stranger in idle[:30]:  # The oldest are ended, long before their time is over.
            stranger.settimeout(5.0)
            while stranger.recv(1000):
                pass
        with meeting(node(port, 1)) as (second,):
            assert first.result().placed.job_id == second.result().placed.job_id


def test_a_launcher_with_another_secret_is_refused_and_the_others_meet():
    port = free_port()
    stranger = node(port, 1, secret="another secret of the job")
    with meeting(node(port, 0), stranger) as (first, refused):
        with pytest.raises(ConfigError, match="does not know this job's secret"):
            refused.result()
        with meeting(node(port, 1)) as (other,):
            assert other.result().placed.first_rank == first.result().placed.size - 1


def test_a_node_rank_that_is_taken_is_refused():
    port = free_port()
    with meeting(node(port, 0, 3), node(port, 1, 3), node(port, 1, 3)) as (first, *same):
        wait_until(lambda: any(one.done() for one in same), "a refusal")
        (refused,) = (one for one in same if one.done())
        with pytest.raises(ConfigError, match=r"--node-rank 1 is that of .* already"):
            refused.result()
        with meeting(node(port, 2, 3)):
            assert first.result().placed.size == 3


@contextlib.contextmanager
def events_of(meeting: Meeting) -> Iterator[Callable[[], list[Event]]]:
    """What reads the connections of a meeting, and returns the events that they bring."""
    with selectors.DefaultSelector() as selector:
        meeting.register(selector)
        yield lambda: [each for key, _ in selector.select(0.01) for each in key.data() or ()]


def test_who_comes_after_the_start_finds_nobody():
    port = free_port()
    with meeting(node(port, 0), node(port, 1)) as (first, one):
        first.result(), one.result()
        late = Nodes(node(port, 1, join_timeout_s=0.1), deque())
        with pytest.raises(ConfigError, match="A job that has started takes no more nodes"):
            late.meet(0)


def test_what_ranks_do_is_told_to_all_without_texts():
    """Node 0 passes it on; of a launcher that is gone it tells the ranks, once."""
    raised = Raised("ValueError", peer=0, exception="ValueError: private", traceback=["private"])
    told, ended = Told(2, Raised("ValueError", peer=0)), Ended(2, -9, "killed")
    port = free_port()
    with meeting(*(node(port, number, 3) for number in (0, 1, 2))) as found:
        zero, one, two = (each.result() for each in found)
        assert zero.hosts == one.hosts == two.hosts == ["b"] * 3
        with events_of(zero) as read_zero, events_of(one) as read_one:
            two.tell(Told(2, raised))
            two.tell(ended)
            both: tuple[list[Event], list[Event]] = [], []

            def have_all() -> bool:
                for events, read in zip(both, (read_zero, read_one), strict=True):
                    events += read()
                return ended in both[1]

            wait_until(have_all, "what node 2 has told")
            assert both == ([told, ended], [told, ended])
            assert zero.poll() == []
            two.close()
            wait_until(lambda: read_zero() or zero.poll() == [2], "the end of a launcher")
            assert zero.poll() == []


def test_who_comes_for_the_next_attempt_is_not_refused():
    port = free_port()
    both = (node(port, number, max_restarts=1) for number in (0, 1))
    zero, one = (Nodes(each, deque()) for each in both)
    with contextlib.closing(zero), ThreadPoolExecutor() as threads:
        joined = threads.submit(one.meet, 0)
        first, other = zero.meet(0), joined.result()
        other.close()
        again = threads.submit(one.meet, 1)
        wait_until(lambda: select.select([zero._listener], [], [], 0)[0], "it to come again")
        with events_of(first) as read:
            read()
        assert not again.done()
        first.close()
        second, anew = zero.meet(1), again.result()
        for met in (second, anew):
            assert met.placed.restart == 1
            met.close()


def test_launchers_that_wait_show_that_they_live(monkeypatch):
    """Else those that wait for longer than a silent launcher is waited for are taken for lost."""
    monkeypatch.setattr(meeting_module, "TIMES", replace(TIMES, agent_ping_s=0.0))

    def await_alive(end: socket.socket, *, is_first: bool, sends: list[Join]) -> None:
        with end:
            channel = Channel(NodeRecord, SECRET, b"1" * NONCE_BYTES, is_first=is_first)
            end.sendall(channel.opening)
            received: list[NodeRecord] = []
            while Alive() not in received:
                received += channel.feed(end.recv(1 << 16))
                while channel.is_open and sends:
                    end.sendall(channel.encode(sends.pop()))

    signals: deque[int] = deque()
    port = free_port()
    zero = Nodes(node(port, 0, 3), signals)
    with contextlib.closing(zero), ThreadPoolExecutor() as threads:
        waiting = threads.submit(zero.meet, 0)
        end = socket.create_connection(("127.0.0.1", port))
        await_alive(end, is_first=False, sends=[Join(__version__, 3, 0, 1, 1, "b")])
        signals.append(signal.SIGINT)
        assert waiting.result() is None
    signals.clear()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        one = Nodes(node(listener.getsockname()[1], 1), signals)
        waiting = threads.submit(one.meet, 0)
        await_alive(listener.accept()[0], is_first=True, sends=[])
        signals.append(signal.SIGINT)
        assert waiting.result() is None


@pytest.mark.parametrize("said", ["waits at {} for node 1", "finds nobody at {}, where node 0"])
def test_after_a_while_a_launcher_says_for_whom_it_waits(monkeypatch, said):
    monkeypatch.setattr(nodes, "TIMES", replace(TIMES, remind_s=0.0))
    waiting, reminders = node(free_port(), int("nobody" in said), join_timeout_s=0.5), list[str]()
    waits = Nodes(waiting, deque(), reminders.append)
    with contextlib.closing(waits), pytest.raises(ConfigError):
        waits.meet(0)
    (reminder,) = reminders
    assert reminder.startswith(said.format(waiting.address))
    assert reminder.endswith("; it gives up 0.5 s after its start")


def test_nodes_that_do_not_come_and_a_rendezvous_that_is_taken_or_elsewhere_are_named():
    with meeting(node(free_port(), 0, 4, join_timeout_s=0.2)) as (first,):
        missing = r"waited 0.2 s at 127\.0\.0\.1:.* and nodes 1, 2, 3 did not come"
        assert re.search(missing, str(first.exception()))
    with meeting(node(free_port(), 1, join_timeout_s=0.2)) as (other,):
        assert "got no answer from node 0 at 127.0.0.1:" in str(other.exception())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host in ("127.0.0.1", "192.0.2.1"):
            with pytest.raises(ConfigError, match=f"the ranks cannot meet at {host}:"):
                Nodes(node(taken.getsockname()[1], 0, host=host), deque())


# --- Jobs -------------------------------------------------------------------------------------
@contextlib.contextmanager
def jobs(
    directory: Path,
    *options: str,
    more: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> Iterator[list[Process]]:
    """Launchers of node 0, which has `more` options, and of node 1; `arguments` of the program."""
    variables, port = {"RINGREDUCE_SECRET": SECRET}, free_port()
    with contextlib.ExitStack() as stack:
        launched = []
        for number in (0, 1):
            (folder := directory / f"node{number}").mkdir()
            command = ("run", "--nnodes", "2", "--node-rank", str(number))
            command += ("--rendezvous", f"127.0.0.1:{port}", *options, *more * (not number))
            program = (str(directory / "script.py"), *arguments)
            node = launcher(folder, *command, *program, **variables)
            launched.append(stack.enter_context(node))
        yield launched


def test_a_failure_ends_all_hosts_which_have_a_grace_and_name_it(tmp_path):
    text = """
        if rank < 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 2:
            wait_for("ready")
            exit(3)
        """
    script(tmp_path, RANK, text, WAITS)
    with jobs(tmp_path, more=("-n", "2", "--grace", "0.2")) as (first, other):
        first.wait_shown("pid", times=2)
        (tmp_path / "ready").touch()
        for node in (first, other):
            assert node.wait() == 3
            name = f"rank 2 on {socket.gethostname()} failed first (exit code 3)"
            assert f"ringreduce: {name}" in node.stderr
        assert "killed ranks 0, 1, which had not ended 0.2 s after SIGTERM" in first.stderr
        assert "killed" not in other.stderr
        wait_gone(numbers(first.stdout))


def test_a_rank_that_leaves_before_it_joins_ends_all_hosts(tmp_path):
    script(tmp_path, RANK, "if rank == 0:\n    import ringreduce\n    ringreduce.init()\n")
    with jobs(tmp_path) as launched:
        name = f"rank 1 on {socket.gethostname()} failed first (exit code 0, before it joined"
        for node in launched:
            assert node.wait() == 1
            assert f"ringreduce: {name}" in node.stderr


@pytest.mark.full
def test_a_ring_forms_over_launchers_and_starts_again_after_a_failure(tmp_path):
    text = """
        import os, ringreduce, numpy
        ring = ringreduce.init()
        total = ring.all_reduce(numpy.full(3, ring.rank + 1.0))
        if os.environ["RINGREDUCE_RESTART"] == "0" and ring.rank == 2:
            raise ValueError("bad data")
        print("total", int(total[0]), flush=True)
        ring.barrier()
        """
    script(tmp_path, text)
    with jobs(tmp_path, "-n", "2", "--max-restarts", "1", "--log-dir", "logs") as both:
        for node in both:
            assert node.wait() == 0, node.stderr
            assert numbers(node.stdout, "total").count(10) >= 2
            for text in ("ringreduce: starting again, 1 of 1", "rank 2 on "):
                assert text in node.stderr
        assert "ValueError: bad data" in both[1].stderr
    logs = tmp_path / "node1" / "logs" / "restart-1"
    assert sorted(path.name for path in logs.glob("*.log")) == ["rank-2.log", "rank-3.log"]


def test_an_elastic_job_goes_on_without_the_launcher_of_node_0(tmp_path):
    tells = """
        from ringreduce.commands.launch import handover
        from ringreduce.commands.launch.worker_records import Joins, Reformed
        handover.tell(Joins(2, "formed"))
        print("pid", os.getpid(), flush=True)
        wait_for("lost")
        handover.tell(Reformed(1, (1,), "in step 7", 0.1))
        """
    script(tmp_path, RANK, tells)
    with jobs(tmp_path, "--elastic") as (first, other):
        first.wait_shown("pid"), other.wait_shown("pid")
        first.signal(signal.SIGKILL)
        wait_gone(numbers(first.stdout))
        (tmp_path / "lost").touch()
        assert other.wait() == 0, other.stderr
        gone = f"rank 0 on {socket.gethostname()} was lost in step 7 (its launcher is gone, or the "
        assert gone in other.stderr
        assert "ringreduce: ended well without rank 0" in other.stderr


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 9])
@pytest.mark.parametrize("which", [0, 1])
def test_the_end_of_a_launcher_ends_others(tmp_path, which, number):
    script(tmp_path, WAITS)
    with jobs(tmp_path) as launched:
        for node in launched:
            node.wait_shown("pid")
        launched[which].signal(number)
        left = launched[1 - which]
        assert left.wait() == (255 if number == 9 else 128 + number)
        assert f"rank {which} on " in left.stderr
        assert ("its launcher is gone" if number == 9 else "stopped by SIGINT") in left.stderr
        launched[which].wait()
        wait_gone([pid for node in launched for pid in numbers(node.stdout)])
