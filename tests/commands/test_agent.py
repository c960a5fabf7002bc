"""The agent of `ringreduce run -H`, with this test in the launcher's role."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ringreduce.commands.launch import exchange
from ringreduce.commands.launch.exchange import MAGIC, Ended, Order, Report, Start
from ringreduce.commands.launch.frames import Records, encode
from ringreduce.commands.launch.worker_records import Stands
from tests.launching import WAITS, script
from tests.processes import DEADLINE_S, clean_environment


@contextlib.contextmanager
def agent(
    folder: Path, text: str, size: int = 1, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that has one rank to start, of a job of `size`, which runs `text`."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "ringreduce.commands.launch.agent"]
    environment = clean_environment(**environment)
    process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    with process:
        try:
            name, choices = script(folder, text), {"secret": "0123456789abcdef" * 2}
            placed = exchange.Placed(0, size, "job", 0, port=0)
            order(process, exchange.Assignment(placed, 1, [name], choices, {}, 1, None))
            yield process
        finally:
            process.kill()


def order(process: subprocess.Popen[bytes], *orders: Order) -> None:
    """Send orders at once."""
    process.stdin.write(b"".join(map(encode, orders)))
    process.stdin.flush()


def test_a_signal_that_comes_with_the_start_reaches_the_rank(tmp_path):
    with agent(tmp_path, WAITS) as process:
        records, reports = Records[Report](Report, after=MAGIC), list[Report]()
        while not any(isinstance(report, exchange.Ready) for report in reports):
            data = process.stdout.read1()
            assert data, "it has ended"
            reports += records.feed(data)
        order(process, Start(0), exchange.Signal(0, signal.SIGKILL))
        reports += records.feed(process.stdout.read())
        assert reports[-1] == Ended(0, -signal.SIGKILL, is_seen=True)


def test_ranks_hear_what_has_become_of_those_on_other_hosts(tmp_path):
    text = """
        import sys, time
        from ringreduce.commands.launch import handover
        while not handover.word_of(1).is_gone:
            time.sleep(0.01)
        sys.stdout.write(repr([tuple(handover.word_of(rank)) for rank in (0, 1)]))
        """
    with agent(tmp_path, text, size=2, RINGREDUCE_ELASTIC="1") as process:
        lost = Ended(1, 255, "its host was lost")  # That proves nothing.
        told = exchange.Told(1, Stands(7, 2, is_gone=False))
        order(process, Start(4000), lost, told, Ended(1, 0, is_seen=True))
        assert b"[(0, 0, False), (7, 2, True)]" in process.stdout.read()


def test_it_ends_when_nothing_comes_before_its_ranks_may_start(tmp_path):
    with agent(tmp_path, WAITS, RINGREDUCE_TIME_SCALE="0.02") as process:
        process.wait(DEADLINE_S)
        assert b"nothing came from the launcher for long" in process.stderr.read()


def test_it_ends_when_nothing_comes_though_it_cannot_write(tmp_path):
    """As when the network is cut while ranks print much."""
    text = "while True:\n    print('x' * 10_000)\n"
    with agent(tmp_path, text, RINGREDUCE_TIME_SCALE="0.02") as process:
        order(process, Start(0))
        process.wait(DEADLINE_S)
        assert b"nothing came from the launcher for long" in process.stderr.read()
