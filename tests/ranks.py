"""Tests that run on every rank of a ring, and functions whose results a test compares.

    @on_ranks(2)
    def test_sums():
        assert rr.all_reduce(tf.constant([1.0, 2.0]) * rr.rank()).numpy().tolist() == [1.0, 2.0]
        return digest(...)  # what is returned must be the same on all ranks

    @pytest.mark.parametrize("size", [2, in_full(3)])
    @on_ranks()
    def test_counts():
        assert rr.all_reduce(1) == rr.size()

    def numbers(factor):
        return factor * rr.rank()

    def test_numbers(ranks):
        assert ranks(3, numbers, 2) == [0, 2, 4]

The calls of one file share a ring, which takes longer to form than most calls. Its ranks are forked
from a process that has run nothing (`tests.forkserver`), and forked anew after a call in which one
raised or the ring broke. RINGREDUCE_TEST_ALONE=1 gives each call ranks of its own.
"""

import contextlib
import inspect
import os
import pickle
import reprlib
import secrets
import select
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import cloudpickle

if __name__ == "__main__":  # As a script, its folder would be looked at first.
    sys.path[0] = str(Path(__file__).parents[1])

from ringreduce.vocabulary.config import Config
from tests.processes import Process, clean_environment

__all__ = ["Ranks", "on_ranks"]

_ROOT = Path(__file__).parents[1]
_DEADLINE_S = 300.0
# A rank that has ended takes the others with it sooner than this.
_AFTER_A_FAILURE_S = 30.0


class Result(NamedTuple):
    """How a call ended on one rank: its value, or the traceback of what it raised."""

    value: Any
    error: str
    is_last: bool  # The rank has ended after this call.


class Ranks:
    """Rings for the tests of one file.

    Args:
        directory: where the ranks' output goes.
        environment: variables of every rank.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self._rings: dict[tuple[object, ...], _Ring] = {}

    def __call__(
        self, size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> list[Any]:
        """Return what ``function(*arguments, **keywords)`` returned on each rank of a ring.

        Args:
            size: number of ranks.
            function: of a module, or one that can be pickled; so is what it returns.
            arguments: the same for all ranks, which know theirs by ``rr.rank()``.
            keywords: further arguments.

        Raises:
            AssertionError: a rank raised, ended, or returned nothing in time.
        """
        return self.ring(size)(function, *arguments, **keywords)

    def ring(
        self, size: int, *, hosts: Sequence[str] = (), lost: Sequence[int] = (), **environment: str
    ) -> Callable[..., list[Any]]:
        """Return what makes such calls on another ring of this file.

        Args:
            size: number of ranks.
            hosts: a name for each rank: ranks of one name are on one host.
            lost: ranks that end, stop or fail in a call, and then the others end; their result is
                None.
            environment: variables of the ranks.
        """
        key = size, tuple(hosts), tuple(sorted(environment.items()))

        def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
            ring = self._rings.pop(key, None)
            if ring is None:
                ring = _Ring(self._directory, size, self._environment | environment, hosts)
            with contextlib.ExitStack() as stack:
                stack.callback(ring.kill)
                results = ring.call(cloudpickle.dumps((function, arguments, keywords)), lost)
                if lost:
                    ring.end(lost)
                elif not any(result.is_last for result in results):
                    stack.pop_all()
                    self._rings[key] = ring
            if os.environ.get("RINGREDUCE_TEST_ALONE", "") == "1":
                self.close()
            return [result.value for result in results]

        return call

    def close(self) -> None:
        """End all ranks; each must end well."""
        while self._rings:
            self._rings.popitem()[1].end()


def on_ranks(
    size: int | None = None, **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a function a test that runs on every rank of a ring; all must return the same.

    Its parameters are those of a parametrization. So is `size`, where none is given here; it and
    `settings` as in `Ranks.ring`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def test(ranks: Ranks, **arguments: Any) -> None:
            count = arguments.pop("size") if size is None else size
            results = ranks.ring(count, **settings)(test, **arguments)
            assert all(result == results[0] for result in results), results

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        names = ["ranks"] if size is not None else ["ranks", "size"]
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        parameters = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature([*parameters, *added])  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


class _Ring:
    """The processes of one ring, which wait for calls on standard input."""

    def __init__(
        self, directory: Path, size: int, environment: Mapping[str, str], hosts: Sequence[str]
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._workers: list[Process] = []
        self._answers: list[IO[bytes]] = []
        name = secrets.token_hex(4)
        job_id, secret = secrets.token_hex(8), secrets.token_hex(32)
        with self._stack, socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            for rank in range(size):
                config = Config(
                    rank=rank,
                    size=size,
                    local_rank=rank,
                    local_size=size,
                    rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
                    rendezvous_fd=None if rank else listener.fileno(),
                    job_id=job_id,
                    timeout_s=60.0,
                    secret=secret,
                    host_id=hosts[rank] if hosts else "",
                )
                variables = {
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    **config.to_environment(),
                    **environment,
                }
                reading, writing = os.pipe()
                self._answers.append(self._stack.enter_context(os.fdopen(reading, "rb", 0)))
                with os.fdopen(writing, "wb"):
                    worker = Process(
                        [sys.executable, __file__, str(writing)],
                        _ROOT,
                        output=directory,
                        name=f"{name}.rank{rank}",
                        environment=clean_environment(**variables),
                        pass_fds=(writing,) if rank else (writing, listener.fileno()),
                        stdin=subprocess.PIPE,
                        worker=True,
                    )
                self._workers.append(self._stack.enter_context(worker))
            self._stack = self._stack.pop_all()

    def call(self, request: bytes, lost: Sequence[int]) -> list[Result]:
        """Have every rank make the call; return what each answered, if no other raised."""
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # Its answer says that it has ended.
                _write(worker.stdin, request)
        deadline = time.monotonic() + _DEADLINE_S
        results = {rank: Result(None, "", True) for rank in lost}
        while len(results) < len(self._workers):
            waiting = {a: r for r, a in enumerate(self._answers) if r not in results}
            ready, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer of ranks {list(waiting.values())}", results)
            for answers in ready:
                rank = waiting[answers]
                answer = _read(answers)
                if answer is None:
                    results[rank] = Result(None, f"ended with {self._workers[rank].wait()}", True)
                else:
                    results[rank] = Result(*pickle.loads(answer))
                if results[rank].error:
                    deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE_S)
        if any(result.error for result in results.values()):
            self._fail("the call failed", results)
        return [results[rank] for rank in range(len(self._workers))]

    def _fail(self, reason: str, results: Mapping[int, Result]) -> None:
        self.kill()
        text = [reason]
        for rank, worker in enumerate(self._workers):
            if rank in results:
                text.append(f"---- rank {rank}\n{results[rank].error or 'returned'}")
            text.append(f"{worker.stdout[-2000:]}{worker.stderr[-4000:]}")
        raise AssertionError("\n".join(text))

    def end(self, lost: Sequence[int] = ()) -> None:
        """Have the ranks leave the ring; raise if one that is not lost does not end well."""
        with self._stack:
            for worker in self._workers:
                worker.stdin.close()
            for rank in {*range(len(self._workers))} - {*lost}:
                code = self._workers[rank].wait()
                assert code == 0, f"rank {rank} ended with {code}:\n{self._workers[rank].stderr}"

    def kill(self) -> None:
        self._stack.close()


def _write(file: IO[bytes], payload: bytes) -> None:
    view = memoryview(len(payload).to_bytes(8, "big") + payload)
    while view:
        view = view[file.write(view) :]
    file.flush()


def _read(file: IO[bytes]) -> bytes | None:
    """The next payload; None at the end."""
    count = _read_exactly(file, 8)
    return None if count is None else _read_exactly(file, int.from_bytes(count, "big"))


def _read_exactly(file: IO[bytes], count: int) -> bytes | None:
    parts = []
    while count:
        part = file.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _described(error: BaseException) -> str:
    """The traceback, and the variables of the last frame of a test, which pytest would show."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [frame for frame in frames if "/tests/" in frame.f_code.co_filename]
    names = ours[-1].f_locals.items() if ours else ()
    shown = "".join(f"    {name} = {reprlib.repr(value)}\n" for name, value in names)
    return f"{''.join(traceback.format_exception(error))}{shown}"


def _serve(answers: IO[bytes]) -> None:
    """In a rank: make calls until there are no more, or the ring is broken."""
    import ringreduce.keras as rr
    from tests.programs.shared import keep_graphs

    keep_graphs()
    comm = rr.init()
    calls = os.fdopen(0, "rb", 0, closefd=False)
    while (request := _read(calls)) is not None:
        try:
            function, arguments, keywords = pickle.loads(request)
            value = getattr(function, "on_rank", function)(*arguments, **keywords)
            is_last = comm.closed or comm.failure is not None
            answer = pickle.dumps((value, "", is_last))
        except BaseException as raised:
            _write(answers, pickle.dumps((None, _described(raised), True)))
            raise  # As from a program: the other ranks are told.
        _write(answers, answer)
        if is_last:
            return
    rr.shutdown()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "wb", 0) as _answers:
        _serve(_answers)
