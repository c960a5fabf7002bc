"""Whole jobs in tests: every rank runs one script to its end."""

import contextlib
import json
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringreduce.testing import JobResult
from ringreduce.vocabulary.config import Config
from tests.processes import Process, clean_environment, wait_until

__all__ = ["facts_in", "members", "run_job"]

_ROOT = Path(__file__).parents[1]
# A rank that fails takes the others with it sooner than this.
_AFTER_A_FAILURE_S = 30.0


def members(listener: socket.socket, size: int, **settings: Any) -> Iterator[Config]:
    """The settings of each rank of a new job, which meets at a socket that rank 0 inherits."""
    settings |= {"size": size, "local_size": size, "job_id": secrets.token_hex(8)}
    settings["rendezvous"] = f"127.0.0.1:{listener.getsockname()[1]}"
    for rank in range(size):
        inherited = None if rank else listener.fileno()
        yield Config(rank=rank, local_rank=rank, rendezvous_fd=inherited, **settings)


def run_job(
    size: int,
    arguments: Sequence[str],
    *,
    timeout_s: float = 60.0,
    deadline_s: float = 500.0,
    environment: Mapping[str, str] | None = None,
    unlike: Mapping[int, Mapping[str, str]] | None = None,
    directory: Path = _ROOT,
) -> JobResult:
    """Run ``python *arguments`` as `size` workers, as `ringreduce.testing.ring_of_processes` does.

    Without the launcher, and forked, so that it starts at once (`tests.forkserver`).

    Args:
        size: number of workers.
        arguments: a script, from the root of the repository, and its arguments.
        timeout_s: the workers' ``RINGREDUCE_TIMEOUT_S``.
        deadline_s: what still runs after this is killed, and the test fails.
        environment: further variables.
        unlike: by rank, variables of its own; its process is a fresh one, since what is imported
            has read some of them.
        directory: the workers' current folder.

    Returns:
        The first exit code that is not 0, and each rank's lines, marked with its rank.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        workers = []
        secret = secrets.token_hex(32)
        for config in members(listener, size, timeout_s=timeout_s, secret=secret):
            rank = config.rank
            variables = {
                **{"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                **config.to_environment(),
                **(environment or {}),
                **(unlike or {}).get(rank, {}),
            }
            worker = Process(
                [sys.executable, str(_ROOT / arguments[0]), *arguments[1:]],
                directory,
                output=folder,
                name=f"rank{rank}",
                environment=clean_environment(**variables),
                pass_fds=() if rank else (listener.fileno(),),
                worker=rank not in (unlike or {}),
            )
            workers.append(stack.enter_context(worker))
        deadline = time.monotonic() + deadline_s
        codes: dict[int, int] = {}
        while len(codes) < size:
            wait_until(
                lambda: any(r not in codes and w.has_ended() for r, w in enumerate(workers)),
                f"the end of {arguments}",
                deadline - time.monotonic(),
            )
            for rank, worker in enumerate(workers):
                if rank not in codes and worker.has_ended():
                    codes[rank] = worker.wait()
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE_S)
        output = [_marked(rank, worker.stdout) for rank, worker in enumerate(workers)]
        errors = [_marked(rank, worker.stderr) for rank, worker in enumerate(workers)]
        failed = next((code for code in codes.values() if code), 0)
        return JobResult(failed, "".join(output), "".join(errors))


def facts_in(output: str) -> Iterator[dict[str, Any]]:
    """The lines of JSON that ranks printed, each of which begins with its rank in brackets."""
    for line in output.splitlines():
        text = line.partition("] ")[2]
        if text.startswith("{"):
            yield json.loads(text)


def _marked(rank: int, text: str) -> str:
    return "".join(f"[{rank}] {line}\n" for line in text.splitlines())
