"""The agent of `ringreduce run -H`, with this test in the launcher's role."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ringreduce.commands.launch.exchange import (
    MAGIC,
    Assignment,
    Ended,
    Order,
    Ready,
    Report,
    Signal,
    Start,
)
from ringreduce.commands.launch.frames import Records, encode
from tests.launching import WAITS, script
from tests.processes import DEADLINE_S, clean_environment

SECRET = "0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def agent(folder: Path, text: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that has one rank to start, which runs `text`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ringreduce.commands.launch.agent"],
        cwd=folder,
        env=clean_environment(**environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            choices = {"secret": SECRET}
            order(
                process,
                Assignment([script(folder, text)], 0, 1, 1, "job", 0, choices, {}, 1, None),
            )
            yield process
        finally:
            process.kill()


def order(process: subprocess.Popen[bytes], *orders: Order) -> None:
    """Send orders at once."""
    assert process.stdin is not None
    process.stdin.write(b"".join(map(encode, orders)))
    process.stdin.flush()


def reports(output: IO[bytes] | None) -> Iterator[Report]:
    """What the agent reports, until it ends."""
    assert output is not None
    found = Records[Report](Report, after=MAGIC)
    while data := output.read1():  # type: ignore[attr-defined]
        yield from found.feed(data)


def test_a_signal_that_comes_with_the_start_reaches_the_rank(tmp_path: Path) -> None:
    with agent(tmp_path, WAITS) as process:
        said = reports(process.stdout)
        assert any(isinstance(report, Ready) for report in said)
        order(process, Start(0), Signal(0, signal.SIGKILL))
        assert list(said)[-1] == Ended(0, -signal.SIGKILL)


def test_it_ends_when_nothing_comes_though_it_cannot_write(tmp_path: Path) -> None:
    """As when the network is cut while ranks print much."""
    text = "while True:\n    print('x' * 10_000)\n"
    with agent(tmp_path, text, RINGREDUCE_TIME_SCALE="0.02") as process:
        order(process, Start(0))
        process.wait(DEADLINE_S)
        assert process.stderr is not None
        assert b"nothing came from the launcher for long" in process.stderr.read()
