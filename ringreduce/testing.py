"""A ring inside a test: in threads, which is fast, or in processes, which is realistic.

from ringreduce.testing import ring_of_threads

def test_sum():
    def work(comm):
        return comm.all_reduce(numpy.ones(5))

    for result in ring_of_threads(3, work):
        assert (result == 3).all()

A rank's communicator can be split into groups (`Communicator.split`).
"""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.supervisor import supervise
from ringreduce.communicator.communicator import Communicator
from ringreduce.vocabulary.config import Config

__all__ = ["JobResult", "ring_of_processes", "ring_of_threads"]

_Result = TypeVar("_Result")


def ring_of_threads(
    size: int,
    work: Callable[[Communicator], _Result],
    *,
    hosts: Sequence[str] = (),
    **settings: Any,
) -> list[_Result]:
    """Run `work` on every rank of a ring, each in a thread of this process.

    Ranks wait for each other in TensorFlow's graphs, which share its threads: of more ranks than
    it has (``tf.config.threading``, between operations; by default one for each core) some never
    get one, if they exchange in graphs. Run those by `ring_of_processes`.

    Args:
        work: called with each rank's communicator, once all have formed the ring; it is closed
            afterwards.
        hosts: a name for each rank's host, to simulate several hosts.
        settings: further fields of `Config`, such as ``timeout_s``, which is 20 here, also for
            ranks in user code.

    Returns:
        What `work` returned, in rank order.

    Raises:
        BaseException: that of the lowest rank that failed; its notes hold the other ranks'.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        common = {
            "size": size,
            "rendezvous": f"127.0.0.1:{listener.getsockname()[1]}",
            "job_id": secrets.token_hex(8),
            # As `ringreduce run` does, so that tests run what jobs run.
            "secret": secrets.token_hex(32),
            "timeout_s": 20.0,
            # In a test nothing takes the ten minutes that a job grants.
            "busy_timeout_s": settings.get("timeout_s", 20.0),
            **settings,
        }

        formed = threading.Barrier(size)

        def run(rank: int) -> _Result:
            descriptor = listener.fileno() if rank == 0 else None
            host = hosts[rank] if hosts else ""
            config = Config(rank=rank, rendezvous_fd=descriptor, host_id=host, **common)
            try:
                made = Communicator(config)
            except BaseException:
                formed.abort()  # The others need not wait.
                raise
            with made as communicator:
                # A rank that fails in `work` must not be the reason why another one does not form.
                with contextlib.suppress(threading.BrokenBarrierError):
                    formed.wait()
                return work(communicator)

        with ThreadPoolExecutor(size) as threads:
            ranks = [threads.submit(run, rank) for rank in range(size)]
        # libzmq has closed the descriptor.
        if size > 1:
            listener.detach()
    failures = {rank: error for rank, future in enumerate(ranks) if (error := future.exception())}
    if failures:
        first = failures.pop(min(failures))
        for rank, error in failures.items():
            note = f"rank {rank} raised {type(error).__name__}: {error}"
            getattr(first, "add_note", str)(note)  # Python 3.10 has no notes.
        raise first
    return [future.result() for future in ranks]


@dataclass(frozen=True)
class JobResult:
    """A job's exit code, and the lines that it printed."""

    exit_code: int
    output: str
    errors: str


def ring_of_processes(
    size: int, arguments: Sequence[str], *, timeout_s: float | None = None
) -> JobResult:
    """Run ``python *arguments`` as `size` workers, as ``ringreduce run`` does.

    Call it from the main thread, where pytest runs tests.

    Args:
        arguments: a script or ``-m module``, and its arguments.
        timeout_s: the workers' ``RINGREDUCE_TIMEOUT_S``.
    """
    output, errors = io.StringIO(), io.StringIO()
    plan = JobPlan(arguments, size, {"timeout_s": timeout_s})
    code = supervise(plan, stdout=output, stderr=errors).conclude()
    return JobResult(code, output.getvalue(), errors.getvalue())
