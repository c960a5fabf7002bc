"""Worker processes in a moment: forked from one that has imported what they need.

Importing TensorFlow takes four seconds of processor time, numba one, and the suite starts hundreds
of workers. A server imports both once and runs nothing; each worker is a fork of it that becomes
what ``python script.py arguments`` would have been: own environment, folder, descriptors, signal
handlers and ``__main__``. It dies with the server, and that with the process of the tests.

What a worker has in common with the others that fresh processes have not: Python's seed of hashes,
and what modules read from the environment when they were imported. It also ends as soon as threads
are joined and exit handlers have run; taking all of TensorFlow's modules apart would take longer
than most workers do. A program about the interpreter's end sets ``WHOLE_END = True``.
`make test-full` runs the same tests with fresh processes (RINGREDUCE_TEST_FRESH=1).
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import numba

__all__ = ["Forked", "close", "is_wanted", "preload"]

# What a worker may need, slowest first; imported in the server, where nothing of it runs.
_PRELOADED = (
    "tensorflow",
    "keras",
    "sklearn.datasets",
    "ringreduce.keras",
    "ringreduce.keras.horovod",
    "ringreduce.communicator.communicator",
)
_ROOT = Path(__file__).parents[1]
_REQUEST_BYTES_MAX = 1 << 20
_PR_SET_PDEATHSIG = 1
# Descriptors are kept above those that workers expect to find theirs at, until they get them.
_SPARE_FD = 500

_server: _Server | None = None


def is_wanted() -> bool:
    """Whether workers are forked; else each is a fresh process."""
    return os.environ.get("RINGREDUCE_TEST_FRESH", "") != "1"


class Forked:
    """A worker; what `subprocess.Popen` offers, as far as tests use it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        cwd: Path,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.stdin = None
        self.returncode: int | None = None
        with contextlib.ExitStack() as stack:
            if stdin == subprocess.DEVNULL:
                stdin = os.open(os.devnull, os.O_RDONLY)
                stack.callback(os.close, stdin)
            elif stdin == subprocess.PIPE:
                stdin, writer = os.pipe()
                stack.callback(os.close, stdin)
                self.stdin = os.fdopen(writer, "wb", 0)
            self._status, theirs = socket.socketpair()
            stack.callback(theirs.close)
            wanted = {0: stdin, 1: stdout, 2: stderr, **{fd: fd for fd in pass_fds}}
            request = {
                "arguments": list(map(str, arguments)),
                "cwd": str(cwd),
                "env": dict(env),
                "fds": list(wanted),
            }
            _the_server().send(request, [theirs.fileno(), *wanted.values()])
        self.pid = int.from_bytes(_received(self._status, 8), "big")

    def poll(self) -> int | None:
        """The exit code as `subprocess` gives it, or None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(f"forked worker {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        # Its parent, the server, may collect it at any moment.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            status = int.from_bytes(_received(self._status, 8), "big", signed=True)
            self.returncode = os.waitstatus_to_exitcode(status)
            self._status.close()
        return self.returncode


class _Server:
    """The process that forks workers, as the tests see it; ends with the tests' process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={
                    **{k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")},
                    # Read while TensorFlow is imported.
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    "CUDA_VISIBLE_DEVICES": "",
                    # Of the server's; workers set their own. A pool of threads is not forked.
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def send(self, request: dict[str, object], descriptors: Sequence[int]) -> None:
        """Ask for a worker that gets `descriptors`; the first is for the server."""
        payload = json.dumps(request).encode()
        assert len(payload) < _REQUEST_BYTES_MAX
        ancillary = array.array("i", descriptors)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ancillary)]
        self._socket.sendmsg([payload], rights)

    def close(self) -> None:
        self._socket.close()
        self.process.wait(10)


def close() -> None:
    """End the server, if there is one, and with it what still runs."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _the_server() -> _Server:
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = _Server()
    return _server


def _received(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = source.recv(count - len(found))
        assert part, "the server that forks workers has ended"
        found += part
    return found


def preload() -> None:
    """Import what workers need, and load the compiled loops, or compile them, for all to find."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _load_loops()


def _load_loops() -> None:
    """0.3 s of each worker that uses sockets, or seconds where several would compile at once."""
    import numpy as np

    from ringreduce.pure import kernels
    from ringreduce.pure.encodings import encoding_of
    from ringreduce.transport import libzmq, loop, sodium
    from ringreduce.vocabulary.types import ReduceOp

    libzmq.load()
    sodium.load()
    for function, arguments in ((loop.run, 3), (loop.exchange, 3), (loop.transfer, 5)):
        function.compile((numba.int64,) * arguments)
    values = np.ones(8, np.float32)
    for encoding in map(encoding_of, ("bf16", "fp16", "int8")):
        encoded = np.empty(encoding.nbytes(values.size), np.uint8)
        encoding.encode(values, encoded, np.zeros_like(values))
        encoding.decode(encoded, values)
    for name in ("float32", "float64", "int64"):
        kernels.divide(np.dtype(name))
        for op in ReduceOp:
            kernels.reduction(op, np.dtype(name))


def _serve(requests: socket.socket) -> None:
    """Fork a worker for each request; returns in a worker, and when the tests have ended."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for pidfd in set(ready) - {requests}:
            pid, status = running.pop(pidfd)
            _, code = os.waitpid(pid, 0)
            os.close(pidfd)
            with contextlib.suppress(OSError):  # Nobody need be interested any more.
                status.sendall(code.to_bytes(8, "big", signed=True))
            status.close()
        if requests not in ready:
            continue
        payload, rights, _, _ = requests.recvmsg(_REQUEST_BYTES_MAX, socket.CMSG_SPACE(4 * 64))
        if not payload:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in rights:
            descriptors.frombytes(data[: len(data) - len(data) % 4])
        status = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            for pidfd in running:
                os.close(pidfd)
            for _, other in running.values():
                other.close()
            status.close()
            requests.close()
            _become(json.loads(payload), descriptors[1:])
            return
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        running[os.pidfd_open(pid)] = pid, status
        status.sendall(pid.to_bytes(8, "big"))


def _become(request: dict, descriptors: Sequence[int]) -> None:
    """Make this fork what a fresh process would be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Out of the way of each other, then where they are expected.
    spare = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _SPARE_FD) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for wanted, descriptor in zip(request["fds"], spare, strict=True):
        os.dup2(descriptor, wanted)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    if path := request["env"].get("PYTHONPATH"):
        sys.path[1:1] = path.split(os.pathsep)
    time.tzset()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _run() -> None:
    """What ``python script.py`` does; an exception goes on to the interpreter."""
    path = sys.argv[0]
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    code: object = 0
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            raise
    if main.__dict__.get("WHOLE_END"):
        sys.exit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    listening = socket.socket(fileno=int(sys.argv[1]))
    preload()
    gc.collect()
    gc.freeze()
    _serve(listening)
    _run()
