"""Programs of tests that use Ray: run on a cluster of their own, of which no process is left."""

import shutil
import sys
import tempfile
from pathlib import Path

import psutil

from tests.processes import Process, clean_environment

__all__ = ["output_of"]

# A quarter of it on an idle machine.
_LIMIT_S = 400.0
# By default Ray's workers give way to all other programs, such as other tests.
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_worker_niceness": "0",
}


def output_of(folder: Path, program: Path, *arguments: str) -> str:
    """What a program that uses Ray prints; no process of Ray's is left."""
    # Ray's sockets lie in it, whose paths must be short.
    short = tempfile.mkdtemp(prefix="rr-")
    environment = clean_environment(**_VARIABLES, RAY_TMPDIR=short)
    command = [sys.executable, str(program), *arguments]
    try:
        with Process(command, folder, environment=environment) as process:
            try:
                code = process.wait(_LIMIT_S)
            finally:
                _end_all_below(process.pid)
            assert code == 0, process.stdout + process.stderr
            return process.stdout
    finally:
        shutil.rmtree(short, ignore_errors=True)


def _end_all_below(pid: int) -> None:
    """End Ray's processes, if the program has not."""
    try:
        left = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in left:
        process.kill()
