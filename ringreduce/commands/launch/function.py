"""`launch`: a function instead of a script, from a notebook, a test or a program.

The function and its arguments are pickled with cloudpickle, by value where they are defined in
`__main__` or a notebook, into a nameless file that the workers inherit. Each worker writes its
result to such a file of its own. Files, not pipes: nobody must read while another writes, and no
process that a worker leaves behind can hold an end open.
"""

import contextlib
import linecache
import operator
import pickle
import signal
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import IO, Any, ClassVar, TypeVar

import cloudpickle

from ringreduce.commands.launch import call
from ringreduce.commands.launch.display import OUTPUTS
from ringreduce.commands.launch.failure import worker_error
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.supervisor import supervise
from ringreduce.vocabulary.config import SETTINGS, TIMES
from ringreduce.vocabulary.errors import ConfigError, WorkerError

_Result = TypeVar("_Result")


def launch(
    function: Callable[..., _Result],
    n: int,
    *args: Any,
    threads_per_worker: int | None = None,
    max_restarts: int = 0,
    grace_s: float = TIMES.grace_s,
    output: str = "all",
    **settings: Any,
) -> list[_Result]:
    """Call ``function(*args)`` in `n` new processes of this host that can form a ring.

    The function does what a script does under ``ringreduce run``: it imports what it needs and
    calls `init`. It may be a closure, a lambda, or defined in a notebook's cell::

        def train(epochs):
            import ringreduce.keras as rr

            comm = rr.init()
            ...
            return comm.rank, model.get_weights()

        results = ringreduce.launch(train, 2, 5)

    The workers' output appears in this process's ``sys.stdout`` and ``sys.stderr``, each line with
    its rank. No worker is left when this returns or raises, nor when this process dies.

    Args:
        function: what each worker calls. It and `args` are copied by cloudpickle. Models and
            datasets are best made within it.
        n: number of workers.
        threads_per_worker: compute threads of each; by default the cores shared out.
        max_restarts, grace_s, output: as options of ``ringreduce run``: how often all workers are
            started again after a failure; how long they have to end before they are killed; whose
            lines are shown (``all``, ``rank0``, ``failed``).
        settings: what a user chooses of `Config`, such as ``timeout_s``, ``transport`` or
            ``log_dir``; by default as the environment has it.

    Returns:
        What the function returned, in rank order: copies, made by cloudpickle. None of a rank that
        has left an elastic training since it was told to go.

    Raises:
        ConfigError: the function or its arguments cannot be pickled, `n` is not at least 1, or a
            setting is unknown or impossible. Nothing was started.
        WorkerError: a worker failed, or its result cannot be pickled. `peer` is the first that
            failed, `traceback` says how; all others were stopped. Or training has stopped since
            some were told to go: the error says how it goes on.
        KeyboardInterrupt: this process was interrupted. Other signals, too, do what they would
            have done, once the workers have ended.
    """
    size = checked_size(n, "launch(function, n, *args)")
    choices = {name for name, setting in SETTINGS.items() if setting.is_choice}
    if unknown := sorted(set(settings) - choices):
        raise ConfigError(
            f"launch got the unknown option {', '.join(unknown)}",
            remedy="Known are threads_per_worker, max_restarts, grace_s, output, "
            f"{', '.join(sorted(choices))}; arguments of the function stand after the number "
            "of workers, without names.",
        )
    if output not in OUTPUTS:
        raise ConfigError(f"output is {output!r}; accepted: {', '.join(OUTPUTS)}")
    with contextlib.ExitStack() as stack:
        sent = stack.enter_context(tempfile.TemporaryFile())
        _write(sent, function, args)
        results = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        plan = JobPlan(
            [str(Path(call.__file__))],
            size,
            settings,
            threads=threads_per_worker,
            max_restarts=max_restarts,
            grace_s=grace_s,
            output=output,
            inherited=[(sent.fileno(), result.fileno()) for result in results],
        )
        job = supervise(plan)
        if job.ended_by is None and job.stopped:
            raise WorkerError(job.stopped, size=size)
        if job.ended_by is not None:
            job.conclude()
            signal.raise_signal(job.ended_by)
            # The caller's handler returned.
            name = signal.Signals(job.ended_by).name
            raise WorkerError(f"the workers were stopped by {name}", size=size)
        if (cause := job.cause) is not None:
            raise worker_error(cause, size, [*cause.first.traceback, *job.consequences()])
        left = job.left
        returned: list[Any] = [
            None if rank in left else _read(result, rank, size)
            for rank, result in enumerate(results)
        ]
        return returned


def checked_size(count: Any, call: str) -> int:
    """`count` as a number of workers; raises ConfigError, which shows how `call` is written."""
    try:
        size = operator.index(count)
    except TypeError:
        size = 0
    if size < 1:
        raise ConfigError(
            f"{call.partition('(')[0]} got {count!r} as the number of workers; accepted: 1 or more",
            remedy=f"Call {call}.",
        )
    return size


def _reduce(code: CodeType) -> Any:
    """Pickles code with its file, which tracebacks show and cloudpickle >= 3.1.3 leaves out."""
    if not code.co_filename:
        return cloudpickle.Pickler.dispatch_table[CodeType](code)
    named = operator.methodcaller("replace", co_filename=code.co_filename)
    return named, (code.replace(co_filename=""),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce}, cloudpickle.Pickler.dispatch_table
    )


def _write(file: IO[bytes], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write what `call.main` reads."""
    # Lines of code that is in no file, such as cells', for tracebacks.
    cached = linecache.cache.items()
    sources = {name: source for name, source in cached if len(source) == 4 and source[1] is None}
    pickle.dump((sys.path, sys.argv, sources), file)
    try:
        _Pickler(file).dump((function, args))
    except Exception as error:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise ConfigError(
            f"cannot send {name} and its arguments to the workers: {type(error).__name__}: {error}",
            remedy="Make what cannot be pickled, such as a dataset or a communicator, within the "
            "function.",
        ) from error
    file.flush()


def _read(file: IO[bytes], rank: int, size: int) -> Any:
    """The result that the worker of this rank has written."""
    if not file.seek(0, 2):
        raise WorkerError(
            f"rank {rank} of {size} ended with exit code 0 before the function returned",
            size=size,
            peer=rank,
            remedy="Return from the function instead of ending the process.",
        )
    file.seek(0)
    try:
        return pickle.load(file)
    except Exception as error:
        raise WorkerError(
            f"the result of rank {rank} of {size} cannot be unpickled here: "
            f"{type(error).__name__}: {error}",
            size=size,
            peer=rank,
        ) from error
